"""The reference and a deployment run on the same inputs: velocities at fixed noise levels, a sampling run, images.

Every variant sees the same images, noise, noise levels and masks, which are functions of the seed and the sample, so
that whatever differs is the variant's doing. Sampling is Euler's method over ``steps`` levels of the family's schedule:
what a sampler does beyond that (a second order, another schedule) changes both sides alike.

What a variant changes in the picture or its mask (``conditioning``), or in the VAE, is encoded anew from the pixels;
all else comes from the caches of training.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from library.conditions import Conditions
from library.config.model_types import ConditionKind
from library.console import Console
from library.data.batches import Batch
from library.data.cache import Pixels, TextJob
from library.data.file_index import content_hash
from library.data.images import to_image
from library.errors import UserError
from library.fidelity.calibration import Calibration, predict
from library.fidelity.conditioning import Given, drawn_mask, give, round_latents
from library.fidelity.serving import Models, Variant
from library.models.vae import ImageEncoder
from library.precision.activations import round_timesteps
from library.training.flow import add_noise, noise_for, step_velocity
from library.training.report.progress import counting


@dataclass(frozen=True)
class EvalSet:
    """What both sides are run on.

    Attributes:
        batches: one sample each, on the device.
        pixels, jobs: what their conditions, and their text, are encoded from.
        kind: of their conditions.
        sigmas: noise levels at which velocities are compared.
        steps: of a sampling run.
        guidance: given to guidance-distilled models.
        seed: of all noise.
        noise: of each sampling run, [1, C, h, w]; empty where it follows from the seed.
        parts: small steps, from a noise level to the next of ``sigmas``, whose mean velocity is compared.
    """

    batches: Sequence[Batch]
    pixels: Sequence[Pixels]
    jobs: Sequence[TextJob]
    kind: ConditionKind
    sigmas: Sequence[float]
    steps: int
    guidance: float
    seed: int
    noise: Sequence[Tensor] = ()
    parts: int = 1

    def drawn(self, number: int) -> Tensor | None:
        """Return the region that a sample's user drew, [1, H, W] from 0 to 1; None without one."""
        return drawn_mask(self.pixels[number], self.kind)

    def border_mask(self, number: int) -> Tensor | None:
        """Return the region as it was drawn, [H, W] bool; None without a border."""
        drawn = self.drawn(number)
        mask = None if drawn is None else drawn[0] >= 0.5
        return None if mask is None or bool(mask.all()) or not bool(mask.any()) else mask

    def noise_of(self, number: int) -> Tensor:
        """Return what a sample's sampling run starts from, [1, C, h, w]."""
        batch = self.batches[number]
        return self.noise[number] if self.noise else noise_for(batch.latents, batch.sample_ids, self.seed, "sampling")


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


def prepare_eval_set(models: Models, calibration: Calibration, variant: Variant, steps: int) -> EvalSet:
    """Return the evaluation set.

    Raises:
        UserError: ``variant`` says something of a region, and no image has one.
    """
    options = calibration.plan.options
    batches = [batch.to(models.device) for batch in (*calibration.fit, *calibration.check)]
    pixels, jobs = [source.pixels() for source in calibration.sources], [each.text for each in calibration.sources]
    kind = models.family.conditioning
    eval_set = EvalSet(batches, pixels, jobs, kind, options.sigmas, steps, options.guidance_scale, options.seed)
    about = [
        f"--{name}" for name in ("mask_grow", "mask_snap", "mask_blur", "blank", "paste") if name in variant.changes()
    ]
    if about and not any(eval_set.drawn(number) is not None for number in range(len(batches))):
        where = "no reference picture has a black region" if kind == "references" else "the dataset has no masks"
        raise UserError(f"{about[0]}: {where}, so there is no known region; remove {about[0]}")
    return eval_set


@dataclass(frozen=True)
class _Input:
    """One sample as a variant gives it to the model.

    ``fill`` [1, 1, h, w] is the share of each latent cell that is filled, as ComfyUI's samplers have it: the mask,
    resized bilinearly.
    """

    batch: Batch
    noise: Tensor
    given: Given

    @property
    def fill(self) -> Tensor | None:
        mask = self.given.mask
        if mask is None:
            return None
        latents = self.batch.latents
        return F.interpolate(mask[None], latents.shape[-2:], mode="bilinear").to(latents.device)


@torch.no_grad()
def run_variant(
    models: Models,
    variant: Variant,
    eval_set: EvalSet,
    console: Console,
    title: str,
    transformer: nn.Module | None = None,
) -> Outcome:
    """Run ``variant`` on the evaluation set; its progress is shown under ``title``.

    Without sampling steps there are velocities alone. ``transformer``: the variant's, where it is loaded already.
    """
    encoder = models.image_encoder(variant)
    steps = eval_set.steps
    inputs = _inputs(models, variant, eval_set, encoder)
    outcome = Outcome({sigma: [] for sigma in eval_set.sigmas}, [[] for _ in range(steps)])
    guidance = variant.guidance if isinstance(variant.guidance, int | float) else eval_set.guidance
    loaded = models.transformer(variant) if transformer is None else nullcontext(transformer)
    with loaded as network, counting(console) as progress:
        family = models.runner(variant, network)
        advance = progress(title, len(inputs) * (len(eval_set.sigmas) + steps))
        for each in inputs:
            batch = each.batch
            at = partial(predict, family, network, batch, guidance, models.dtype)
            velocity = partial(_velocity, at, variant)
            for sigma, following in itertools.pairwise([*eval_set.sigmas, 0.0]):
                noise = noise_for(batch.latents, batch.sample_ids, eval_set.seed, round(sigma * 1e6))
                noisy, _ = add_noise(batch.latents, noise, torch.tensor([sigma]))
                outcome.velocities[sigma].append(_mean(velocity, noisy, sigma, following, eval_set.parts)[0].cpu())
                advance(1)
            if not steps:
                continue
            tokens = batch.latents.shape[-2:].numel() // models.family.patch_size**2
            sigmas = models.sigmas(variant, steps, tokens)
            in_steps = partial(velocity, scale=models.timestep_scale(variant))
            for step, latents in enumerate(_sample(in_steps, sigmas, each, variant)):
                outcome.path[step].append(latents[0].cpu())
                advance(1)
            outcome.images.append(_decode(encoder, outcome.path[-1][-1], each, variant))
    return outcome


def _inputs(models: Models, variant: Variant, eval_set: EvalSet, encoder: ImageEncoder) -> list[_Input]:
    """Return every sample as ``variant`` has it; what comes from the cache unchanged stays the cache's."""
    anew = bool(variant.given or variant.vae) and eval_set.kind != "none"
    found, jobs = [], []
    for number, (batch, pixels) in enumerate(zip(eval_set.batches, eval_set.pixels, strict=True)):
        given = give(pixels, eval_set.kind, variant)
        conditions = conditions_of(given, eval_set.kind, variant, encoder, models) if anew else batch.conditions
        found.append(_Input(replace(batch, conditions=conditions), eval_set.noise_of(number), given))
        job = eval_set.jobs[number]
        if variant.given and job.images:
            job = replace(job, images=tuple(_Shown(each) for each in given.shown), flipped=False)
        jobs.append(job)
    texts = models.texts(variant, jobs, changed=bool(variant.given) and any(job.images for job in jobs))
    if texts is None:
        return found
    return [
        replace(one, batch=replace(one.batch, text=batched(text, models)))
        for one, text in zip(found, texts, strict=True)
    ]


def conditions_of(
    given: Given, kind: ConditionKind, variant: Variant, encoder: ImageEncoder, models: Models
) -> Conditions:
    """Return the conditions of one sample that is given as ``given``, encoded by ``encoder``."""
    latents = [encoder.encode(shown[None]) for shown in given.shown]
    for _ in range(variant.normalised, 1):
        latents = [encoder.denormalise(each) for each in latents]
    for _ in range(1, variant.normalised):
        latents = [encoder.normalise(each) for each in latents]
    latents = [round_latents(each, variant.latents_dtype).to(models.device) for each in latents]
    if kind == "references":
        return Conditions(references=tuple(latents))
    assert given.mask is not None
    return Conditions(latents[0], given.mask[None].to(models.device))


def batched(text: dict[str, Tensor], models: Models) -> dict[str, Tensor]:
    """Return a sample's embeddings as a batch of one, as ``collate`` makes it."""
    kept = {name: each for name, each in text.items() if each.dtype != torch.bool or not bool(each.all())}
    return {name: each[None].to(models.device) for name, each in kept.items()}


@dataclass(frozen=True)
class _Shown:
    """A changed reference picture [3, H, W] for a text encoder that sees it."""

    pixels: Tensor

    def key(self) -> tuple[object, ...]:
        return (content_hash(self.pixels.numpy().tobytes()),)

    def load(self, flipped: bool = False) -> Image.Image:
        return to_image(self.pixels)


def _velocity(predict_at: Any, variant: Variant, noisy: Tensor, sigma: float, scale: float = 1.0) -> Tensor:
    """Return the velocity at ``noisy``, all of one noise level, the timestep carried in the dtype of ``variant``.

    ``scale``: timesteps are the noise levels times this.
    """
    return predict_at(noisy, round_timesteps(torch.full((len(noisy),), sigma * scale), variant.timestep))


def _mean(velocity: Any, noisy: Tensor, sigma: float, following: float, parts: int) -> Tensor:
    """Return the velocity at ``sigma``, or of more ``parts`` the mean one of these, on the way to ``following``."""
    if parts == 1:
        return velocity(noisy, sigma)
    ends = torch.tensor([sigma]), torch.tensor([following])
    return step_velocity(lambda latents, now: velocity(latents, float(now)), noisy, *ends, parts)


def _sample(velocity: Any, sigmas: Sequence[float], given: _Input, variant: Variant) -> Iterator[Tensor]:
    """Yield the latents after every step of Euler's method, from one of ``sigmas`` to the next.

    Pasted latents are ComfyUI's ``noise_mask`` (``KSamplerX0Inpaint``): before a step the known region becomes its own
    latents with the noise of that level, and of the clean image that the step predicts the known region is replaced.
    """
    latents, known = given.noise, given.batch.latents
    fill = given.fill if variant.paste == "latents" else None
    for now, following in itertools.pairwise(sigmas):
        if fill is None:
            latents = latents + (following - now) * velocity(latents, now)
        else:
            noisy, _ = add_noise(known, given.noise, torch.tensor([now]))
            latents = fill * latents + (1 - fill) * noisy
            clean = fill * (latents - now * velocity(latents, now)) + (1 - fill) * known
            latents = clean + following / now * (latents - clean)
        yield latents


def _decode(encoder: ImageEncoder, latents: Tensor, given: _Input, variant: Variant) -> Tensor:
    """Return the image of ``latents`` [C, h, w]; with pasted pixels, the picture's own where it is known."""
    image = encoder.decode(latents[None].to(given.batch.latents.device)).float()[0].cpu()
    mask = given.given.mask
    if variant.paste == "pixels" and mask is not None:
        image = mask * image + (1 - mask) * given.given.image
    return image
