"""Step 7: from GPT-2 to Llama 2, 3, 3.1 and 3.2. Each change is one field."""

# %%
from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(globals().get("__file__", "here")).resolve().parent.parent))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from walkthrough.course import draw
from walkthrough.sizes import Parts, Sizes
from walkthrough.step2_gpt2 import GPT2, Decoder

# %% [markdown]
# **1. LayerNorm becomes RMSNorm** (arXiv 1910.07467). No mean is subtracted, and there is no bias: as good, less work.


# %%
class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(sizes.width)), sizes.eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


# %% [markdown]
# **2. Learned positions become rotations** (RoPE, arXiv 2104.09864). Pairs of numbers of a query and a key are turned
# by an angle that grows with the position, so their product knows only the distance. There is no last position, and
# nothing to learn. Pairs are (i, i + head / 2), as in the files for transformers. The first pair turns by 1 radian from
# a position to the next, the last by about 1 / theta. Llama 3.1 reads 16 times as far as its training began (`factor`,
# arXiv 2407.21783). Pairs that turn four times or more over the original context tell neighbours apart and stay. Those
# that never complete a turn become slower by the factor, so they see no angle that they have not been trained on.
# Between the two it is a blend.


# %%
def frequencies(sizes: Sizes) -> Tensor:
    """Return how far each pair turns from one position to the next, [head / 2]."""
    plain = sizes.theta ** (-torch.arange(0, sizes.head, 2, dtype=torch.float64) / sizes.head)
    turns = sizes.original_context * plain / (2 * math.pi)
    kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return plain * (kept + (1 - kept) / sizes.factor)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs of ``x`` [B, heads, S, head] by position * ``turns``."""
    angles = torch.outer(torch.arange(x.shape[-2], dtype=turns.dtype), turns).to(x.device)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


# %% [markdown]
# PyTorch's `scaled_dot_product_attention` is step 2's formula, and never stores the scores. Keys and values may have
# fewer heads than queries (*grouped*, arXiv 2305.13245): a text being written keeps the keys and values of all its
# tokens, and when four queries share a key, that takes a quarter of the memory.


# %%
class RotaryAttention(nn.Module):
    """Causal self-attention that knows distances, [B, S, width] to the same."""

    def __init__(self, sizes: Sizes, bias: bool) -> None:
        super().__init__()
        self.head, self.turns = sizes.head, frequencies(sizes)
        keys = sizes.kv_heads * sizes.head
        self.q, self.out = (nn.Linear(sizes.width, sizes.width, bias=bias) for _ in range(2))
        self.k, self.v = (nn.Linear(sizes.width, keys, bias=bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, self.turns), rotate(k, self.turns)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


# %% [markdown]
# **3. GELU becomes SwiGLU** (arXiv 2002.05202): a second matrix decides how much of the first goes through. Three
# matrices instead of two, so `hidden` is about 8/3 of the width instead of 4.


# %%
class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), where silu(x) is x * sigmoid(x)."""

    def __init__(self, sizes: Sizes, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=bias) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


# %% [markdown]
# **The walk.** Without biases and with a head of its own this is Llama 2: biases did nothing for the loss, and what
# predicts a token need not be what reads it. Llama 3 has fewer keys, and a theta of 500,000, so that positions far
# apart stay apart. Llama 3.1 has a factor of 8. Llama 3.2 is small and ties the head again, which would be 263 of 1,500
# million parameters; its factor is 32. The picture shows the angles: a row is a pair, a column a position.

# %%
RMS_NORM = replace(GPT2, norm=RMSNorm)
ROPE = replace(RMS_NORM, attention=RotaryAttention, learned_positions=False)
SWIGLU = replace(ROPE, feed_forward=SwiGLU)
NO_BIASES = replace(SWIGLU, biases=False)
LLAMA2 = replace(NO_BIASES, tied=False)
LLAMA32 = replace(LLAMA2, tied=True)

SMALL = Sizes(hidden=128, original_context=32)
STEPS: dict[str, tuple[Parts, Sizes]] = {
    "GPT-2": (GPT2, SMALL),
    "+ RMSNorm": (RMS_NORM, SMALL),
    "+ RoPE": (ROPE, SMALL),
    "+ SwiGLU": (SWIGLU, SMALL),
    "- biases": (NO_BIASES, SMALL),
    "Llama 2: + own head": (LLAMA2, SMALL),
    "+ grouped keys": (LLAMA2, replace(SMALL, kv_heads=2)),
    "Llama 3: + theta": (LLAMA2, replace(SMALL, kv_heads=2, theta=5e5)),
    "Llama 3.1: + factor": (LLAMA2, replace(SMALL, kv_heads=2, theta=5e5, factor=8.0)),
    "Llama 3.2: - own head": (LLAMA32, replace(SMALL, kv_heads=2, theta=5e5, factor=32.0)),
}

if __name__ == "__main__":
    from tests.walkthrough.compare import compare, random_llama

    for name, (parts, sizes) in STEPS.items():
        print(f"{name:<22} {sum(p.numel() for p in Decoder(sizes, parts).parameters()):7,} parameters")
        if name.startswith("Llama"):  # transformers has no model for the steps between
            compare(name, *random_llama(sizes, parts))
    kinds = {"theta 1e4": {}, "theta 5e5": {"theta": 5e5}, "theta 5e5, factor 8": {"theta": 5e5, "factor": 8.0}}
    with draw("step7_rotations", *kinds, sharey=True) as charts:  # the colour is the cosine of the angle
        for chart, change in zip(charts, kinds.values()):
            angles = torch.outer(
                frequencies(Sizes(width=4096, heads=32, **change)), torch.arange(0, 32768.0, 32).double()
            )
            chart.imshow(angles.cos(), aspect="auto", cmap="RdBu", extent=(0, 32768, 63, 0), interpolation="nearest")
            chart.set(xlabel="position", ylabel="pair", xticks=(0, 16384, 32768))
            chart.grid(False)
