"""Train the tiny VAE: crops of painted pictures in, sharp reconstructions and well-behaved latents out.

Loss: mean absolute error, the same on horizontal and vertical differences (which makes edges sharp without
a perceptual network), and a KL term strong enough that neighbouring latents decode to neighbouring
pictures, which is what the transformer needs. The first part of the steps sees 64-pixel crops, the last
quarter whole pictures, because GroupNorm's statistics depend on how much of a picture it sees. At the end,
shift and scale of the latents are measured.

A second stage trains the decoder alone, on latents with noise added: a transformer's samples are never quite
what the encoder would have made, and a decoder that knows only exact latents turns that into stains.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL

from tools.tiny_models.architecture import TinySizes, build_vae
from tools.tiny_models.run_state import AveragedWeights, Progress, cosine_rate, load_state, save_state
from tools.tiny_models.scenes import random_scene
from tools.tiny_models.textures import random_texture_picture


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
    average = AveragedWeights(vae, decay=0.999)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=training.learning_rate, betas=(0.9, 0.99))
    first_step = 0
    if resume:
        state = load_state(state_path)
        vae.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]
    pool = paint_pool(training.pool, training.seed)
    print(f"{phase}: painted {len(pool)} pictures", flush=True)
    progress = Progress(phase, first_step, training.steps, every=50)
    for step in range(first_step, training.steps):
        losses = _train_step(vae, optimizer, pool, training, step)
        average.update(vae)
        progress.report(step, losses)
        if (step + 1) % 500 == 0 or step + 1 == training.steps:
            state = {"model": vae.state_dict(), "average": average.state_dict(), "step": step + 1}
            factors = latent_factors(vae, average, training.seed)
            save_state(state_path, state | {"optimizer": optimizer.state_dict(), "factors": factors})
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


def _train_step(
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
