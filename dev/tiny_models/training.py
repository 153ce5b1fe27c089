"""Training of the tiny FLUX: its VAE, then rectified flow with the text encoders, then guidance distillation.

VAE: crops of painted images in, sharp reconstructions and well-behaved latents out. The loss is the mean absolute
error, the same on horizontal and vertical differences (which makes edges sharp without a perceptual network), and a KL
term strong enough that neighbouring latents decode to neighbouring images, which is what the transformer needs. The
first part of the steps sees 64-pixel crops, the last quarter full images, because GroupNorm's statistics depend on how
much of an image it sees. At the end shift and scale of the latents are measured. A second stage trains the decoder
alone, on latents with noise added: a transformer's samples are never quite what the encoder would have made, and a
decoder that knows only exact latents turns that into stains. The VAE must also carry what a LoRA brings along later, so
half of its images are scenes, the rest are random outlines and lines, patterns at any angle, soft noise, and creatures
built like the demo's subject in random colours.

Phase "dit". For latents x and noise e, at sigma s (logit-normal, shifted like FLUX's own schedule) the
transformer sees (1 - s) x + s e and learns the velocity e - x. One caption in ten is empty, so the model
also knows the unconditional velocity. The guidance input is random and says nothing yet.

Phase "distill". A frozen copy of the averaged weights is the teacher: target = u + g (c - u) from its
conditional and unconditional velocities, and the student is told g through FLUX's guidance embedder. One
pass then does what two did.

Optimizers: Muon for the blocks' matrices, AdamW for everything else. Every random choice is a function of
(seed, step), so a resumed run goes on as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CLIPTextModel, T5EncoderModel

from dev.tiny_models.latent_pool import SIZES, Captions, Pool, tokenize
from dev.tiny_models.painting import SHAPES, Picture, Rgb, checkers, coverage, dots, gradient, paint, plain, stripes
from dev.tiny_models.run_state import AveragedWeights, Progress, RunState, cosine_rate, load_state
from dev.tiny_models.scenes import paint_zorbo, random_scene, random_zorbo
from dev.tiny_models.transformer import TIME_SHIFT, TextToImage, TinySizes, build_text_to_image, build_vae


@dataclass(frozen=True)
class VaeTraining:
    steps: int = 4000
    batch: int = 16
    crop: int = 64
    pool: int = 10000  # pictures painted before training; each is seen many times, in different crops
    learning_rate: float = 2e-3
    kl_weight: float = 1e-3
    whole_share: float = 0.25  # the last steps' share that sees whole pictures
    latent_noise: float = 0.0  # above 0: keep the encoder, and add up to this share of the latents' deviation
    seed: int = 0


def train_vae(phase: str, vae: AutoencoderKL, training: VaeTraining, state_path: Path, resume: bool) -> AutoencoderKL:
    """Train `vae` in place, saving the state as it goes; returns an averaged copy with its latent factors."""
    trained = vae.decoder if training.latent_noise else vae
    trained.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=training.learning_rate, betas=(0.9, 0.99))
    run = RunState(vae, 0.999, [optimizer])
    first_step = run.restore(state_path) if resume else 0
    pool = paint_pool(training.pool, training.seed)
    print(f"{phase}: painted {len(pool)} pictures", flush=True)
    progress = Progress(phase, first_step, training.steps, every=50)
    for step in range(first_step, training.steps):
        losses = _vae_step(vae, optimizer, pool, training, step)
        run.average.update(vae)
        progress.report(step, losses)
        if (step + 1) % 500 == 0 or step + 1 == training.steps:
            run.save(state_path, step + 1, factors=latent_factors(vae, run.average, training.seed))
    return trained_vae(TinySizes(tuple(vae.config.block_out_channels)), state_path)


def trained_vae(sizes: TinySizes, state_path: Path) -> AutoencoderKL:
    """The averaged VAE of a saved state, in fp32, without gradients."""
    state = load_state(state_path)
    vae = build_vae(sizes)
    vae.load_state_dict(state["average"]["shadow"])
    shift, scale = state["factors"]
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    return vae.eval().requires_grad_(False)


def paint_pool(count: int, seed: int) -> np.ndarray:
    """[count, 128, 128, 3] uint8."""
    rng = np.random.default_rng(seed)
    pool = np.empty((count, 128, 128, 3), np.uint8)
    for index in range(count):
        pool[index] = np.clip(random_texture_picture(rng), 0, 1) * 255 + 0.5
    return pool


def _vae_step(
    vae: AutoencoderKL, optimizer: torch.optim.Optimizer, pool: np.ndarray, training: VaeTraining, step: int
) -> dict[str, float]:
    rng = np.random.default_rng([training.seed, step])
    whole = step >= training.steps * (1 - training.whole_share)
    size, crop = (training.batch // 4, 128) if whole else (training.batch, training.crop)  # as many pixels
    pixels = _batch(pool, rng, size, crop)
    for group in optimizer.param_groups:
        group["lr"] = cosine_rate(step, training.steps, training.learning_rate)
    generator = torch.Generator().manual_seed(training.seed * 1_000_003 + step)
    with torch.autocast("cpu", torch.bfloat16):
        latents, kl = _noised_latents(vae, pixels, training.latent_noise, generator)
        decoded = vae.decoder(latents)
    error = decoded.float() - pixels
    flat = error.abs().mean()
    edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
    (flat + 0.5 * edges + training.kl_weight * kl).backward()
    torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return {"l1": flat.item(), "edges": edges.item(), "kl": kl.item()}


def _noised_latents(
    vae: AutoencoderKL, pixels: torch.Tensor, latent_noise: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
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


def _batch(pool: np.ndarray, rng: np.random.Generator, size: int, crop: int) -> torch.Tensor:
    """[size, 3, crop, crop] in -1..1: random pictures, random crops, mirrored at random."""
    crops = []
    for index in rng.integers(0, len(pool), size):
        top, left = rng.integers(0, 128 - crop + 1, 2)
        piece = pool[index, top : top + crop, left : left + crop]
        crops.append(piece[:, ::-1] if rng.random() < 0.5 else piece)
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).float().div(127.5).sub(1.0)


@torch.no_grad()
def latent_factors(vae: AutoencoderKL, average: AveragedWeights, seed: int) -> tuple[float, float]:
    """(shift_factor, scaling_factor): after (latent - shift) * scale, scenes have mean 0 and deviation 1."""
    kept = {name: value.clone() for name, value in vae.state_dict().items()}
    vae.load_state_dict(average.shadow)
    rng = np.random.default_rng(seed + 1)
    pixels = np.stack([random_scene(rng).picture for _ in range(128)])
    means = vae.encoder(torch.from_numpy(pixels).permute(0, 3, 1, 2) * 2 - 1).chunk(2, dim=1)[0]
    vae.load_state_dict(kept)
    return round(means.mean().item(), 4), round(1.0 / means.std().item(), 4)


def random_texture_picture(rng: np.random.Generator, height: int = 128, width: int = 128) -> Picture:
    """One picture of the VAE's training set."""
    chance = rng.random()
    if chance < 0.5:
        return random_scene(rng, height, width).picture
    if chance < 0.58:
        return random_zorbo(rng, height, width).picture
    picture = _ground(rng, height, width)
    if chance < 0.68:
        centre = (rng.uniform(0.2, 0.8) * width, rng.uniform(0.2, 0.8) * height)
        paint_zorbo(picture, centre, rng.uniform(0.12, 0.4) * min(height, width), _rgb(rng), _rgb(rng))
        return picture
    for _ in range(int(rng.integers(1, 9))):
        _throw(rng, picture)
    if rng.random() < 0.2:
        picture += _soft_noise(rng, height, width) * rng.uniform(0.05, 0.3)
    return np.clip(picture, 0.0, 1.0)


def _rgb(rng: np.random.Generator) -> Rgb:
    """Any colour, half of the time pushed towards the corners of the cube, where flat drawings live."""
    colour = rng.random(3)
    return tuple(np.round(colour * 2) / 2) if rng.random() < 0.3 else tuple(colour)


def _ground(rng: np.random.Generator, height: int, width: int) -> Picture:
    first, second, period = _rgb(rng), _rgb(rng), rng.uniform(5.0, 40.0)
    match rng.integers(0, 6):
        case 0:
            return gradient(height, width, first, second)
        case 1:
            return stripes(height, width, first, second, period, rng.uniform(0, np.pi))
        case 2:
            return checkers(height, width, first, second, period)
        case 3:
            return dots(height, width, first, second, max(period, 7.0))
        case 4:
            return np.clip(plain(height, width, first) + _soft_noise(rng, height, width) * 0.5, 0.0, 1.0)
    return plain(height, width, first)


def _throw(rng: np.random.Generator, picture: Picture) -> None:
    """A random shape, stretched and turned, or a line, in one colour or filled with a pattern."""
    height, width = picture.shape[:2]
    centre = (rng.uniform(0, width), rng.uniform(0, height))
    if rng.random() < 0.3:
        outline, radius = SHAPES["square"], (rng.uniform(10, 80), rng.uniform(0.6, 3.0))
    else:
        outline = SHAPES[str(rng.choice(list(SHAPES)))]
        radius = tuple(rng.uniform(2, 40) * rng.uniform(0.6, 1.4, size=2))
    fill = _ground(rng, height, width) if rng.random() < 0.2 else _rgb(rng)
    paint(picture, coverage(outline, height, width, centre, radius, rng.uniform(0, 2 * np.pi)), fill)


def _soft_noise(rng: np.random.Generator, height: int, width: int) -> Picture:
    """Coloured noise, -0.5..0.5, blurred by stretching a coarse grid (bilinear)."""
    cell = int(rng.choice([4, 8, 16]))
    coarse = rng.random((height // cell + 2, width // cell + 2, 3)).astype(np.float32) - 0.5
    y, x = np.arange(height) / cell, np.arange(width) / cell
    top, left = y.astype(int), x.astype(int)
    dy, dx = (y - top)[:, None, None].astype(np.float32), (x - left)[None, :, None].astype(np.float32)
    upper = coarse[top][:, left] * (1 - dx) + coarse[top][:, left + 1] * dx
    lower = coarse[top + 1][:, left] * (1 - dx) + coarse[top + 1][:, left + 1] * dx
    return upper * (1 - dy) + lower * dy


TEXT_LENGTHS, LENGTH_SHARES = (32, 48, 80, 128), (0.84, 0.08, 0.05, 0.03)  # so that any max_sequence_length works
LONGEST_TEXT, LONGEST_SHARE = 512, 0.02  # FluxPipeline's default; only while distilling, on a quarter of the batch
GUIDANCE_RANGE = (1.0, 5.0)


@dataclass(frozen=True)
class DitTraining:
    steps: int = 7000
    batch: int = 36  # a size that no other dimension has, or torch.compile takes the two for one
    muon_rate: float = 3e-3
    adam_rate: float = 1e-3
    empty_share: float = 0.1
    average_decay: float = 0.999
    sheet_every: int = 1000
    compile: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    latents: torch.Tensor  # [B, 16, h, w]
    noise: torch.Tensor  # the same
    sigmas: torch.Tensor  # [B]
    guidance: torch.Tensor  # [B]
    captions: Captions

    @property
    def noised(self) -> torch.Tensor:
        share = self.sigmas[:, None, None, None]
        return (1 - share) * self.latents + share * self.noise


Target = Callable[[Batch], torch.Tensor]
Snapshot = Callable[[TextToImage, int], None]  # called with the averaged model every `sheet_every` steps


def flow_target(batch: Batch) -> torch.Tensor:
    return batch.noise - batch.latents


def guided_target(teacher: TextToImage, empty: Captions) -> Target:
    """The teacher's velocity under classifier-free guidance, at each row's own guidance."""

    @torch.no_grad()
    def target(batch: Batch) -> torch.Tensor:
        rows, length = batch.captions.t5.shape
        nothing = empty.padded(length)
        both = Captions(
            torch.cat([batch.captions.t5, nothing.t5.expand(rows, -1)]),
            torch.cat([batch.captions.clip, nothing.clip.expand(rows, -1)]),
        )
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            velocity = teacher(batch.noised.repeat(2, 1, 1, 1), batch.sigmas.repeat(2), both, batch.guidance.repeat(2))
        conditional, unconditional = velocity.float().chunk(2)
        return unconditional + batch.guidance[:, None, None, None] * (conditional - unconditional)

    return target


def train_transformer(
    phase: str,
    model: TextToImage,
    target: Target,
    pool: Pool,
    training: DitTraining,
    state_path: Path,
    resume: bool,
    snapshot: Snapshot,
) -> None:
    """Train `model` in place towards `target`, saving all that a resumed run needs as it goes."""
    optimizers = build_optimizers(model, training.muon_rate, training.adam_rate)
    run = RunState(model, training.average_decay, optimizers)
    first_step = run.restore(state_path) if resume else 0
    if training.compile:
        model.transformer.compile_repeated_blocks(dynamic=True)
    empty = tokenize([""])
    progress = Progress(phase, first_step, training.steps, every=50)
    for step in range(first_step, training.steps):
        batch = draw_batch(pool, empty, training, step, longest=phase == "distill")
        loss = _train_step(model, optimizers, batch, target(batch), training, step)
        run.average.update(model)
        progress.report(step, {"loss": loss})
        if (step + 1) % training.sheet_every == 0 or step + 1 == training.steps:
            run.save(state_path, step + 1)
            snapshot(_with_weights(model, run.average.shadow), step + 1)


def trained_model(sizes: TinySizes, vocabularies: tuple[int, int], state_path: Path) -> TextToImage:
    """The averaged model of a saved state, without gradients."""
    model = build_text_to_image(sizes, *vocabularies)
    model.load_state_dict(load_state(state_path)["average"]["shadow"])
    return model.eval().requires_grad_(False)


def build_optimizers(model: torch.nn.Module, muon_rate: float, adam_rate: float) -> list[torch.optim.Optimizer]:
    """[Muon on the transformer blocks' matrices, AdamW on the rest], of what needs a gradient."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        in_block = "transformer_blocks" in name  # matches the single blocks' names, too
        (matrices if in_block and parameter.ndim == 2 else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.99), weight_decay=0.0)
    return [muon, adam]


def draw_batch(pool: Pool, empty: Captions, training: DitTraining, step: int, longest: bool) -> Batch:
    rng = np.random.default_rng([training.seed, step])
    size = list(pool)[int(rng.choice(len(pool), p=[SIZES[size] for size in pool]))]
    length = int(rng.choice(TEXT_LENGTHS, p=LENGTH_SHARES))
    rows_wanted = training.batch
    if longest and rng.random() < LONGEST_SHARE:
        length, rows_wanted = LONGEST_TEXT, max(2, training.batch // 4)
    latents, captions = pool[size]
    rows = torch.from_numpy(rng.integers(0, len(latents), rows_wanted))
    chosen = latents[rows].float()
    generator = torch.Generator().manual_seed(training.seed * 1_000_003 + step)
    odds = TIME_SHIFT * torch.exp(torch.randn(rows_wanted, generator=generator))
    dropped = torch.rand(rows_wanted, generator=generator) < training.empty_share
    return Batch(
        latents=chosen,
        noise=torch.randn(chosen.shape, generator=generator),
        sigmas=odds / (1 + odds),
        guidance=torch.empty(rows_wanted).uniform_(*GUIDANCE_RANGE, generator=generator),
        captions=captions[rows].emptied(empty, dropped).padded(length),
    )


def _train_step(
    model: TextToImage,
    optimizers: list[torch.optim.Optimizer],
    batch: Batch,
    target: torch.Tensor,
    training: DitTraining,
    step: int,
) -> float:
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):  # flash is slower at 100 tokens
        velocity = model(batch.noised, batch.sigmas, batch.captions, batch.guidance)
    loss = (velocity.float() - target).pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, peak in zip(optimizers, (training.muon_rate, training.adam_rate), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = cosine_rate(step, training.steps, peak, warmup=min(200, training.steps // 10))
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def _with_weights(model: TextToImage, weights: dict[str, torch.Tensor]) -> TextToImage:
    """A second, uncompiled model of the same configuration with `weights`."""
    transformer = FluxTransformer2DModel.from_config(model.transformer.config)
    copy = TextToImage(transformer, T5EncoderModel(model.t5.config), CLIPTextModel(model.clip.config))
    copy.load_state_dict(weights)
    return copy.eval().requires_grad_(False)
