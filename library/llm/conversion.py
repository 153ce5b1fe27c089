"""A language model in any layout written as a transformers folder or GGUF file: weights, configuration, tokenizer, chat
template.

Tensors are read, dequantised where they are quantised, and written one at a time. A folder is what transformers, vLLM,
peft and the other tools here read, a GGUF file what llama.cpp reads too; nothing appears under its name until it is
complete.

What was published beside the weights of a transformers folder is written as it was (:func:`read_text_files`); of the
other layouts the same files are made. Training reads them before its first step, so that what
it saves hours later is whole though the model was deleted.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GGMLType
from gguf import GGUFValueType
from torch import Tensor

from library.errors import UserError
from library.files import atomic_folder, atomic_path, check_new_folder, check_room, read_bytes, read_json, write_text
from library.gguf_header import gguf_file, gguf_name
from library.llm.chat_templates import JINJA_FILE, jinja_sources
from library.llm.tokenizer_files import gguf_tokenizer, load_tokenizer
from library.llm.tokenizers import Tokenizer
from library.models.llm.files import TransformersFiles
from library.models.llm.gguf import GGUF_ENDS, gguf_divisors, gguf_metadata, gguf_tensor
from library.models.llm.spec import LMConfig, as_tokens, config_to_hf, special_to_hf
from library.safetensors_io import RowRange, stream_safetensors, tensor_bytes

_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7}  # llama.cpp's LLAMA_FTYPE
Change = Callable[[str, Tensor, torch.dtype], Tensor]  # transformers' name, the tensor, the dtype to return it in


def write_transformers(
    files: TransformersFiles,
    save_to: Path,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    change: Change = lambda name, tensor, dtype: tensor.to(dtype),
    progress: Callable[[int, int], None] = lambda done, total: None,
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write ``files`` as the folder ``save_to``; return a remark, or nothing.

    Args:
        files: the model.
        save_to: made; it must not hold anything.
        dtype: of the weights; default: theirs, bf16 of quantised ones.
        tokenizer: file or folder; default: the model's own, which may be missing; the remark says so.
        change: what becomes of each tensor, such as a merge.
        progress: called with (tensors done, tensors in all).
        metadata: of the weights' file.
    """
    dtype = dtype or files.dtype
    layout = {name: (dtype, entry.shape) for name, entry in files.entries.items()}
    check_new_folder(save_to)
    check_room(save_to, sum(tensor_bytes(*spec) for spec in layout.values()))
    done = 0

    def produce(name: str) -> Tensor:
        nonlocal done
        made = change(name, files.read([RowRange(name)]), dtype)
        progress(done := done + 1, len(layout))
        return made

    text_files, config, remark = dict[str, bytes](), files.config, ""
    try:
        text_files = read_text_files(tokenizer or files.path)
        config = with_ends(config, load_tokenizer(tokenizer or files.path))
    except UserError as error:
        if tokenizer is not None:
            raise
        remark = f"without a tokenizer: {error}"
    with atomic_folder(save_to) as folder:
        write_text_files(folder, text_files, read_generation_config(files.path), config)
        stream_safetensors(folder / "model.safetensors", layout, produce, {"format": "pt", **(metadata or {})})
        values = config_to_hf(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
        write_text(folder / "config.json", json.dumps(values, indent=2) + "\n")
    return remark


def write_gguf(
    files: TransformersFiles,
    save_to: Path,
    kind: str,
    tokenizer: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Write ``files`` as the GGUF file ``save_to``, as llama.cpp's converter does; return a remark, or nothing.

    Args:
        files: the model.
        save_to: must not exist.
        kind: ggml's type of the matrices, F32, F16, BF16 or Q8_0; norms and biases are F32. Where rows are no whole
            blocks of Q8_0, F16 takes its place, as there; the remark says so.
        tokenizer: file or folder; default: the model's own.
        progress: called with (tensors done, tensors in all).

    Raises:
        UserError: ``save_to`` exists; GGUF has no words for the model or the tokenizer; or F16 is too narrow.
    """
    if save_to.exists():
        raise UserError(f"{save_to}: exists; choose another --save_to")
    if kind not in _FILE_TYPES:
        raise UserError(f"{files.path}: weights in {kind} are not written as GGUF; choose a --save_precision")
    said, left = _gguf_tokenizer(tokenizer or files.path, files.config)
    metadata = gguf_metadata(files.config) | said
    metadata |= {"general.type": "model", "general.name": save_to.stem, "general.file_type": _FILE_TYPES[kind]}
    metadata["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    divisors, kinds = gguf_divisors(files.config), dict[str, GGMLType]()
    writer = gguf.GGUFWriter(None, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        type_of_value = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
        if value != []:  # which the package cannot write
            writer.add_key_value(key, value, type_of_value)
    for name, tensor in (divisors | files.entries).items():
        fits = tensor.shape[-1] % gguf.GGML_QUANT_SIZES[GGMLType[kind]][0] == 0
        kinds[name] = GGMLType["F32" if len(tensor.shape) < 2 else kind if fits else "F16"]
        size = math.prod(gguf.quant_shape_to_byte_shape(tensor.shape, kinds[name]))
        writer.add_tensor_info(gguf_name(name), tensor.shape, np.dtype(np.float32), size, kinds[name])
    check_room(save_to, sum(info.nbytes for info in writer.tensors[0].values()))
    with atomic_path(save_to) as path, closing(writer):
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, (name, kind_of_tensor) in enumerate(kinds.items(), 1):
            weight = divisors[name] if name in divisors else files.read([RowRange(name)]).float()
            if kind_of_tensor is GGMLType.F16 and weight.abs().max() > torch.finfo(torch.float16).max:
                raise UserError(f"{files.path}: {name} exceeds fp16's 65504; choose another --save_precision")
            numbers = gguf_tensor(name, weight, files.config).contiguous().numpy()
            writer.write_tensor_data(gguf.quants.quantize(numbers, kind_of_tensor))
            progress(done, len(kinds))
    remarks = [f"GGUF has no key for the further end tokens {', '.join(map(str, left))}"] if left else []
    if halves := kind == "Q8_0" and list(kinds.values()).count(GGMLType.F16):
        remarks.append(f"{halves} matrices are in fp16, for their rows are no whole blocks of 32")
    return "; ".join(remarks)


def _gguf_tokenizer(source: Path, config: LMConfig) -> tuple[dict[str, Any], list[int]]:
    """Return the metadata that hold the tokenizer and chat template in ``source``, and the ends of ``config``.

    Also return the ends that GGUF has no key for.
    """
    tokenizer, (templates, names) = load_tokenizer(source), jinja_sources(source)
    said = gguf_tokenizer(tokenizer, config.vocab_size, source)
    tokens, config = said["tokenizer.ggml.tokens"], with_ends(config, tokenizer)
    ends = dict.fromkeys(number for number in (*tokenizer.ends, tokenizer.eos, *config.eos) if number is not None)
    ids: dict[str, int | None] = dict(zip(GGUF_ENDS, ends, strict=False))
    firsts = [number for number in (*tokenizer.begins, tokenizer.bos, config.bos) if number is not None]
    ids |= {"bos": next(iter(firsts), None), "padding": config.pad}
    for theirs, ours in (("padding", "pad_token"), ("unknown", "unk_token")):
        ids |= {theirs: tokens.index(names[ours])} if names.get(ours) in tokens else {}
    said |= {f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items() if number is not None}
    said |= {
        "tokenizer.ggml.add_bos_token": bool(tokenizer.begins),
        "tokenizer.ggml.add_eos_token": bool(tokenizer.ends),
    }
    keys = {name: "" if name == "default" else f".{name}" for name in templates}
    said |= {f"tokenizer.chat_template{keys[name]}": text for name, text in templates.items()}
    return said, [*ends][len(GGUF_ENDS) :]


_GENERATION = "generation_config.json"
_SETTINGS = "tokenizer_config.json"
_BESIDE_VOCABULARY = (_SETTINGS, "special_tokens_map.json", JINJA_FILE, "additional_chat_templates/*.jinja")
_VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")


def read_text_files(source: Path) -> dict[str, bytes]:
    """Return name -> content of the files that a transformers folder with the tokenizer in ``source`` has.

    Those of a transformers folder are as published. Chat template and special tokens of a GGUF file are among them.

    Raises:
        UserError: there is no tokenizer, or it cannot be read.
    """
    with tempfile.TemporaryDirectory() as made:
        load_tokenizer(source).save(made)
        found = {file.name: file.read_bytes() for file in Path(made).iterdir()}
    if gguf_file(source) is None:
        folder, vocabulary = (source, _VOCABULARY) if source.is_dir() else (source.parent, tuple[str, ...]())
        for pattern in (*_BESIDE_VOCABULARY, *vocabulary):
            found |= {file.relative_to(folder).as_posix(): read_bytes(file) for file in folder.glob(pattern)}
        return found
    templates, names = jinja_sources(source)
    if _SETTINGS in found:
        more = {key: name for key, name in names.items() if key in ("pad_token", "unk_token")}
        found[_SETTINGS] = _as_json(json.loads(found[_SETTINGS]) | more)
    return found | ({JINJA_FILE: templates["default"].encode()} if templates else {})


def read_generation_config(model: Path) -> dict[str, Any]:
    """Return the ``generation_config.json`` beside a model's weights; nothing where there is none."""
    file = model / _GENERATION
    return read_json(file) if file.is_file() else {}


def with_ends(config: LMConfig, tokenizer: Tokenizer, more: Sequence[int] = ()) -> LMConfig:
    """Return ``config`` with the tokenizer's first and last tokens where it names none, and ``more`` last tokens."""
    ends = dict.fromkeys((*(config.eos or tokenizer.stop_tokens), *more))
    return replace(config, bos=tokenizer.bos if config.bos is None else config.bos, eos=tuple(ends))


def write_text_files(folder: Path, files: Mapping[str, bytes], generation: Mapping[str, Any], config: LMConfig) -> None:
    """Write what was read; ``generation_config.json`` ends texts with the tokens of ``config``, too."""
    ends = dict.fromkeys((*as_tokens(generation.get("eos_token_id")), *config.eos))
    known = {key: value for key, value in generation.items() if value is not None}
    special = special_to_hf(replace(config, eos=tuple(ends)))
    generation = special | known | {"eos_token_id": special["eos_token_id"]}
    for name, content in {**files, _GENERATION: _as_json(generation)}.items():
        with atomic_path(folder / name) as temporary:
            temporary.write_bytes(content)


def _as_json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=2).encode() + b"\n"
