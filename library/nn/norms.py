"""Root mean square normalisation, once for every model in Tandem.

RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467): y = x / sqrt(mean(x^2) + eps) * weight,
the mean taken over the last axis. The sum of squares and the product with the weight are computed in fp32
whatever the dtype of ``x`` (the fused kernel behind ``F.rms_norm`` does so in registers), and rounded once at
the end.

Libraries differ in what happens when ``x`` and the weight have different dtypes, as under autocast with fp32
weights: ``torch.nn.RMSNorm`` falls back to a chain of unfused operations with a warning, diffusers' RMSNorm
returns the weight's dtype. Here the weight follows ``x``, as a linear's weight follows under autocast, and
the result has the dtype of ``x``. With equal dtypes the output is that of ``torch.nn.RMSNorm`` bit for bit.

What stands between the linear layers of a diffusion transformer's block: norm with modulation, GELU, slices.

All of it is cheap to make and as wide as what it is made of, so blocks hand these functions to
``library.nn.frozen_linear.project_recomputed``, which makes them again in backward instead of keeping their results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """RMSNorm over the last axis; its only parameter is ``weight`` [dim], None when ``affine`` is false."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype)) if affine else None

    @classmethod
    def adopt(cls, norm: Any) -> RMSNorm:
        """Return an RMSNorm sharing the weight of ``norm``, ``torch.nn.RMSNorm`` or diffusers' RMSNorm.

        Raises:
            ValueError: ``norm`` has a bias or normalises over several axes, which FLUX's and Qwen's norms do
            not.
        """
        shape = tuple(norm.normalized_shape) if isinstance(norm, nn.RMSNorm) else tuple(norm.dim)
        if len(shape) != 1 or getattr(norm, "bias", None) is not None:
            raise ValueError(f"{type(norm).__name__} over {shape} with a bias or several axes has no equal here")
        # torch.nn.RMSNorm(eps=None) means the epsilon of fp32, in which it computes.
        eps = torch.finfo(torch.float32).eps if norm.eps is None else float(norm.eps)
        ours = cls(shape[0], eps=eps, affine=False)
        ours.weight = norm.weight
        ours.train(norm.training)
        return ours

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., dim]; shape and dtype stay."""
        weight: Tensor | None = self.weight
        if weight is not None and weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        # `.to` costs nothing where dtypes agree; it undoes autocast policies that return fp32.
        return F.rms_norm(x, (self.dim,), weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, affine={self.weight is not None}"


_LARGEST_FP16 = 65504


class Kept:
    """A block's modulation from its run in forward to that in backward, which would make it again.

    Its layers hold a quarter of FLUX's weights and a third of Qwen-Image's, and give a few vectors, which follow from
    nothing that is trained unless they are; see :func:`once`. No dict: what walks through arguments leaves it whole.
    """

    def __init__(self) -> None:
        self.vectors: dict[str, Tensor] = {}


def once(kept: Kept | None, name: str, make: Callable[[], Tensor]) -> Tensor:
    """Return ``make()``, or what it gave in this block's first run; what needs a gradient is made in every run."""
    if torch.compiler.is_compiling() or kept is None:
        return make()
    if name in kept.vectors:
        return kept.vectors[name]
    made = make()
    if not made.requires_grad:
        kept.vectors[name] = made
    return made


def modulated(norm: Any) -> functools.partial[Tensor]:
    """Return :func:`modulated_norm` with the epsilon of ``norm``, a LayerNorm without weights."""
    return functools.partial(modulated_norm, eps=norm.eps)


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return LayerNorm of ``x`` [B, S, W] times (1 + scale) plus shift, these [B, 1, W]."""
    return F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift


def gelu(x: Tensor) -> Tensor:
    """Return GELU in the tanh form that both FLUX and Qwen-Image were trained with."""
    return F.gelu(x, approximate="tanh")


def tokens(x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    """Return tokens ``start`` to ``end`` of ``x`` [B, S, W]."""
    return x[:, start:end]


def within_fp16(x: Tensor) -> Tensor:
    """Return ``x``, an fp16 one kept within its range: residual streams grow beyond it."""
    return x.clip(-_LARGEST_FP16, _LARGEST_FP16) if x.dtype == torch.float16 else x
