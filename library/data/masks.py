"""Masks to train a fill model on, drawn from nothing: rectangles, borders, brush strokes, halves.

The proportions follow LaMa (Suvorov et al. 2022, arXiv 2109.07161; ``mask_gen_kwargs`` of its training configurations
for 256-pixel crops, https://github.com/advimman/lama/blob/main/configs/training/data/abl-04-256-mh-dist.yaml), given
here as shares of the shorter side so that they hold at any resolution:

- rectangles: one to three (LaMa: to four), sides of 30 to 150 pixels of 256, at least 10 pixels from the edge;
- strokes: one to five polylines of one to five segments, each 10 to 210 pixels long, 5 to 105 wide, in a direction of
  up to 4 radians to either side. LaMa's segments have flat ends; here they are round, as a brush leaves them.

Borders and halves are what outpainting needs and LaMa has not: one to four sides, each 1/8 to 3/8 of the image deep,
and one half of it, the cut anywhere from 35 to 65 %. diffusers' inpainting examples draw a single rectangle or ellipse
of any size up to the whole image; masks of nearly nothing and nearly everything teach little, so here a mask whose
filled share is not between 5 and 90 % is drawn again. In an image as long as a ribbon (from about 16 : 1) no three
rectangles fill that much, their sides being shares of the shorter one: after 200 draws a half stands in.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from library.randomness import python_random

MaskKind = Literal["rectangles", "borders", "strokes", "halves"]
MASK_KINDS: tuple[MaskKind, ...] = get_args(MaskKind)
MASKS_VERSION = 1  # part of the key of everything cached with a mask: raise it when the same seed gives other masks
SMALLEST_SHARE, LARGEST_SHARE = 0.05, 0.9  # of the image that is filled

Mask = NDArray[np.uint8]  # [H, W], 1 where the image is to be filled
_LAMA_SIDE = 256  # the side that LaMa's numbers of pixels are of
_MOST_DRAWS = 200  # at 8 : 1, where one draw in nine is right, one mask in 10^10 runs out of them


def generated_mask(
    kinds: tuple[MaskKind, ...], width: int, height: int, seed: int, identity: str, variant: int
) -> Mask:
    """Return the mask of one sample: a function of (seed, sample, variant), its kind drawn from ``kinds``.

    Args:
        kinds: what may be drawn, each as likely as the others; not empty.
        width, height: the image's size in pixels.
        seed: the run's.
        identity: the sample's.
        variant: which of the sample's masks.
    """
    rng = python_random("inpaint mask", seed, identity, variant)
    return draw_mask(rng.choice(kinds), width, height, rng)


def draw_mask(kind: MaskKind, width: int, height: int, rng: random.Random) -> Mask:
    """Return a mask [H, W] uint8 of ``kind``, 1 where to fill, with 5 to 90 % of the image filled.

    Where the image's shape allows no such mask of ``kind``, it is one of "halves".
    """
    for _ in range(_MOST_DRAWS):  # about one draw in ten is thrown away
        mask = _DRAW[kind](width, height, rng)
        if SMALLEST_SHARE <= mask.mean() <= LARGEST_SHARE:
            return mask
    return _halves(width, height, rng)


def _rectangles(width: int, height: int, rng: random.Random) -> Mask:
    mask = np.zeros((height, width), dtype=np.uint8)
    short = min(width, height)
    margin = short * 10 // _LAMA_SIDE
    for _ in range(rng.randint(1, 3)):
        wide, high = (max(1, int(short * rng.uniform(30, 150) / _LAMA_SIDE)) for _ in range(2))
        left = rng.randint(margin, width - margin - wide)
        top = rng.randint(margin, height - margin - high)
        mask[top : top + high, left : left + wide] = 1
    return mask


def _borders(width: int, height: int, rng: random.Random) -> Mask:
    mask = np.ones((height, width), dtype=np.uint8)
    sides = rng.sample(range(4), rng.randint(1, 4))
    depths = [rng.uniform(1 / 8, 3 / 8) if side in sides else 0.0 for side in range(4)]
    left, right = round(width * depths[0]), width - round(width * depths[1])
    top, bottom = round(height * depths[2]), height - round(height * depths[3])
    mask[top:bottom, left:right] = 0
    return mask


def _strokes(width: int, height: int, rng: random.Random) -> Mask:
    image = Image.new("L", (width, height), 0)
    draw = ImageDraw.Draw(image)
    unit = min(width, height) / _LAMA_SIDE
    for _ in range(rng.randint(1, 5)):
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        for _ in range(rng.randint(1, 5)):
            angle, length = rng.uniform(-4, 4), unit * rng.uniform(10, 210)
            brush = max(1, round(unit * rng.uniform(5, 105)))
            end_x = min(max(x + length * float(np.cos(angle)), 0), width)
            end_y = min(max(y + length * float(np.sin(angle)), 0), height)
            draw.line((x, y, end_x, end_y), fill=1, width=brush)
            for cx, cy in ((x, y), (end_x, end_y)):
                draw.ellipse((cx - brush / 2, cy - brush / 2, cx + brush / 2, cy + brush / 2), fill=1)
            x, y = end_x, end_y
    return np.array(image, dtype=np.uint8)


def _halves(width: int, height: int, rng: random.Random) -> Mask:
    mask = np.zeros((height, width), dtype=np.uint8)
    share, side = rng.uniform(0.35, 0.65), rng.randint(0, 3)
    across, down = round(width * share), round(height * share)
    mask[
        (slice(None), slice(None), slice(None, down), slice(height - down, None))[side],
        (slice(None, across), slice(width - across, None), slice(None), slice(None))[side],
    ] = 1
    return mask


_DRAW: dict[MaskKind, Callable[[int, int, random.Random], Mask]] = {
    "rectangles": _rectangles,
    "borders": _borders,
    "strokes": _strokes,
    "halves": _halves,
}
