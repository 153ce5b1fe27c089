"""Where the linear layers of a family lie in the files of a base model, and their weights one at a time.

A module (diffusers' name) is some rows of a tensor: all of them in diffusers' layout, a part of them where the
original checkpoint stacks several modules (qkv). Weights in fp8 are given back as the numbers they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from library.errors import UserError
from library.precision.checkpoint_layouts import detect_layout
from library.precision.quantize import dequantize
from networks.base_files import BaseFile
from networks.key_map import KeyMap
from networks.targets import LoraTargets, architectures

_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")
_LEFT_OUT = "transformer."  # what GPT-2's published file leaves out of transformers' names


@dataclass(frozen=True)
class BaseModule:
    """One module's place: ``rows`` of ``tensor`` in ``file``.

    ``swapped``: their two halves come in the other order. ``transposed``: the tensor is [in, out], columns are meant.
    """

    file: Path
    tensor: str
    rows: slice
    columns: int
    swapped: bool = False
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Output rows and input columns."""
        return self.rows.stop - self.rows.start, self.columns


def find_modules(files: Sequence[BaseFile], keys: KeyMap, model_name: str) -> dict[str, BaseModule]:
    """Return diffusers module name -> its place.

    Raises:
        UserError: the files hold no such model, more of another one, or one whose parts do not add up.
    """
    places = _modules(files, keys, model_name)
    fullest = fullest_targets(files)
    if fullest and len(_held(files, fullest[0])) > len(places):
        family = fullest[0].family
        raise UserError(f"{files[0].path}: is a model of {family}, not of {model_name}; set --model_type {family}")
    if not places:
        raise UserError(f"{files[0].path}: holds no transformer of {model_name}; give its transformer file")
    return places


def fullest_targets(files: Sequence[BaseFile]) -> list[LoraTargets]:
    """Return the row of the architecture most of whose layers lie in ``files``; several if they are equal, or none."""
    counts = {row.family: len(_held(files, row)) for row in architectures()}
    most = max(counts.values())
    return [row for row in architectures() if most and counts[row.family] == most]


def _held(files: Sequence[BaseFile], row: LoraTargets) -> dict[str, BaseModule]:
    try:
        return _modules(files, row.keys, row.family)
    except UserError:  # the names of another architecture's layers, in other shapes
        return {}


def _modules(files: Sequence[BaseFile], keys: KeyMap, model_name: str) -> dict[str, BaseModule]:
    places: dict[str, BaseModule] = {}
    for file in files:
        for key, (_, shape) in file.tensors.items():
            prefix = next(p for p in _PREFIXES if key.startswith(p))
            name = key.removeprefix(prefix).removesuffix(".weight")
            place = keys.find(name) or keys.find(_LEFT_OUT + name)
            if not key.endswith(".weight") or place is None or len(shape) != 2:
                continue
            if place.part is not None:
                rows, columns = shape[::-1] if place.row.transposed else shape
                module = BaseModule(file.path, key, slice(0, rows), columns, transposed=place.row.transposed)
                places[place.modules[place.part]] = module
                continue
            try:
                heights = place.row.part_rows(shape[0], shape[1])
            except ValueError as error:
                raise UserError(f"{file.path}: {key}: {error}; not a {model_name} model") from None
            top = 0
            for name, height in zip(place.modules, heights, strict=True):
                part = slice(top, top + height)
                places[name] = BaseModule(file.path, key, part, shape[1], place.row.halves_swapped)
                top += height
    return places


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor, as ``library.precision.checkpoint_layouts`` asks for them."""

    source: str
    start: int
    stop: int | None


class WeightReader:
    """Reads the weights of one model's modules, fp8 ones too; nothing is kept.

    Raises:
        UserError: the files hold a quantisation that is not known.
    """

    def __init__(self, files: Sequence[BaseFile]) -> None:
        self._layout = detect_layout(files[0].path, [file.path for file in files])

    def read(self, module: BaseModule, device: torch.device | str = "cpu") -> Tensor:
        """Return the weight of ``module``, [out, in] fp32 on ``device``, rows in diffusers' order."""
        with safe_open(module.file, framework="pt") as file:
            tensor = file.get_slice(module.tensor)
            rows = (tensor[:].t() if module.transposed else tensor[module.rows]).to(device)
        piece = _Piece(module.tensor, module.rows.start, module.rows.stop)
        if self._layout is not None and self._layout.holds_codes([piece]):
            scale = self._layout.scale_of([piece])
            codes = rows.view(self._layout.dtypes[module.tensor])
            rows = dequantize(codes, None if scale is None else scale.to(device), torch.float32)
        rows = rows.float()
        return torch.cat(rows.chunk(2)[::-1]) if module.swapped else rows

    def is_bookkeeping(self, name: str) -> bool:
        """Return whether the tensor ``name`` is a scale or marker of the quantisation."""
        return self._layout is not None and name in self._layout.bookkeeping
