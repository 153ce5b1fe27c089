"""LoKr and LoHa, the Kronecker and Hadamard products of LyCORIS (https://arxiv.org/abs/2309.14859), of a linear layer.

LoKr: the update is ``s * w1 (x) w2``. Out and in are each cut into a smaller and a larger factor (``factor``: the
smaller one wanted), w1 takes the smaller ones, w2 the larger ones. w2 is a product of rank ``rank`` where that is
smaller, w1 only if ``decompose_both``; with ``full_matrix`` neither is. s = alpha / rank, 1 where neither is a product.
With x as a matrix [in_1, in_2]

    (w1 (x) w2) x = w1 x w2^T

so the [out, in] matrix is never formed, which peft's layer does in every forward. Either product can come first; what
is widened comes last. Where w2 has no fewer rows than columns that is w2's: w1 x is as large as x, and is made again in
backward, for 1 / 48 of w2's product where FLUX.1's 3072 are 8 x 384, so x alone is saved. Of a w2 that is a product w1
stands between its factors, where it has ``rank`` columns to multiply (2 to 4 times faster than behind them, on a CPU).

LoHa: ``s * (a1 b1) * (a2 b2)``, element by element, has up to the squared rank. Here the matrix has to be formed;
peft's autograd function keeps only the factors for backward.

Names, splitting and initial weights are LyCORIS's, so that its readers (ComfyUI, Forge) load the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from library.errors import UserError
from networks.adapters.base import AdapterLinear, fill, in_compute_dtype, new_parameter


def factorization(size: int, factor: int) -> tuple[int, int]:
    """Return the smaller and the larger factor of a side, the smaller one near ``factor``; -1: both near the root."""
    from peft.tuners.lokr.layer import factorization as peft_factorization  # seconds, which a LoRA does not wait for

    return peft_factorization(size, factor)


def refuse_large_factor(option: str, factor: int, shapes: Iterable[Sequence[int]]) -> None:
    """Refuse a factor that is larger than every side of the layers it is for; ``shapes``: [out, in] of them."""
    largest = max((max(shape) for shape in shapes), default=factor)
    if factor > largest:
        raise UserError(f"{option}={factor}: no layer has more than {largest} rows or columns; lower it")


def other_factors(factor: int, w1_shapes: Iterable[Sequence[int]]) -> str | None:
    """Return in words which factors were taken where ``factor`` is none of a side, or not its smaller one."""
    taken = sorted({side for shape in w1_shapes for side in shape} - {factor})
    words = ", ".join(map(str, taken))
    return f"factor {factor} is not the smaller factor of every side; w1 has {words} there" if taken else None


class LoKrLinear(AdapterLinear):
    """A frozen layer with a Kronecker product added."""

    kind, scaled, from_zero = "lokr", ("lokr_w1", "lokr_w1_b"), ("lokr_w2", "lokr_w2_b")
    like_file = "set network_dim, and factor and full_matrix in network_args, as in the file"

    def __init__(
        self,
        base: nn.Module,
        rank: int,
        alpha: float,
        *,
        factor: int = -1,
        decompose_both: bool = False,
        full_matrix: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(base, rank, alpha)
        out_small, out_large = sorted(factorization(self.out_features, factor))
        in_small, in_large = sorted(factorization(self.in_features, factor))
        self._in_shape, self.w1_shape, self.factor = (in_small, in_large), (out_small, in_small), factor

        def add(name: str, rows: int, columns: int, is_product: bool) -> None:
            shapes = (
                {f"{name}_a": (rows, rank), f"{name}_b": (rank, columns)} if is_product else {name: (rows, columns)}
            )
            for key, shape in shapes.items():
                self.register_parameter(key, new_parameter(base, *shape, dtype=dtype))

        add("lokr_w1", out_small, in_small, decompose_both and rank < max(out_small, in_small) / 2)
        add("lokr_w2", out_large, in_large, not full_matrix and rank < max(out_large, in_large) / 2)

    @property
    def is_full(self) -> bool:
        """Whether neither w1 nor w2 is a product: rank and alpha then mean nothing."""
        return hasattr(self, "lokr_w1") and hasattr(self, "lokr_w2")

    @property
    def size(self) -> str:
        """Rows and columns of w1, and the rank of what is a product."""
        return f"w1 {self.w1_shape[0]}x{self.w1_shape[1]}, {'w2 full' if self.is_full else super().size}"

    @property
    def scale(self) -> float:
        """alpha / rank where w1 or w2 is a product, else 1."""
        return 1.0 if self.is_full else self.alpha / self.rank

    def initialise(self, generator: torch.Generator) -> None:
        """Draw all but w2, or w2's second factor, which is zero."""
        for name, parameter in self.trained().items():
            values = torch.zeros(parameter.shape)
            if name not in self.from_zero:
                nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
            fill(parameter, values)

    def changed(self, out: Tensor, x: Tensor) -> Tensor:
        """Add w1 x w2^T of each x as a matrix."""
        x = in_compute_dtype(x)
        factors = {name: parameter.to(x.dtype) for name, parameter in self.trained().items()}
        w1 = factors["lokr_w1"] if "lokr_w1" in factors else factors["lokr_w1_a"] @ factors["lokr_w1_b"]
        w1 = w1 * self.scale
        h = x.reshape(-1, *self._in_shape)  # [N, in_1, in_2]
        if "lokr_w2" not in factors:
            h = F.linear(h, factors["lokr_w2_b"])  # [N, in_1, rank]
            h = F.linear(torch.matmul(w1, h), factors["lokr_w2_a"])
        elif len(w2 := factors["lokr_w2"]) < w2.shape[1]:
            h = torch.matmul(w1, F.linear(h, w2))
        else:  # a compiler decides itself what is made again
            h = F.linear(torch.matmul(w1, h), w2) if torch.compiler.is_compiling() else _Product.apply(h, w1, w2)
        return out + h.reshape(out.shape)


class _Product(torch.autograd.Function):
    """``w1 x w2^T`` of each x: [N, in_1, in_2] -> [N, out_1, out_2]. w1 x is made again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        ctx.save_for_backward(x, w1, w2)
        return F.linear(torch.matmul(w1, x), w2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, w1, w2 = ctx.saved_tensors
        g = gradients[0]  # [N, out_1, out_2]
        w2_gradient = g.reshape(-1, len(w2)).t() @ torch.matmul(w1, x).reshape(-1, w2.shape[1])
        h = torch.matmul(g, w2)  # [N, out_1, in_2]
        w1_gradient = torch.matmul(h, x.mT).sum(0)
        return torch.matmul(w1.t(), h) if ctx.needs_input_grad[0] else None, w1_gradient, w2_gradient


class LoHaLinear(AdapterLinear):
    """A frozen layer with the elementwise product of two low-rank matrices added."""

    kind, scaled, from_zero = "loha", ("hada_w1_a",), ("hada_w2_a",)

    def __init__(self, base: nn.Module, rank: int, alpha: float, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(base, rank, alpha)
        from peft.tuners.loha.layer import make_weight  # seconds, which a LoRA does not wait for

        self._make_weight = make_weight
        for name in ("hada_w1", "hada_w2"):
            self.register_parameter(f"{name}_a", new_parameter(base, self.out_features, rank, dtype=dtype))
            self.register_parameter(f"{name}_b", new_parameter(base, rank, self.in_features, dtype=dtype))

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def initialise(self, generator: torch.Generator) -> None:
        """Draw from normal distributions of LyCORIS's widths; the second product's first factor is zero."""
        widths = {"hada_w1_a": 0.1, "hada_w1_b": 1.0, "hada_w2_a": 0.0, "hada_w2_b": 1.0}
        for name, parameter in self.trained().items():
            fill(parameter, torch.randn(parameter.shape, generator=generator) * widths[name])

    def changed(self, out: Tensor, x: Tensor) -> Tensor:
        """Add the product with the [out, in] matrix."""
        x = in_compute_dtype(x)
        trained = self.trained()
        factors = [trained[name] for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")]
        with torch.autocast(x.device.type, enabled=False):
            update = self._make_weight(*factors, torch.tensor(self.scale))  # [out, in]
        return out + F.linear(x, update.to(x.dtype))
