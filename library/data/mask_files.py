"""Masks that a user brings: which part of a file is the mask, and what is to be said of it.

Masks of the loss and of a fill model's region mean the same: what is white counts, what is black does not. The file
decides where the mask is:

- an image whose transparency varies has it in its alpha, and what is opaque counts, whatever colour it has (a brush on
  an empty layer, a cut-out);
- any other image has it in its luminance, as OneTrainer and diffusers read masks. sd-scripts takes the red channel,
  which is the same of a grey image; of a coloured one it is not, and that is said.

Where nothing can be seen, because the image is fully transparent, nothing counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image, ImageChops

from library.data.buckets import Fit
from library.data.config import SubsetSettings
from library.data.file_index import FileIndex, SourceFile
from library.data.images import decode
from library.data.masks import Mask
from library.data.sources import Source
from library.errors import counted, names_in_short
from library.files import read_bytes

MASK_READING = 2  # part of the key of everything cached with a mask file: raise it when a file means another mask
MaskKey = Literal["conditioning_data_dir", "alpha_mask", "inpaint_mask_directory", "inpaint_alpha_mask"]

_FILLS: tuple[MaskKey, ...] = ("inpaint_mask_directory", "inpaint_alpha_mask")
_REFUSED = "nothing is filled, which training refuses"
_FILES: dict[MaskKey, Callable[[Source, SubsetSettings], SourceFile | None]] = {
    "conditioning_data_dir": lambda image, _: image.mask,
    "alpha_mask": lambda image, settings: image.image if settings.alpha_mask else None,
    "inpaint_mask_directory": lambda image, _: image.inpaint_mask,
    "inpaint_alpha_mask": lambda image, settings: image.image if settings.inpaint_alpha_mask else None,
}  # where each key's mask is
_HALF_WHITE = 128
_PLAIN = 8  # levels of 255 that compression leaves in an area of one colour
_COLOURED = 32  # levels between red and luminance


class MaskFacts(NamedTuple):
    """What a mask shows.

    Attributes:
        source: "alpha" or "luminance".
        low, high: its lowest and highest level, 0 to 255; of a region to fill 0 or 255, as it is filled or not.
        doubt: what else it could mean; empty if nothing.
        box: left, top, right, bottom of all that counts, as shares of width and height; None if nothing does.
    """

    source: str
    low: int
    high: int
    doubt: str
    box: Sequence[float] | None

    @property
    def is_plain(self) -> bool:
        """Whether it has one value everywhere."""
        return self.high - self.low <= _PLAIN

    def is_seen(self, fit: Fit) -> bool:
        """Whether anything that counts lies in what is trained on."""
        return self.box is not None and all(
            self.box[axis] * fit.resized[axis] < fit.offset[axis] + fit.encoded[axis]
            and self.box[axis + 2] * fit.resized[axis] > fit.offset[axis]
            for axis in (0, 1)
        )


class LookedMask(NamedTuple):
    """A mask, what it belongs to, and what a user should know of it; ``remark`` is empty if that is nothing."""

    image: str
    path: str
    key: MaskKey
    source: str
    remark: str

    @property
    def is_refused(self) -> bool:
        """Whether training refuses the image for it."""
        return self.remark.endswith(_REFUSED)


def read_mask(data: bytes, name: str) -> tuple[Image.Image, str, str]:
    """Decode a mask file to mode L, 255 counts fully, 0 not at all; see the module's text.

    Args:
        data: the file's content.
        name: its path, for messages.

    Returns:
        The mask; "alpha" or "luminance", where it was; what else the file could mean, empty if nothing.
    """
    image, alpha = decode(data, name, alpha_mask=True)
    luminance = image.convert("L")
    low, high = _extrema(alpha) if alpha is not None else (255, 255)
    if alpha is None or (high and high - low <= _PLAIN):
        red_differs = _extrema(ImageChops.difference(image.getchannel("R"), luminance))[1] > _COLOURED
        return luminance, "luminance", "coloured: its luminance counts, where sd-scripts takes red" * red_differs
    seen = np.asarray(luminance)[np.asarray(alpha) >= _HALF_WHITE]
    shows_two = bool(high) and seen.size > 0 and int(np.ptp(seen)) > _PLAIN
    return alpha, "alpha", "its colours have a shape too: its alpha counts, what is opaque" * shows_two


def binary_mask(image: Image.Image) -> Mask:
    """Return the mask [H, W] that an image of mode L shows: 1, to be filled, from half white on."""
    return (np.asarray(image) >= _HALF_WHITE).astype(np.uint8)


def look_at_mask(path: str, key: MaskKey) -> MaskFacts:
    """Return what the mask in a file shows that ``key`` asks for.

    Raises:
        UserError: the image is damaged.
    """
    data, source, doubt = read_bytes(path), "alpha", ""
    if key in ("alpha_mask", "inpaint_alpha_mask"):
        mask = decode(data, path, alpha_mask=True)[1] or Image.new("L", (1, 1), 255)
    else:
        mask, source, doubt = read_mask(data, path)
    if key == "inpaint_alpha_mask":
        mask = ImageChops.invert(mask)
    if key in _FILLS:
        mask = Image.fromarray(binary_mask(mask) * 255)
    box = mask.getbbox()
    shares = [side / whole for side, whole in zip(box, mask.size * 2, strict=True)] if box else None
    return MaskFacts(source, *_extrema(mask), doubt, shares)


def look_at_masks(
    images: Sequence[tuple[Source, Sequence[Fit]]], settings: SubsetSettings, index: FileIndex
) -> list[LookedMask]:
    """Return what is to be known of the masks of a subset's images.

    Args:
        images: with how they are cropped, at each resolution.
        settings: of the subset.
        index: remembers what was read.
    """
    looked = list[LookedMask]()
    for key, of in _FILES.items():
        files = [(image.image.path, of(image, settings), fits) for image, fits in images]
        wanted = [(path, file, fits) for path, file, fits in files if file is not None]
        facts = index.look(key, (file for _, file, _ in wanted), partial(look_at_mask, key=key))
        for path, file, fits in wanted:
            found = MaskFacts(*facts[file.path])
            looked.append(LookedMask(path, file.path, key, found.source, _remark(found, key, fits)))
    return looked


def _remark(facts: MaskFacts, key: MaskKey, fits: Iterable[Fit]) -> str:
    nothing = _REFUSED if key in _FILLS else "nothing of the image counts in the loss"
    if not facts.is_plain:
        cropped = f"{key}: what counts is cropped away, {nothing}"
        return facts.doubt if all(map(facts.is_seen, fits)) else cropped
    ends = ("black", "white") if facts.source == "luminance" else ("fully transparent", "opaque")
    black, white = ends[::-1] if key == "inpaint_alpha_mask" else ends
    value = black if facts.high <= _PLAIN else white if facts.low >= 255 - _PLAIN else f"level {facts.high} of 255"
    everything = "all of the image is filled" if key in _FILLS else "all of the image counts alike, as without a mask"
    return f"{key}: a mask of one value ({value}), {everything if facts.high > _PLAIN else nothing}"


def where_masks_are(looked: Iterable[LookedMask]) -> list[str]:
    """Return a line for each key that names a folder of masks: what counts in how many of its files."""
    sources: dict[str, dict[str, str]] = defaultdict(dict)
    for mask in looked:
        if mask.path != mask.image:
            sources[mask.key][Path(mask.path).name] = mask.source
    lines = list[str]()
    for key, masks in sources.items():
        by_alpha = [name for name, source in masks.items() if source == "alpha"]
        parts = [f"what is opaque in {len(by_alpha)} ({names_in_short(by_alpha, 3)})"] if by_alpha else []
        parts += [f"what is white in {len(masks) - len(by_alpha)}"] if len(by_alpha) < len(masks) else []
        lines.append(f"{key}: of {counted(len(masks), 'mask')} counts {', '.join(parts)}")
    return lines


def remarks_in_short(looked: Iterable[LookedMask]) -> list[str]:
    """Return a line for each remark, with the masks that have it."""
    alike: dict[str, list[str]] = defaultdict(list)
    for mask in looked:
        if mask.remark:
            alike[mask.remark].append(Path(mask.path).name)
    return [f"{names_in_short(names, 3)}: {remark}" for remark, names in alike.items()]


def _extrema(image: Image.Image) -> tuple[int, int]:
    low, high = np.asarray(image).min(), np.asarray(image).max()
    return int(low), int(high)
