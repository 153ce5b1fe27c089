"""Which size an image is trained at.

A model trains on many shapes of about the same area. kohya's buckets (sd-scripts ``BucketManager``) are kept:

- the bucket sizes are all multiples of ``bucket_reso_steps`` between ``min_bucket_reso`` and
  ``max_bucket_reso`` whose area is at most that of ``resolution``, for each width the tallest such height;
- an image goes to the bucket of its own size if there is one, else to that with the nearest aspect ratio, is
  resized until it just covers it, and the overhang is cropped;
- with ``bucket_no_upscale`` an image is only ever made smaller: its bucket is its own (reduced) size
  rounded down;
- without ``enable_bucket`` there is one bucket, ``resolution``.

What is encoded is the bucket-sized centre crop; for ``random_crop`` it is the whole resized image (rounded
down to whole patches), so that a crop can be chosen every epoch among the cached latents.

Control images are resized by musubi-tuner's keys (its docs/dataset_config.md):

- without any, to the size that the image is trained at, the overhang cropped;
- ``control_resolution``: to its own proportions, at about that area;
- ``no_resize_control``: not resized, only trimmed to whole patches; with ``control_resolution`` too, that is the
  largest area.

Every side is a multiple of the model's patch. Where a size in whole patches does not have the image's proportions
exactly, the image covers it and the overhang, less than a patch, is cropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from library.data.config import Dataset
from library.errors import UserError

Size = tuple[int, int]  # width, height in pixels


@dataclass(frozen=True, slots=True)
class Fit:
    """How one image becomes training pixels: resize, crop ``encoded`` at ``offset``; train on ``bucket``."""

    resized: Size
    offset: Size  # left, top of the encoded box in the resized image
    encoded: Size  # what the image encoder sees
    bucket: Size  # what the model sees; smaller than ``encoded`` only with random_crop


class Bucketing:
    """The buckets of one dataset.

    Args:
        dataset: its settings.
        pixel_multiple: every side must be a multiple of this (VAE factor times patch size).
    """

    def __init__(self, dataset: Dataset, pixel_multiple: int) -> None:
        settings = dataset.settings
        self.where = dataset.where
        self.resolution = dataset.resolution
        self.pixel_multiple = pixel_multiple
        self.no_upscale = settings.enable_bucket and settings.bucket_no_upscale
        self.steps = settings.bucket_reso_steps if settings.enable_bucket else pixel_multiple
        self.sizes: list[Size] = [dataset.resolution]
        self.limits: Size | None = None  # of a bucket's side
        self._fits: dict[tuple[Size, bool], Fit] = {}
        if not settings.enable_bucket:
            for side in dataset.resolution:
                self._require_multiple("resolution", side)
            return
        self._require_multiple("bucket_reso_steps", self.steps)
        if min(dataset.resolution) < self.steps:
            raise UserError(
                f"{self.where}: resolution {size_text(dataset.resolution)} is smaller than bucket_reso_steps "
                f"{self.steps}; set bucket_reso_steps = {pixel_multiple}"
            )
        self.limits = self._limits(settings.min_bucket_reso, settings.max_bucket_reso)
        self.sizes = bucket_sizes(dataset.resolution, *self.limits, self.steps)

    def _require_multiple(self, key: str, value: int) -> None:
        unit = self.pixel_multiple
        if value % unit:
            good = max(unit, round(value / unit) * unit)
            raise UserError(f"{self.where}: {key} {value} is not a multiple of {unit}, the model's patch; use {good}")

    def _limits(self, low: int | None, high: int | None) -> Size:
        """Limits of a bucket's side; unless given kohya's 256 and 1024, or wider to hold the resolution."""
        shortest, longest = min(self.resolution), max(self.resolution)
        if low is not None and low > shortest:
            raise UserError(
                f"{self.where}: min_bucket_reso {low} is larger than resolution {size_text(self.resolution)}; "
                f"use at most {shortest}"
            )
        if high is not None and high < longest:
            raise UserError(
                f"{self.where}: max_bucket_reso {high} is smaller than resolution {size_text(self.resolution)}; "
                f"use at least {longest}"
            )
        low = low if low is not None else (256 if shortest >= 256 else shortest // 2)
        high = high if high is not None else (1024 if longest <= 1024 else 2 * longest)
        return max(self.steps, low // self.steps * self.steps), math.ceil(high / self.steps) * self.steps

    def fit(self, size: Size, random_crop: bool, name: str) -> Fit:
        """Return how an image of ``size`` (width, height) is resized and cropped; ``name`` is for the
        message.
        """
        known = self._fits.get((size, random_crop))
        if known is None:
            bucket, resized = self._shrink_only(size, name) if self.no_upscale else self._cover(size)
            unit = self.pixel_multiple
            whole = (resized[0] // unit * unit, resized[1] // unit * unit)
            encoded = whole if random_crop else bucket
            offset = ((resized[0] - encoded[0]) // 2, (resized[1] - encoded[1]) // 2)
            known = self._fits[(size, random_crop)] = Fit(resized, offset, encoded, bucket)
        return known

    def _cover(self, size: Size) -> tuple[Size, Size]:
        """Bucket with the nearest aspect ratio, and the size that just covers it."""
        aspect = size[0] / size[1]
        bucket = size if size in self.sizes else min(self.sizes, key=lambda b: abs(b[0] / b[1] - aspect))
        scale = bucket[1] / size[1] if aspect > bucket[0] / bucket[1] else bucket[0] / size[0]
        covered = (max(bucket[0], int(size[0] * scale + 0.5)), max(bucket[1], int(size[1] * scale + 0.5)))
        return bucket, covered

    def _shrink_only(self, size: Size, name: str) -> tuple[Size, Size]:
        """Bucket and resized size with bucket_no_upscale: down to the area of resolution, never up."""
        width, height = size
        area = self.resolution[0] * self.resolution[1]
        resized = size
        if width * height > area:
            aspect = width / height
            by_width = self._rounded(math.sqrt(area * aspect))
            by_height = self._rounded(area / math.sqrt(area * aspect))
            error_width = abs(by_width / max(1, self._rounded(by_width / aspect)) - aspect)
            error_height = abs(self._rounded(by_height * aspect) / max(1, by_height) - aspect)
            if error_width < error_height:  # the side that rounds with less distortion keeps its whole steps
                resized = (by_width, int(by_width / aspect + 0.5))
            else:
                resized = (int(by_height * aspect + 0.5), by_height)
        bucket = (resized[0] // self.steps * self.steps, resized[1] // self.steps * self.steps)
        if min(bucket) == 0:
            raise UserError(
                f"{name}: {size_text(size)} gives a side below bucket_reso_steps {self.steps}; "
                "remove the image or set bucket_no_upscale = false"
            )
        return bucket, resized

    def _rounded(self, side: float) -> int:
        return int(side + 0.5) // self.steps * self.steps


def bucket_sizes(resolution: Size, low: int, high: int, steps: int) -> list[Size]:
    """All sizes with sides in multiples of ``steps`` from ``low`` to ``high`` and at most the area."""
    area = resolution[0] * resolution[1]
    square = math.isqrt(area) // steps * steps
    sizes = {(square, square)}
    for width in range(low, high + 1, steps):
        height = min(high, area // width // steps * steps)
        if height >= low:
            sizes |= {(width, height), (height, width)}
    return sorted(sizes)


@dataclass(frozen=True, slots=True)
class ControlSizing:
    """How control images are sized: ``resolution`` (width, height) gives an area; ``keep``: no_resize_control."""

    resolution: Size | None = None
    keep: bool = False

    def fit(self, size: Size, trained: Size, unit: int, name: str) -> Fit:
        """Return how a control image is resized and cropped.

        Args:
            size: the image's (width, height).
            trained: the size its image is trained at.
            unit: sides become multiples of this.
            name: the image's path, for the message.
        """
        width, height = size
        area = None if self.resolution is None else self.resolution[0] * self.resolution[1]
        if self.keep and (area is None or width * height <= area):
            return _trim(size, unit, name)
        target = trained
        if area is not None:
            root = math.sqrt(area * width / height)
            target = (_whole(root, unit), _whole(root * height / width, unit))
        return cover(size, target)


def cover(size: Size, target: Size) -> Fit:
    """Return the fit that resizes ``size`` until it just covers ``target`` and crops the overhang evenly."""
    scale = max(target[0] / size[0], target[1] / size[1])
    resized = (max(target[0], round(size[0] * scale)), max(target[1], round(size[1] * scale)))
    offset = ((resized[0] - target[0]) // 2, (resized[1] - target[1]) // 2)
    return Fit(resized, offset, target, target)


def _trim(size: Size, unit: int, name: str) -> Fit:
    whole = (size[0] // unit * unit, size[1] // unit * unit)
    if min(whole) == 0:
        raise UserError(f"{name}: {size_text(size)} is smaller than a patch of {unit}; remove no_resize_control")
    return Fit(size, ((size[0] - whole[0]) // 2, (size[1] - whole[1]) // 2), whole, whole)


def _whole(side: float, unit: int) -> int:
    return max(unit, round(side / unit) * unit)


def same_shape(one: Size, other: Size) -> bool:
    """Return whether two sizes have the same proportions, a side being off by 1 % at most."""
    return abs(one[0] * other[1] - one[1] * other[0]) <= 0.01 * one[0] * other[1]


def size_text(size: Size) -> str:
    """Return a size as it is shown, such as 1024x768."""
    return f"{size[0]}x{size[1]}"
