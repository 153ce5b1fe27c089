"""LoKr and LoHa, the Kronecker and Hadamard products of LyCORIS (https://arxiv.org/abs/2309.14859), of a linear layer.

LoKr: the update is ``s * w1 (x) w2``. Out and in are each cut into a smaller and a larger factor (``factor``: the
smaller one wanted), w1 takes the smaller ones, w2 the larger ones. w2 is a product of rank ``rank`` where that is
smaller, w1 only if ``decompose_both``. s = alpha / rank, 1 where neither is a product. With x as a matrix [in_1, in_2]

    (w1 (x) w2) x = w1 x w2^T

so the [out, in] matrix is never formed, which peft's layer does in every forward.

LoHa: ``s * (a1 b1) * (a2 b2)``, element by element, has up to the squared rank. Here the matrix has to be formed;
peft's autograd function keeps only the factors for backward.

Names, splitting and initial weights are LyCORIS's, so that its readers (ComfyUI, Forge) load the files.
"""

from __future__ import annotations

import math

import torch
from peft.tuners.loha.layer import make_weight
from peft.tuners.lokr.layer import factorization
from torch import Tensor, nn
from torch.nn import functional as F

from networks.adapters.base import AdapterLinear, fill, in_compute_dtype, new_parameter


class LoKrLinear(AdapterLinear):
    """A frozen layer with a Kronecker product added."""

    kind, scaled, from_zero = "lokr", ("lokr_w1", "lokr_w1_b"), ("lokr_w2", "lokr_w2_b")

    def __init__(
        self,
        base: nn.Module,
        rank: int,
        alpha: float,
        *,
        factor: int = -1,
        decompose_both: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(base, rank, alpha)
        out_small, out_large = sorted(factorization(self.out_features, factor))
        in_small, in_large = sorted(factorization(self.in_features, factor))
        self._in_shape = (in_small, in_large)

        def add(name: str, rows: int, columns: int, is_product: bool) -> None:
            shapes = (
                {f"{name}_a": (rows, rank), f"{name}_b": (rank, columns)} if is_product else {name: (rows, columns)}
            )
            for key, shape in shapes.items():
                self.register_parameter(key, new_parameter(base, *shape, dtype=dtype))

        add("lokr_w1", out_small, in_small, decompose_both and rank < max(out_small, in_small) / 2)
        add("lokr_w2", out_large, in_large, rank < max(out_large, in_large) / 2)

    @property
    def scale(self) -> float:
        """alpha / rank where w1 or w2 is a product, else 1."""
        trained = self.trained()
        return 1.0 if "lokr_w1" in trained and "lokr_w2" in trained else self.alpha / self.rank

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
        h = x.reshape(-1, *self._in_shape)  # [N, in_1, in_2]
        for name in ("lokr_w2", "lokr_w2_b", "lokr_w2_a"):
            h = F.linear(h, factors[name]) if name in factors else h  # [N, in_1, out_2]
        for name in ("lokr_w1", "lokr_w1_b", "lokr_w1_a"):
            h = torch.matmul(factors[name], h) if name in factors else h  # [N, out_1, out_2]
        return out + (h * self.scale).reshape(out.shape)


class LoHaLinear(AdapterLinear):
    """A frozen layer with the elementwise product of two low-rank matrices added."""

    kind, scaled, from_zero = "loha", ("hada_w1_a",), ("hada_w2_a",)

    def __init__(self, base: nn.Module, rank: int, alpha: float, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(base, rank, alpha)
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
            update = make_weight(*factors, torch.tensor(self.scale))  # [out, in]
        return out + F.linear(x, update.to(x.dtype))
