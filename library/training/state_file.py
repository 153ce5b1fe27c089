"""Optimizer and scheduler state on disk without pickle: tensors in safetensors, the rest as JSON.

A state dict is a tree of dicts, lists, tuples, numbers, strings and tensors. The tree is written as JSON in
which every tensor is a reference into the safetensors file beside it; tuples and integer keys are marked so
that reading gives back exactly what was written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from library.errors import UserError
from library.files import write_safetensors, write_text

_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"


def write_state(stem: Path, tree: Any) -> None:
    """Write ``tree`` as ``<stem>.json`` and ``<stem>.safetensors``.

    Raises:
        UserError: the tree holds something that is neither JSON nor a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_encode(tree, tensors, stem.name))
    if tensors:  # the format has no empty file
        write_safetensors(stem.with_suffix(".safetensors"), tensors)
    write_text(stem.with_suffix(".json"), text)


def read_state(stem: Path) -> Any:
    """Return the tree written under ``stem``, tensors on the CPU.

    Raises:
        UserError: a file is missing or damaged.
    """
    try:
        data = stem.with_suffix(".safetensors")
        tensors = load_file(data) if data.exists() else {}
        return _decode(json.loads(stem.with_suffix(".json").read_text(encoding="utf-8")), tensors)
    except Exception as error:
        raise UserError(f"{stem}.json: the saved state cannot be read ({error}); resume from another one") from error


def _encode(node: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    if isinstance(node, torch.Tensor):
        name = f"t{len(tensors)}"
        # A tensor may be a view of a larger one or share memory with another; a copy may not.
        tensors[name] = node.detach().cpu().clone()
        return {_TENSOR: name}
    if isinstance(node, dict):
        return {_PAIRS: [[key, _encode(value, tensors, f"{where}.{key}")] for key, value in node.items()]}
    if isinstance(node, tuple):
        return {_TUPLE: [_encode(value, tensors, where) for value in node]}
    if isinstance(node, list):
        return [_encode(value, tensors, where) for value in node]
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    raise UserError(f"{where}: a {type(node).__name__} in the optimizer's state cannot be saved; use another optimizer")


def _decode(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    if _TENSOR in node:
        return tensors[node[_TENSOR]]
    if _TUPLE in node:
        return tuple(_decode(value, tensors) for value in node[_TUPLE])
    return {key: _decode(value, tensors) for key, value in node[_PAIRS]}
