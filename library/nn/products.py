"""The three products of a linear layer, y = x W^T, dx = dy W and dW = dy^T x, on CPUs that are not Intel's.

PyTorch's builds for x86 multiply fp32 by MKL, which picks slow kernels on other CPUs. oneDNN, which PyTorch has for
bf16, is twice as fast there: all three products of a Llama of width 384 run at 110 GFLOP/s by MKL and at 190 to 255 by
oneDNN on a core of an EPYC (on a Xeon it is 94 ms against 101, but an input gradient 189 against 98). Both sum in fp32,
in another order. The CPU's vendor decides and not a stop watch, so that a run gives the same bits each time.

oneDNN is reached by an operator that PyTorch makes for its compiler's own use. Its weight may lie by columns: it makes
itself a copy in the order that it wants, so of a large one it is given some rows at a time. To ``torch.compile`` the
operator is opaque, under a name of our own (``tandem::linear``), since Inductor takes its weight for a constant.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def _prefers_onednn() -> bool:
    """Return whether PyTorch has oneDNN, and not MKL on a CPU of Intel's."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        cpuinfo = platform.processor()
    mkl_is_fast = torch.backends.mkl.is_available() and "GenuineIntel" in cpuinfo
    return torch.backends.mkldnn.is_available() and not mkl_is_fast


PREFERS_ONEDNN = _prefers_onednn()
_CHUNK = 1 << 21  # weights copied at once: 8 MiB
_LARGE = 1 << 24  # multiplications; below that a product takes less than half a millisecond either way


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``; [n, in] and [out, in] give [n, out]. Not recorded by autograd."""
    if not _use_onednn(x, weight):
        return F.linear(x, weight, bias)
    call = _opaque_linear if torch.compiler.is_compiling() else onednn_linear
    return call(x, weight, bias)


def add_input_gradient_of(weight: Tensor, gradient: Tensor, into: Tensor) -> Tensor:
    """Add ``gradient @ weight`` to ``into`` in place: [n, out], [out, in] and [n, in]; return ``into``."""
    if not _use_onednn(gradient, weight.t()):
        return into.addmm_(gradient, weight)
    for rows in _runs(*weight.shape):
        into += product(gradient[:, rows], weight[rows].t())
    return into


def input_gradient_of(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return ``gradient @ weight``: [out, in] and [n, out] give [n, in]."""
    if not _use_onednn(gradient, weight.t()):
        return gradient @ weight
    return add_input_gradient_of(weight, gradient, gradient.new_zeros(len(gradient), weight.shape[1]))


def add_weight_gradient(x: Tensor, gradient: Tensor, into: Tensor) -> Tensor:
    """Add ``gradient.T @ x`` to ``into`` in place: [n, out], [n, in] and [out, in]; return ``into``."""
    if not _use_onednn(gradient.t(), x.t()):
        return into.addmm_(gradient.t(), x)
    for rows in _runs(*into.shape):
        into[rows] += product(gradient[:, rows].t(), x.t())
    return into


class TrainedLinear(nn.Linear):
    """An ``nn.Linear`` whose products, all three, are this module's; same names, same numbers but for their rounding.

    Where there is nothing to gain, and under autocast, it is ``nn.Linear``.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]``."""
        if not _use_onednn(x, self.weight) or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        rows = _Trained.apply(x.reshape(-1, self.in_features), self.weight, self.bias)
        return rows.view(*x.shape[:-1], self.out_features)


def train_by_products(model: nn.Module) -> None:
    """Make every ``nn.Linear`` below ``model`` a :class:`TrainedLinear`, in place; parameters stay the same objects."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = TrainedLinear


class _Trained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (gradient,), wanted = ctx.saved_tensors, gradients, ctx.needs_input_grad
        d_x = input_gradient_of(weight, gradient) if wanted[0] else None
        d_weight = add_weight_gradient(x, gradient, torch.zeros_like(weight)) if wanted[1] else None
        return d_x, d_weight, gradient.sum(0) if wanted[2] else None


def _use_onednn(x: Tensor, weight: Tensor) -> bool:
    is_large = PREFERS_ONEDNN and x.device.type == "cpu" and x.numel() * weight.shape[0] >= _LARGE
    return is_large and x.dtype == weight.dtype == torch.float32


def _runs(rows: int, columns: int) -> list[slice]:
    """Return runs of rows of ``_CHUNK`` numbers."""
    step = max(64, _CHUNK // columns // 64 * 64)
    return [slice(start, start + step) for start in range(0, rows, step)]


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias``, [..., in] to [..., out], by oneDNN; ``weight`` may lie in its own order."""
    # It falls back to a loop a thousand times slower for an x that is stored by columns.
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")


_opaque_linear = torch.library.custom_op("tandem::linear", onednn_linear, mutates_args=())


@_opaque_linear.register_fake
def _(x: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
