"""Llama 2 (arXiv 2307.09288): four changes to GPT-2, of which each makes it simpler or its texts longer."""

# %%
from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from walkthrough.gpt2 import GPT2, Decoder, Parts, Sizes

# %% [markdown]
# **1. LayerNorm becomes RMSNorm** (arXiv 1910.07467). No mean is subtracted and there is no bias: one sum less over the
# stream, and training is as stable.


# %%
class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(sizes.width)), sizes.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., width]."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


WITH_RMS_NORM = replace(GPT2, norm=RMSNorm)

# %% [markdown]
# **2. Learned positions become rotations** (RoPE, arXiv 2104.09864). Pairs of numbers of a query and a key are turned
# by an angle that grows with the position, so their product knows only the distance. There is no last position, and
# nothing to learn. Pairs are (i, i + head / 2), as in the files for transformers.


# %%
def frequencies(sizes: Sizes) -> Tensor:
    """Return how far each pair turns from one position to the next, [head / 2]."""
    return sizes.theta ** (-torch.arange(0, sizes.head, 2, dtype=torch.float64) / sizes.head)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs of ``x`` [B, heads, S, head] by position * ``turns``."""
    places = torch.arange(x.shape[-2], dtype=turns.dtype, device=turns.device)
    angles = torch.outer(places, turns).to(x.device)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RotaryAttention(nn.Module):
    """Causal self-attention that knows distances; keys and values may have fewer heads (Llama 3)."""

    def __init__(self, sizes: Sizes, bias: bool, turns: Tensor | None = None) -> None:
        super().__init__()
        self.head, self.turns = sizes.head, frequencies(sizes) if turns is None else turns
        keys = sizes.kv_heads * sizes.head
        self.q, self.out = (nn.Linear(sizes.width, sizes.width, bias=bias) for _ in range(2))
        self.k, self.v = (nn.Linear(sizes.width, keys, bias=bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens of ``x`` [B, S, width]."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, self.turns), rotate(k, self.turns)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


WITH_ROPE = replace(WITH_RMS_NORM, attention=RotaryAttention, learned_positions=False)

# %% [markdown]
# **3. GELU becomes SwiGLU** (arXiv 2002.05202): a second projection decides how much of the first goes through. Three
# matrices instead of two, so `hidden` is about 8/3 of the width instead of 4.


# %%
class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, sizes: Sizes, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=bias) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., width]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


WITH_SWIGLU = replace(WITH_ROPE, feed_forward=SwiGLU)

# %% [markdown]
# **4. No biases, and a head of its own.** Biases did nothing for the loss. What predicts a token need not be what reads
# it, if there are parameters to spare.

# %%
WITHOUT_BIASES = replace(WITH_SWIGLU, biases=False)
LLAMA2 = replace(WITHOUT_BIASES, tied=False)
STEPS: dict[str, Parts] = {
    "+ RMSNorm": WITH_RMS_NORM,
    "+ RoPE": WITH_ROPE,
    "+ SwiGLU": WITH_SWIGLU,
    "- biases": WITHOUT_BIASES,
    "+ own head": LLAMA2,
}

# %%
if __name__ == "__main__":
    from tests.walkthrough.compare import largest_difference, parameters, random_llama

    sizes = Sizes(hidden=128)
    for name, parts in STEPS.items():
        print(f"{name:<16} {parameters(Decoder(sizes, parts)):7,} parameters")
    ours, theirs = random_llama(sizes, LLAMA2)
    print(f"Llama 2          {parameters(ours):7,} parameters, {largest_difference(ours, theirs)}")
