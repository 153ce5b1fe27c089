"""What int8, nvfp4 and mxfp8 layers have in common: ComfyUI's word about a layer, and the order of block scales.

ComfyUI says of each layer how it is quantised, in a tensor ``<layer>.comfy_quant`` of JSON bytes or in the header:

    {"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}

Options may lie in an object ``params`` inside. ``full_precision_matrix_mult`` has inputs left alone and weights
dequantised (``mixed_precision_ops`` and ``_load_quantized_module`` in ``comfy/ops.py``). So has a card that cannot
multiply the format (``pick_operations``): nvfp4 and mxfp8 need Blackwell. int8 is the same everywhere and always: what
ComfyUI calls in high precision rounds its inputs all the same (``StoredInt8.served_rounding``).

*Block scales* are one number a run of inputs of a row, [out, in / run]. Tensor cores want them in tiles of 128 rows by
4 runs, in each of which the rows r, r + 32, r + 64, r + 96 lie side by side; rows and runs are filled up with zeros to
whole tiles (https://docs.nvidia.com/cuda/cublas/index.html, "1D block scaling factors layout"). ComfyUI's files have
them so, others by rows. Here they are by rows, so that rows and columns can be cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from library.errors import UserError
from library.precision.files.base import HIGH_PRODUCTS, QuantizedWeight, Scheme, StoredWeight, runs_of
from library.precision.files.cut_weight import CutWeight
from library.precision.files.file_tensors import FileTensors
from library.precision.names import LayoutKind

_TILE_ROWS, _TILE_RUNS, _SIDE_BY_SIDE = 128, 4, 32


@dataclass(frozen=True)
class ComfyLayer:
    """A layer of ``file`` that ComfyUI's ``config`` speaks of, by its ``name``."""

    file: FileTensors
    name: str
    config: Mapping[str, Any]

    @property
    def weight(self) -> str:
        """Name of the tensor with its values."""
        return f"{self.name}.weight"

    def option(self, key: str, default: Any) -> Any:
        """Return what the configuration says of ``key``."""
        inside = self.config.get("params")
        return self.config.get(key, inside.get(key, default) if isinstance(inside, dict) else default)

    def tensor(self, leaf: str, dtypes: Sequence[str]) -> str:
        """Return the name of the layer's tensor ``leaf``, which has to have one of ``dtypes``.

        Raises:
            UserError: it is missing or has another.
        """
        name, kind = f"{self.name}.{leaf}", self.config.get("format")
        found = self.file.dtype(name)
        if found is None:
            what = "marks a layer without a weight" if leaf == "weight" else f"says {kind}, and there is no {leaf}"
            raise self.file.damaged(f"{self.name}.comfy_quant", what)
        if found not in dtypes:
            raise self.file.damaged(name, f"has dtype {found} where {kind} has {' or '.join(dtypes)}")
        return name

    def matrix(self, dtypes: Sequence[str]) -> tuple[int, int]:
        """Return the shape of the weight's tensor, which has to be a matrix of one of ``dtypes``."""
        shape = self.file.entries[self.tensor("weight", dtypes)].shape
        if len(shape) != 2 or 0 in shape:
            raise self.file.refuse(self.weight, f"of shape {list(shape)} is no matrix of a linear layer")
        return shape[0], shape[1]

    def unpadded(self, stored_shape: tuple[int, int], multiple: int) -> tuple[int, int]:
        """Return the shape, by ``orig_shape``, of a weight whose tensor may be filled up to a ``multiple``.

        Raises:
            UserError: the inputs were filled up, which is not read, or ``orig_shape`` is another matrix's.
        """
        orig_shape = self.config.get("orig_shape")
        if orig_shape is None or orig_shape == list(stored_shape):
            return stored_shape
        sides = isinstance(orig_shape, list) and len(orig_shape) == 2 and all(type(side) is int for side in orig_shape)
        if not sides or orig_shape[1] != stored_shape[1] or -(-orig_shape[0] // multiple) * multiple != stored_shape[0]:
            raise self.file.refuse(
                self.weight,
                f"holds {list(stored_shape)} where orig_shape says {orig_shape}, which is not just fewer outputs",
            )
        return orig_shape[0], orig_shape[1]

    def fields(self, shape: tuple[int, int], **tensors: str) -> dict[str, Any]:
        """Return what a :class:`StoredComfyWeight` of ``shape`` has, with ``tensors`` beside its values."""
        entries, named = self.file.entries, {"values": self.weight, **tensors}
        beside = [name for leaf in ("comfy_quant", "input_scale") if (name := f"{self.name}.{leaf}") in entries]
        return {
            "name": self.weight,
            "shape": shape,
            "layout": "comfy_quant",
            "tensors": named,
            "tensor_specs": {name: entries[name].spec for name in named.values()},
            "kept": tuple(beside),
            "full_precision": bool(self.config.get(HIGH_PRODUCTS)),
            "input_scale": next((name for name in beside if name.endswith("input_scale")), None),
        }


def comfy_layers(file: FileTensors, kind: str) -> Iterator[ComfyLayer]:
    """Yield the layers of ``file`` whose format ComfyUI calls ``kind``."""
    for name, config in file.layer_configs.items():
        if config.get("format") == kind:
            yield ComfyLayer(file, name, config)


@dataclass(frozen=True, kw_only=True)
class StoredComfyWeight(StoredWeight):
    """A weight of a format that ComfyUI calls ``kind`` and rounds inputs for by ``rounding``."""

    kind: ClassVar[str]
    rounding: ClassVar[str]

    @property
    def served_rounding(self) -> str | None:
        """``rounding``, on cards that multiply the format, unless the file asks for high precision."""
        return None if self.full_precision else self.rounding

    def comfy_config(self) -> dict[str, Any]:
        """Return the format."""
        return {"format": self.kind}


def new_fields(
    what: str, layout: LayoutKind, name: str, shape: tuple[int, ...], **stored: tuple[str, torch.dtype, tuple[int, ...]]
) -> dict[str, Any]:
    """Return the fields of a :class:`StoredComfyWeight` that is to be written: ``stored`` has leaf, dtype and shape.

    Raises:
        UserError: weights of the scheme ``what`` are to go into another layout than ComfyUI's.
    """
    if layout != "comfy_quant":
        raise UserError(f"{what}: is written in the layout comfy_quant, not {layout}; choose that layout")
    tensors = {field: f"{name.removesuffix('.weight')}.{leaf}" for field, (leaf, _, _) in stored.items()}
    specs = {tensors[field]: (dtype, size) for field, (_, dtype, size) in stored.items()}
    return {"name": name, "shape": shape, "layout": layout, "tensors": tensors, "tensor_specs": specs}


@dataclass(frozen=True)
class BlockScaledWeight(CutWeight):
    """A weight with a scale for each run of inputs of a row, ``block_scale``."""

    block_scale: Tensor


class BlockScheme(Scheme):
    """How weights with a step for each ``block`` inputs of a row are made."""

    block: ClassVar[int]

    def describe(self) -> str:
        """Return it in words."""
        return f"{self.name}, a scale per {self.block} inputs"

    def fitting(self, shape: Sequence[int]) -> Self | None:
        """Return the scheme where both sides are whole blocks; ComfyUI's tools leave other layers alone as well."""
        return None if any(side % self.block for side in shape) else self

    def groups(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return a step for each block of a row."""
        return shape[0], runs_of(shape[1], self.block)


def with_rows(values: Tensor, rows: int) -> Tensor:
    """Return ``values`` [n, ...] of one byte each with zeros below, ``rows`` in all."""
    return functional.pad(values.view(torch.uint8), (0, 0, 0, rows - len(values))).view(values.dtype)


def tiled_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape that block scales of ``shape`` [rows, runs] have in whole tiles."""
    rows, runs = shape
    return -(-rows // _TILE_ROWS) * _TILE_ROWS, -(-runs // _TILE_RUNS) * _TILE_RUNS


def to_tiles(scales: Tensor) -> Tensor:
    """Return ``scales`` [rows, runs], of one byte each, in tiles: :func:`tiled_shape`."""
    (rows, runs), shape = tiled_shape(scales.shape), scales.shape
    padded = functional.pad(scales.view(torch.uint8), (0, runs - shape[1], 0, rows - shape[0]))
    tiles = padded.view(rows // _TILE_ROWS, _TILE_ROWS // _SIDE_BY_SIDE, _SIDE_BY_SIDE, runs // _TILE_RUNS, _TILE_RUNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, runs).view(scales.dtype)


def from_tiles(tiles: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the scales of ``shape`` [rows, runs] that lie in ``tiles``, in memory of their own."""
    rows, runs = tiled_shape(shape)
    split = tiles.view(torch.uint8).reshape(
        rows // _TILE_ROWS, runs // _TILE_RUNS, _SIDE_BY_SIDE, _TILE_ROWS // _SIDE_BY_SIDE, _TILE_RUNS
    )
    by_rows = split.permute(0, 3, 2, 1, 4).reshape(rows, runs)[: shape[0], : shape[1]]
    return by_rows.contiguous().view(tiles.dtype)


def scales_are_tiled(file: FileTensors, name: str, weight: tuple[int, int], run: int, tiles: bool = True) -> bool:
    """Return whether the block scales ``name`` of a ``weight`` of that shape lie in tiles, by their tensor's shape.

    Args:
        run: inputs that share one.
        tiles: whether whole tiles are taken for tiles; by rows they would have the same shape.

    Raises:
        UserError: the shape is neither's.
    """
    if weight[1] % run:
        raise file.damaged(name, f"cannot scale runs of {run} of {weight[1]} inputs")
    by_rows, shape = (weight[0], weight[1] // run), file.entries[name].shape
    tiled = tiled_shape(by_rows)
    if tiles and shape in (tiled, (tiled[0] * tiled[1],)):
        return True
    if shape == by_rows:
        return False
    expected = f"{list(tiled)} (in tiles) or {list(by_rows)} (by rows)" if tiles else f"{list(by_rows)}, by rows"
    raise file.damaged(name, f"of shape {list(shape)} are not the block scales of their weight, which are {expected}")


@dataclass(frozen=True, kw_only=True)
class StoredBlockScaled(StoredComfyWeight):
    """A weight with block scales in a file; ``tiled``: whether they lie in tiles."""

    block: ClassVar[int]
    tiled: bool

    def read_numbers(self, file: FileTensors, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return numbers and, as ``dtype``, block scales of some rows."""
        start, stop, _ = rows.indices(self.shape[0])
        values = file.read(self.name, slice(start, stop))
        scales = file.read(self.tensors["block_scale"]).view(dtype)
        if self.tiled:
            scales = from_tiles(scales, (self._rows, self.shape[1] // self.block))
        return values, scales[start:stop]

    def written(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Return numbers and block scales as the file has them, rows filled up with zeros."""
        assert isinstance(weight, BlockScaledWeight)
        blocks = with_rows(weight.block_scale, self._rows)
        found = {self.name: with_rows(weight.values, self._rows)}
        found[self.tensors["block_scale"]] = to_tiles(blocks) if self.tiled else blocks
        return {
            name: tensor.view(self.tensor_specs[name][0]).reshape(self.tensor_specs[name][1])
            for name, tensor in found.items()
        }

    @property
    def _rows(self) -> int:
        """The outputs with those that they are filled up with."""
        return self.tensor_specs[self.name][1][0]
