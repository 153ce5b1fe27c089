"""The feed-forward half of a language model's block, in the two forms in use.

- :class:`FeedForward`: widen, GELU (tanh form, as GPT-2 was trained), narrow.
- :class:`GatedFeedForward`: SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202), down(silu(gate x) * up x). Gate
  and up are one matrix, so ``x`` is read once and one product is made where two would be.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """down(gelu(up(x))), [..., width] to the same."""

    def __init__(self, width: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., width]; shape and dtype stay."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class GatedFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), [..., width] to the same; rows of ``gate_up`` are the gate's, then the other's."""

    def __init__(self, width: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., width]; shape and dtype stay."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        if torch.is_grad_enabled():
            return self.down(F.silu(gate) * up)
        return self.down(F.silu(gate).mul_(up))  # one temporary less
