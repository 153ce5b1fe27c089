"""Normalisation, and what stands with it between a block's linear layers: modulation, GELU, slices.

RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467): y = x / sqrt(mean(x^2) + eps) * weight, the mean
taken over the last axis. Sum of squares and product with the weight are fp32 whatever the dtype of ``x`` (the fused
kernel behind ``F.rms_norm`` does so in registers), rounded once at the end. Libraries differ where ``x`` and the weight
differ in dtype, as under autocast with fp32 weights: ``torch.nn.RMSNorm`` falls back to unfused operations with a
warning, diffusers' returns the weight's dtype. Here the weight follows ``x``, as a linear's does under autocast. With
equal dtypes the output is that of ``torch.nn.RMSNorm`` bit for bit. For CPUs PyTorch has no fused kernel: a pass over
memory for each operation of the formula, in fp32, and two for each in backward. There a norm with a fixed weight goes
through its input in pieces that stay in the cache, and its gradient is written out: with r = 1 / sqrt(mean(x^2) + eps)
and g the gradient of y times the weight,

    dx = r (g - x r^2 mean(g x))

Modulation (adaLN, Peebles and Xie 2023, arXiv 2212.09748): LayerNorm(x) (1 + scale) + shift, with shift and scale from
the conditioning. Like GELU and slices it is cheap to compute and as wide as its input, so blocks hand these functions
to ``library.nn.frozen_linear.project_recomputed``, which recomputes them in backward instead of saving their results.
The modulation *layers* are the opposite: a quarter of FLUX's weights and a third of Qwen-Image's for a few vectors. A
block under activation checkpointing saves those vectors in a :class:`ModulationCache` and does not run them twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.RMSNorm):
    """RMSNorm over the last axis, in the dtype of its input."""

    @classmethod
    def adopt(cls, norm: Any) -> RMSNorm:
        """Return an RMSNorm sharing the weight of ``norm``, ``torch.nn.RMSNorm`` or diffusers' RMSNorm.

        Raises:
            ValueError: ``norm`` has a bias or normalises over several axes, which FLUX's and Qwen's norms do not.
        """
        shape = tuple(norm.normalized_shape) if isinstance(norm, nn.RMSNorm) else tuple(norm.dim)
        if len(shape) != 1 or getattr(norm, "bias", None) is not None:
            raise ValueError(f"{type(norm).__name__} over {shape} with a bias or several axes has no equal here")
        # torch.nn.RMSNorm(eps=None) means the epsilon of fp32, in which it computes.
        eps = torch.finfo(torch.float32).eps if norm.eps is None else float(norm.eps)
        ours = cls(shape[0], eps=eps, elementwise_affine=False)
        ours.weight = norm.weight
        ours.train(norm.training)
        return ours

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., dim]; shape and dtype stay."""
        weight: Tensor | None = self.weight
        if weight is not None and weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        fixed = weight is None or not weight.requires_grad
        if fixed and x.device.type == "cpu" and x.requires_grad and not torch.compiler.is_compiling():
            return _NormInPieces.apply(x, weight, self.eps)
        # `.to` costs nothing where dtypes agree; it undoes autocast policies that return fp32.
        return F.rms_norm(x, self.normalized_shape, weight, self.eps).to(x.dtype)


_PIECE = 1 << 16  # numbers: 256 KiB in fp32


class _NormInPieces(torch.autograd.Function):
    """RMSNorm of ``x`` [..., dim], differentiable in ``x`` alone.

    Forward and backward of FLUX's 640 x 24 x 128 in bf16 on one core take 9.5 ms instead of 31, and x is all they save.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        rows, dim = x.reshape(-1, x.shape[-1]), x.shape[-1:]
        y = torch.empty_like(rows)
        for part, out in zip(_pieces(rows), _pieces(y), strict=True):
            out.copy_(F.rms_norm(part, dim, weight, eps))
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        rows, y_gradient = (tensor.reshape(-1, x.shape[-1]) for tensor in (x, gradients[0]))
        wide = torch.promote_types(x.dtype, torch.float32)
        x_gradient = torch.empty_like(rows)
        for part, out, given in zip(_pieces(rows), _pieces(x_gradient), _pieces(y_gradient), strict=True):
            part, g = part.to(wide), given.to(wide)
            g = g if weight is None else g * weight.to(wide)
            inverse = part.square().mean(-1, keepdim=True).add_(ctx.eps).rsqrt_()
            along = (g * part).mean(-1, keepdim=True).mul_(inverse.square())
            out.copy_(torch.addcmul(g, part, along, value=-1).mul_(inverse))
        return x_gradient.view(x.shape), None, None


def _pieces(rows: Tensor) -> tuple[Tensor, ...]:
    """Few of them where nothing is computed: the estimate before a run would take four seconds for hundreds."""
    return rows.split(max(1, _PIECE // rows.shape[1])) if type(rows) is Tensor else rows.chunk(8)


class ModulationCache:
    """A block's modulation vectors, from its run in forward to its recomputation in backward.

    Not a dict: checkpointing and hooks that walk through arguments would take that apart.
    """

    def __init__(self) -> None:
        self.vectors: dict[str, Tensor] = {}


def memoise(cache: ModulationCache | None, name: str, compute: Callable[[], Tensor]) -> Tensor:
    """Return ``compute()``, from ``cache`` if this block ran before; what needs a gradient is computed in every run."""
    if torch.compiler.is_compiling() or cache is None:
        return compute()
    if name in cache.vectors:
        return cache.vectors[name]
    vector = compute()
    if not vector.requires_grad:
        cache.vectors[name] = vector
    return vector


def modulated(norm: Any) -> functools.partial[Tensor]:
    """Return :func:`modulated_norm` with the epsilon of ``norm``, a LayerNorm without weights."""
    return functools.partial(modulated_norm, eps=norm.eps)


def modulated_norm(x: Tensor, shift: Tensor | None, scale: Tensor, eps: float) -> Tensor:
    """Return LayerNorm of ``x`` [B, S, W] times (1 + scale) plus shift, these [B, 1, W], or [B, S, W] of each token.

    Without ``shift`` there is none.
    """
    with torch.autocast(x.device.type, enabled=False):  # which would write the norm in fp32
        wide = torch.promote_types(x.dtype, torch.float32)
        if scale.shape[1] > 1:
            scaled = F.layer_norm(x.to(wide), x.shape[-1:], eps=eps) * (1 + scale)
            return (scaled if shift is None else scaled + shift).to(x.dtype)
        # On CPUs weights in fp32 keep the means in fp32 for backward; on GPUs, whose kernel wants one dtype, they are.
        dtype = wide if x.device.type == "cpu" else x.dtype
        weights = (1 + scale).to(dtype).flatten(1).unbind()
        biases = [None] * len(weights) if shift is None else shift.to(dtype).flatten(1).unbind()
        parts = zip(x.unbind(), weights, biases, strict=True)
        normed = [F.layer_norm(one, one.shape[-1:], weight, bias, eps) for one, weight, bias in parts]
        return normed[0].unsqueeze(0) if len(normed) == 1 else torch.stack(normed)


def gelu(x: Tensor) -> Tensor:
    """Return GELU in the tanh form that both FLUX and Qwen-Image were trained with."""
    return beside_gelu(None, x)


def beside_gelu(first: Tensor | None, x: Tensor) -> Tensor:
    """Return ``first`` [..., W] and GELU of ``x`` [..., M] side by side, [..., W + M]; GELU alone without ``first``.

    Both passes write where the result is going to be: x's gradient takes the place of the output's. That one must be
    nobody else's, as it is where a linear layer follows and nothing besides.
    """
    if torch.compiler.is_compiling():
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        by_sigmoid = x.device.type == "cpu"
        activated = (_gelu_gate(wide) * wide).to(x.dtype) if by_sigmoid else F.gelu(x, approximate="tanh")
        return activated if first is None else torch.cat([first, activated], dim=-1)
    return _BesideGelu.apply(first, x)


class _BesideGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor | None, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.width = width = 0 if first is None else first.shape[-1]
        out = x.new_empty(*x.shape[:-1], width + x.shape[-1])
        if first is not None:
            out[..., :width] = first
        _write_gelu(x, out[..., width:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor]:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        x_gradient = gradient[..., ctx.width :]
        torch.ops.aten.gelu_backward.grad_input(x_gradient, x, approximate="tanh", grad_input=x_gradient)
        return gradient[..., : ctx.width] if ctx.width else None, x_gradient


def _gelu_gate(x: Tensor) -> Tensor:
    """Return what GELU multiplies ``x``, fp32 or wider, by: (1 + tanh(u)) / 2, which is sigmoid(2 u).

    For CPUs PyTorch has a tanh that takes ten times as long as its sigmoid. GELU of 640 x 12288 in bf16 on an EPYC core
    takes 5.7 ms by this, in pieces that stay in the cache, 9.3 by PyTorch's.
    """
    twice = 2 * math.sqrt(2 / math.pi)
    return torch.addcmul(torch.tensor(twice, dtype=x.dtype), x, x, value=0.044715 * twice).mul_(x).sigmoid_()


def _write_gelu(x: Tensor, out: Tensor) -> None:
    """Write GELU of ``x`` into ``out``."""
    if x.device.type != "cpu" or type(x) is not Tensor:
        torch.ops.aten.gelu.out(x, approximate="tanh", out=out)
        return
    for part, result in zip(_pieces(x.flatten(0, -2)), _pieces(out.flatten(0, -2)), strict=True):
        wide = part.to(torch.promote_types(x.dtype, torch.float32))
        torch.mul(_gelu_gate(wide), wide, out=result)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return SiLU of ``gate`` times ``up``, both [..., M] (Shazeer 2020, arXiv 2002.05202).

    Backward writes one gradient where the output's is, which must be nobody else's: see :func:`beside_gelu`.
    """
    return F.silu(gate) * up if torch.compiler.is_compiling() else _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gate, up), (gradient,) = ctx.saved_tensors, gradients
        up_gradient = F.silu(gate).mul_(gradient)
        gate_gradient = gradient.mul_(up)
        torch.ops.aten.silu_backward.grad_input(gate_gradient, gate, grad_input=gate_gradient)
        return gate_gradient, up_gradient


def swiglu_halves(x: Tensor) -> Tensor:
    """Return :func:`swiglu` [..., M] of a layer that gives gate and factor side by side, ``x`` [..., 2M]."""
    return swiglu(*x.chunk(2, dim=-1))


def slice_tokens(x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    """Return tokens ``start`` to ``end`` of ``x`` [B, S, W]."""
    return x[:, start:end]


def join_tokens(text: Tensor, image: Tensor) -> Tensor:
    """Return tokens [B, L, W] and [B, S, W] as one, [B, L + S, W]; those of :func:`split_tokens` are not copied."""
    return torch.cat([text, image], dim=1) if torch.compiler.is_compiling() else _Join.apply(text, image)


def split_tokens(stream: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the first ``length`` tokens of ``stream`` [B, L + S, W], and the others: views of it."""
    if torch.compiler.is_compiling():
        return stream[:, :length], stream[:, length:]
    return _Split.apply(stream, length)


def _side_by_side(text: Tensor, image: Tensor) -> Tensor:
    """Return both as one tensor: that of which they are neighbouring parts, where there is one."""
    whole = (text.shape[0], text.shape[1] + image.shape[1], text.shape[2])
    follows = image.storage_offset() == text.storage_offset() + text.shape[1] * text.shape[2]
    of_one = text.untyped_storage()._cdata == image.untyped_storage()._cdata and text.stride() == image.stride()
    if follows and of_one and text.stride() == (whole[1] * whole[2], whole[2], 1):
        return text.as_strided(whole, text.stride())
    return torch.cat([text, image], dim=1)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, text: Tensor, image: Tensor) -> Tensor:
        ctx.length = text.shape[1]
        return _side_by_side(text, image)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient[:, : ctx.length], gradient[:, ctx.length :]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Tensor, length: int) -> tuple[Tensor, Tensor]:
        return stream[:, :length], stream[:, length:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _side_by_side(*gradients), None


def clamp_fp16(x: Tensor) -> Tensor:
    """Return ``x``, an fp16 one clamped to its range: residual streams grow beyond it."""
    limit = torch.finfo(torch.float16).max
    return x.clip(-limit, limit) if x.dtype == torch.float16 else x
