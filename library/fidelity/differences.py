"""How far a run is from the reference: in one step, in finished images, along the mask's border."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from library.fidelity.border import Border, judge_border, white_noise
from library.fidelity.intervals import Share, ratio_interval
from library.fidelity.runs import EvalSet, Outcome


@dataclass(frozen=True)
class Differences:
    """Relative rms errors over all of the evaluation set's samples, and what the border sees.

    Attributes:
        velocity: over all noise levels.
        latents, image: of the finished ones; NaN where there was no sampling or no decoding.
        border: of the decoded images; None without masks or images.
        by_image: squared error of each image, of what ``error`` is of; it adds up to the whole's.
    """

    velocity: float
    latents: float
    image: float
    border: Border | None
    by_image: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        """The error people see: of the decoded image, else of the latents, else of the velocity."""
        return next((size for size in (self.image, self.latents, self.velocity) if math.isfinite(size)), 0.0)


def taken_off(before: Differences, after: Differences) -> Share:
    """Return the share of the squared error of ``before`` that is gone in ``after``."""
    gone = [old - new for old, new in zip(before.by_image, after.by_image, strict=True)]
    share = 1 - (after.error / before.error) ** 2 if before.error else 0.0
    return Share(share, *ratio_interval(gone, before.by_image))


def compare(
    reference: Outcome, other: Outcome, eval_set: EvalSet, decode: Callable[[Tensor], Tensor] | None = None
) -> Differences:
    """Measure how far ``other`` is from ``reference``.

    ``decode``: latents [1, C, h, w] -> pixels [1, 3, H, W], the reference's, for the border's control; without it the
    border is not judged.
    """
    velocities = [
        [velocity for sigma in eval_set.sigmas for velocity in outcome.velocities[sigma]]
        for outcome in (reference, other)
    ]
    # the border is that of the mask as it was drawn, to the pixel
    drawn = [eval_set.border_mask(number) for number in range(len(other.images))]
    return Differences(
        velocity=relative_error(*velocities),
        latents=relative_error(reference.latents, other.latents) if other.path else math.nan,
        image=relative_error(reference.images, other.images) if other.images else math.nan,
        border=judge_border(*border_errors_of(reference, other, drawn, decode)) if decode and other.images else None,
        by_image=_by_image(_judged(reference), _judged(other)),
    )


def relative_error(reference: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the rms of all differences over the rms of the reference; 0 of 0 is 0."""
    error = sum(float((b.double() - a.double()).square().sum()) for a, b in zip(reference, other, strict=True))
    size = sum(float(a.double().square().sum()) for a in reference)
    return math.sqrt(error / size) if error else 0.0


def _judged(outcome: Outcome) -> Sequence[Sequence[Tensor]]:
    """Return what ``Differences.error`` is of, lists that have an entry an image."""
    if outcome.path:
        return [outcome.images or outcome.latents]
    return [*outcome.velocities.values()]


def _by_image(reference: Sequence[Sequence[Tensor]], other: Sequence[Sequence[Tensor]]) -> tuple[float, ...]:
    """Return the squared error of each image, added up over what there is of it."""
    pairs = (zip(*lists, strict=True) for lists in zip(reference, other, strict=True))
    errors = ([float((b.double() - a.double()).square().sum()) for a, b in pair] for pair in pairs)
    return tuple(map(sum, zip(*errors, strict=True)))


def border_errors_of(
    reference: Outcome, other: Outcome, masks: Sequence[Tensor | None], decode: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return what :func:`judge_border` takes: errors, those of white noise, and masks, of the images that have one."""
    errors, noise, borders = [], [], []
    for number, (image, mask) in enumerate(zip(reference.images, masks, strict=True)):
        if mask is None:
            continue
        latents, found = (each.latents[number] for each in (reference, other))
        noisy = white_noise(latents, found, image, other.images[number], decode, number)
        errors.append(other.images[number] - image)
        noise.append(noisy - image)
        borders.append(mask)
    return errors, noise, borders
