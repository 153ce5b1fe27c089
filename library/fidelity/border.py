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
rounding stays below: of 87 deployments (fp8 of five kinds, activations in fp8, LoRAs merged; three sets of masks) the
figures were up to 1.4 inside, 1.7 outside, where a model copies with the least certainty, and 1.4 across
(``docs/precision.md``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from library.errors import counted
from library.precision.parity.seam import BorderErrors, border_errors
from library.randomness import generator

LEAST_IMAGES = 3  # of two the interval is from the one to the other, and both may be odd
RING = 8  # pixels: one latent cell
STEP_8BIT = 2 / 255  # of pixels in [-1, 1]
_INVISIBLE = STEP_8BIT / math.sqrt(12)
_RESAMPLES = 4000
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
        return self.low > self.limit

    def words(self) -> str:
        """Return the figure with all that it is judged by."""
        interval = "" if math.isnan(self.low) else f" [{self.low:.2f} to {self.high:.2f}]"
        found = f"{WORDS[self.name]} {self.error:.2f} (white noise {self.noise:.2f}), {self.times:.2f} times"
        return f"{found}{interval}, limit {self.limit:g}"


@dataclass(frozen=True)
class Border:
    """What is known about the border.

    Attributes:
        figures: each a ratio, see the module's first lines.
        images: with a border.
        ring_error: rms error within 8 pixels of the border, of both sides, in 8-bit steps.
        signed: mean error of the ring inside less that of the interior, in 8-bit steps: rounding noise has no sign, a
            weaker LoRA has one.
    """

    figures: tuple[BorderFigure, ...]
    images: int
    ring_error: float
    signed: float

    @property
    def state(self) -> Literal["worse", "as usual", "invisible", "unknown"]:
        """What can be said: nothing of one or two images; worse only where it can be seen."""
        if self.images < LEAST_IMAGES:
            return "unknown"
        if not any(figure.decides for figure in self.figures):
            return "as usual"
        return "worse" if self.ring_error >= 1 else "invisible"

    @property
    def worst(self) -> BorderFigure:
        """The figure that says most: of those that decide the farthest above its limit."""
        return max(self.figures, key=lambda figure: (figure.decides, figure.times / figure.limit))

    def sentence(self) -> str:
        """Return the verdict on the border, with the very figures that decided it."""
        images = counted(self.images, "image")
        beside = f"within {RING} pixels of it over farther away, {images}"
        if self.state == "unknown":
            return f"{images} cannot tell whether the border is worse: give 8 or more (--images). {self.worst.words()}."
        if self.state == "as usual":
            return f"The border is no worse than honest rounding makes it ({beside}): at most {self.worst.words()}."
        words = "; ".join(figure.words() for figure in self.figures if figure.decides)
        seen = f"the error there is {self.ring_error:.1f} of 255 steps"
        if self.state == "invisible":
            return f"The error gathers along the border, but {seen}, too small to be seen ({beside}): {words}."
        return f"The border is worse, and {seen} ({beside}): {words}."


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
    return Border(
        tuple(figures),
        len(errors),
        math.sqrt(sum(rings) / len(rings)) / STEP_8BIT,
        sum(each.signed for each in of_error) / len(of_error) / STEP_8BIT,
    )


def interval(values: Tensor, share: float = 0.95) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean of ``values`` [n]; NaN for fewer than two."""
    if len(values) < 2:
        return math.nan, math.nan
    chosen = torch.randint(len(values), (_RESAMPLES, len(values)), generator=generator("bootstrap", len(values)))
    means = values.double()[chosen].mean(1)
    low, high = means.quantile(torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=torch.float64)).tolist()
    return low, high


def _ratio(errors: BorderErrors, name: str) -> float:
    return max(errors.near[name], _INVISIBLE) / max(errors.far[name], _INVISIBLE)
