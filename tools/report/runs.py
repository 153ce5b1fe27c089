"""One variant on the probe: velocities at fixed noise levels, a whole sampling run, and decoded pictures.

Every variant sees the same pictures, noise, noise levels and masks, which are functions of the seed and the sample, so
that whatever differs is the variant's doing. Sampling is Euler's method over ``steps`` levels with FLUX's shift by
resolution: what a sampler does beyond that (a second order, another schedule) changes both sides alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.data.batches import Batch
from library.models.family import Family
from library.models.vae import ImageEncoder
from library.precision.fake_quantize import timestep_rounding
from library.training.flow import add_noise, flux_mu, noise_for, shift_sigmas
from tools.report.deployments import Paste, Variant


@dataclass(frozen=True)
class Probe:
    """What both sides are run on.

    Attributes:
        batches: one sample each, on the device.
        texts: each batch's embeddings as the deployment's text encoder gives them; empty where it is the reference's.
        sigmas: noise levels at which velocities are compared.
        steps: of a sampling run.
        guidance: given to guidance-distilled models.
        seed: of all noise.
    """

    batches: Sequence[Batch]
    texts: Sequence[dict[str, Tensor]]
    sigmas: Sequence[float]
    steps: int
    guidance: float
    seed: int

    def mask(self, number: int) -> Tensor | None:
        """Return a sample's region to fill in latent cells, [h, w] bool; None without one.

        A cell counts as filled if at least half of it is.
        """
        batch = self.batches[number]
        if batch.conditions.mask is not None:
            mask = _to_cells(batch.conditions.mask, batch)
        elif batch.masks is not None:
            mask = batch.masks.float()
        else:
            return None
        cells = mask[0, 0] >= 0.5
        return cells.cpu() if bool(cells.any()) and not bool(cells.all()) else None


@dataclass
class Outcome:
    """What a variant gave, on the CPU in fp32; every list has an entry a sample.

    Attributes:
        velocities: sigma -> [C, h, w] each.
        path: step -> latents [C, h, w] each, the last being the finished picture's.
        pictures: [3, H, W] in about [-1, 1]; empty where none were decoded.
    """

    velocities: dict[float, list[Tensor]] = field(default_factory=dict)
    path: list[list[Tensor]] = field(default_factory=list)
    pictures: list[Tensor] = field(default_factory=list)

    @property
    def latents(self) -> list[Tensor]:
        """The finished latents."""
        return self.path[-1]


@torch.no_grad()
def run_variant(
    family: Family,
    transformer: nn.Module,
    variant: Variant,
    probe: Probe,
    dtype: torch.dtype,
    image_encoder: ImageEncoder | None = None,
    sample: bool = True,
    advance: Callable[[], None] = lambda: None,
    begin: Callable[[int], None] = lambda number: None,
) -> Outcome:
    """Run ``transformer`` on the probe.

    Args:
        family, transformer: the variant's, with its LoRA.
        variant: what else of it is rounded or pasted.
        probe: the inputs.
        dtype: of the products; 16-bit ones run under autocast.
        image_encoder: decodes the finished latents; None for no pictures.
        sample: whether to sample at all; velocities alone are cheaper.
        advance: called after every evaluation.
        begin: called with the number of the sample that comes next.
    """
    outcome = Outcome({sigma: [] for sigma in probe.sigmas}, [[] for _ in range(probe.steps if sample else 0)])
    for number, batch in enumerate(probe.batches):
        begin(number)
        text = probe.texts[number] if variant.text and probe.texts else batch.text
        velocity = _velocity(family, transformer, variant, batch, text, probe, dtype, advance)
        for sigma in probe.sigmas:
            noise = noise_for(batch.latents, batch.sample_ids, probe.seed, round(sigma * 1e6))
            noisy, _ = add_noise(batch.latents, noise, torch.tensor([sigma]))
            outcome.velocities[sigma].append(velocity(noisy, sigma)[0].float().cpu())
        if not sample:
            continue
        for step, latents in enumerate(_sample(velocity, batch, probe, variant.paste)):
            outcome.path[step].append(latents[0].cpu())
        if image_encoder is not None:
            outcome.pictures.append(_decode(image_encoder, outcome.path[-1][-1], batch, variant.paste))
    return outcome


def sampling_sigmas(steps: int, tokens: int) -> list[float]:
    """Return the levels of a sampling run from 1 down to 0, ``steps + 1`` of them, shifted as FLUX's sampler does."""
    even = torch.linspace(1, 0, steps + 1)
    return shift_sigmas(even, math.exp(flux_mu(tokens))).tolist()


Velocity = Callable[[Tensor, float], Tensor]


def _velocity(
    family: Family,
    transformer: nn.Module,
    variant: Variant,
    batch: Batch,
    text: dict[str, Tensor],
    probe: Probe,
    dtype: torch.dtype,
    advance: Callable[[], None],
) -> Velocity:
    """Return ``velocity(noisy [1, C, h, w], sigma)`` of one sample."""
    rounded = timestep_rounding(variant.timestep)
    device = batch.latents.device

    def velocity(noisy: Tensor, sigma: float) -> Tensor:
        sigmas = rounded(torch.tensor([sigma], device=device))
        with torch.autocast(device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
            result = family.predict_velocity(transformer, noisy, sigmas, text, probe.guidance, batch.conditions)
        advance()
        return result.float()

    return velocity


def _sample(velocity: Velocity, batch: Batch, probe: Probe, paste: Paste | None) -> list[Tensor]:
    """Return the latents after every step."""
    tokens = batch.latents.shape[-2] * batch.latents.shape[-1] // 4
    sigmas = sampling_sigmas(probe.steps, tokens)
    noise = noise_for(batch.latents, batch.sample_ids, probe.seed, "sampling")
    latents, path = noise, []
    for now, following in itertools.pairwise(sigmas):
        latents = latents + (following - now) * velocity(latents, now)
        if paste == "steps" and (fill := _fill_cells(batch)) is not None:
            known, _ = add_noise(batch.latents, noise, torch.tensor([following]))
            latents = fill * latents + (1 - fill) * known
        path.append(latents)
    return path


def _decode(encoder: ImageEncoder, latents: Tensor, batch: Batch, paste: Paste | None) -> Tensor:
    """Return the picture of ``latents`` [C, h, w]; with ``end`` the known region is the encoder's own picture of it."""
    picture = encoder.decode(latents[None].to(batch.latents.device)).float()
    fill = _fill_cells(batch)
    if paste == "end" and fill is not None:
        whole = F.interpolate(fill, picture.shape[-2:], mode="nearest")
        picture = whole * picture + (1 - whole) * encoder.decode(batch.latents).float()
    return picture[0].cpu()


def _fill_cells(batch: Batch) -> Tensor | None:
    """Return [1, 1, h, w] fp32, the share of each latent cell that is to be filled."""
    if batch.conditions.mask is not None:
        return _to_cells(batch.conditions.mask, batch)
    return None if batch.masks is None else batch.masks.float()


def _to_cells(mask: Tensor, batch: Batch) -> Tensor:
    """Return the share of each latent cell that ``mask`` [1, 1, H, W] covers, [1, 1, h, w]."""
    height, width = batch.latents.shape[-2:]
    return F.adaptive_avg_pool2d(mask.float(), (height, width))
