"""Step 4: training. A GPT-2 of half a million parameters learns to write stories, as the large ones learn."""

# %%
from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(globals().get("__file__", "here")).resolve().parent.parent))

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from walkthrough.course import OUTPUT, check, draw
from walkthrough.sizes import Sizes
from walkthrough.step2_gpt2 import GPT2, Decoder
from walkthrough.step3_loss import HELD_OUT, READ, VOCABULARY, loss_of, perplexity, surprises, windowed

SIZES = Sizes(vocabulary=VOCABULARY, width=128, hidden=512, layers=2)
UPDATES = 300  # steps of the training
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# **Rate.** The first gradients are the wildest, so the learning rate rises from 0 (*warm-up*). Then it falls along half
# a cosine to 10 % of its peak: large steps to get near, small ones to settle. **Weight decay** pulls matrices towards
# 0, so that they do not grow without need. Biases and norms are left alone.


# %%
def rate(step: int, steps: int, peak: float = 3e-3) -> float:
    """Return the learning rate of ``step``; the warm-up takes a tenth of ``steps``."""
    if step < (warm := steps // 10):
        return peak * step / warm
    return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW that decays only matrices."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) == decays] for decays in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


# %% [markdown]
# **A step.** A batch that does not fit into memory is taken in parts whose gradients add up (*accumulation*). Each loss
# is divided by the number of parts, so the sum is the gradient of the whole. A gradient longer than 1 is cut to that
# length (*clipping*), so that no odd batch throws the model away. On a GPU, **autocast** computes products in 16 bits;
# weights and optimizer stay in 32. **TF32** rounds 32-bit numbers to 11 significant bits before a product. A batch in
# **pinned memory** is copied while the GPU computes. GPUs compute in tiles, so GPT-2's vocabulary of 50,257 is
# **padded** to 50,304, a multiple of 64, by tokens that never occur (step 9).


# %%
def backward(model: Decoder, tokens: Tensor, parts: int, dtype: torch.dtype | None = None, scale: float = 1) -> float:
    """Add the gradient of ``scale`` times the loss of ``tokens``, a part at a time; return the loss."""
    total = 0.0
    for part in tokens.chunk(parts):
        with torch.autocast(tokens.device.type, dtype, enabled=dtype is not None):
            loss = loss_of(model(part).float(), part) / parts
        (loss * scale).backward()
        total += loss.item()
    return total


def train(model: Decoder, steps: int, size: int = 8) -> list[float]:
    """Train ``model`` in place, each step on ``size`` places of the stories; return the losses."""
    torch.set_float32_matmul_precision("high")  # TF32
    optimizer, generator, losses = optimizer_of(model), torch.Generator().manual_seed(0), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        tokens = READ[torch.randint(len(READ) - 64, (size, 1), generator=generator) + torch.arange(64)]
        if DEVICE == "cuda":
            tokens = tokens.pin_memory().to(DEVICE, non_blocking=True)
        losses.append(backward(model, tokens, 1, torch.bfloat16 if DEVICE == "cuda" else None))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(anew: bool = False) -> Decoder:
    """Return the model that this script makes; from its file if there is one."""
    torch.manual_seed(0)
    model, file = Decoder(SIZES, GPT2), OUTPUT / "stories.safetensors"
    if anew or not file.exists():
        losses = train(model.to(DEVICE), UPDATES)
        with draw("step4_training", "Learning rate", "Loss; grey: counting pairs") as (left, right):
            left.plot([rate(step, UPDATES) for step in range(UPDATES)])
            right.plot(losses)
            right.axhline(surprises(HELD_OUT)["counting pairs"].mean(), color="grey")
        save_model(model, str(file))
    load_model(model, file)
    return model.cpu()


# %% [markdown]
# **Loss scaling.** fp16 knows no number below 6e-8: smaller gradients become 0. It ends at 65,504: larger ones become
# infinite. So the loss is multiplied by a scale and the gradient divided by it. A step with an infinite gradient is
# left out, and the scale halved. bf16 reaches as far as 32 bits do and needs none, with 8 significant bits, not 11.
#
# **Dead ReLUs.** max(0, x) has slope 0 below 0. A step too large can push a unit below 0 for all inputs; then its
# gradient is 0, and it stays there. GELU's slope is small there, but not 0.


# %%
def gradient(tokens: Tensor, dtype: torch.dtype | None = None, scale: float = 1, parts: int = 1) -> Tensor:
    """Return the gradient of the trained model as one vector."""
    model = trained()
    backward(model, tokens, parts, dtype, scale)
    return torch.cat([p.grad.flatten() for p in model.parameters()]) / scale


def dead_units(rate: float) -> list[float]:
    """Return the share of a layer's ReLUs that are 0 for every input, before each step of a small training."""
    x, net, shares = torch.randn(512, 16), nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1)), []
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    for _ in range(60):
        shares.append((net[:2](x) == 0).all(0).float().mean().item())
        (net(x) - x.norm(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return shares


if __name__ == "__main__":
    print(f"perplexity of new stories: {perplexity(windowed(trained(anew=True), HELD_OUT[:2000], stride=32)):.2f}")
    tokens = READ[:256].view(4, 64)
    exact, scales = gradient(tokens), [2.0**n for n in range(-10, 21, 5)]
    errors = [((gradient(tokens, torch.float16, s) - exact).norm() / exact.norm()).item() for s in scales]
    with draw("step4_numbers", "fp16's error by loss scale (no point: infinite)", "Share of dead ReLUs") as charts:
        charts[0].loglog(scales, errors, marker="o")
        for speed in (0.05, 0.1, 0.12):
            charts[1].plot(dead_units(speed), label=f"rate {speed}")
        charts[1].legend()

# %% [markdown]
# **Is it right?** The gradient of four parts is that of the batch, and transformers knows the same schedule.

# %%
if __name__ == "__main__":
    from transformers import get_cosine_with_min_lr_schedule_with_warmup as schedule

    check("gradient in four parts against one", gradient(tokens, parts=4), exact, 1e-5)  # sums in another order
    theirs = schedule(torch.optim.SGD([torch.zeros(1)], lr=3e-3), 30, 300, min_lr_rate=0.1).lr_lambdas[0]
    rates = ([f(step) for step in range(300)] for f in (lambda step: rate(step, 300), lambda step: 3e-3 * theirs(step)))
    check("learning rate against transformers", *map(torch.tensor, rates), 1e-6)
