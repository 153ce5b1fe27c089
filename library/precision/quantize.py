"""A weight as fp8 codes and scales, and back.

    weight[o, i]  ~  codes[o, i] * scale[o or 0, i // block]

Scales are fp32 and two-dimensional, ``[rows, blocks]`` with rows 1 or ``out`` and blocks 1 or ``in / block``:

    plain cast        no scale            every number rounded as it is
    tensor            [1, 1]              one scale for the matrix (ComfyUI's scaled fp8)
    row               [out, 1]            one for each output (torchao, musubi-tuner's "channel")
    block64, 128      [out, in / block]   one for each run of inputs of a row (musubi-tuner's "block")

A scale is the group's largest magnitude divided by the format's largest number. A group of zeros has scale 1.

How codes become numbers again quickly on a CPU: ``cpu_dequantize``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from library.precision.cpu_dequantize import dequantize_on_cpu
from library.precision.formats import E4M3FN, Fp8Format, format_of
from library.precision.rounding import round_stochastically, round_to_nearest

Granularity = Literal["cast", "tensor", "row", "block64", "block128"]
GRANULARITIES: tuple[Granularity, ...] = ("cast", "tensor", "row", "block64", "block128")


@dataclass(frozen=True)
class Quantized:
    """Codes ``[out, in]`` (an fp8 dtype) and their scale ``[1 or out, blocks]`` fp32, or None for a plain cast."""

    codes: Tensor
    scale: Tensor | None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in ``dtype``."""
        return dequantize(self.codes, self.scale, dtype)


def block_size(granularity: Granularity) -> int | None:
    """Return the run of inputs that shares a scale, or None if all inputs of a row do."""
    return int(granularity.removeprefix("block")) if granularity.startswith("block") else None


def fitting_granularity(granularity: Granularity, in_features: int) -> Granularity:
    """Return ``granularity``, or ``row`` where blocks do not divide ``in_features`` (as musubi-tuner does)."""
    block = block_size(granularity)
    return "row" if block is not None and in_features % block else granularity


def compute_scale(
    weight: Tensor,
    granularity: Granularity,
    fp8: Fp8Format = E4M3FN,
    scale_dtype: torch.dtype = torch.float32,
) -> Tensor | None:
    """Return the scale of ``weight`` [out, in], fp32, as the module's first lines lay it out; None for a cast.

    Args:
        scale_dtype: dtype the scale will be stored in. It is rounded to that first, so that codes fit what
            is stored.

    Raises:
        ValueError: blocks do not divide ``in``.
    """
    if granularity == "cast":
        return None
    out_features, in_features = weight.shape
    magnitudes = weight.abs()
    if granularity == "tensor":
        largest = magnitudes.amax().reshape(1, 1)
    else:
        block = block_size(granularity) or in_features
        if in_features % block:
            raise ValueError(f"{in_features} inputs cannot be cut into blocks of {block}")
        largest = magnitudes.view(out_features, in_features // block, block).amax(dim=-1)
    scale = (largest.float() / fp8.max).to(scale_dtype).float()
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantize(
    weight: Tensor,
    granularity: Granularity,
    fp8: Fp8Format = E4M3FN,
    *,
    stochastic: bool = False,
    generator: torch.Generator | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> Quantized:
    """Return ``weight`` [out, in] (fp32, bf16 or fp16) as fp8.

    Args:
        stochastic: round stochastically instead of to nearest.
        generator: for stochastic rounding.
        scale_dtype: see :func:`compute_scale`.

    Raises:
        ValueError: blocks do not divide ``in``, or the weight holds a NaN.
    """
    scale = compute_scale(weight.detach(), granularity, fp8, scale_dtype)
    values = weight.detach().float()
    if scale is not None:
        values = (_blocked(values, scale) / _per_block(scale)).view(weight.shape)
    if stochastic:
        return Quantized(round_stochastically(values, fp8, generator), scale)
    return Quantized(round_to_nearest(values, fp8), scale)


def dequantize(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``codes * scale`` in ``dtype``: the product in fp32, rounded once.

    Args:
        codes: [out, in], e4m3fn or e5m2, finite (see ``formats.holds_nan_or_inf``); may be a slice.
        scale: [1 or out, blocks] fp32, or None.
        dtype: fp32, bf16 or fp16.
    """
    assert format_of(codes.dtype) is not None, f"{codes.dtype} is no fp8 dtype"
    if codes.device.type == "cpu" and not torch.compiler.is_compiling():
        return dequantize_on_cpu(codes, scale, dtype)
    if scale is None:
        return codes.to(dtype)
    product = _blocked(codes.to(torch.float32), scale) * _per_block(scale)
    return product.to(dtype).view(codes.shape)


def _blocked(values: Tensor, scale: Tensor) -> Tensor:
    """Return ``values`` [out, in] as [out, blocks, block]."""
    return values.view(values.shape[0], scale.shape[1], -1)


def _per_block(scale: Tensor) -> Tensor:
    """Return ``scale`` [rows, blocks] so that it broadcasts over [out, blocks, block]."""
    return scale.unsqueeze(-1)
