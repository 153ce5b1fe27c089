"""What can be said of few images: intervals by resampling them, and the three answers that an interval gives.

An interval that lies on one side of a limit proves that side. One that crosses the limit proves nothing: that is said,
and never worded as a no, with the number of images that would tell. An interval is as wide as 1/sqrt(images).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from library.randomness import generator

LEAST_IMAGES = 3  # of two the interval is from the one to the other, and both may be odd
_RESAMPLES = 4000
_ROUND = (8, 10, 12, 16, 20, 30, 40, 60, 80, 100, 150, 200, 300)
Side = Literal["above", "below", "open"]


def interval(values: Tensor) -> tuple[float, float]:
    """Return the 95 % interval, by percentile bootstrap, of the mean of ``values`` [n]; NaN for fewer than two."""
    return ratio_interval(values.tolist(), [1.0] * len(values))


def ratio_interval(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, float]:
    """Return the same of sum(parts) / sum(wholes), a pair an image; NaN where there is nothing to divide by."""
    if len(parts) < 2:
        return math.nan, math.nan
    chosen = torch.randint(len(parts), (_RESAMPLES, len(parts)), generator=generator("bootstrap", len(parts)))
    part, whole = (torch.tensor(values, dtype=torch.float64)[chosen].sum(1) for values in (parts, wholes))
    low, high = (part / whole).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


@dataclass(frozen=True)
class Share:
    """A share of the squared error, with its 95 % interval over images; NaN of a single one."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def times(self, factor: float) -> Share:
        """Return so much of it."""
        return Share(*(factor * each for each in (self.value, self.low, self.high)))

    def side(self, limit: float) -> Side:
        """Return on which side of ``limit`` it is; without an interval it may be four times as large, or small."""
        known = not math.isnan(self.low)
        return side(*((self.low, self.high) if known else (self.value / 4, 4 * self.value)), limit)


def side(low: float, high: float, limit: float) -> Side:
    """Return on which side of ``limit`` an interval lies; open where it has both, or there is none (NaN)."""
    return "above" if low > limit else "below" if high < limit else "open"


def images_to_tell(images: int, middle: float, low: float, high: float, limit: float) -> str:
    """Return how many images would tell on which side of ``limit`` the truth is, in words.

    Args:
        images: that the interval is of. middle: the figure. low, high: its interval.
        limit: what it has to be told from.
    """
    if images < LEAST_IMAGES or math.isnan(low):
        return f"{_ROUND[0]} or more images"
    width, distance = (high - middle if middle < limit else middle - low), abs(middle - limit)
    wanted = images * (width / distance) ** 2 if distance else math.inf
    found = next((number for number in _ROUND if number >= max(wanted, images + 1)), None)
    return f"about {found} images" if found else f"more than {_ROUND[-1]} images"
