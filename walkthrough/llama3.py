"""Llama 3 and 3.1 (arXiv 2407.21783): fewer keys, slower rotations, and a longer context from the same frequencies."""

# %%
from __future__ import annotations

import functools
import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch import Tensor

from walkthrough.gpt2 import Sizes
from walkthrough.llama2 import LLAMA2, RotaryAttention, frequencies

# %% [markdown]
# **1. Grouped-query attention** (arXiv 2305.13245). While a text is written, keys and values of all tokens before are
# kept. Four queries share a key: a quarter of that memory, and hardly a worse model. `RotaryAttention` has had the
# heads of keys apart from those of queries all along, so this is a number.


# %%
def cache_bytes(sizes: Sizes, tokens: int, itemsize: int = 2) -> int:
    """Return what keys and values of ``tokens`` take."""
    return 2 * sizes.layers * sizes.kv_heads * sizes.head * tokens * itemsize


# %% [markdown]
# **2. `theta` rises from 10,000 to 500,000**: the slowest pair makes a turn only after millions of tokens, so positions
# in a long text stay apart. Also a number.

# %%
LLAMA3 = LLAMA2

# %% [markdown]
# **3. Llama 3.1 reads 16 times as far** as its training began. Pairs that turn often over the first 8192 positions tell
# neighbours apart and stay; those that never complete a turn are slowed down by the factor, so that they see no angle
# that they have not been trained on; between the two it is a blend.


# %%
def stretched(sizes: Sizes) -> Tensor:
    """Return Llama 3.1's frequencies [head / 2]."""
    plain = frequencies(sizes)
    turns = sizes.original_context * plain / (2 * math.pi)  # over the original context
    kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return plain * (kept + (1 - kept) / sizes.factor)


def stretched_attention(sizes: Sizes, bias: bool) -> RotaryAttention:
    """Return attention by :func:`stretched` frequencies."""
    return RotaryAttention(sizes, bias, stretched(sizes))


LLAMA31 = replace(LLAMA3, attention=stretched_attention)

# %%
if __name__ == "__main__":
    from tests.walkthrough.compare import largest_difference, random_llama

    published = functools.partial(Sizes, width=4096, layers=32, heads=32)
    for name, heads in (("Llama 2, 7B", 32), ("Llama 3, 8B", 8)):
        gib = cache_bytes(published(kv_heads=heads), 8192) / 2**30
        print(f"{name}      {gib:.0f} GiB of keys and values at 8192 tokens")
    sizes = Sizes(hidden=128, kv_heads=2, theta=500000.0)
    print(f"Llama 3          {largest_difference(*random_llama(sizes, LLAMA3))}")
    sizes = replace(sizes, factor=8.0, original_context=32)
    print(f"Llama 3.1        {largest_difference(*random_llama(sizes, LLAMA31))}")
