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

from collections.abc import Sequence
from functools import partial
from typing import Literal, get_args

import numpy as np
from PIL import Image, ImageChops

from library.data.buckets import Fit
from library.data.config import Subset, SubsetSettings
from library.data.file_index import FileIndex, SourceFile
from library.data.images import decode
from library.data.masks import Mask
from library.data.sources import Source
from library.errors import counted
from library.files import read_bytes

MASK_READING = 2  # part of the key of everything cached with a mask file: raise it when a file means another mask
REFUSED = "nothing is filled, which training refuses"
MaskKey = Literal["conditioning_data_dir", "inpaint_mask_directory", "alpha_mask", "inpaint_alpha_mask"]
_HALF_WHITE = 128
_PLAIN = 8  # levels of 255 that compression leaves in an area of one colour
_FAR = 32  # levels between the channels of a coloured mask, or from white to the brightest of a faint one


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
        is_coloured = int(np.ptp(np.asarray(image), axis=2).max()) > _FAR
        return luminance, "luminance", "coloured: its luminance counts, where sd-scripts takes red" * is_coloured
    seen = np.asarray(luminance)[np.asarray(alpha) >= _HALF_WHITE]
    shows_two = bool(high) and seen.size > 0 and int(np.ptp(seen)) > _PLAIN
    return alpha, "alpha", "its colours have a shape too: its alpha counts, what is opaque" * shows_two


def binary_mask(image: Image.Image) -> Mask:
    """Return the mask [H, W] that an image of mode L shows: 1, to be filled, from half white on."""
    return (np.asarray(image) >= _HALF_WHITE).astype(np.uint8)


def look_at_mask(path: str, key: MaskKey) -> tuple[str, str, Sequence[float]]:
    """Return what the mask in a file shows that ``key`` asks for.

    Returns:
        "alpha" or "luminance"; a remark if it shows nothing, everything or two things, else ""; left, top, right and
        bottom of all that counts, as shares of width and height, all 0 where nothing does.

    Raises:
        UserError: the image is damaged.
    """
    data, source, remark, fills = read_bytes(path), "alpha", "", key.startswith("inpaint")
    if key in ("alpha_mask", "inpaint_alpha_mask"):
        mask = decode(data, path, alpha_mask=True)[1] or Image.new("L", (1, 1), 255)
    else:
        mask, source, remark = read_mask(data, path)
    low, high = _extrema(mask)
    levels = f"{source} {low}" + f" to {high}" * (high > low)
    if key == "inpaint_alpha_mask":
        mask = ImageChops.invert(mask)
    if fills:
        mask = Image.fromarray(binary_mask(mask) * 255)
    low, high = _extrema(mask)
    if high - low <= _PLAIN:
        all_of_it = "all of the image is filled" if fills else "all of the image counts alike, as without a mask"
        remark = f"one value everywhere ({levels}), {all_of_it if high > _PLAIN else _nothing(fills)}"
    elif high < 255 - _FAR:
        faint = f"its brightest value is {high} of 255, which counts {high / 255:.0%}"
        remark = "; ".join(filter(None, (faint, remark)))
    box = mask.getbbox() or (0, 0, 0, 0)
    return source, remark, [side / whole for side, whole in zip(box, mask.size * 2, strict=True)]


def look_at_masks(
    images: Sequence[tuple[Source, Sequence[Fit]]], subset: Subset, index: FileIndex
) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Return a line on how each folder of masks is read, and the remarks on masks: image, file, remark.

    Args:
        images: of a subset, with how they are cropped at each resolution.
        subset: theirs.
        index: remembers what was read.
    """
    lines, remarks, settings = list[str](), list[tuple[str, str, str]](), subset.settings
    for key in get_args(MaskKey):
        masks = [(image, file, fits) for image, fits in images if (file := _mask_of(image, key, settings))]
        looked = index.look(key, [file for _, file, _ in masks], partial(look_at_mask, key=key))
        for image, file, fits in masks:
            _, remark, box = looked[file.path]
            if not remark and not all(_is_seen(box, fit) for fit in fits):
                remark = f"what counts is cropped away, {_nothing(key.startswith('inpaint'))}"
            remarks += [(image.image.path, file.path, f"{key}: {remark}")] if remark else []
        if looked and getattr(settings, key) is not True:
            by_alpha = sum(source == "alpha" for source, *_ in looked.values())
            read = f"{by_alpha} by alpha (opaque counts), {len(looked) - by_alpha} by luminance (white counts)"
            lines.append(f"{subset.where}: {key}: {counted(len(looked), 'mask')} read, {read}")
    index.save()
    return lines, remarks


def _mask_of(image: Source, key: MaskKey, settings: SubsetSettings) -> SourceFile | None:
    own = image.image if getattr(settings, key) else None
    return {"conditioning_data_dir": image.mask, "inpaint_mask_directory": image.inpaint_mask}.get(key, own)


def _nothing(fills: bool) -> str:
    return REFUSED if fills else "nothing of the image counts in the loss"


def _extrema(image: Image.Image) -> tuple[int, int]:
    return int(np.asarray(image).min()), int(np.asarray(image).max())


def _is_seen(box: Sequence[float], fit: Fit) -> bool:
    """Whether a box lies in what is trained on, at least in part."""
    parts = zip(box[:2], box[2:], fit.resized, fit.offset, fit.encoded, strict=True)
    return all(low * side < offset + width and high * side > offset for low, high, side, offset, width in parts)
