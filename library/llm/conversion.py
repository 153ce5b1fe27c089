"""A language model in any layout written as a transformers folder: weights, configuration, tokenizer, chat template.

Tensors are read, dequantised where they are quantised, and written one at a time. What the folder holds is what
transformers, vLLM, peft and the other tools here read; nothing appears under its name until it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from library.errors import UserError
from library.files import atomic_folder, check_new_folder, check_room, write_text
from library.llm.chat_templates import JINJA_FILE, jinja_source
from library.llm.tokenizer_files import load_tokenizer
from library.models.llm.files import TransformersFiles
from library.models.llm.spec import config_to_hf
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

    with atomic_folder(save_to) as folder:
        remark = _write_tokenizer(tokenizer or files.path, folder, tokenizer is not None)
        stream_safetensors(folder / "model.safetensors", layout, produce, {"format": "pt", **(metadata or {})})
        config = config_to_hf(files.config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
        write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return remark


def _write_tokenizer(source: Path, folder: Path, is_wanted: bool) -> str:
    try:
        load_tokenizer(source).save(folder)
    except UserError as error:
        if is_wanted:
            raise
        return f"without a tokenizer: {error}"
    if template := jinja_source(source)[0]:
        write_text(folder / JINJA_FILE, template)
    return ""
