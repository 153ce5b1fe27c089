"""Training of the tiny FLUX: its VAE, then rectified flow with the text encoders, then guidance distillation.

VAE: crops of painted images in, sharp reconstructions and well-behaved latents out. The loss is the mean absolute
error, the same on horizontal and vertical differences (which makes edges sharp without a perceptual network), and a KL
term strong enough that neighbouring latents decode to neighbouring images, which is what the transformer needs. The
first part of the steps sees 64-pixel crops, the last quarter full images, because GroupNorm's statistics depend on how
much of an image it sees. Shift and scale of the latents are measured on scenes. A second stage trains the decoder
alone, on latents with noise added: a transformer's samples are never quite what the encoder would have made, and a
decoder that knows only exact latents turns that into stains. The VAE must also carry what a LoRA brings along later, so
half of its images are scenes, the rest are random outlines in any colour over a scene's background.

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
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from tqdm import trange

from dev.tiny_models.latent_pool import SIZES, Captions, Pool, tokenize
from dev.tiny_models.painting import SHAPES, Pixels, coverage, paint
from dev.tiny_models.scenes import background, random_scene
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


@dataclass(frozen=True)
class VaeTraining(Training):
    steps: int = 4000
    batch: int = 16
    crop: int = 64
    pool: int = 10000  # images painted before training; each is seen many times, in different crops
    learning_rate: float = 2e-3
    kl_weight: float = 1e-3
    full_share: float = 0.25  # the last steps' share that sees full images
    latent_noise: float = 0.0  # above 0: keep the encoder, and add up to this share of the latents' deviation


def train_vae(phase: str, vae: AutoencoderKL, training: VaeTraining) -> dict[str, Tensor]:
    """Train `vae`; return its averaged weights."""
    trained = vae.decoder if training.latent_noise else vae
    trained.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=training.learning_rate, betas=(0.9, 0.99))
    pool = paint_pool(training.pool)
    return train(phase, vae, [optimizer], lambda step: vae_loss(vae, pool, training, step), training)


@torch.no_grad()
def scale_latents(vae: AutoencoderKL) -> None:
    """Set shift and scale such that scenes have latents of mean 0 and deviation 1."""
    rng = np.random.default_rng(1)
    pixels = torch.from_numpy(np.stack([random_scene(rng).image for _ in range(128)])).permute(0, 3, 1, 2) * 2 - 1
    means = vae.encoder(pixels).chunk(2, dim=1)[0]
    shift, scale = round(means.mean().item(), 4), round(1.0 / means.std().item(), 4)
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)


def paint_pool(count: int) -> np.ndarray:
    """[count, 128, 128, 3] uint8."""
    rng = np.random.default_rng(0)
    pool = np.empty((count, 128, 128, 3), np.uint8)
    for index in range(count):
        pool[index] = np.clip(random_image(rng), 0, 1) * 255 + 0.5
    return pool


def vae_loss(vae: AutoencoderKL, pool: np.ndarray, training: VaeTraining, step: int) -> Tensor:
    rng = np.random.default_rng([0, step])
    full = step >= training.steps * (1 - training.full_share)
    size, crop = (training.batch // 4, 128) if full else (training.batch, training.crop)  # as many pixels
    pixels = _batch(pool, rng, size, crop)
    generator = torch.Generator().manual_seed(step)
    with torch.autocast("cpu", torch.bfloat16):
        latents, kl = _noised_latents(vae, pixels, training.latent_noise, generator)
        decoded = vae.decoder(latents)
    error = decoded.float() - pixels
    flat = error.abs().mean()
    edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
    return flat + 0.5 * edges + training.kl_weight * kl


def _noised_latents(
    vae: AutoencoderKL, pixels: Tensor, latent_noise: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(latents [B, 16, h, w], KL): sampled from the posterior, or its mean with noise on it."""
    with torch.set_grad_enabled(latent_noise == 0):
        mean, log_variance = vae.encoder(pixels).float().chunk(2, dim=1)
    log_variance = log_variance.clamp(-20, 10)
    noise = torch.randn(mean.shape, generator=generator)
    kl = 0.5 * (mean.pow(2) + log_variance.exp() - 1 - log_variance).mean()
    if latent_noise == 0:
        return mean + torch.exp(0.5 * log_variance) * noise, kl
    strength = latent_noise * torch.rand(len(mean), 1, 1, 1, generator=generator)
    return mean + strength / vae.config.scaling_factor * noise, kl


def _batch(pool: np.ndarray, rng: np.random.Generator, size: int, crop: int) -> Tensor:
    """[size, 3, crop, crop] in -1..1: random images, random crops, mirrored at random."""
    crops = []
    for index in rng.integers(0, len(pool), size):
        top, left = rng.integers(0, 128 - crop + 1, 2)
        piece = pool[index, top : top + crop, left : left + crop]
        crops.append(piece[:, ::-1] if rng.random() < 0.5 else piece)
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).float().div(127.5).sub(1.0)


def random_image(rng: np.random.Generator) -> Pixels:
    """One image of the VAE's training set, [128, 128, 3]."""
    if rng.random() < 0.5:
        return random_scene(rng).image
    _, image, _ = background(rng, 128, 128, ())
    for _ in range(int(rng.integers(1, 9))):
        outline = SHAPES[str(rng.choice(list(SHAPES)))]
        centre, radius = rng.uniform(0, 128, size=2), rng.uniform(1, 50, size=2)  # also as thin as a line
        mask = coverage(outline, 128, 128, tuple(centre), tuple(radius), rng.uniform(0, 2 * np.pi))
        paint(image, mask, tuple(rng.random(3)))
    return image


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
