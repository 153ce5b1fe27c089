"""Causal attention of a training step in bf16 on a CPU, as products of blocks.

PyTorch's flash attention for CPUs multiplies tiles that are small for the units that multiply bf16 (AVX-512, AMX), and
repeats keys for groups of queries. Here a block of 64 or 128 queries is multiplied with all keys that it sees, of all
texts and heads in one call, and the queries of a group are so many more rows. With m a query's largest score and l the
sum of its exponentials (FlashAttention 2, arXiv 2307.08691, section 2.3):

    E = exp((Q K^T - m) scale)     l = sum E     O = E V / l
    dV = E^T (dO / l)     dS = E ((dO / l) V^T - sum(dO O) / l)     dQ = dS K scale     dK = dS^T Q scale

Nothing is kept but Q, K, V, O, m and l: backward makes E again. A product rounds its results to bf16, of which scores,
whose exponentials count, would suffer; so what is subtracted from them is subtracted within the product, as a column
more: [Q, -m, 0] [K, 1, 1]^T. What then is left of a score that counts is small, and its rounding smaller. So it is with
the sum in dS, which is given as two numbers, itself in bf16 and the rest. Against float64 it is about as near as the
kernel: outputs 3.0e-3 and 1.9e-3, gradients of queries 4.2e-3 and 2.6e-3, of keys 4.5e-3 and 4.8e-3, of values 3.5e-3
and 4.7e-3, where a rounding to bf16 alone is 1.7e-3 (8 x 256 tokens, 6 heads of 64, 2 of keys).

Forward and backward of these take 13 ms of a core of an EPYC, the kernel 30; with 6 heads of keys 19 and 30; with 1024
tokens in 4 texts 94 and 129.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_MULTIPLIES_BF16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
_SHORT = 512  # tokens; above that blocks are larger, as each adds to the gradients of all keys before it


def is_faster(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether :func:`attend_causally` is made for these tensors."""
    if not (_MULTIPLIES_BF16 and query.device.type == "cpu" and torch.is_grad_enabled()):
        return False
    trained = query.requires_grad and key.requires_grad and value.requires_grad
    return trained and query.dtype == key.dtype == value.dtype == torch.bfloat16 and query.shape[1] > 1


def attend_causally(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Return softmax(query key^T * scale) value, each token seeing itself and those before it, [B, S, H, D].

    Args:
        query: [B, S, H, D].
        key, value: [B, S, Hkv, D], H a multiple of Hkv.
        scale: default 1/sqrt(D).
    """
    return _Causal.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        output, largest, sums = causal_attention(query, key, value, scale)
        ctx.save_for_backward(query, key, value, output, largest, sums)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *_gradients(gradients[0], *ctx.saved_tensors, ctx.scale), None


def _forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return O [B, S, H, D], and m and l [B, H, S, 1]."""
    groups, keys, values = _grouped(query, key), _joined(key), _joined(value)
    moved_keys = F.pad(keys, (0, 2), value=1.0)
    output, largest, sums = _empty_results(query)
    outputs, each_largest, each_sum = _grouped(output, key), _of_heads(largest, key), _of_heads(sums, key)
    for rows in _blocks(query.shape[1]):
        own, seen = _rows(groups, rows), slice(0, rows.stop)
        scores = torch.bmm(own, keys[:, seen].transpose(1, 2))
        most = _set_later(scores, rows, -math.inf).amax(dim=-1, keepdim=True)
        shares = _exponentials(own, moved_keys, rows, most, scale)
        total = shares.sum(dim=-1, keepdim=True, dtype=sums.dtype)
        mixed = torch.bmm(shares, values[:, seen]) / total
        for whole, part in ((outputs, mixed), (each_largest, most), (each_sum, total)):
            whole[..., rows, :] = part.view_as(whole[..., rows, :])
    return output, largest, sums


def _backward(
    d_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, largest: Tensor, sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dQ, dK and dV."""
    keys = _joined(key)
    groups, outputs, d_outputs = (_grouped(each, key) for each in (query, output, d_output))
    each_largest, each_sum = _of_heads(largest, key), _of_heads(sums, key)
    moved_keys, moved_values = (F.pad(each, (0, 2), value=1.0) for each in (keys, _joined(value)))
    d_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    d_queries = _grouped(d_query, key)
    d_keys, d_values = (torch.zeros_like(keys, dtype=sums.dtype) for _ in range(2))
    for rows in _blocks(query.shape[1]):
        own, total, seen = _rows(groups, rows), _rows(each_sum, rows), slice(0, rows.stop)
        d_mixed = (_rows(d_outputs, rows) / total).to(own.dtype)
        subtracted = (d_mixed * _rows(outputs, rows)).sum(dim=-1, keepdim=True, dtype=sums.dtype)
        rounded = subtracted.to(own.dtype)
        moved = torch.cat((d_mixed, -rounded, (rounded - subtracted).to(own.dtype)), dim=-1)
        shares = _exponentials(own, moved_keys, rows, _rows(each_largest, rows), scale)
        d_values[:, seen] += torch.bmm(shares.transpose(1, 2), d_mixed)
        d_scores = torch.bmm(moved, moved_values[:, seen].transpose(1, 2)).mul_(shares)
        d_own = torch.bmm(d_scores, keys[:, seen]).mul_(scale)
        d_queries[..., rows, :] = d_own.view_as(d_queries[..., rows, :])
        d_keys[:, seen] += torch.bmm(d_scores.transpose(1, 2), own)
    return d_query, _apart(d_keys.mul_(scale), key), _apart(d_values, value)


def _empty_results(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    largest = output.new_empty(query.shape[0], query.shape[2], query.shape[1], 1)
    return output, largest, torch.empty_like(largest, dtype=torch.promote_types(query.dtype, torch.float32))


# Operators: torch.compile, which would compile the loop over blocks anew for each length, takes them as they are, and
# selective checkpointing keeps their results.
causal_attention = torch.library.custom_op("tandem::causal_attention", _forward, mutates_args=())
_gradients = torch.library.custom_op("tandem::causal_attention_backward", _backward, mutates_args=())
OPERATOR = torch.ops.tandem.causal_attention.default


@causal_attention.register_fake
def _(query: Tensor, _key: Tensor, _value: Tensor, _scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_results(query)


@_gradients.register_fake
def _(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    d_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    return d_query, _apart(torch.empty_like(_joined(key)), key), _apart(torch.empty_like(_joined(value)), value)


def _exponentials(queries: Tensor, moved_keys: Tensor, rows: slice, largest: Tensor, scale: float) -> Tensor:
    """Return E of a block's ``queries`` [N, G n, D] and the keys they see, [N, G n, rows.stop]; those behind are 0."""
    moved = torch.cat((queries, -largest, torch.zeros_like(largest)), dim=-1)
    scores = torch.bmm(moved, moved_keys[:, : rows.stop].transpose(1, 2))
    return _set_later(scores.mul_(scale).exp_(), rows, 0.0)


def _set_later(scores: Tensor, rows: slice, to: float) -> Tensor:
    """Set what a block's queries and the keys behind each have together, in place."""
    own = rows.stop - rows.start
    later = torch.ones(own, own, dtype=torch.bool, device=scores.device).triu_(1)
    scores.view(len(scores), -1, own, rows.stop)[..., rows].masked_fill_(later, to)
    return scores


def _blocks(length: int) -> list[slice]:
    step = 64 if length <= _SHORT else 128
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """Return a view [B, Hkv, G, S, D] of ``x`` [B, S, H, D]."""
    return x.unflatten(2, (key.shape[2], -1)).permute(0, 2, 3, 1, 4)


def _of_heads(x: Tensor, key: Tensor) -> Tensor:
    """Return a view [B, Hkv, G, S, 1] of ``x`` [B, H, S, 1]."""
    return x.unflatten(1, (key.shape[2], -1))


def _rows(groups: Tensor, rows: slice) -> Tensor:
    """Return some tokens' rows of ``groups`` [B, Hkv, G, S, D] as [N, G n, D]."""
    return groups[..., rows, :].reshape(groups.shape[0] * groups.shape[1], -1, groups.shape[-1])


def _joined(x: Tensor) -> Tensor:
    """Return ``x`` [B, S, Hkv, D] as [N, S, D], N texts and heads of keys."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _apart(x: Tensor, like: Tensor) -> Tensor:
    """Return ``x`` [N, S, D] as [B, S, Hkv, D] in the dtype of ``like``."""
    return x.view(len(like), -1, *x.shape[1:]).transpose(1, 2).to(like.dtype)
