"""Make a few-step student of the tiny FLUX, as FLUX.1-schnell and Z-Image-Turbo are of their bases.

    python dev/distil_tiny_flux.py                # assets/tiny-flux-turbo.safetensors: a quarter of an hour on one core
    python dev/distil_tiny_flux.py --measure      # is it one? its images beside the teacher's

The student takes STEPS large steps of the schedule, the teacher STEPS * FINER small ones between the same noise levels.
In each large step the student learns the one velocity that leads from where the teacher entered it to where the teacher
left it: the target of progressive distillation (Salimans & Ho 2022, arXiv 2202.00512, section 3) with all halvings at
once, each window of noise levels being made straight (PeRFlow: Yan et al. 2024, arXiv 2405.07510). No image is needed:
the teacher's own paths from random noise are the data. As published "Lightning" and "Hyper" LoRAs are, the student is
the base and a low-rank difference, which is what is tracked; merged into the base (``tools/merge_lora.py``) it is a
model like any other.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dev.tiny_models.latent_pool import TINY_FLUX, Captions, tokenize
from dev.tiny_models.scenes import random_scene
from dev.tiny_models.training import Training, forward_context, train
from dev.tiny_models.transformer import LATENT_CHANNELS, TIME_SHIFT, TextToImage, load_pipeline, text_to_image_of
from library.models.flux.files import FLUX_TARGETS
from library.training.flow import shift_sigmas
from networks.files.adapters import load_lora
from networks.network import AdapterNetwork, attach_lora, inject_adapter
from networks.options import NetworkOptions

DIFFERENCE = TINY_FLUX.with_name("tiny-flux-turbo.safetensors")
STEPS, FINER = 4, 5  # large steps, and the teacher's small ones in each
GUIDANCE = 3.5  # of the teacher; the student is given it, too
RANK, SIDE, BATCH = 32, 16, 32  # SIDE: of the latents
PATHS, TRAINING_STEPS, RATE = 1024, 500, 2e-3  # PATHS: of the teacher


def sigmas_of(steps: int) -> list[float]:
    """Return the noise levels of a run, from 1 to 0: those of steps * n hold those of steps."""
    return [*shift_sigmas(torch.linspace(1, 1 / steps, steps), TIME_SHIFT).tolist(), 0.0]


def velocity(model: TextToImage, latents: Tensor, sigmas: Tensor, captions: Captions) -> Tensor:
    """Return the velocity [B, 16, h, w] in fp32."""
    with forward_context():
        return model(latents, sigmas, captions, torch.full_like(sigmas, GUIDANCE)).float()


@torch.no_grad()
def path(model: TextToImage, latents: Tensor, captions: Captions, sigmas: Sequence[float]) -> list[Tensor]:
    """Return the latents at each of ``sigmas``, by Euler's method from ``latents`` at the first."""
    found = [latents]
    for now, following in itertools.pairwise(sigmas):
        level = torch.full((len(latents),), now)
        found.append(found[-1] + (following - now) * velocity(model, found[-1], level, captions))
    return found


def draw(count: int, seed: int) -> tuple[Tensor, Captions]:
    """Return noise [N, 16, h, w] and captions of the domain."""
    rng = np.random.default_rng(seed)
    captions = tokenize([random_scene(rng, 32, 32).caption for _ in range(count)])
    return torch.randn(count, LATENT_CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(seed)), captions


def load() -> TextToImage:
    """Return the base's three trained parts, without gradients."""
    return text_to_image_of(load_pipeline(TINY_FLUX)).eval().requires_grad_(False)


def distil() -> AdapterNetwork:
    """Train the student's difference on paths of the teacher."""
    model, fine = load(), sigmas_of(STEPS * FINER)
    noise, captions = draw(PATHS, seed=0)
    some = tqdm(torch.arange(PATHS).split(64), "the teacher's paths")
    pool = [torch.stack(path(model, noise[rows], captions[rows], fine)[::FINER]) for rows in some]
    states = torch.cat(pool, dim=1)  # [STEPS + 1, N, 16, h, w]
    levels = torch.tensor(fine[::FINER])
    network = inject_adapter(model.transformer, NetworkOptions(dim=RANK, alpha=RANK), FLUX_TARGETS, seed=0)
    trained = nn.ParameterList(network.parameters())
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)

    def loss_of(step: int) -> Tensor:
        rows = torch.randint(PATHS, (BATCH,), generator=torch.Generator().manual_seed(step))
        windows = torch.arange(BATCH) % STEPS
        now, following = levels[windows], levels[windows + 1]
        start, end = states[windows, rows], states[windows + 1, rows]
        target = (end - start) / (following - now).view(-1, 1, 1, 1)
        return (velocity(model, start, now, captions[rows]) - target).square().mean()

    training = Training(TRAINING_STEPS, BATCH, warmup=30, average_decay=0.99)
    trained.load_state_dict(train("distil", trained, [optimizer], loss_of, training))
    return network


def measure(count: int, seed: int = 2026) -> dict[str, tuple[float, float]]:
    """Return run -> its relative error of latents and images against the teacher's ``STEPS * FINER`` steps."""
    model, vae = load(), load_pipeline(TINY_FLUX).vae
    noise, captions = draw(count, seed)

    def finished(steps: int) -> tuple[Tensor, Tensor]:
        latents = torch.cat(
            [path(model, noise[rows], captions[rows], sigmas_of(steps))[-1] for rows in torch.arange(count).split(32)]
        )
        with torch.no_grad():
            return latents, vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample

    wanted = finished(STEPS * FINER)
    found = {f"base, {steps} steps": finished(steps) for steps in (STEPS, 2 * STEPS, 3 * STEPS)}
    attach_lora(model.transformer, load_lora(DIFFERENCE, FLUX_TARGETS).weights, FLUX_TARGETS, str(DIFFERENCE))
    found[f"student, {STEPS} steps"] = finished(STEPS)
    return {
        name: tuple(float((each - goal).norm() / goal.norm()) for each, goal in zip(pair, wanted, strict=True))
        for name, pair in found.items()
    }


def main() -> None:
    """Distil, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="no training: measure the tracked difference")
    options = parser.parse_args()
    if not options.measure:
        distil().save(DIFFERENCE, "diffusers", "fp16", {"tandem.distilled_steps": str(STEPS)})
    for name, (latents, image) in measure(64).items():
        print(f"{name:<20} latents {latents:.1%}, image {image:.1%}")


if __name__ == "__main__":
    main()
