"""Attention on a CPU with matrix products that the processor is good at.

PyTorch's flash kernel for CPUs multiplies small blocks through the BLAS it was built with. On AMD that BLAS is slow
(``library.nn.frozen_linear``), in bf16 most of all. This is the same computation, head by head, some rows of queries
at a time; scores are made again in backward, so nothing of their size is kept (640 tokens, 12 heads of 128, forward
and backward in bf16 on one core: 51 ms against 88 ms). On Intel's processors PyTorch's kernel is as fast or faster and
takes over:

    S = scale Q K^T     P = softmax S     O = P V
    dV = P^T dO     dS = P * (dP - rowsum(P * dP)), dP = dO V^T     dQ = scale dS K     dK = scale dS^T Q

What diffusion transformers do to queries and keys first, RMS normalisation and rotation, happens to a head's rows while
they are in the cache, and again in backward: only the projections' own outputs are kept, and the dozen passes over
memory that separate operations take fall away.

S, softmax, norm, rotation and sums over rows are fp32. For bf16 tensors P and dS are rounded to bf16 before they are
multiplied, as the flash kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from library.nn.frozen_linear import blas_suits, product
from library.nn.norms import RMSNorm
from library.nn.rope import Table

_SCORES = 1 << 20  # scores held at once: 4 MiB in fp32
_LARGE = 1 << 24  # multiplications of one head's scores; below that PyTorch's kernel is as fast


class Stream(NamedTuple):
    """Tokens of one kind, [B, S, H, D] each, and how their queries and keys are normalised over D."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None


def fits(streams: Sequence[Stream]) -> bool:
    """Return whether :func:`attend_on_cpu` takes these streams and is worth it."""
    query, key = streams[0].query, streams[0].key
    if query.device.type != "cpu" or torch.compiler.is_compiling() or query.shape[2] != key.shape[2] or blas_suits():
        return False
    norms = [norm for stream in streams for norm in (stream.query_norm, stream.key_norm) if norm is not None]
    if any(norm.weight is not None and norm.weight.requires_grad for norm in norms):
        return False
    queries, keys = sum(s.query.shape[1] for s in streams), sum(s.key.shape[1] for s in streams)
    large = queries * keys * query.shape[3] >= _LARGE
    return large and query.dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()


def attend_on_cpu(streams: Sequence[Stream], rope: Table | None = None, scale: float | None = None) -> Tensor:
    """Return softmax(query key^T * scale) value over all streams' tokens together, [B, sum of Sq, H, D].

    Args:
        streams: of one dtype; their norms are frozen.
        rope: cos and sin [sum of S, D/2], turning neighbouring pairs of normalised queries and keys; or None.
        scale: default 1/sqrt(D).
    """
    scale = streams[0].query.shape[-1] ** -0.5 if scale is None else scale
    turn = None if rope is None else torch.complex(*rope)
    query_norms = [_Norm.of(stream.query_norm) for stream in streams]
    key_norms = [_Norm.of(stream.key_norm) for stream in streams]
    tensors = [tensor for stream in streams for tensor in stream[:3]]
    with torch.autocast("cpu", enabled=False):
        return _Attention.apply(scale, _Heads(query_norms, turn), _Heads(key_norms, turn), *tensors)


class _Norm(NamedTuple):
    weight: Tensor | None  # [D] fp32
    eps: float

    @classmethod
    def of(cls, norm: RMSNorm | None) -> _Norm | None:
        if norm is None:
            return None
        return cls(None if norm.weight is None else norm.weight.detach().float(), norm.eps)


class _Heads(NamedTuple):
    """What happens to one head's queries (or keys) before they meet, and the way back."""

    norms: list[_Norm | None]  # one a stream
    turn: Tensor | None  # [S, D/2] complex64

    def prepare(self, raw: Sequence[Tensor]) -> Tensor:
        """Return [S, D] fp32 of the streams' rows."""
        rows = [_normalised(_fp32(x), norm) for x, norm in zip(raw, self.norms, strict=True)]
        return _turned(torch.cat(rows) if len(rows) > 1 else rows[0], self.turn)

    def backward(self, gradient: Tensor, raw: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient [S, D] fp32 of each stream's rows; may write to ``gradient``."""
        gradient = _turned(gradient, None if self.turn is None else self.turn.conj())
        parts = gradient.split([x.shape[0] for x in raw])
        return [_norm_gradient(g, _fp32(x), norm) for g, x, norm in zip(parts, raw, self.norms, strict=True)]


def _normalised(x: Tensor, norm: _Norm | None) -> Tensor:
    if norm is None:
        return x
    y = x * _inverse_rms(x, norm)
    return y if norm.weight is None else y.mul_(norm.weight)


def _norm_gradient(gradient: Tensor, x: Tensor, norm: _Norm | None) -> Tensor:
    """y = x r w with r = (mean(x^2) + eps)^-1/2, so dx = r (g - x r^2 mean(g x)) with g = dy w."""
    if norm is None:
        return gradient
    g = gradient if norm.weight is None else gradient * norm.weight
    r = _inverse_rms(x, norm)
    return (g - x * ((g * x).mean(dim=-1, keepdim=True) * r * r)).mul_(r)


def _inverse_rms(x: Tensor, norm: _Norm) -> Tensor:
    return x.square().mean(dim=-1, keepdim=True).add_(norm.eps).rsqrt_()


def _turned(x: Tensor, turn: Tensor | None) -> Tensor:
    if turn is None:
        return x
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, on_queries: _Heads, on_keys: _Heads, *tensors: Tensor) -> Tensor:
        queries, keys, values = tensors[0::3], tensors[1::3], tensors[2::3]
        batch, _, heads, _ = queries[0].shape
        out = (
            torch.cat([torch.empty_like(x) for x in queries], dim=1)
            if len(queries) > 1
            else torch.empty_like(queries[0])
        )
        for b, h in _pairs(batch, heads):
            q, k = on_queries.prepare(_rows(queries, b, h)) * scale, on_keys.prepare(_rows(keys, b, h))
            v_columns = torch.cat(_rows(values, b, h)).t().contiguous()
            for rows in _row_blocks(q.shape[0], k.shape[0]):
                weights = product(q[rows], k).softmax(dim=-1)
                out[b, rows, h] = product(weights.to(out.dtype), v_columns)
        ctx.save_for_backward(*tensors)
        ctx.scale, ctx.on_queries, ctx.on_keys = scale, on_queries, on_keys
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        queries, keys, values = tensors[0::3], tensors[1::3], tensors[2::3]
        found = [torch.empty_like(tensor) for tensor in tensors]
        for b, h in _pairs(queries[0].shape[0], queries[0].shape[2]):
            raw_q, raw_k, raw_v = (_rows(kind, b, h) for kind in (queries, keys, values))
            q, k = ctx.on_queries.prepare(raw_q) * ctx.scale, ctx.on_keys.prepare(raw_k)
            d_query, d_key, d_value = _head_backward(q, k, torch.cat(raw_v), gradients[0][b, :, h])
            parts = (
                ctx.on_queries.backward(d_query.mul_(ctx.scale), raw_q),
                ctx.on_keys.backward(d_key, raw_k),
                d_value.split([x.shape[0] for x in raw_v]),
            )
            for place, part in enumerate(parts):
                for whole, own in zip(found[place::3], part, strict=True):
                    whole[b, :, h] = own
        return None, None, None, *found


def _head_backward(q: Tensor, k: Tensor, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one head's scaled queries, keys and values, fp32 [S, D]; ``q`` and ``k`` are fp32.

    oneDNN is given the operand that is stored by columns as its second: sums over queries are made transposed.
    """
    dtype = value.dtype
    v, g = _fp32(value), _fp32(gradient)
    q_columns, k_columns, g_columns = (t.to(dtype).t().contiguous() for t in (q, k, g))
    d_query, d_key, d_value = torch.empty_like(q), torch.zeros_like(k.t()), torch.zeros_like(v.t())
    for rows in _row_blocks(q.shape[0], k.shape[0]):
        weights = product(q[rows], k).softmax(dim=-1)
        d_scores = torch._softmax_backward_data(product(g[rows], v), weights, -1, torch.float32).to(dtype)
        d_value += product(g_columns[:, rows], weights.to(dtype).t())
        d_key += product(q_columns[:, rows], d_scores.t())
        d_query[rows] = product(d_scores, k_columns)
    return d_query, d_key.t().contiguous(), d_value.t()


def _rows(tensors: Sequence[Tensor], b: int, h: int) -> list[Tensor]:
    """Return one head's rows [S, D] of each stream."""
    return [tensor[b, :, h] for tensor in tensors]


def _pairs(batch: int, heads: int) -> list[tuple[int, int]]:
    return [(b, h) for b in range(batch) for h in range(heads)]


def _row_blocks(length: int, keys: int) -> list[slice]:
    step = max(64, _SCORES // keys)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _fp32(x: Tensor) -> Tensor:
    return x.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
