"""nvfp4: four bits a number, a scale in fp8 for each 16, one more for the matrix.

    weight[o, i]  ~  e2m1(values)[o, i] * block_scale[o, i // 16] * scale

Numbers are e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, two to a byte. Block scales are e4m3fn, ``scale`` is
fp32 and makes them fit: the matrix's largest magnitude / (6 * 448) (NVIDIA, "Pretraining Large Language Models with
NVFP4", https://arxiv.org/abs/2509.25149). ComfyUI dequantises in bf16 and casts ``scale`` to it first, so the one made
here is rounded up to a power of two: then all products of scales are exact in bf16, and a server has the weight that
was trained. A block whose scale would round to zero gets the smallest there is instead.

In files:

    comfy_quant    ``<layer>.weight`` uint8 [out, in / 2], the *first* of two numbers in the high four bits;
                   ``weight_scale`` in the tiles of tensor cores (``comfy_quant.py``), or by rows where its shape is so;
                   ``weight_scale_2`` the fp32 one; ``input_scale``, calibrated, perhaps. Outputs may be filled up to a
                   multiple of 16, with ``orig_shape`` in ComfyUI's word of the layer.
    modelopt       no marker; the first number in the *low* four bits, ``weight_scale`` by rows (NVIDIA ModelOpt, Black
                   Forest Labs' files for diffusers: ``diffusers.quantizers.bfl``).

So the marker tells the order of the two numbers. Without one, scales in tiles are refused: nothing says the order. Most
shapes fit both, so where the marker may have been lost, the scales themselves have to show that they lie by rows.
``pre_quant_scale`` (AWQ) is refused too: ComfyUI applies a LoRA to the inputs that it has scaled by it, so no LoRA
looks there as elsewhere. Sources: comfy-kitchen (``tensor/nvfp4.py``, ``float_utils.py``), ComfyUI ``comfy/ops.py``.

In memory the first number is in the high four bits and block scales are by rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from library.precision.files.base import QuantizedWeight, StoredWeight, cached_tensor
from library.precision.files.comfy_quant import (
    BlockScaledWeight,
    BlockScheme,
    ComfyLayer,
    StoredBlockScaled,
    comfy_layers,
    from_tiles,
    new_fields,
    scales_are_tiled,
    tiled_shape,
)
from library.precision.files.cut_weight import in_chunks
from library.precision.files.file_tensors import FileTensors, quantization_method
from library.precision.fp8_numbers import E4M3FN, holds_nan_or_inf, power_of_two, refuse_nan, round_to_whole
from library.precision.names import LayoutKind

BLOCK = 16
_LARGEST = 6.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LOOKED_AT = 8  # layers of a file without markers
_TELLING = 8.0  # standard deviations of one layer's answer
_SATURATION = 7 / 6  # what 6 can stand for: up to 7 numbers are rounded to it


@dataclass(frozen=True)
class Nvfp4Weight(BlockScaledWeight):
    """Values [out, in / 2] uint8, the first of two in the high bits; ``block_scale`` [out, in / 16] e4m3fn, by rows.

    ``scale`` is fp32, [1, 1], or [out, 1] where weights with different ones were stacked.
    """

    scale: Tensor
    spans: ClassVar = {"values": 2, "block_scale": BLOCK}

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], 2 * self.values.shape[1]

    @property
    def scheme(self) -> Nvfp4Scheme:
        """It keeps the matrix's scale where that suffices."""
        return Nvfp4Scheme(self.scale if len(self.scale) == 1 else None)

    def steps(self) -> Tensor:
        """Return the products of the scales; of a block of zeros the smallest there is."""
        return self.block_scale.float().clamp_min_(E4M3FN.smallest).mul_(self.scale)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight: fp32 products, rounded once."""
        pairs = _pairs(self.values.device)

        def numbers(weight: Nvfp4Weight) -> Tensor:
            # e4m3fn times fp32, as comfy-kitchen has it, and only then times the number
            scales = weight.block_scale.float().mul_(weight.scale)
            units = pairs.index_select(0, weight.values.int().view(-1)).view(torch.float32)
            return units.view(*scales.shape, BLOCK).mul_(scales.unsqueeze(-1)).view(weight.shape)

        return in_chunks(self, numbers, dtype)


@dataclass(frozen=True)
class Nvfp4Scheme(BlockScheme):
    """How nvfp4 weights are made; a step is a block's scale times the matrix's.

    Attributes:
        matrix: the scale [1, 1] of the matrix that is added to, which stays as long as its steps do.
    """

    matrix: Tensor | None = field(default=None, compare=False, repr=False)
    name, block = "nvfp4", BLOCK
    largest_unit = _LARGEST

    def steps(self, largest: Tensor, before: Tensor | None = None) -> Tensor:
        """Return the blocks' scales times that of the matrix, which is the least power of two that all of them fit."""
        wanted = largest / _LARGEST
        scale = None if before is None else self._scale_of(before)
        if scale is None or (wanted > _SATURATION * E4M3FN.max * scale).any():
            # The largest is rounded first: pack will find the scale from what it became.
            scale = _matrix_scale(wanted if before is None else torch.maximum(wanted, before))
            scale = _matrix_scale((wanted.amax() / scale).to(E4M3FN.dtype).float() * scale)
        blocks = (wanted / scale).clamp_max(E4M3FN.max).to(E4M3FN.dtype).float().clamp_min_(E4M3FN.smallest)
        return (blocks if before is None else torch.maximum(blocks, _rounded_up(before / scale))).mul_(scale)

    def _scale_of(self, steps: Tensor) -> Tensor:
        """Return the scale of the matrix that ``steps`` were made with."""
        scale = _matrix_scale(steps)
        exact = (steps / scale).to(E4M3FN.dtype).float() * scale == steps
        return scale if self.matrix is None or exact.all() else self.matrix

    def round(self, units: Tensor, stochastic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """See :meth:`Scheme.round`; between two numbers as near it takes the one with even bits."""
        refuse_nan(units, self.name)
        magnitude = units.abs().clamp_max_(_LARGEST)
        gap = gap_above(magnitude)
        return round_to_whole(magnitude / gap, stochastic, generator).mul_(gap).copysign_(units)

    def pack(self, units: Tensor, steps: Tensor | None) -> Nvfp4Weight:
        """Return the weight of numbers ``units`` and of their steps."""
        assert steps is not None
        magnitude = units.abs()
        bits = torch.where(magnitude < 2, magnitude * 2, torch.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4))
        bits = bits.to(torch.uint8) | (units.signbit().to(torch.uint8) << 3)
        scale = self._scale_of(steps)
        return Nvfp4Weight(bits[:, ::2] << 4 | bits[:, 1::2], (steps / scale).to(E4M3FN.dtype), scale)

    def store(self, layout: LayoutKind, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredNvfp4:
        """See :meth:`Scheme.store`."""
        stored = {
            "values": ("weight", torch.uint8, (shape[0], shape[1] // 2)),
            "block_scale": ("weight_scale", E4M3FN.dtype, tiled_shape(self.groups(shape))),
            "scale": ("weight_scale_2", torch.float32, ()),
        }
        return StoredNvfp4(**new_fields(self.describe(), layout, name, shape, **stored), tiled=True)


@dataclass(frozen=True, kw_only=True)
class StoredNvfp4(StoredBlockScaled):
    """An nvfp4 weight in a file; ``low_first``: whether the first of two numbers is in the low four bits."""

    kind = rounding = "nvfp4"
    block = BLOCK
    low_first: bool = False

    @property
    def scheme(self) -> Nvfp4Scheme:
        """There is one."""
        return Nvfp4Scheme()

    def read(self, file: FileTensors, rows: slice = slice(None)) -> Nvfp4Weight:
        """Return numbers and scales of some rows."""
        values, blocks = self.read_numbers(file, rows, E4M3FN.dtype)
        if self.low_first:
            values = _swapped(values)
        if holds_nan_or_inf(blocks) or (blocks.float() < 0).any():
            raise file.damaged(self.tensors["block_scale"], "holds a scale that is NaN or negative")

        def used() -> Tensor:
            return (values & 0x77 != 0).view(*blocks.shape, BLOCK // 2).any(-1)

        file.used_scale(self.tensors["block_scale"], blocks.view(torch.uint8), used)
        scale = file.read_scale(name := self.tensors["scale"], zeros=True).reshape(1, 1)
        return Nvfp4Weight(values, blocks, file.used_scale(name, scale, lambda: used().any(), most=0))

    def written(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Return numbers and scales as the file has them, rows filled up with zeros."""
        assert isinstance(weight, Nvfp4Weight)
        scale = self.tensors["scale"]
        ordered = replace(weight, values=_swapped(weight.values)) if self.low_first else weight
        return super().written(ordered) | {scale: weight.scale.reshape(self.tensor_specs[scale][1])}


def find(file: FileTensors) -> dict[str, StoredWeight]:
    """Return the nvfp4 weights of ``file``, by name."""
    found: dict[str, StoredWeight] = {layer.weight: _stored(layer) for layer in comfy_layers(file, "nvfp4")}
    unmarked = list(_unmarked_layers(file))
    if unmarked and found:
        missing = f"{unmarked[0].name}.comfy_quant"
        raise file.damaged(missing, f"is missing, which {len(found)} other nvfp4 layers have")
    others = {layer.weight: _stored(layer, marked=False) for layer in unmarked}
    _refuse_unsaid(file, [*others.values()])
    return found | others


def _unmarked_layers(file: FileTensors) -> Iterator[ComfyLayer]:
    """Yield the layers that have both scales, and of which ComfyUI says nothing."""
    for name in file.entries:
        layer, _, leaf = name.rpartition(".")
        known = file.dtype(f"{layer}.weight") == "U8" and file.dtype(f"{layer}.weight_scale") in ("F8_E4M3", "U8")
        if leaf == "weight_scale_2" and known and layer not in file.layer_configs:
            yield ComfyLayer(file, layer, {"format": "nvfp4"})


def _refuse_unsaid(file: FileTensors, layers: Sequence[StoredNvfp4]) -> None:
    """Raise a UserError if the scales of a file without markers may lie in tiles: its marker may have been lost.

    They lie by rows if any layer's can only do that (its shape is not that of whole tiles), if a ``config.json`` says
    modelopt, or if scales of one row, and of one run of inputs, are more alike so. Weights differ from row to row; in
    the wrong order this is lost.
    """
    shapes = [stored.tensor_specs[stored.tensors["block_scale"]][1] for stored in layers]
    if not shapes or any(tiled_shape(s) != s for s in shapes) or quantization_method(file.path) == "modelopt":
        return
    largest = sorted(layers, key=lambda stored: -math.prod(stored.shape))[:_LOOKED_AT]
    gains = []
    for stored in largest:
        scales = file.read(stored.tensors["block_scale"]).view(E4M3FN.dtype)
        gains.append(_alike(scales) - _alike(from_tiles(scales, scales.shape)))
    if sum(gains) < _TELLING * math.sqrt(len(gains)):
        raise file.refuse(
            layers[0].tensors["block_scale"],
            "may lie by rows (modelopt) or in tiles (ComfyUI), and there is no marker",
            'use the file with ComfyUI\'s _quantization_metadata, or say {"quantization_config": {"quant_method": '
            '"modelopt"}} in a config.json beside it',
        )


def _alike(scales: Tensor) -> float:
    """Return how many standard deviations above chance scales [rows, runs] of one row, and of one run, are alike.

    The logarithm of F of an analysis of variance, whose own deviation is sqrt(2 / a + 2 / b) for a and b degrees.
    """
    logs, found = scales.float().clamp_min(E4M3FN.smallest).log(), 0.0
    for groups in (logs, logs.T):
        count, size = groups.shape
        if min(count, size) > 1:
            ratio = size * groups.mean(1).var() / groups.var(1).mean().clamp_min(1e-12)
            found += float(ratio.clamp_min(1e-12).log()) / math.sqrt(2 / (count - 1) + 2 / (count * (size - 1)))
    return found


def _stored(layer: ComfyLayer, marked: bool = True) -> StoredNvfp4:
    """Return where the weight of ``layer`` lies."""
    file, stored_shape = layer.file, layer.matrix(("U8",))
    if f"{layer.name}.pre_quant_scale" in file.entries:
        raise file.refuse(
            f"{layer.name}.pre_quant_scale", "scales the layer's inputs (AWQ), behind which ComfyUI puts LoRAs"
        )
    blocks, scale = layer.tensor("weight_scale", ("F8_E4M3", "U8")), layer.tensor("weight_scale_2", ("F32",))
    if torch.Size(file.entries[scale].shape).numel() != 1:
        raise file.damaged(scale, f"of shape {list(file.entries[scale].shape)} is not one scale of a matrix")
    whole = (stored_shape[0], 2 * stored_shape[1])
    fields = layer.fields(layer.unpadded(whole, BLOCK), block_scale=blocks, scale=scale)
    if not marked:
        fields |= {"layout": "modelopt", "full_precision": None}
    tiled = scales_are_tiled(file, blocks, whole, BLOCK, tiles=marked)
    return StoredNvfp4(**fields, tiled=tiled, low_first=not marked)


def _matrix_scale(steps: Tensor) -> Tensor:
    """Return the least power of two by which all ``steps``, divided, are at most 448; [1, 1].

    Of steps that were made with it, it finds itself again: the largest of them is above 224 times it.
    """
    return power_of_two(steps.amax() / E4M3FN.max, -100, 100).reshape(1, 1)


def _rounded_up(blocks: Tensor) -> Tensor:
    """Return block scales as e4m3fn has them, not below ``blocks`` by more than fp32's rounding."""
    nearest = blocks.clamp_max(E4M3FN.max).to(E4M3FN.dtype)
    above = (nearest.view(torch.uint8) + 1).clamp_max_(0x7E).view(E4M3FN.dtype).float()
    return torch.where(nearest.float() < blocks * (1 - 2.0**-20), above, nearest.float())


def gap_above(magnitude: Tensor) -> Tensor:
    """Return how far apart numbers lie above ``magnitude``."""
    return torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))


def _swapped(values: Tensor) -> Tensor:
    """Return bytes with their halves in the other order."""
    return values << 4 | values >> 4


@cached_tensor
def _pairs(device: torch.device) -> Tensor:
    """Return the two fp32 numbers of each byte as one int64, [256]: one look-up gives both."""
    numbers = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
    byte = torch.arange(256)
    return torch.stack([numbers[byte >> 4], numbers[byte & 15]], dim=1).view(torch.int64).view(-1).to(device)
