"""The error of a variant against the reference: by noise level, by region, along the seam, over a sampling run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from library.precision.parity.seam import edge_regions, seam_figures, spectrum
from tools.report.runs import Outcome, Probe


@dataclass(frozen=True)
class Differences:
    """Relative rms errors over all of the probe's samples, and what the border sees.

    Attributes:
        velocity: over all noise levels.
        velocity_by_sigma: sigma -> whole, filled, known and ring, those that there are.
        latents_by_step: after each step of the sampling run.
        latents, picture: of the finished ones; NaN where there was no sampling or no decoding.
        seam: figures of the finished latents along the mask's border, medians over samples; empty without masks.
        picture_seam: the same of the decoded pictures, in pixels.
        edges: rms error on the reference picture's own edges over that on its flat half.
        spectrum: frequencies and mean power of the finished latents' error.
    """

    velocity: float
    velocity_by_sigma: dict[float, dict[str, float]]
    latents_by_step: list[float]
    latents: float
    picture: float
    seam: dict[str, Any]
    picture_seam: dict[str, Any]
    edges: float
    spectrum: tuple[list[float], list[float]]

    @property
    def ring_and_step(self) -> tuple[float, float]:
        """Error of the ring inside the border over the interior's, and of the step across it: of the picture, in 8
        pixels, else of the latents, in 2 cells; NaN without masks."""
        seam, width = (self.picture_seam, 8) if self.picture_seam else (self.seam, 2)
        return (seam["inside"][width], seam["step"]) if seam else (math.nan, math.nan)

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def compare(reference: Outcome, other: Outcome, probe: Probe) -> Differences:
    """Measure how far ``other`` is from ``reference``."""
    masks = [probe.mask(number) for number in range(len(probe.batches))]
    by_sigma = {
        sigma: _by_region(reference.velocities[sigma], other.velocities[sigma], masks) for sigma in probe.sigmas
    }
    everything = [
        (a, b)
        for sigma in probe.sigmas
        for a, b in zip(reference.velocities[sigma], other.velocities[sigma], strict=True)
    ]
    steps = [relative_error(a, b) for a, b in zip(reference.path, other.path, strict=False)]
    sampled = bool(reference.path and other.path)
    finished = list(zip(reference.latents, other.latents, strict=True)) if sampled else []
    pictures = list(zip(reference.pictures, other.pictures, strict=True)) if other.pictures else []
    return Differences(
        velocity=relative_error([a for a, _ in everything], [b for _, b in everything]),
        velocity_by_sigma=by_sigma,
        latents_by_step=steps,
        latents=steps[-1] if steps else math.nan,
        picture=relative_error([a for a, _ in pictures], [b for _, b in pictures]) if pictures else math.nan,
        seam=median_seam(finished, masks),
        picture_seam=median_seam(pictures, [_in_pixels(m, p) for m, p in zip(masks, pictures, strict=False)]),
        edges=_on_edges(finished),
        spectrum=_mean_spectrum([b - a for a, b in finished]),
    )


def relative_error(reference: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the rms of all differences over the rms of the reference; 0 of 0 is 0."""
    error = sum(float((b.double() - a.double()).square().sum()) for a, b in zip(reference, other, strict=True))
    size = sum(float(a.double().square().sum()) for a in reference)
    return math.sqrt(error / size) if error else 0.0


def median_seam(pairs: Sequence[tuple[Tensor, Tensor]], masks: Sequence[Tensor | None]) -> dict[str, Any]:
    """Return the median of each seam figure over the samples that have a border; infinities are left out.

    Not the mean: where an interior of a few cells happens to have no error, a ratio has no bound.
    """
    found = [asdict(seam_figures(a, b, m)) for (a, b), m in zip(pairs, masks, strict=False) if m is not None]
    if not found:
        return {}
    return {name: _median_of([each[name] for each in found]) for name in found[0]}


def _median_of(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _median_of([value[key] for value in values]) for key in values[0]}
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else math.nan


def _by_region(
    reference: Sequence[Tensor], other: Sequence[Tensor], masks: Sequence[Tensor | None]
) -> dict[str, float]:
    found = {"whole": relative_error(reference, other)}
    seams = median_seam(list(zip(reference, other, strict=True)), masks)
    if seams:
        found |= {"filled": seams["error_filled"], "known": seams["error_known"]}
        found |= {"ring": seams["inside"][2] * seams["error_interior"]}
    return found


def _in_pixels(mask: Tensor | None, pictures: tuple[Tensor, Tensor]) -> Tensor | None:
    if mask is None:
        return None
    factor = pictures[0].shape[-1] // mask.shape[-1]
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
