"""Synthetic layers with what makes real ones hard to quantise: heavy tails, outlier channels, inputs that lie in few
directions, a LoRA that lies in those too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from library.precision.files.fp8 import Fp8Scheme, Fp8Weight
from library.precision.fp8_numbers import E4M3FN, Fp8Format
from library.precision.names import Granularity
from library.precision.parity.activations import LayerInputs

RANK = 16


@dataclass(frozen=True)
class Layer:
    """One layer: bf16 numbers in fp32, a LoRA's factors and update, inputs of a calibration and others to judge by."""

    weight: Tensor  # [out, in]
    up: Tensor
    down: Tensor
    inputs: LayerInputs
    others: Tensor  # [n, in] rows that nothing was fitted to or chosen by

    @property
    def update(self) -> Tensor:
        """The LoRA's update, of scale 1."""
        return self.up @ self.down

    def output_error(self, error: Tensor) -> float:
        """Return rms(x error^T) / rms(x (W + D)^T) over ``others``, in float64."""
        x = self.others.double()
        wanted = x @ (self.weight + self.update).double().t()
        return float((x @ error.double().t()).norm() / wanted.norm())


def make_layer(out_features: int = 320, in_features: int = 384, seed: int = 0, std: float = 0.02) -> Layer:
    """Return a layer: Student-t weights (5 degrees of freedom), 8 outlier channels, LoRA of rank 16 and 1 % of W.

    The inputs' spectrum falls as k^-0.6, so a tenth of the directions holds half of the energy.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    weight = normal(out_features, in_features) / (normal(out_features, in_features, 5).square().mean(-1)).sqrt()
    weight[:, torch.randperm(in_features, generator=random)[:8]] *= 5
    weight = (weight * (std / weight.std())).bfloat16().float()
    spectrum = torch.arange(1, in_features + 1).float() ** -0.6
    axes = torch.linalg.qr(normal(in_features, in_features)).Q
    down, up = (normal(RANK, in_features) * spectrum) @ axes.t(), normal(out_features, RANK)
    size = 0.01 * weight.norm() / (up @ down).norm()
    fit, check, others = ((normal(count, in_features) * spectrum) @ axes.t() for count in (2048, 512, 1024))
    inputs = LayerInputs(fit.t() @ fit / len(fit), len(fit), fit.abs().amax(0), check)
    return Layer(weight, up * size.sqrt(), down * size.sqrt(), inputs, others)


def quantize(
    weight: Tensor,
    granularity: Granularity,
    fp8: Fp8Format = E4M3FN,
    *,
    stochastic: bool = False,
    generator: torch.Generator | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> Fp8Weight:
    """Return ``weight`` as fp8."""
    return Fp8Scheme(granularity, fp8, scale_dtype).quantize(weight, stochastic=stochastic, generator=generator)


def saturated(values: Tensor, quantized: Fp8Weight) -> float:
    """Return the share of ``values`` [out, in] that lies outside of what the scales of ``quantized`` can hold."""
    limit = quantized.fp8.max * (1 + 2.0**-20)  # amax / scale rounds to a hair above the largest number
    scaled = values.float()
    if quantized.scale is not None:
        scaled = scaled.view(scaled.shape[0], quantized.scale.shape[1], -1) / quantized.scale.unsqueeze(-1)
    return float((scaled.abs() > limit).double().mean())
