"""Step 9: the same training step, faster and faster. Every rung is measured on this machine and kept if it helps.

A few seconds a rung on a CPU, and up to a minute for the compiler. With a GPU the model is GPT-2 of 124 million
parameters, which needs 24 GB; without, one of 4 million, and what is made for GPUs gains little or nothing.
"""

# %%
from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(globals().get("__file__", "here")).resolve().parent.parent))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from walkthrough.course import check, draw
from walkthrough.sizes import Sizes
from walkthrough.step2_gpt2 import GPT2, Attention, Decoder
from walkthrough.step8_growing import grown

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Sizes(vocabulary=4097, context=128, width=256, layers=4, heads=4, hidden=1024)
SIZES = Sizes(50257, 1024, 768, 12, 12, 3072) if DEVICE == "cuda" else SMALL
SECONDS = 3.0  # that a rung is measured, by the processor's time where one thread computes: others may use it too
CLOCK = time.process_time if DEVICE == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


@dataclass(frozen=True)
class Ways:
    """What of the ladder is in use."""

    joined: bool = False
    tf32: bool = False
    bf16: bool = False
    fused_attention: bool = False
    compiled: bool = False
    fused_adamw: bool = False
    padded: bool = False
    batch: int = 4


# %% [markdown]
# **One matrix** for q, k and v: one large product keeps a processor busier than three small ones. **TF32** and **bf16**
# (step 4): a GPU multiplies them 8 and 16 times as fast as 32 bits, and bf16 is half as much to move.
#
# **Fused attention.** The textbook writes scores [B, heads, S, S] to memory four times. `scaled_dot_product_attention`
# computes them in blocks that fit into the processor's own small memory (FlashAttention, arXiv 2205.14135).


# %%
class JoinedAttention(nn.Module):
    """Step 2's attention with one matrix, made of one with three."""

    def __init__(self, before: Attention, fused: bool) -> None:
        super().__init__()
        self.head, self.out, self.fused = before.head, before.out, fused
        parts = (before.q, before.k, before.v)
        self.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]))
        self.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]))

    def forward(self, x: Tensor) -> Tensor:
        joined = F.linear(x, self.weight, self.bias).unflatten(-1, (3, -1, self.head))
        q, k, v = joined.permute(2, 0, 3, 1, 4)  # each [B, heads, S, head]
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = q @ k.transpose(-1, -2) / self.head**0.5
            mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


# %% [markdown]
# **Compiled**: PyTorch writes a program for each block in which everything between two products is one pass over
# memory. **Fused AdamW** updates all weights in one pass. **Padded vocabulary**: 50,304 rows instead of 50,257 are
# whole tiles. **A larger batch**: weights are read and updated once for four times the tokens.


# %%
def padded(vocabulary: int, multiple: int = 64) -> int:
    """Return the next multiple: 50,304 for GPT-2's 50,257."""
    return -(-vocabulary // multiple) * multiple


def trainer(ways: Ways) -> Callable[[], float]:
    """Return a function that takes a training step and returns its loss."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high" if ways.tf32 else "highest")
    model = Decoder(SIZES, GPT2)
    tokens = torch.randint(0, SIZES.vocabulary, (ways.batch, SIZES.context + 1)).to(DEVICE)
    if ways.padded:
        model = grown(model, torch.zeros(padded(SIZES.vocabulary) - SIZES.vocabulary, SIZES.width))
    for block in model.blocks:
        if ways.joined or ways.fused_attention:
            block.attention = JoinedAttention(block.attention, ways.fused_attention)
        if ways.compiled:
            block.compile()
    optimizer = torch.optim.AdamW(model.to(DEVICE).parameters(), lr=1e-3, fused=ways.fused_adamw, foreach=False)

    def step() -> float:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=ways.bf16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def measured(ways: Ways) -> tuple[float, list[float]]:
    """Return tokens a second, and the first three losses."""
    step = trainer(ways)
    losses, times, begun = [step() for _ in range(3)], [], time.perf_counter()
    while not times or time.perf_counter() - begun < SECONDS:
        start = CLOCK()
        step()
        times.append(CLOCK() - start)
    return ways.batch * SIZES.context / min(times), losses


# %% [markdown]
# **The ladder.** Each rung must also train as the textbook does: its third loss, after two updates, is compared.

# %%
if __name__ == "__main__":
    best, rungs = Ways(), {}
    textbook, expected = measured(best)
    rungs["textbook"] = speed = textbook
    for name in ("joined", "tf32", "bf16", "fused_attention", "compiled", "fused_adamw", "padded", "batch"):
        ways = replace(best, **{name: best.batch * 4 if name == "batch" else True})
        rungs[name], losses = measured(ways)
        verdict = "kept" if rungs[name] > speed else "not kept"
        print(f"{name:<16} {rungs[name]:9,.0f} tokens/s, {rungs[name] / textbook:5.2f} times the textbook, {verdict}")
        if rungs[name] > speed:
            best, speed = ways, rungs[name]
        if name != "batch":  # other tokens
            # rounding to 8 bits, and 63 more tokens to choose from: less than a hundredth of a loss of 8
            check(name, torch.tensor(losses[2]), torch.tensor(expected[2]), 1e-2 if ways.bf16 or ways.padded else 1e-4)
    with draw("step9_ladder", f"Tokens a second on {DEVICE}", width=6) as (chart,):
        chart.bar_label(chart.barh([*rungs], [*rungs.values()]), fmt="{:,.0f}")
        chart.invert_yaxis()
