"""A language model in any layout written as a transformers folder: weights, configuration, tokenizer, chat template.

Tensors are read, dequantised where they are quantised, and written one at a time. The folder is what transformers,
vLLM, peft and the other tools here read; nothing appears under its name until it is complete.

What was published beside the weights of a transformers folder is written as it was (:func:`read_text_files`); of the
other layouts the same files are made. Training reads them before its first step, so that what it saves hours later is
whole though the model was deleted.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library.errors import UserError
from library.files import atomic_folder, atomic_path, check_new_folder, check_room, read_bytes, read_json, write_text
from library.gguf_header import gguf_file
from library.llm.chat_templates import JINJA_FILE, jinja_sources
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import Tokenizer
from library.models.llm.files import TransformersFiles
from library.models.llm.spec import LMConfig, as_tokens, config_to_hf, special_to_hf
from library.safetensors_io import RowRange, stream_safetensors, tensor_bytes

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
