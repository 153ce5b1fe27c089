"""Step 5: decoding. A model gives probabilities; which token to take is a choice, and what was computed is kept."""

# %%
from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(globals().get("__file__", "here")).resolve().parent.parent))

import torch
from torch import Tensor

from walkthrough.course import check, draw, seconds
from walkthrough.sizes import Sizes
from walkthrough.step1_tokens import TOKENIZER
from walkthrough.step2_gpt2 import GPT2, Decoder
from walkthrough.step4_training import trained

# %% [markdown]
# The likeliest token each time (*greedy*) gives the same text again and again. A token drawn by its probability gives
# variety, and now and then nonsense: thousands of unlikely tokens are likely together. Three numbers are between the
# two.
#
# - **Temperature** divides the logits: below 1 the likely becomes likelier, above 1 all become more alike.
# - **Top-k** keeps the k likeliest tokens.
# - **Top-p** keeps the likeliest tokens that together have probability p: few where the model is sure, many where not.


# %%
def filtered(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return ``logits`` [B, V] by temperature, those that are not kept as minus infinity."""
    logits = logits / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    ordered, order = logits.softmax(-1).sort(descending=True)
    unlikely = ordered.cumsum(-1) - ordered >= top_p  # the likelier ones have p already
    return logits.masked_fill(unlikely.gather(-1, order.argsort(-1)), -math.inf)


def chosen(logits: Tensor, generator: torch.Generator, temperature: float = 0, **kept: Any) -> Tensor:
    """Return a token for each row of ``logits``, [B, 1]; temperature 0 is greedy."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial(filtered(logits, temperature, **kept).softmax(-1), 1, generator=generator)


# %% [markdown]
# **The cache.** A new token needs the keys and values of all tokens before it, which do not change. Computed anew for
# each token, a text of n tokens takes n² work. `Cache` keeps them, so that only the new token goes through the model.


# %%
class Cache:
    """Keys and values of each block of a GPT-2 for the tokens it has read."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.length = model, 0
        self.kept: list[list[Tensor]] = [[] for _ in model.blocks]  # of each block: keys and values [B, heads, S, head]

    def read(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, V] of what follows ``tokens`` [B, S], which follow what was read before."""
        model, end = self.model, self.length + tokens.shape[1]
        x = model.embedding(tokens) + model.positions.weight[self.length : end]
        for number, block in enumerate(model.blocks):
            layer, normed = block.attention, block.norm1(x)
            parts = (part(normed).unflatten(-1, (-1, layer.head)) for part in (layer.q, layer.k, layer.v))
            q, k, v = (part.transpose(1, 2) for part in parts)
            if self.length:
                k, v = (torch.cat((old, new), dim=2) for old, new in zip(self.kept[number], (k, v)))
            self.kept[number] = [k, v]
            later = torch.ones(q.shape[2], end, dtype=torch.bool).triu(1 + self.length)
            shares = (q @ k.transpose(-1, -2) / math.sqrt(layer.head)).masked_fill(later, -math.inf).softmax(-1)
            x = x + layer.out((shares @ v).transpose(1, 2).flatten(2))
            x = x + block.feed_forward(block.norm2(x))
        self.length = end
        return model.head(model.norm(x[:, -1]))


@torch.no_grad()
def write(model: Decoder, tokens: Tensor, count: int, cached: bool = True, **choice: Any) -> Tensor:
    """Return ``tokens`` [B, S] with ``count`` more, by the ``choice`` of ``chosen``."""
    generator, cache, new = torch.Generator().manual_seed(0), Cache(model), tokens
    for _ in range(count):
        logits = cache.read(new) if cached else model(tokens)[:, -1]
        new = chosen(logits, generator, **choice)
        tokens = torch.cat((tokens, new), dim=1)
    return tokens


def cache_bytes(sizes: Sizes, tokens: int, itemsize: int = 2) -> int:
    """Return what keys and values of ``tokens`` take."""
    return 2 * sizes.layers * sizes.kv_heads * sizes.head * tokens * itemsize


# %% [markdown]
# The model of step 4 writes a story. The picture shows its choice after "Once upon a time there was a".

# %%
if __name__ == "__main__":
    model, prompt = trained(), torch.tensor([TOKENIZER.encode("\nOnce upon a time there was a")])
    for choice in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 2.0}):
        print(f"{choice}: {TOKENIZER.decode(write(model, prompt, 50, **choice)[0].tolist()).strip()}")
    with torch.no_grad():
        logits = model(prompt)[:, -1]
    likely = logits[0].topk(16).indices
    kinds: dict[str, dict[str, float]] = {
        "as it is": {},
        "temperature 0.5": {"temperature": 0.5},
        "temperature 2": {"temperature": 2.0},
        "top-p 0.8": {"top_p": 0.8},
    }
    with draw("step5_choice", *kinds, sharex=True) as charts:
        for chart, kind in zip(charts, kinds.values()):
            words = [TOKENIZER.decode([int(number)]) for number in likely]
            chart.barh(words, filtered(logits, **kind).softmax(-1)[0, likely])
            chart.invert_yaxis()
            chart.set(xlabel="probability")

# %% [markdown]
# How long a text takes, with 3 random layers; and how large a cache becomes.

# %%
if __name__ == "__main__":
    large, counts = Decoder(Sizes(context=256, width=128, hidden=512), GPT2), (25, 50, 100, 200)
    with draw("step5_cache", "Seconds for a text of so many tokens", width=5) as (chart,):
        for name, cached in {"all tokens again": False, "with a cache": True}.items():
            times = [seconds(lambda n=n, cached=cached: write(large, prompt[:, :1] % 100, n, cached)) for n in counts]
            chart.plot(counts, times, marker="o", label=name)
        chart.set(xlabel="tokens", ylim=(0, None))
        chart.legend()
    size = cache_bytes(Sizes(width=4096, layers=32, heads=32, kv_heads=32), 8192) / 2**30
    print(f"the cache of a Llama 2 of 7 billion parameters takes {size:.0f} GiB for 8,192 tokens")

# %% [markdown]
# **Is it right?** The cache gives the same text as computing all anew, and transformers keeps the same tokens.

# %%
if __name__ == "__main__":
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    assert torch.equal(write(model, prompt, 50, cached=False), write(model, prompt, 50))
    print("check: 50 tokens with the cache are the same as without")
    logits = torch.randn(4, 1000) * 3
    theirs = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(50)(None, TemperatureLogitsWarper(0.7)(None, logits)))
    ours = filtered(logits, 0.7, 50, 0.8)
    check("temperature, top-k and top-p against transformers", ours.softmax(-1), theirs.softmax(-1), 1e-6)
