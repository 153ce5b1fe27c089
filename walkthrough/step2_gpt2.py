"""Step 2: GPT-2 (Radford et al. 2019). Tokens go in, a number for each possible next token comes out."""

# %%
from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(globals().get("__file__", "here")).resolve().parent.parent))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from walkthrough.course import check, draw
from walkthrough.sizes import Parts, Sizes

# %% [markdown]
# **Attention** lets tokens read each other. From its vector each token makes a *query* (what it looks for), a *key*
# (what it can be found by) and a *value* (what it tells). Query times key is a score. A token must not see what comes
# after it, or it could copy the answer: those scores become minus infinity. `softmax` turns scores into shares that are
# positive and sum to 1; the result is the mean of the values by these shares. Several *heads* do so side by side.


# %%
class Attention(nn.Module):
    """Causal self-attention, [B, S, width] to the same: B texts of S tokens."""

    def __init__(self, sizes: Sizes, bias: bool) -> None:
        super().__init__()
        self.head = sizes.head
        self.q, self.k, self.v, self.out = (nn.Linear(sizes.width, sizes.width, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head)  # [B, heads, S, S]
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Each token by itself: to a wide vector, through GELU (about max(0, x), but smooth), and back."""

    def __init__(self, sizes: Sizes, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=bias)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


# %% [markdown]
# **The decoder.** A token's vector, its embedding plus one for its position, runs through all blocks. Each block adds
# to it twice: this is the *residual stream*. Norms bring what a layer reads to mean 0 and standard deviation 1. In the
# end the vector is compared with each token's embedding ("tied": the same table again). The products, *logits*, say
# which token is likely next.


# %%
class Block(nn.Module):
    """One layer; ``x`` is the stream, [B, S, width]."""

    def __init__(self, sizes: Sizes, parts: Parts) -> None:
        super().__init__()
        self.norm1, self.attention = parts.norm(sizes), parts.attention(sizes, parts.biases)
        self.norm2, self.feed_forward = parts.norm(sizes), parts.feed_forward(sizes, parts.biases)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Decoder(nn.Module):
    """A language model of some ``parts``: tokens [B, S] to logits [B, S, vocabulary]."""

    def __init__(self, sizes: Sizes, parts: Parts) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width) if parts.learned_positions else None
        self.blocks = nn.ModuleList(Block(sizes, parts) for _ in range(sizes.layers))
        self.norm = parts.norm(sizes)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if parts.tied:
            self.head.weight = self.embedding.weight
        initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


GPT2 = Parts(lambda sizes: nn.LayerNorm(sizes.width, eps=sizes.eps), Attention, FeedForward)

# %% [markdown]
# **Before training** all matrices are random, with standard deviation 0.02: small, so that at first every token is
# about as likely. N blocks add to the stream 2N times. Sums of 2N random numbers are sqrt(2N) times as large as one, so
# GPT-2 divides the layers that write into the stream by sqrt(2N). The picture shows the stream with and without that.


# %%
def initialise(model: Decoder, scaled: bool = True) -> None:
    """Draw the matrices of ``model`` anew; biases begin at 0."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 2:
            writes = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * model.sizes.layers) if writes and scaled else 0.02)


@torch.no_grad()
def stream(model: Decoder, tokens: Tensor) -> list[Tensor]:
    """Return the standard deviation of what was added to the stream, after each block."""
    x = start = model.embedding(tokens) + model.positions.weight[: tokens.shape[1]]
    return [(x := block(x)).sub(start).std() for block in model.blocks]


if __name__ == "__main__":
    torch.manual_seed(0)
    tokens, last = torch.randint(0, 100, (1, 64)), {}
    with draw("step2_stream", "0.02 everywhere", "Layers that write: 0.02 / sqrt(2N)", sharey=True) as charts:
        for layers in (6, 12, 24, 48):
            model = Decoder(Sizes(width=192, hidden=768, layers=layers), GPT2)
            for chart, scaled in zip(charts, (False, True)):
                initialise(model, scaled)
                last[layers, scaled] = (sizes := stream(model, tokens))[-1]
                chart.plot(range(1, layers + 1), sizes, label=f"N = {layers}")
                chart.set(xlabel="block", ylabel="what was added to the stream")
        charts[0].legend()
    check("4 times as many blocks add sqrt(4) times as much", last[48, False], last[12, False] * 2, 0.2)  # chance
    check("scaled, they add the same", last[48, True], last[12, True], 0.1)

# %% [markdown]
# **Is it GPT-2?** transformers' GPT-2 with the same random weights (step 6 shows how they get across) has to give the
# same logits, and Tandem's decoder too. The sums are in another order, so they differ by a few roundings of 6e-8.

# %%
if __name__ == "__main__":
    from tests.walkthrough.compare import compare, random_gpt2

    compare("GPT-2", *random_gpt2(Sizes()))
