"""Training of the tiny FLUX: rectified flow with the text encoders, then guidance distillation.

Phase "dit". For latents x and noise e, at sigma s (logit-normal, shifted like FLUX's own schedule) the
transformer sees (1 - s) x + s e and learns the velocity e - x. One caption in ten is empty, so the model
also knows the unconditional velocity. The guidance input is random and says nothing yet.

Phase "distill". A frozen copy of the averaged weights is the teacher: target = u + g (c - u) from its
conditional and unconditional velocities, and the student gets g through FLUX's guidance embedder. One
pass then does what two did.

Every stage goes through one loop (:func:`train`). The learning rate is half a cosine behind a warm-up, of each
optimizer's own height. What a stage makes are the averaged weights; their decay grows with the number of updates, so
that they soon forget the start (``library.training.optim.after_update``). Every random choice is a function of the
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from tqdm import trange

from dev.tiny_models.latent_pool import SIZES, Captions, Pool, tokenize
from dev.tiny_models.transformer import LATENT_FACTOR, TIME_SHIFT, TextToImage
from library.config.schema import OptimizerConfig
from library.models.flux.model import pack_mask
from library.models.vae import pack_latents
from library.training.optim.schedules import lr_multiplier

FLOOR = 0.02  # of the cosine


@dataclass(frozen=True)
class Training:
    """What every stage has."""

    steps: int
    batch: int
    warmup: int = 100
    average_decay: float = 0.999


def train(
    phase: str,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_of: Callable[[int], Tensor],
    training: Training,
) -> dict[str, Tensor]:
    """Train ``model`` in place on ``loss_of`` each step; return the averaged weights by name."""

    def update(averages: Any, weights: Any, updates: Tensor) -> None:
        decay = min(training.average_decay, float((1 + updates) / (10 + updates)))
        torch._foreach_lerp_(averages, weights, 1 - decay)

    average = AveragedModel(model, multi_avg_fn=update)
    average.n_averaged.fill_(1)
    cosine = OptimizerConfig(lr_scheduler="cosine", lr_warmup_steps=training.warmup, lr_scheduler_min_lr_ratio=FLOOR)
    schedules = [
        LambdaLR(optimizer, lambda step: lr_multiplier(cosine, step, training.steps)) for optimizer in optimizers
    ]
    for step in (progress := trange(training.steps, desc=phase)):
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        average.update_parameters(model)
        progress.set_postfix(loss=loss.item())
    return average.module.state_dict()


TEXT_LENGTHS, LENGTH_SHARES = (32, 48, 80, 128), (0.84, 0.08, 0.05, 0.03)  # so that any max_sequence_length works
LONGEST_TEXT = 512  # FluxPipeline's default; on a quarter of the batch
GUIDANCE_RANGE = (1.0, 5.0)
FILL_GUIDANCE_RANGE = (1.0, 50.0)  # drawn evenly on a logarithmic scale


@dataclass(frozen=True)
class FlowTraining(Training):
    steps: int = 7000
    batch: int = 36  # a size that no other dimension has, or torch.compile takes the two for one
    warmup: int = 200
    muon_rate: float = 3e-3
    adam_rate: float = 1e-3
    embedder_rate: float | None = None  # of a fill model's first layer, whose new columns start at zero
    empty_share: float = 0.1
    longest_share: float = 0.0  # of batches with the longest text
    compile: bool = True


@dataclass(frozen=True)
class Batch:
    latents: Tensor  # [B, 16, h, w]
    noise: Tensor  # the same
    sigmas: Tensor  # [B]
    guidance: Tensor  # [B]
    captions: Captions
    masked: Tensor | None = None  # a fill model's, [B, 16, h, w]
    mask: Tensor | None = None  # [B, 1, H, W] fp32, 1 in the region to fill

    @property
    def noised(self) -> Tensor:
        share = self.sigmas[:, None, None, None]
        return (1 - share) * self.latents + share * self.noise

    @property
    def beside(self) -> Tensor | None:
        """Blanked image and mask, packed as FluxFillPipeline packs them; None for the text-to-image model."""
        if self.masked is None:
            return None
        return torch.cat([pack_latents(self.masked), pack_mask(self.mask, LATENT_FACTOR)], dim=-1)


Loss = Callable[[Batch, Tensor], Tensor]  # of the velocity [B, 16, h, w]


def flow_loss(batch: Batch, velocity: Tensor) -> Tensor:
    return (velocity - (batch.noise - batch.latents)).pow(2).mean()


def guided_loss(teacher: TextToImage) -> Loss:
    """Towards the teacher's velocity under classifier-free guidance, at each row's own guidance."""

    def loss(batch: Batch, velocity: Tensor) -> Tensor:
        rows, length = batch.captions.t5.shape
        empty = tokenize([""]).padded(length)
        both = Captions(
            torch.cat([batch.captions.t5, empty.t5.expand(rows, -1)]),
            torch.cat([batch.captions.clip, empty.clip.expand(rows, -1)]),
        )
        with torch.no_grad(), forward_context():
            found = teacher(batch.noised.repeat(2, 1, 1, 1), batch.sigmas.repeat(2), both, batch.guidance.repeat(2))
        conditional, unconditional = found.float().chunk(2)
        target = unconditional + batch.guidance[:, None, None, None] * (conditional - unconditional)
        return (velocity - target).pow(2).mean()

    return loss


def train_transformer(
    phase: str, model: TextToImage, loss: Loss, pool: Pool, training: FlowTraining
) -> dict[str, Tensor]:
    """Train `model` in place; return the averaged weights.

    The optimizers are Muon for the blocks' matrices and AdamW for what else has gradients.
    A fill model's first layer has a Muon of its own, which moves all directions of a matrix alike. Under AdamW that
    layer soon passed on the large patterns of the blanked image, while what makes its outlines, directions of little
    variance, stayed near zero for 1,500 steps.
    """
    matrices, embedder, others = [], [], []
    for name, parameter in model.named_parameters():
        if name == "transformer.x_embedder.weight" and training.embedder_rate is not None:
            embedder.append(parameter)
        elif parameter.requires_grad:
            in_block = "transformer_blocks" in name  # matches the single blocks' names, too
            (matrices if in_block and parameter.ndim == 2 else others).append(parameter)
    muon = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    optimizers = [
        muon(matrices, lr=training.muon_rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=training.adam_rate, betas=(0.9, 0.99), weight_decay=0.0),
        *([muon(embedder, lr=training.embedder_rate, weight_decay=0.0)] if embedder else []),
    ]
    if training.compile:
        model.transformer.compile_repeated_blocks(dynamic=True)

    def loss_of(step: int) -> Tensor:
        batch = draw_batch(pool, training, step)
        with forward_context():
            velocity = model(batch.noised, batch.sigmas, batch.captions, batch.guidance, batch.beside)
        return loss(batch, velocity.float())

    return train(phase, model, optimizers, loss_of, training)


@contextmanager
def forward_context() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):  # flash is slower at 100 tokens
        yield


def draw_batch(pool: Pool, training: FlowTraining, step: int) -> Batch:
    """The batch of a step."""
    rng = np.random.default_rng([0, step])
    height, width = list(SIZES)[int(rng.choice(len(SIZES), p=list(SIZES.values())))]
    part = pool[f"{height}x{width}"]
    length, count = int(rng.choice(TEXT_LENGTHS, p=LENGTH_SHARES)), training.batch
    if training.longest_share and rng.random() < training.longest_share:
        length, count = LONGEST_TEXT, max(2, training.batch // 4)
    rows = torch.from_numpy(rng.integers(0, len(part["latents"]), count))
    latents = part["latents"][rows].float()
    generator = torch.Generator().manual_seed(step)
    odds = TIME_SHIFT * torch.exp(torch.randn(count, generator=generator))
    dropped = torch.rand(count, generator=generator) < training.empty_share
    noise, guidance = torch.randn(latents.shape, generator=generator), torch.empty(count)
    captions = Captions(part["t5"][rows], part["clip"][rows]).emptied(tokenize([""]), dropped).padded(length)
    if "masked" not in part:
        guidance.uniform_(*GUIDANCE_RANGE, generator=generator)
        return Batch(latents, noise, odds / (1 + odds), guidance, captions)
    guidance.uniform_(*map(math.log, FILL_GUIDANCE_RANGE), generator=generator).exp_()
    masked, mask = part["masked"][rows].float(), part["masks"][rows].float().unsqueeze(1)
    return Batch(latents, noise, odds / (1 + odds), guidance, captions, masked, mask)
