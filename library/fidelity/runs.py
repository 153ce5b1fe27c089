"""The reference and a deployment run on the same inputs: velocities at fixed noise levels, a sampling run, images.

Every variant sees the same images, noise, noise levels and masks, which are functions of the seed and the sample, so
that whatever differs is the variant's doing. Sampling is Euler's method over ``steps`` levels of the family's schedule:
what a sampler does beyond that (a second order, another schedule) changes both sides alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from library.console import Console
from library.data.batches import Batch
from library.fidelity.calibration import predict
from library.fidelity.serving import Models, Paste, Variant
from library.models.vae import ImageEncoder
from library.training.flow import add_noise, noise_for
from library.training.report.progress import counting


@dataclass(frozen=True)
class EvalSet:
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
        mask = _fill_cells(self.batches[number])
        if mask is None:
            return None
        cells = mask[0, 0] >= 0.5
        return cells.cpu() if bool(cells.any()) and not bool(cells.all()) else None


@dataclass
class Outcome:
    """What a variant gave, on the CPU in fp32; every list has an entry a sample.

    Attributes:
        velocities: sigma -> [C, h, w] each.
        path: step -> latents [C, h, w] each, the last being the finished image's.
        images: [3, H, W] in about [-1, 1]; empty where none were decoded.
    """

    velocities: dict[float, list[Tensor]] = field(default_factory=dict)
    path: list[list[Tensor]] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)

    @property
    def latents(self) -> list[Tensor]:
        """The finished latents."""
        return self.path[-1]


@torch.no_grad()
def run_variant(models: Models, variant: Variant, eval_set: EvalSet, console: Console, title: str) -> Outcome:
    """Load ``variant`` and run it on the evaluation set; its progress is shown under ``title``.

    Without sampling steps there are velocities alone.
    """
    family = models.deployed_family if variant.weights else models.family
    encoder = models.image_encoder(variant) if eval_set.steps else None
    outcome = Outcome({sigma: [] for sigma in eval_set.sigmas}, [[] for _ in range(eval_set.steps)])
    with models.transformer(variant) as transformer, counting(console) as progress:
        advance = progress(title, len(eval_set.batches) * (len(eval_set.sigmas) + eval_set.steps))
        for number, batch in enumerate(eval_set.batches):
            text = eval_set.texts[number] if variant.text and eval_set.texts else batch.text
            given = replace(batch, text=text)
            velocity = partial(predict, family, transformer, given, eval_set.guidance, models.dtype, variant.timestep)
            for sigma in eval_set.sigmas:
                noise = noise_for(batch.latents, batch.sample_ids, eval_set.seed, round(sigma * 1e6))
                noisy, _ = add_noise(batch.latents, noise, torch.tensor([sigma]))
                outcome.velocities[sigma].append(velocity(noisy, sigma)[0].cpu())
                advance(1)
            if encoder is None:
                continue
            sigmas = family.sampling_sigmas(eval_set.steps, batch.latents.shape[-2:].numel() // 4)
            for step, latents in enumerate(_sample(velocity, sigmas, batch, eval_set, variant.paste)):
                outcome.path[step].append(latents[0].cpu())
                advance(1)
            outcome.images.append(_decode(encoder, outcome.path[-1][-1], batch, variant.paste))
    return outcome


Velocity = Callable[[Tensor, float], Tensor]


def _sample(
    velocity: Velocity, sigmas: Sequence[float], batch: Batch, eval_set: EvalSet, paste: Paste | None
) -> Iterator[Tensor]:
    """Yield the latents after every step, from one of ``sigmas`` to the next."""
    noise = noise_for(batch.latents, batch.sample_ids, eval_set.seed, "sampling")
    latents = noise
    for now, following in itertools.pairwise(sigmas):
        latents = latents + (following - now) * velocity(latents, now)
        if paste == "steps" and (fill := _fill_cells(batch)) is not None:
            known, _ = add_noise(batch.latents, noise, torch.tensor([following]))
            latents = fill * latents + (1 - fill) * known
        yield latents


def _decode(encoder: ImageEncoder, latents: Tensor, batch: Batch, paste: Paste | None) -> Tensor:
    """Return the image of ``latents`` [C, h, w]; with ``end`` the known region is the encoder's own image of it."""
    image = encoder.decode(latents[None].to(batch.latents.device)).float()
    fill = _fill_cells(batch)
    if paste == "end" and fill is not None:
        pixels = F.interpolate(fill, image.shape[-2:], mode="nearest")
        image = pixels * image + (1 - pixels) * encoder.decode(batch.latents).float()
    return image[0].cpu()


def _fill_cells(batch: Batch) -> Tensor | None:
    """Return [1, 1, h, w] fp32, the share of each latent cell that is to be filled."""
    if batch.conditions.mask is not None:
        return F.adaptive_avg_pool2d(batch.conditions.mask.float(), batch.latents[0, 0].shape)  # type: ignore[arg-type]
    return None if batch.masks is None else batch.masks.float()
