"""mxfp8: e4m3fn with a power of two for each 32 inputs (Open Compute Project, "Microscaling Formats v1.0", 2023).

    weight[o, i]  ~  values[o, i] * 2^(block_scale[o, i // 32] - 127)

In ComfyUI's files (``comfy_quant`` with the format ``mxfp8``): ``<layer>.weight`` e4m3fn, ``<layer>.weight_scale`` e8m0
or uint8, in the tiles of tensor cores (``comfy_quant.py``) or by rows where its shape is that. A scale of 255 is NaN;
one of 0 stands for 0 to comfy-kitchen, which writes it for blocks of zeros. Outputs may be filled up to a multiple of
32, with ``orig_shape`` in ComfyUI's word of the layer. Such files are read and merged into, not made of other ones.
Sources: comfy-kitchen (``tensor/mxfp8.py``, ``backends/eager/quantization.py``), ComfyUI ``comfy/ops.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from library.precision.files.base import StoredWeight
from library.precision.files.comfy_quant import (
    BlockScaledWeight,
    BlockScheme,
    ComfyLayer,
    StoredBlockScaled,
    comfy_layers,
    scales_are_tiled,
)
from library.precision.files.file_tensors import FileTensors
from library.precision.fp8_numbers import (
    E4M3FN,
    dequantize,
    holds_nan_or_inf,
    power_of_two,
    round_stochastically,
    round_to_nearest,
)

BLOCK = 32
_LARGEST_EXPONENT = 127 + 16  # above, a weight's numbers would be beyond fp16's largest
_MANTISSA_BITS = 23  # of fp32, above which its exponent lies, with e8m0's bias


@dataclass(frozen=True)
class Mxfp8Weight(BlockScaledWeight):
    """Values [out, in] e4m3fn; ``block_scale`` [out, in / 32] uint8, the exponents, by rows."""

    spans: ClassVar = {"values": 1, "block_scale": BLOCK}

    @property
    def scheme(self) -> Mxfp8Scheme:
        """There is one."""
        return Mxfp8Scheme()

    def steps(self) -> Tensor:
        """Return the powers of two; of a block of zeros the smallest there is."""
        return self._factors(self.block_scale.clamp_min(1))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight: fp32 products, rounded once."""
        return dequantize(self.values, self._factors(self.block_scale), dtype)

    @staticmethod
    def _factors(exponents: Tensor) -> Tensor:
        return (exponents.int() << _MANTISSA_BITS).view(torch.float32)


@dataclass(frozen=True)
class Mxfp8Scheme(BlockScheme):
    """How mxfp8 weights are made; a step is the least power of two that a block fits."""

    name, block = "mxfp8", BLOCK
    largest_unit = E4M3FN.max

    def steps(self, largest: Tensor, before: Tensor | None = None) -> Tensor:
        """Return powers of two."""
        steps = power_of_two(largest / E4M3FN.max, -126, 127)
        return steps if before is None else torch.maximum(steps, before)

    def round(self, units: Tensor, stochastic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """See :meth:`Scheme.round`; in e4m3fn."""
        return round_stochastically(units, E4M3FN, generator) if stochastic else round_to_nearest(units, E4M3FN)

    def pack(self, units: Tensor, steps: Tensor | None) -> Mxfp8Weight:
        """Return the weight of numbers ``units`` and of their steps."""
        assert steps is not None
        return Mxfp8Weight(units.to(E4M3FN.dtype), (steps.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8))


@dataclass(frozen=True, kw_only=True)
class StoredMxfp8(StoredBlockScaled):
    """An mxfp8 weight in a file."""

    kind = rounding = "mxfp8"
    block = BLOCK

    @property
    def scheme(self) -> Mxfp8Scheme:
        """There is one."""
        return Mxfp8Scheme()

    def read(self, file: FileTensors, rows: slice = slice(None)) -> Mxfp8Weight:
        """Return numbers and scales of some rows."""
        values, blocks = self.read_numbers(file, rows, torch.uint8)
        values = values.view(E4M3FN.dtype)
        if holds_nan_or_inf(values):
            raise file.damaged(self.name, "holds NaN")
        name = self.tensors["block_scale"]
        if (blocks > _LARGEST_EXPONENT).any():
            worst = int(blocks.max())
            what = "NaN" if worst == 255 else f"2^{worst - 127}, which no weight is as large as"
            raise file.damaged(name, f"holds {what}")
        numbers = values.view(torch.uint8)
        file.used_scale(name, blocks, lambda: (numbers & 0x7F).view(*blocks.shape, BLOCK).any(-1))
        return Mxfp8Weight(values, blocks)


def find(file: FileTensors) -> dict[str, StoredWeight]:
    """Return the mxfp8 weights of ``file``, by name."""
    return {layer.weight: _stored(layer) for layer in comfy_layers(file, "mxfp8")}


def _stored(layer: ComfyLayer) -> StoredMxfp8:
    """Return where the weight of ``layer`` lies."""
    stored_shape, blocks = layer.matrix(("F8_E4M3", "U8")), layer.tensor("weight_scale", ("F8_E8M0", "U8"))
    shape = layer.unpadded(stored_shape, BLOCK)
    tiled = scales_are_tiled(layer.file, blocks, stored_shape, BLOCK)
    return StoredMxfp8(**layer.fields(shape, block_scale=blocks), tiled=tiled)
