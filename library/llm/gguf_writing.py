"""A language model in any layout written as a GGUF file, which llama.cpp reads.

Tensor names, metadata keys and types are those of llama.cpp's ``convert_hf_to_gguf.py``; the ``gguf`` package writes.
Tensors are read, dequantised where they are quantised, and written one at a time; nothing appears under the file's name
until it is complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GGMLType
from gguf import GGUFValueType

from library.errors import UserError
from library.files import atomic_path, check_room
from library.gguf_header import gguf_name
from library.llm.chat_templates import jinja_sources
from library.llm.conversion import with_ends
from library.llm.tokenizer_files import gguf_tokenizer, load_tokenizer
from library.models.llm.files import TransformersFiles
from library.models.llm.gguf import GGUF_ENDS, gguf_divisors, gguf_metadata, gguf_tensor
from library.models.llm.spec import LMConfig
from library.safetensors_io import RowRange

_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7}  # llama.cpp's LLAMA_FTYPE


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
