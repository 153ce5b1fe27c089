"""The tensors of a model's files by name, before anybody knows what they mean, and ComfyUI's words about layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library.errors import UserError
from library.safetensors_io import RowRange, TensorEntry, read_rows

COMFY_PREFIX = "model.diffusion_model."


@dataclass(frozen=True)
class FileTensors:
    """The tensors of a model's files by name, and their strings."""

    path: Path
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]

    def dtype(self, name: str) -> str | None:
        """Return the dtype of tensor ``name`` as the file calls it; None if there is no such tensor."""
        entry = self.entries.get(name)
        return entry.dtype if entry is not None else None

    def read(self, name: str, rows: slice = slice(None), held: tuple[int, ...] | None = None) -> Tensor:
        """Return some rows of tensor ``name``; as bytes of shape ``held``, if given, whatever the file calls them."""
        entry = self.entries[name]
        if held is not None:
            entry = replace(entry, dtype="U8", shape=held)
        return read_rows({name: entry}, [RowRange(name, rows.start or 0, rows.stop)])

    def read_scale(self, name: str) -> Tensor:
        """Return tensor ``name`` in fp32, a scale: positive and finite."""
        scale = self.read(name).float()
        if not (torch.isfinite(scale).all() and (scale > 0).all()):
            raise self.refuse(name, "holds a scale that is not positive and finite", "download it again")
        return scale

    def refuse(
        self, name: str, why: str, remedy: str = "use the bf16 file, or one of a format that is read"
    ) -> UserError:
        """Return the error for tensor ``name``."""
        return UserError(f"{self.path}: {name!r} {why}; {remedy}")

    @cached_property
    def layer_configs(self) -> dict[str, dict[str, Any]]:
        """Layer -> what ComfyUI's ``comfy_quant`` says of it, from its marker or from the header."""
        configs: dict[str, dict[str, Any]] = {}
        if "_quantization_metadata" in self.metadata:
            try:
                layers = json.loads(self.metadata["_quantization_metadata"])["layers"]
                configs |= {self.full_name(layer): dict(config) for layer, config in layers.items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise self.refuse("_quantization_metadata", "is not the JSON object ComfyUI writes") from None
        for name in (name for name in self.entries if name.rpartition(".")[2] == "comfy_quant"):
            try:
                configs[name.rpartition(".")[0]] = dict(json.loads(bytes(self.read(name).tolist())))
            except (ValueError, TypeError, RecursionError):
                raise self.refuse(name, "is not the JSON object ComfyUI writes") from None
        for layer, config in configs.items():
            if not isinstance(kind := config.get("format"), str | None):
                raise self.refuse(f"{layer}.comfy_quant", f"names the format {kind!r}, which is not read")
        return configs

    def full_name(self, layer: str) -> str:
        """Return ``layer`` with the file's prefix, which some writers leave out of the header."""
        for prefix in ("", COMFY_PREFIX):
            if f"{prefix}{layer}.weight" in self.entries:
                return prefix + layer
        return layer
