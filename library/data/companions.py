"""Files that belong to an image by its name: masks, masks of the region to fill, control pictures.

A companion has the image's stem in a folder of its own: ``photos/cat.jpg`` has ``masks/cat.png``. Of control pictures
there may be several: ``cat_0.png``, ``cat_1.png`` (or with leading zeros), counted from 0.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePath

from library.data.file_index import FileIndex, SourceFile, list_folder
from library.data.images import IMAGE_SUFFIXES
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

    Raises:
        UserError: an image has no mask.
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


def find_controls(
    where: str, folder: Path, images: Sequence[str], index: FileIndex, warnings: list[str]
) -> list[tuple[SourceFile, ...]]:
    """Return the control pictures of every image in their order; none for an image without.

    Raises:
        UserError: an image has both a plain and numbered pictures, or their numbers have a gap.
    """
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
    _note_unused(where, "control pictures", folder, plain, used, warnings)
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
