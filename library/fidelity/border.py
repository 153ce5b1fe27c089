"""Whether an error lies along the mask's border: five figures an image, each against white noise, over all images.

An error that has nothing to do with the border is not the same everywhere: pictures have more detail in one place than
in another, and a decoder makes more of an error where there is detail. So each figure is taken twice on the same image
and mask: of the error, and of white noise of the error's size added to the reference's latents and decoded (to the
pixels, where the latents are right and only the decoder errs). What is judged is the one over the other, *times*:
1 is an error that knows nothing of the border.

    ring inside, outside     rms error within 8 pixels of the border, over that of the rest of its side
    grain inside, outside    the same of the error's high-pass part, which the eye sees as noise
    step                     the error's change from pixel to pixel across the border, over that in the interior

Errors below what saving in 8 bits rounds away, 1/255/sqrt(12) of the range, count as that much, so that nothing divides
by an interior that happens to be right, and what no one can see decides nothing.

Over the images the geometric mean is given, with the 95 % interval of a percentile bootstrap over images (Efron and
Tibshirani 1993, chapter 13). A figure *decides* if the whole interval lies above its limit, which is what honest
rounding stays below; only if all intervals lie below their limits is the border said to be not worse. Of 87
deployments (fp8 of five kinds, activations in fp8, LoRAs merged; three sets of masks) the figures were up to 1.4
inside, 1.7 outside, where a model copies with the least certainty, and 1.4 across (``docs/precision.md``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from library.errors import counted
from library.fidelity.intervals import LEAST_IMAGES, images_to_tell, interval, side
from library.precision.parity.seam import BorderErrors, border_errors
from library.randomness import generator

RING = 8  # pixels: one latent cell
STEP_8BIT = 2 / 255  # of pixels in [-1, 1]
_INVISIBLE = STEP_8BIT / math.sqrt(12)
LIMITS = {"ring inside": 1.5, "grain inside": 1.5, "ring outside": 2.0, "grain outside": 2.0, "step": 1.8}
WORDS = {
    "ring inside": "error on the filled side",
    "grain inside": "grain on the filled side",
    "ring outside": "error on the known side",
    "grain outside": "grain on the known side",
    "step": "the step across it",
}


@dataclass(frozen=True)
class BorderFigure:
    """One figure over all images.

    Attributes:
        name: a key of ``LIMITS``.
        error: the figure of the error, geometric mean over images. noise: of white noise of the same size.
        times: error over noise. low, high: its 95 % interval over images; NaN of a single one.
        by_image: ``times`` of each image.
    """

    name: str
    error: float
    noise: float
    times: float
    low: float
    high: float
    by_image: tuple[float, ...]

    @property
    def title(self) -> str:
        """Its name in words."""
        return WORDS[self.name]

    @property
    def limit(self) -> float:
        """What honest rounding stays below."""
        return LIMITS[self.name]

    @property
    def decides(self) -> bool:
        """Whether all of the interval is above the limit."""
        return side(self.low, self.high, self.limit) == "above"

    @property
    def is_open(self) -> bool:
        """Whether the interval has both sides of the limit."""
        return side(self.low, self.high, self.limit) == "open"

    def in_short(self) -> str:
        """Return the figure for someone who knows nothing of intervals."""
        low, high = (f"{value:.1f}" for value in (self.low, self.high))
        some = f"{self.times:.1f}" if math.isnan(self.low) or low == high else f"{low} to {high}"
        return f"along the mask the {WORDS[self.name].removeprefix('the ')} is {some} times what it is elsewhere"


@dataclass(frozen=True)
class Border:
    """What is known about the border.

    Attributes:
        figures: each a ratio, see the module's first lines.
        images: with a border.
        ring_error: rms error within 8 pixels of the border, of both sides, in 8-bit steps.
    """

    figures: tuple[BorderFigure, ...]
    images: int
    ring_error: float

    @property
    def state(self) -> Literal["worse", "not worse", "invisible", "cannot tell"]:
        """What can be said; worse only where it can be seen, not worse only where every figure shows it."""
        decided, undecided = (any(getattr(each, name) for each in self.figures) for name in ("decides", "is_open"))
        if self.images < LEAST_IMAGES or (undecided and not decided and self.ring_error >= 1):
            return "cannot tell"
        if self.ring_error < 1 and (decided or undecided):
            return "invisible"
        return "worse" if decided else "not worse"

    @property
    def worst(self) -> BorderFigure:
        """The figure that says most: of those that decide, else are open, the farthest above its limit."""
        return max(self.figures, key=lambda each: (each.decides, each.is_open, each.times / each.limit))

    @property
    def images_wanted(self) -> str:
        """How many images would tell whether the border is worse, in words: by the logarithms, which are averaged."""
        figure = self.worst
        return images_to_tell(self.images, *map(_log, (figure.times, figure.low, figure.high, figure.limit)))

    def sentence(self) -> str:
        """Return the verdict on the border, in figures for a person."""
        images, figure = counted(self.images, "image"), self.worst
        usual = f"usual with rounding: up to {figure.limit:g}"
        if self.state == "cannot tell":
            return (
                f"{images} cannot tell whether the border is worse: {figure.in_short()} ({usual}); "
                f"{self.images_wanted} would tell (--images)."
            )
        if self.state == "not worse":
            return f"The border is not worse than rounding makes it: {figure.in_short()} ({usual})."
        seen = f"the error there is {self.ring_error:.1f} of 255 steps"
        if self.state == "invisible":
            return f"Nothing can be seen along the border: {seen}."
        return f"The border is worse, and {seen}: {figure.in_short()} ({usual})."


def white_noise(
    wanted: Tensor, found: Tensor, image: Tensor, found_image: Tensor, decode: Callable[[Tensor], Tensor], number: int
) -> Tensor:
    """Return the image [3, H, W] that there would be if ``found`` missed ``wanted`` by white noise of the same size.

    Args:
        wanted, found: latents [C, h, w] of the reference and of what is judged.
        image, found_image: their images [3, H, W].
        decode: latents [1, C, h, w] -> pixels [1, 3, H, W], the reference's.
        number: of the image: what the noise follows from.
    """
    size = (found - wanted).square().mean().sqrt()
    random = generator("border", number)
    if float(size) > 1e-6 * float(wanted.square().mean().sqrt()):
        noise = torch.randn(wanted.shape, generator=random)
        return decode((wanted + size * noise)[None])[0].float().cpu()
    return image + (found_image - image).square().mean().sqrt() * torch.randn(image.shape, generator=random)


def judge_border(errors: Sequence[Tensor], noise: Sequence[Tensor], masks: Sequence[Tensor]) -> Border | None:
    """Return what there is to say about the border; None without images that have one.

    Args:
        errors: of each image [3, H, W], pixels in [-1, 1].
        noise: the same of white noise, see :func:`white_noise`.
        masks: of the filled region, [H, W] bool each, neither empty nor full.
    """
    if not errors:
        return None
    of_error = [border_errors(error, mask, RING) for error, mask in zip(errors, masks, strict=True)]
    of_noise = [border_errors(error, mask, RING) for error, mask in zip(noise, masks, strict=True)]
    figures = []
    for name in LIMITS:
        found, usual = ([math.log(_ratio(each, name)) for each in all_] for all_ in (of_error, of_noise))
        times = torch.tensor(found, dtype=torch.float64) - torch.tensor(usual, dtype=torch.float64)
        low, high = interval(times)
        error, usual_error = (math.exp(sum(values) / len(values)) for values in (found, usual))
        middle, least, most = (math.exp(value) for value in (float(times.mean()), low, high))
        figures.append(BorderFigure(name, error, usual_error, middle, least, most, tuple(times.exp().tolist())))
    rings = [(each.near["ring inside"] ** 2 + each.near["ring outside"] ** 2) / 2 for each in of_error]
    return Border(tuple(figures), len(errors), math.sqrt(sum(rings) / len(rings)) / STEP_8BIT)


def _ratio(errors: BorderErrors, name: str) -> float:
    return max(errors.near[name], _INVISIBLE) / max(errors.far[name], _INVISIBLE)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else math.nan
