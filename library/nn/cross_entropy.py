"""The loss of a language model: cross-entropy of the next token, without the logits as a whole.

Logits are the largest tensor of a language model (8 x 1024 tokens of a vocabulary of 128k in fp32: 4 GiB, and as much
for their gradient). They are made, turned into a loss and into gradients, and dropped a few hundred tokens at a time;
with p = softmax(h W^T) and one-hot targets y

    loss = -mean log p[y]     d logits = (p - y) / n     dh = d logits W     dW = d logits^T h

so the gradients can be had in the forward pass: each product is made once, as in the plain computation. Compilers get
the plain form. Softmax and sums are fp32 whatever the dtype of ``h``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_LOGITS = 1 << 22  # held at once: 16 MiB in fp32
IGNORED = -100


def token_cross_entropy(hidden: Tensor, head: nn.Module, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the mean cross-entropy over targets that are not ``IGNORED``, fp32 [].

    Args:
        hidden: [B, S, W], what the head reads.
        head: a linear layer [rows, W] without bias.
        targets: [B, S] int64, below ``vocab_size``.
        vocab_size: rows of the head that are tokens; padding rows behind them get no probability.
    """
    head = getattr(head, "_orig_mod", head)  # accelerate compiles it by itself; so it would give the logits as a whole
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    count = (wanted != IGNORED).sum().clamp_min(1)
    trained = rows.requires_grad or any(parameter.requires_grad for parameter in head.parameters())
    if torch.is_grad_enabled() and trained:
        if type(head) is nn.Linear and not torch.compiler.is_compiling():
            return _Loss.apply(*_in_autocast_dtype(rows, head.weight), wanted, vocab_size) / count
        logits = head(rows)[:, :vocab_size].float()
        return F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum") / count
    total = rows.new_zeros((), dtype=torch.float32)
    for part, own in zip(*_split(rows, wanted, vocab_size), strict=True):
        logits = head(part)[:, :vocab_size].float()
        total += F.cross_entropy(logits, own, ignore_index=IGNORED, reduction="sum")
    return total / count


def _in_autocast_dtype(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    device = rows.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
    return rows.to(dtype), weight.to(dtype)


def _split(rows: Tensor, targets: Tensor, vocab_size: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    step = max(64, _LOGITS // vocab_size)
    return rows.split(step), targets.split(step)


class _Loss(torch.autograd.Function):
    """Sum of the losses; its gradients wait for backward, which only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return _Loss._forward(ctx, hidden, weight, targets, vocab_size)

    @staticmethod
    def _forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        own = weight[:vocab_size]
        total = hidden.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        parts = zip(*_split(hidden, targets, vocab_size), d_hidden.split(max(64, _LOGITS // vocab_size)), strict=True)
        for part, wanted, d_part in parts:
            scores = F.log_softmax(F.linear(part, own).float(), dim=-1)
            counts = wanted != IGNORED
            places = wanted.where(counts, 0)[:, None]
            total -= (scores.gather(1, places)[:, 0] * counts).sum()
            d_logits = scores.exp_()
            d_logits.scatter_add_(1, places, -torch.ones_like(places, dtype=torch.float32))
            d_logits.mul_(counts[:, None])
            d_logits = d_logits.to(part.dtype)
            torch.mm(d_logits, own, out=d_part)
            if d_weight is None:  # the head is frozen
                continue
            if d_logits.dtype == torch.float32:
                d_weight[:vocab_size].addmm_(d_logits.t(), part)
            else:
                d_weight[:vocab_size] += d_logits.t() @ part
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        scale = gradients[0]
        into_weight = None if d_weight is None else (d_weight * scale).to(ctx.dtype)
        return d_hidden * scale.to(d_hidden.dtype), into_weight, None, None
