"""Root mean square normalisation, once for every model in Tandem.

RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467): y = x / sqrt(mean(x^2) + eps) * weight,
the mean taken over the last axis. The sum of squares and the product with the weight are computed in fp32
whatever the dtype of ``x`` (the fused kernel behind ``F.rms_norm`` does so in registers), and rounded once at
the end.

Libraries differ in what happens when ``x`` and the weight have different dtypes, as under autocast with fp32
weights: ``torch.nn.RMSNorm`` falls back to a chain of unfused operations with a warning, diffusers' RMSNorm
returns the weight's dtype. Here the weight follows ``x``, as a linear's weight follows under autocast, and
the result has the dtype of ``x``. With equal dtypes the output is that of ``torch.nn.RMSNorm`` bit for bit.
"""

from __future__ import annotations

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
