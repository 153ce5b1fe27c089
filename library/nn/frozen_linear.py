"""The matrix products of a frozen linear layer, forward and backward, keeping nothing in between.

``y = x W^T + b`` with W and b fixed needs neither x nor W from autograd: the input gradient is ``dy W``, and the
layer holds W already. The functions here ask the *layer* for its weight when they need it, in backward again. So

* under autocast no cast copy of a weight lives from forward to backward;
* a weight may lie elsewhere between the two (``library.training.memory.block_swap`` moves it): autograd, which would
keep a view of the memory where the weight lay in forward, never sees it.

On CPUs that are not Intel's fp32 products go to oneDNN instead of the BLAS that PyTorch was built with. Its kernels are
generated for the processor at hand; MKL picks slow ones on AMD (640 x 3072 x 3072 on one EPYC core: 53 ms against 123
ms; on a Xeon 94 against 101, and for an input gradient 189 against 98). Both sum in fp32, in another order. Small
products are left where they are.

Several linear layers on one input.

Attention computes q, k and v from the same hidden states. Three frozen base matrices stay three matrix
products, but the low-rank layers around them can share one: a wrapper that knows how
(``networks.adapters.lora.LoRALinear``) offers ``forward_together``, found here by name, so that this layer of the
code needs to know nothing about LoRA.

What stands before a linear layer is often cheap to make and wide to keep: a norm with modulation, an activation. A
wrapper may keep what it is made of instead, if it is told how: :func:`project_recomputed`.

Which matrix kernels suit the processor.

PyTorch's builds for x86 multiply fp32 matrices through MKL, which is Intel's: fast on Intel's processors, and on AMD's
half as fast as oneDNN, whose kernels are generated for the processor at hand (``library.nn.frozen_linear``). PyTorch's
attention kernels for CPUs are built on the same BLAS. The maker decides and not a stop watch, so that a run gives the
same bits each time.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_PIECE = 1 << 21  # weights copied at once: 8 MiB
_LARGE = 1 << 24  # multiplications; below that a product takes less than half a millisecond either way


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``; [n, in] and [out, in] give [n, out]. Not recorded by autograd."""
    if _goes_to_onednn(x, weight):
        # oneDNN falls back to a loop a thousand times slower for an x that is stored by columns.
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def has_input_gradient(layer: nn.Module) -> bool:
    """Return whether :func:`input_gradient` can be had of ``layer``: a frozen nn.Linear, or one that offers it."""
    if hasattr(layer, "input_gradient"):
        return True
    return type(layer) in (nn.Linear, FrozenLinear) and not any(p.requires_grad for p in layer.parameters())


@torch.no_grad()
def output(layer: nn.Module, x: Tensor) -> Tensor:
    """Return ``layer(x)`` of a frozen layer, [n, in] -> [n, out], in the dtype of ``x``; not recorded by autograd."""
    if type(layer) in (nn.Linear, FrozenLinear):
        assert isinstance(layer, nn.Linear)
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return product(x, layer.weight.to(x.dtype), bias)
    return layer(x)


def input_gradient(layer: nn.Module, gradient: Tensor) -> Tensor:
    """Return ``gradient @ weight``: [n, out] -> [n, in], with the weight as the layer holds it now."""
    in_features: Any = layer.in_features
    return add_input_gradient(layer, gradient, gradient.new_zeros(gradient.shape[0], in_features))


@torch.no_grad()
def add_input_gradient(layer: Any, gradient: Tensor, into: Tensor) -> Tensor:
    """Add ``gradient @ weight`` to ``into`` in place: [n, out] and [n, in]; return ``into``.

    oneDNN makes itself a copy of a weight that it multiplies from this side, so it is given some rows at a time.
    """
    if hasattr(layer, "input_gradient"):
        return into.add_(layer.input_gradient(gradient))
    weight = layer.weight.to(gradient.dtype)
    if not _goes_to_onednn(gradient, weight.t()):
        return into.addmm_(gradient, weight)
    step = max(64, _PIECE // weight.shape[1] // 64 * 64)
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        into += product(gradient[:, rows], weight[rows].t())
    return into


class FrozenLinear(nn.Linear):
    """An ``nn.Linear`` with fixed weights; same names, same numbers, nothing kept for backward."""

    @classmethod
    def adopt(cls, linear: nn.Linear) -> FrozenLinear:
        """Return a layer that shares weight and bias with ``linear``."""
        ours = cls.__new__(cls)
        nn.Module.__init__(ours)  # not nn.Linear's: it would allocate a weight
        ours.in_features, ours.out_features = linear.in_features, linear.out_features
        ours.weight, ours.bias = linear.weight, linear.bias
        return ours.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]`` in the dtype of ``x``, or autocast's where autocast is on."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rows = _FrozenProduct.apply(x.reshape(-1, x.shape[-1]), self)
        return rows.view(*x.shape[:-1], self.out_features)


class _FrozenProduct(torch.autograd.Function):
    """``layer(x)``, differentiable in ``x`` alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        return output(layer, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return input_gradient(ctx.layer, gradients[0]), None


def _goes_to_onednn(x: Tensor, weight: Tensor) -> bool:
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    large = x.numel() * weight.shape[0] >= _LARGE and not blas_suits()
    return large and x.dtype == weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def project_together(linears: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Return ``[linear(x) for linear in linears]``, sharing the down-projection where the layers offer it.

    Args:
        linears: layers that map ``[..., in]`` to ``[..., out_i]``; any mix of plain and LoRA-wrapped ones.
        x: their common input, ``[..., in]``.

    Returns:
        One tensor ``[..., out_i]`` per layer, in the given order. Equal to separate calls up to rounding.
    """
    groups: dict[type[nn.Module], list[int]] = {}
    for position, linear in enumerate(linears):
        if hasattr(type(linear), "forward_together"):
            groups.setdefault(type(linear), []).append(position)
    outputs: dict[int, Tensor] = {}
    for kind, positions in groups.items():
        together = kind.forward_together([linears[i] for i in positions], x)  # type: ignore[attr-defined]
        outputs.update(zip(positions, together, strict=True))
    return [outputs[i] if i in outputs else linear(x) for i, linear in enumerate(linears)]


def project_recomputed(linears: Sequence[nn.Module], make: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return :func:`project_together` of ``make(*inputs)``, which is made again in backward where the layers can.

    Args:
        linears: as there.
        make: cheap and differentiable, drawing no random numbers.
        inputs: its arguments; these are kept for backward.
    """
    kind = type(linears[0])
    if hasattr(kind, "forward_together") and all(type(linear) is kind for linear in linears):
        return kind.forward_together(linears, *inputs, make=make)
    return project_together(linears, make(*inputs))


@functools.cache
def blas_suits() -> bool:
    """Return whether PyTorch's BLAS is at home on this processor."""
    return torch.backends.mkl.is_available() and _maker() == "GenuineIntel"


def _maker() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "GenuineIntel" if "Intel" in platform.processor() else ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
