"""Llama 3.2: small, and tied again; and how any of these writes a text, with what it has computed kept."""

# %%
from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.nn import functional as F

from walkthrough.gpt2 import Decoder, Sizes
from walkthrough.llama3 import LLAMA31

# %% [markdown]
# **1. The head is the embedding again**, as in GPT-2: of 1.2 billion parameters a head of its own would be another 263
# million. And the factor is 32 instead of 8.

# %%
LLAMA32 = replace(LLAMA31, tied=True)

# %% [markdown]
# **Training**: at every position the model says how likely the token is that really follows; the loss is minus the
# logarithm of that. A model that knows nothing loses ln(vocabulary).


# %%
def train(model: Decoder, tokens: Tensor, steps: int, lr: float = 1e-2) -> list[float]:
    """Learn ``tokens`` [B, S] by heart; return the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def write(model: Decoder, tokens: Tensor, count: int) -> Tensor:
    """Go on with ``tokens`` [B, S] by the likeliest token each time; everything is computed anew for each."""
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens


# %% [markdown]
# `write` computes keys and values of all tokens for each new one. Tandem keeps them (`library/nn/kv_cache.py`) and
# computes one token each time: the same text, in a fraction of the time.

# %%
if __name__ == "__main__":
    from tests.walkthrough.compare import largest_difference, parameters, random_llama, tandem_of, time_of

    torch.manual_seed(0)
    sizes = Sizes(hidden=128, kv_heads=2, theta=500000.0, factor=32.0, original_context=32)
    ours, theirs = random_llama(sizes, LLAMA32)
    print(f"Llama 3.2        {parameters(ours):7,} parameters, {largest_difference(ours, theirs)}")

    text = "the cat sat on the mat and the dog sat on the cat. "
    letters = sorted(set(text))
    tokens = torch.tensor([[letters.index(letter) for letter in text]])
    model = Decoder(replace(sizes, vocabulary=len(letters)), LLAMA32)
    losses = train(model, tokens, 150)
    print(f"loss             {losses[0]:.2f} -> {losses[-1]:.3f}")
    written, slow = time_of(write, model, tokens[:, :8], 43)
    again, fast = time_of(tandem_of(theirs, model), tokens[:, :8], 43)
    print("it writes        " + "".join(letters[i] for i in written[0].tolist()))
    same = "the same text" if torch.equal(written, again) else "another text"
    print(f"with a cache     {same}, {slow / fast:.1f} times as fast")
