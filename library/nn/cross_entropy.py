"""The loss of a language model: cross-entropy of the next token, without the logits as a whole.

Logits are the largest tensor of a language model (8 x 1024 tokens of a vocabulary of 128k in fp32: 4 GiB, and as much
for their gradient). They are made, turned into a loss and into gradients, and dropped a few hundred tokens at a time;
with p = softmax(h W^T) and one-hot targets y

    loss = -mean log p[y]     d logits = (p - y) / n     dh = d logits W     dW = d logits^T h

so the gradients can be had in the forward pass: each product is made once, as in the plain computation. Compilers get
the plain form. Softmax and sums are fp32 whatever the dtype of ``h``.

Processes that have the head together (``library.nn.tensor_split``) each make the logits of their own tokens. A target's
largest logit and sum of exponentials travel, and dh.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from library.nn.tensor_split import Split, sum_over

_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}  # held at once: 16 MiB in fp32, which a cache holds, and 256 on a card
IGNORED = -100


def token_cross_entropy(
    hidden: Tensor, head: nn.Module, targets: Tensor, vocab_size: int, by_row: bool = False
) -> Tensor:
    """Return the mean cross-entropy over targets that are not ``IGNORED``, fp32 []; ``by_row`` each row's sum, [B].

    Args:
        hidden: [B, S, W], what the head reads.
        head: a linear layer [rows, W] without bias.
        targets: [B, S] int64, below ``vocab_size``.
        vocab_size: rows of the head that are tokens; padding rows behind them get no probability.
        by_row: return minus the log-probability of each row's targets together, as losses on whole answers need.
    """
    head = getattr(head, "_orig_mod", head)  # accelerate compiles it by itself; so it would give the logits as a whole
    if by_row:
        return torch.stack([_summed(*row, head, vocab_size) for row in zip(hidden, targets, strict=True)])
    total = _summed(hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), head, vocab_size)
    return total / (targets != IGNORED).sum().clamp_min(1)


def _summed(rows: Tensor, wanted: Tensor, head: nn.Module, vocab_size: int) -> Tensor:
    """Return the sum of the cross-entropies of ``rows`` [n, W] and what is ``wanted`` [n]."""
    trained = rows.requires_grad or any(parameter.requires_grad for parameter in head.parameters())
    if torch.is_grad_enabled() and trained:
        if type(head) is nn.Linear and not torch.compiler.is_compiling():
            device = rows.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
            inputs = rows.to(dtype), head.weight.to(dtype)
            with torch.autocast(device, enabled=False):
                return _Loss.apply(*inputs, wanted, vocab_size, getattr(head, "split", None))
        if torch.compiler.is_compiling():
            return _part_loss(head, rows, wanted, vocab_size)
    total = rows.new_zeros((), dtype=torch.float32)
    for part, part_wanted in _chunks(vocab_size, rows, wanted):  # made again in backward
        total = total + checkpoint(
            _part_loss, head, part, part_wanted, vocab_size, use_reentrant=False, preserve_rng_state=False
        )
    return total


def _part_loss(head: nn.Module, rows: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    logits = head(rows)[:, :vocab_size].float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def _chunks(vocab_size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    step = max(64, _LOGITS.get(tensors[0].device.type, _LOGITS["cuda"]) // vocab_size)
    return zip(*(tensor.split(step) for tensor in tensors), strict=True)


class _Loss(torch.autograd.Function):
    """Sum of the losses, without autocast; its gradients wait for backward, which only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, split: Split | None
    ) -> Tensor:
        first = 0 if split is None else split.group.rank() * weight.shape[0]  # the token of the first row here
        tokens = min(max(vocab_size - first, 1), weight.shape[0])  # where all is padding, one row that is no target
        token_rows = weight[:tokens]
        total = hidden.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part, wanted, d_part in _chunks(vocab_size, hidden, targets, d_hidden):
            scores = _log_softmax(F.linear(part, token_rows).float(), split, is_token=first < vocab_size)
            counts = wanted != IGNORED
            is_local = counts & (wanted >= first) & (wanted < first + tokens)
            places = (wanted - first).where(is_local, 0)[:, None]
            total -= scores.gather(1, places)[:, 0].where(is_local, 0).sum()
            d_logits = scores.exp_()
            d_logits.scatter_add_(1, places, -is_local[:, None].float())
            d_logits = d_logits.to(part.dtype)
            d_part.copy_(d_logits @ token_rows).mul_(counts[:, None])
            if d_weight is None:  # the head is frozen
                continue
            part = part * counts[:, None]  # tokens that do not count add nothing to the weight's gradient either
            if d_logits.dtype == torch.float32:
                d_weight[:tokens].addmm_(d_logits.t(), part)
            else:
                d_weight[:tokens] += d_logits.t() @ part
        if split is not None:
            total, d_hidden = sum_over(split.group, total), sum_over(split.group, d_hidden)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        scale = gradients[0]
        into_weight = None if d_weight is None else (d_weight * scale).to(ctx.dtype)
        return d_hidden * scale.to(d_hidden.dtype), into_weight, None, None, None


def _log_softmax(logits: Tensor, split: Split | None, is_token: bool) -> Tensor:
    """Return the logarithm of softmax over the logits [n, tokens] of all processes that have the head together.

    ``is_token``: whether this process's are any.
    """
    if split is None:
        return F.log_softmax(logits, dim=-1)
    if not is_token:
        logits = logits.fill_(-torch.inf)
    largest = logits.amax(dim=-1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=split.group)
    logits -= largest
    return logits.sub_(sum_over(split.group, logits.exp().sum(dim=-1, keepdim=True)).log_())
