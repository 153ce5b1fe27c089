"""Control pictures: which size a reference picture is encoded at, and its pixels.

musubi-tuner's keys are kept (its docs/dataset_config.md):

- without any, a control picture is resized and cropped to the size that its image is trained at;
- ``control_resolution``: to its own proportions, at about that area;
- ``no_resize_control``: not resized, only trimmed to whole patches; with ``control_resolution`` too, that is the
  largest area.

Every side is a multiple of the model's patch. Where a size in whole patches does not have the picture's proportions
exactly, the picture covers it and the overhang, less than a patch, is cropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from PIL import Image

from library.data.buckets import Fit, Size
from library.data.file_index import SourceFile, content_hash, read_bytes
from library.data.images import decode, fit_image
from library.errors import UserError


@dataclass(frozen=True, slots=True)
class ControlSizing:
    """How control pictures are sized: ``resolution`` (width, height) gives an area; ``keep``: no_resize_control."""

    resolution: Size | None = None
    keep: bool = False

    def fit(self, size: Size, trained: Size, unit: int, name: str) -> Fit:
        """Return how a control picture is resized and cropped.

        Args:
            size: the picture's (width, height).
            trained: the size its image is trained at.
            unit: sides become multiples of this.
            name: the picture's path, for the message.

        Raises:
            UserError: the picture is not resized and is smaller than a patch.
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
        raise UserError(f"{name}: {size[0]}x{size[1]} is smaller than a patch of {unit}; remove no_resize_control")
    return Fit(size, ((size[0] - whole[0]) // 2, (size[1] - whole[1]) // 2), whole, whole)


def _whole(side: float, unit: int) -> int:
    return max(unit, round(side / unit) * unit)


@dataclass(frozen=True, slots=True)
class Control:
    """A control picture at the size it is encoded at; ``interpolation`` is the filter of its subset."""

    file: SourceFile
    fit: Fit
    interpolation: str | None = None

    def key(self) -> tuple[object, ...]:
        """Return what its pixels follow from; its content must have been hashed."""
        assert self.file.content is not None, "contents are hashed first"
        return (self.file.content, self.fit.resized, self.fit.offset, self.fit.encoded, self.interpolation)

    def load(self, flipped: bool = False) -> Image.Image:
        """Return the RGB picture at its size.

        Raises:
            UserError: it is damaged, or changed since it was hashed.
        """
        image, _ = decode(checked_bytes(self.file), self.file.path)
        fitted = fit_image(image, self.fit, self.interpolation)
        return fitted.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flipped else fitted


def checked_bytes(file: SourceFile) -> bytes:
    """Return the content of a file that has been hashed.

    Raises:
        UserError: it cannot be read, or is another than it was.
    """
    data = read_bytes(file.path)
    if content_hash(data) != file.content:
        raise UserError(f"{file.path}: changed while it was being cached; start again")
    return data
