"""What stands between the linear layers of a diffusion transformer's block: norm with modulation, GELU, slices.

All of it is cheap to make and as wide as what it is made of, so blocks hand these functions to
``library.nn.projection.project_made``, which makes them again in backward instead of keeping their results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
