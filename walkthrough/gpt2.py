"""GPT-2 (Radford et al. 2019): tokens go in, the probability of each next token comes out."""

# %% [markdown]
# Everything that later models change is a field of `Parts`; everything that only scales is a field of `Sizes`.

# %%
from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """How large a model is.

    Attributes:
        vocabulary, context: tokens that exist, and positions.
        width, layers, heads, hidden: of the residual stream, of blocks, of attention, of the feed-forward's middle.
        kv_heads: heads of keys and values (Llama 3); as many as ``heads`` before.
        theta: RoPE's base (Llama 2).
        factor, original_context: how far Llama 3.1 stretches RoPE; 1 is not at all.
    """

    vocabulary: int = 100
    context: int = 64
    width: int = 48
    layers: int = 3
    heads: int = 4
    hidden: int = 192
    kv_heads: int = 4
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int = 8192
    eps: float = 1e-5

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads


@dataclass(frozen=True)
class Parts:
    """What a model is made of; a step of the walk changes one of these."""

    norm: Callable[[Sizes], nn.Module]
    attention: Callable[[Sizes, bool], nn.Module]
    feed_forward: Callable[[Sizes, bool], nn.Module]
    learned_positions: bool
    biases: bool
    tied: bool


# %% [markdown]
# **Attention.** Each token asks (query) what the tokens before it offer (key), and takes a mean of what they say
# (value). Written out once as in the paper; from Llama 2 on `F.scaled_dot_product_attention` never stores the scores.


# %%
class Attention(nn.Module):
    """Causal self-attention, [B, S, width] to the same."""

    def __init__(self, sizes: Sizes, bias: bool) -> None:
        super().__init__()
        self.head = sizes.head
        self.q, self.k, self.v, self.out = (nn.Linear(sizes.width, sizes.width, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens of ``x``."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head)  # [B, heads, S, S]
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Each token by itself: wide, through GELU, and back."""

    def __init__(self, sizes: Sizes, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=bias)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., width]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


# %% [markdown]
# **The decoder** is a stream of vectors, one a token, to which every block adds twice. Its head is the embedding matrix
# once more ("tied"): a token is likely where the stream points at its embedding.


# %%
class Block(nn.Module):
    """One layer."""

    def __init__(self, sizes: Sizes, parts: Parts) -> None:
        super().__init__()
        self.norm1, self.attention = parts.norm(sizes), parts.attention(sizes, parts.biases)
        self.norm2, self.feed_forward = parts.norm(sizes), parts.feed_forward(sizes, parts.biases)

    def forward(self, x: Tensor) -> Tensor:
        """Add to the stream."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Decoder(nn.Module):
    """A language model of some ``parts``: tokens [B, S] to logits [B, S, vocabulary]."""

    def __init__(self, sizes: Sizes, parts: Parts) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width) if parts.learned_positions else None
        self.blocks = nn.ModuleList(Block(sizes, parts) for _ in range(sizes.layers))
        self.norm = parts.norm(sizes)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if parts.tied:
            self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)  # so that at first every token is about as likely

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what each token's successor is likely to be."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def layer_norm(sizes: Sizes) -> nn.Module:
    """Return LayerNorm with weight and bias."""
    return nn.LayerNorm(sizes.width, eps=sizes.eps)


GPT2 = Parts(layer_norm, Attention, FeedForward, learned_positions=True, biases=True, tied=True)

# %% [markdown]
# **Is it GPT-2?** transformers' weights in our model give transformers' logits, and Tandem's.

# %%
if __name__ == "__main__":
    from tests.walkthrough.compare import largest_difference, parameters, random_gpt2

    ours, theirs = random_gpt2(Sizes())
    print(f"GPT-2            {parameters(ours):7,} parameters, {largest_difference(ours, theirs)}")
