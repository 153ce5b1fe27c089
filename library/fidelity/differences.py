"""How far a run is from the reference: by noise level, by region, along the mask's border, over a sampling run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from library.fidelity.runs import EvalSet, Outcome
from library.precision.parity.seam import SeamMetrics, edge_regions, seam_metrics, spectrum


@dataclass(frozen=True)
class Differences:
    """Relative rms errors over all of the evaluation set's samples, and what the border sees.

    Attributes:
        velocity: over all noise levels.
        velocity_by_sigma: sigma -> region (all, filled, known, ring; those that there are) -> error.
        latents_by_step: after each step of the sampling run.
        latents, image: of the finished ones; NaN where there was no sampling or no decoding.
        seam: metrics of the finished latents along the mask's border, medians over samples; empty without masks.
        image_seam: the same of the decoded images, in pixels.
        edges: rms error on the reference image's own edges over that on its flat half.
        spectrum: frequencies and mean power of the finished latents' error.
    """

    velocity: float
    velocity_by_sigma: dict[float, dict[str, float]]
    latents_by_step: list[float]
    latents: float
    image: float
    seam: SeamMetrics
    image_seam: SeamMetrics
    edges: float
    spectrum: tuple[list[float], list[float]]

    @property
    def error(self) -> float:
        """The error people see: of the decoded image, else of the latents, else of the velocity."""
        return next((size for size in (self.image, self.latents, self.velocity) if math.isfinite(size)), 0.0)

    @property
    def border_ring(self) -> float:
        """Error of the ring inside the border over the interior's, 8 pixels wide or 2 latent cells; NaN without one."""
        if self.image_seam:
            return self.image_seam["inside"][8]
        return self.seam["inside"][2] if self.seam else math.nan

    @property
    def border_step(self) -> float:
        """Step of the error across the border over the interior's, of the image, else of the latents; NaN without."""
        seam = self.image_seam or self.seam
        return seam["step"] if seam else math.nan


def compare(reference: Outcome, other: Outcome, eval_set: EvalSet) -> Differences:
    """Measure how far ``other`` is from ``reference``."""
    masks = [eval_set.mask(number) for number in range(len(eval_set.batches))]
    by_sigma = {
        sigma: _by_region(reference.velocities[sigma], other.velocities[sigma], masks) for sigma in eval_set.sigmas
    }
    velocities = [
        [velocity for sigma in eval_set.sigmas for velocity in outcome.velocities[sigma]]
        for outcome in (reference, other)
    ]
    steps = [relative_error(a, b) for a, b in zip(reference.path, other.path, strict=False)]
    sampled = bool(reference.path and other.path)
    finished = list(zip(reference.latents, other.latents, strict=True)) if sampled else []
    images = list(zip(reference.images, other.images, strict=True)) if other.images else []
    return Differences(
        velocity=relative_error(*velocities),
        velocity_by_sigma=by_sigma,
        latents_by_step=steps,
        latents=steps[-1] if steps else math.nan,
        image=relative_error(reference.images, other.images) if images else math.nan,
        seam=median_seam(finished, masks),
        image_seam=median_seam(
            images, [None if m is None else mask_in_pixels(m, a) for m, (a, _) in zip(masks, images, strict=False)]
        ),
        edges=_on_edges(finished),
        spectrum=_mean_spectrum([b - a for a, b in finished]),
    )


def relative_error(reference: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the rms of all differences over the rms of the reference; 0 of 0 is 0."""
    error = sum(float((b.double() - a.double()).square().sum()) for a, b in zip(reference, other, strict=True))
    size = sum(float(a.double().square().sum()) for a in reference)
    return math.sqrt(error / size) if error else 0.0


def median_seam(pairs: Sequence[tuple[Tensor, Tensor]], masks: Sequence[Tensor | None]) -> SeamMetrics:
    """Return the median of each seam metric over the samples that have a border; infinities are left out.

    Not the mean: where an interior of a few cells happens to have no error, a ratio has no bound.
    """
    found = [seam_metrics(a, b, m) for (a, b), m in zip(pairs, masks, strict=False) if m is not None]
    return _median_of(found) if found else {}


def _median_of(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _median_of([value[key] for value in values]) for key in values[0]}
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else math.nan


def _by_region(
    reference: Sequence[Tensor], other: Sequence[Tensor], masks: Sequence[Tensor | None]
) -> dict[str, float]:
    found = {"all": relative_error(reference, other)}
    seams = median_seam(list(zip(reference, other, strict=True)), masks)
    if seams:
        found |= {"filled": seams["error_filled"], "known": seams["error_known"]}
        found |= {"ring": seams["inside"][2] * seams["error_interior"]}
    return found


def mask_in_pixels(mask: Tensor, image: Tensor) -> Tensor:
    """Return ``mask`` [h, w] of latent cells as one of the pixels of ``image`` [3, H, W]."""
    factor = image.shape[-1] // mask.shape[-1]
    return mask.repeat_interleave(factor, 0).repeat_interleave(factor, 1)


def _on_edges(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    ratios = []
    for reference, other in pairs:
        edges, flat = edge_regions(reference)
        error = (other - reference).double().square().mean(0)
        if bool(flat.any()) and float(error[flat].mean()) > 0:
            ratios.append(math.sqrt(float(error[edges].mean() / error[flat].mean())))
    return sum(ratios) / len(ratios) if ratios else math.nan


def _mean_spectrum(errors: Sequence[Tensor]) -> tuple[list[float], list[float]]:
    """Return the mean spectrum of errors of the commonest size."""
    sizes = [error.shape[-2:] for error in errors if bool(error.any())]
    if not sizes:
        return [], []
    commonest = max(set(sizes), key=sizes.count)
    spectra = [spectrum(error) for error in errors if error.shape[-2:] == commonest and bool(error.any())]
    powers = torch.tensor([power for _, power in spectra]).mean(0)
    return spectra[0][0], powers.tolist()
