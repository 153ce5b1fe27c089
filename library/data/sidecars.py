"""Sidecar files: masks and control images that belong to an image by its name, and the size a control image gets.

A sidecar has the image's stem in a folder of its own: ``photos/cat.jpg`` has ``masks/cat.png``. Of control images there
may be several: ``cat_0.png``, ``cat_1.png`` (or with leading zeros), counted from 0. They are resized by musubi-tuner's
keys (its docs/dataset_config.md):

- without any, to the size that the image is trained at, the overhang cropped;
- ``control_resolution``: to its own proportions, at about that area;
- ``no_resize_control``: not resized, only trimmed to whole patches; with ``control_resolution`` too, that is the
  largest area.

Every side is a multiple of the model's patch. Where a size in whole patches does not have the image's proportions
exactly, the image covers it and the overhang, less than a patch, is cropped.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from PIL import Image

from library.data.buckets import Fit, Size
from library.data.file_index import FileIndex, SourceFile, content_hash, list_folder, read_bytes
from library.data.images import IMAGE_SUFFIXES, decode, fit_image
from library.errors import UserError

_NUMBERED = re.compile(r"(.+)_(\d+)")


def is_image(name: str) -> bool:
    """Whether a file name has the suffix of a format that can be read."""
    return f".{name.rpartition('.')[2].lower()}" in IMAGE_SUFFIXES  # pathlib takes seconds for 100,000 names


def stem(name: str) -> str:
    """Return a file name without its suffix."""
    return name.rpartition(".")[0]


def find_masks(
    where: str,
    key: str,
    folder: Path,
    images: Sequence[str],
    index: FileIndex,
    warnings: list[str],
    remedy: str,
) -> list[SourceFile]:
    """Return the mask of every image.

    Args:
        where: the subset, for messages.
        key: the key that named the folder.
        folder: where the masks lie.
        images: the images' names.
        index: memory of the subset's cache folder.
        warnings: a line is added about masks without an image.
        remedy: what to do about an image without one.
    """
    files, masks = _by_stem(folder)
    stems = [stem(PurePath(name).name) for name in images]
    missing = [name for its_stem, name in zip(stems, images, strict=True) if its_stem not in masks]
    if missing:
        raise UserError(
            f"{where}: {len(missing)} of {len(images)} images have no mask in {key} "
            f"{folder} ({missing[0]}, ...); {remedy}"
        )
    _note_unused(where, "masks", folder, masks, set(stems), warnings)
    return [index.image(f"{folder}{os.sep}{masks[s]}", files[masks[s]]) for s in stems]


def find_control_images(
    where: str, folder: Path, images: Sequence[str], index: FileIndex, warnings: list[str]
) -> list[tuple[SourceFile, ...]]:
    """Return the control images of every image in their order; none for an image without."""
    files, plain = _by_stem(folder)
    stems = [stem(PurePath(name).name) for name in images]
    known = set(stems)
    numbered: dict[str, dict[int, str]] = defaultdict(dict)
    for its_stem, name in plain.items():
        match = _NUMBERED.fullmatch(its_stem)
        if match and match[1] in known and its_stem not in known:
            numbered[match[1]][int(match[2])] = name
    found: list[tuple[SourceFile, ...]] = []
    used: set[str] = set()
    for its_stem in stems:
        numbers = numbered.get(its_stem, {})
        if its_stem in plain and numbers:
            both = f"{plain[its_stem]} and {numbers[min(numbers)]}"
            raise UserError(f"{where}: control_directory {folder} holds {both}; number all of an image's or none")
        missing = next((n for n in range(len(numbers)) if n not in numbers), None)
        if missing is not None:
            named = f"{its_stem}_{missing}"
            raise UserError(f"{where}: control_directory {folder} holds no {named} but higher numbers; count from 0")
        names = [plain[its_stem]] if its_stem in plain else [numbers[n] for n in sorted(numbers)]
        used.update(stem(name) for name in names)
        found.append(tuple(index.image(f"{folder}{os.sep}{name}", files[name]) for name in names))
    _note_unused(where, "control images", folder, plain, used, warnings)
    return found


def _by_stem(folder: Path) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """A folder's files, and stem -> name of its images."""
    files = list_folder(folder)
    by_stem: dict[str, str] = {}
    for name in files:
        if is_image(name):
            by_stem.setdefault(stem(name), name)
    return files, by_stem


def _note_unused(
    where: str, what: str, folder: Path, names: dict[str, str], used: set[str], warnings: list[str]
) -> None:
    unused = sorted(names.keys() - used)
    if unused:
        warnings.append(f"{where}: {len(unused)} {what} in {folder} belong to no image ({names[unused[0]]}, ...)")


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
        raise UserError(f"{name}: {size[0]}x{size[1]} is smaller than a patch of {unit}; remove no_resize_control")
    return Fit(size, ((size[0] - whole[0]) // 2, (size[1] - whole[1]) // 2), whole, whole)


def _whole(side: float, unit: int) -> int:
    return max(unit, round(side / unit) * unit)


@dataclass(frozen=True, slots=True)
class ControlImage:
    """A control image at the size it is encoded at; ``interpolation`` is the filter of its subset."""

    file: SourceFile
    fit: Fit
    interpolation: str | None = None

    def key(self) -> tuple[object, ...]:
        """Return what its pixels follow from; its content must have been hashed."""
        assert self.file.content is not None, "contents are hashed first"
        return (self.file.content, self.fit.resized, self.fit.offset, self.fit.encoded, self.interpolation)

    def load(self, flipped: bool = False) -> Image.Image:
        """Return the RGB image at its size."""
        image, _ = decode(checked_bytes(self.file), self.file.path)
        fitted = fit_image(image, self.fit, self.interpolation)
        return fitted.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flipped else fitted


def checked_bytes(file: SourceFile) -> bytes:
    """Return the content of a file that has been hashed."""
    data = read_bytes(file.path)
    if content_hash(data) != file.content:
        raise UserError(f"{file.path}: changed while it was being cached; start again")
    return data
