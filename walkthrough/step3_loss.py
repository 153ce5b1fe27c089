"""Step 3: the loss (how much the token that follows surprises a model) and perplexity (the same as a number)."""

# %%
from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(globals().get("__file__", "here")).resolve().parent.parent))

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.demo_stories import story
from walkthrough.course import check, draw
from walkthrough.sizes import Sizes
from walkthrough.step1_tokens import TOKENIZER
from walkthrough.step2_gpt2 import GPT2, Decoder

READ = torch.tensor(TOKENIZER.encode("\n".join(story(number) for number in range(2000))))  # what models learn from
HELD_OUT = torch.tensor(TOKENIZER.encode("\n".join(story(number) for number in range(2000, 2050))))
VOCABULARY = len(TOKENIZER.tokens)

# %% [markdown]
# **Cross-entropy.** `softmax` of the logits gives each token a probability. The loss of a position is minus the
# logarithm of the probability of the token that really follows: 0 if the model was sure, large if it was surprised.
# Position i predicts token i + 1, so one text of S tokens is S - 1 exercises at once.


# %%
def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of ``logits`` [B, S, vocabulary] for their ``tokens`` [B, S]."""
    log_probabilities = logits[:, :-1] - logits[:, :-1].logsumexp(-1, keepdim=True)
    return -log_probabilities.gather(-1, tokens[:, 1:, None]).mean()


# %% [markdown]
# **What to expect.** A model that knows nothing gives every token 1 / vocabulary: its loss is ln(vocabulary). A fresh
# GPT-2 is there, because its matrices start small. Started fifty times larger it is sure of nonsense.

# %%
if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = Sizes(VOCABULARY)
    texts = READ[: 20 * 60].view(20, 60)
    fresh, loud = Decoder(sizes, GPT2), Decoder(sizes, GPT2)
    torch.nn.init.normal_(loud.embedding.weight, std=1.0)
    with torch.no_grad():
        print(f"ln({VOCABULARY}) is {math.log(VOCABULARY):.2f}; a fresh model loses {loss_of(fresh(texts), texts):.2f}")
        print(f"with an embedding of standard deviation 1 it loses {loss_of(loud(texts), texts):.1f}")

# %% [markdown]
# **Perplexity** is e to the mean loss: the model is as unsure as if it chose among so many tokens. Two models without a
# network, which only count, show what a network has to beat: how often a token occurs, and how often it follows another
# (1/100 is added to each count, so that nothing is impossible).


# %%
def perplexity(losses: Tensor) -> float:
    """Return e to the mean of ``losses``."""
    return math.exp(losses.mean())


def counted(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return log probabilities of tokens [V], and of tokens after each token [V, V], as they were in ``tokens``."""
    pairs = torch.full((VOCABULARY, VOCABULARY), 0.01)
    pairs.index_put_((tokens[:-1], tokens[1:]), torch.ones(1), accumulate=True)
    return (pairs.sum(0) / pairs.sum()).log(), (pairs / pairs.sum(1, keepdim=True)).log()


def surprises(tokens: Tensor) -> dict[str, Tensor]:
    """Return each model's loss at every token of a text but the first."""
    alone, after = counted(READ)
    return {
        "knowing nothing": torch.full((len(tokens) - 1,), math.log(VOCABULARY)),
        "counting tokens": -alone[tokens[1:]],
        "counting pairs": -after[tokens[:-1], tokens[1:]],
    }


if __name__ == "__main__":
    for name, losses in surprises(HELD_OUT).items():
        print(f"perplexity of new stories, {name}: {perplexity(losses):.1f}")
    start = HELD_OUT[:28]
    with draw("step3_surprise", "How surprising each token of a new story is", width=10) as (chart,):
        for (name, losses), colour in zip(surprises(start).items(), ("#CCCCCC", "#56B4E9", "#0072B2")):
            chart.bar(range(1, len(start)), losses, color=colour, label=name)
        chart.set_xticks(range(1, len(start)), [TOKENIZER.decode([int(n)]) for n in start[1:]], rotation=60)
        chart.set(ylabel="loss", ylim=(0, 8.5))
        chart.legend(ncols=3)

# %% [markdown]
# **Long texts.** A model has a last position, so a long text is read in windows. The first tokens of a window have
# little before them and surprise more. So windows overlap, and only what is new in a window counts: each token once.
#
# **Bits per byte.** Models with other tokens have other perplexities, because longer tokens are harder to guess. The
# loss of the whole text in bits, divided by its bytes, can be compared.


# %%
@torch.no_grad()
def windowed(model: Decoder, tokens: Tensor, stride: int) -> Tensor:
    """Return the loss at each of ``tokens`` [S] but the first; a window starts every ``stride`` tokens."""
    found, done, context = [], 1, model.sizes.context
    for start in range(0, len(tokens), stride):
        window = tokens[start : start + context]
        losses = F.cross_entropy(model(window[None])[0, :-1], window[1:], reduction="none")
        new = start + len(window) - done
        found.append(losses[len(losses) - new :])
        done += new
        if done == len(tokens):
            break
    return torch.cat(found)


def bits_per_byte(losses: Tensor, tokens: Tensor) -> float:
    """Return the bits that the losses of a text add up to, by its bytes."""
    return float(losses.sum()) / math.log(2) / len(TOKENIZER.decode(tokens.tolist()).encode())


if __name__ == "__main__":
    losses = windowed(fresh, HELD_OUT[:500], stride=32)
    assert len(losses) == 499
    print(f"a fresh model needs {bits_per_byte(losses, HELD_OUT[:500]):.1f} bits per byte; the text itself has 8")

# %% [markdown]
# **Is it right?** transformers computes a loss too.

# %%
if __name__ == "__main__":
    from tests.walkthrough.compare import random_gpt2

    ours, theirs = random_gpt2(sizes)
    with torch.no_grad():  # 1,180 logarithms are added in another order
        check("loss against transformers", loss_of(ours(texts), texts), theirs(texts, labels=texts).loss, 1e-6)
