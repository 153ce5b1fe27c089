"""Antialiased painting of flat shapes: the pixels under every image the tiny models learn from.

An image is a float32 array [H, W, 3] in 0..1. A shape is an outline, a polygon around the origin that fits
into the unit circle, with y pointing down. `coverage` draws an outline OVERSAMPLING times too large with
Pillow and averages down, which gives for every pixel the share that the shape covers; `paint` blends a
colour or a pattern in by that share. Everything random comes from the numpy generator that the caller
passes, so a seed fixes the image.

Outdoor images: "a red house and a tree on green grass under a night sky with stars and a moon".

Every thing is a few polygons and discs in pixels of a 128-pixel image, measured from where it stands.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from PIL import Image, ImageDraw

Pixels = np.ndarray  # [H, W, 3], float32, 0..1
Mask = np.ndarray  # [H, W], float32, 0..1
Outline = np.ndarray  # [N, 2], float32, (x, y) within the unit circle
Rgb = tuple[float, float, float]

OVERSAMPLING = 4

COLOURS: dict[str, Rgb] = {
    "red": (0.88, 0.10, 0.12),
    "orange": (1.00, 0.55, 0.05),
    "yellow": (1.00, 0.88, 0.10),
    "green": (0.10, 0.62, 0.22),
    "cyan": (0.15, 0.82, 0.88),
    "blue": (0.10, 0.25, 0.88),
    "purple": (0.50, 0.15, 0.70),
    "pink": (1.00, 0.55, 0.75),
    "brown": (0.48, 0.28, 0.12),
    "black": (0.04, 0.04, 0.05),
    "gray": (0.55, 0.55, 0.57),
    "white": (0.97, 0.97, 0.97),
}


def regular_polygon(corners: int, first_angle: float = -math.pi / 2) -> Outline:
    """Corners on the unit circle; the default first angle puts one at the top."""
    angles = first_angle + np.arange(corners) * (2 * math.pi / corners)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _star() -> Outline:
    outline = regular_polygon(10)
    outline[1::2] *= 0.45
    return outline


def _cross() -> Outline:
    quarter = np.array([(-0.32, -0.92), (0.32, -0.92), (0.32, -0.32)], np.float32)
    turn = np.array([(0, 1), (-1, 0)], np.float32)  # a quarter to the right
    return np.concatenate([quarter, quarter @ turn, -quarter, -quarter @ turn])


def _heart() -> Outline:
    t = np.linspace(0, 2 * math.pi, 48, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
    return (np.stack([x, y - 2.5], axis=1) / 17.0).astype(np.float32)


def _crescent() -> Outline:
    outer = np.linspace(math.pi * 0.25, math.pi * 1.75, 32)
    tips = np.array([(math.cos(outer[-1]), math.sin(outer[-1])), (math.cos(outer[0]), math.sin(outer[0]))])
    inner = np.linspace(math.pi * 1.72, math.pi * 0.28, 32)
    bite = np.stack([np.cos(inner) * 0.74 + 0.36, np.sin(inner) * 0.74], axis=1)
    rim = np.stack([np.cos(outer), np.sin(outer)], axis=1)
    return np.concatenate([rim, tips[:1], bite, tips[1:]]).astype(np.float32)


def _ring() -> Outline:
    """A disc with a hole, as one polygon that runs around the rim and back around the hole."""
    rim = regular_polygon(48)
    hole = rim[::-1] * 0.55
    return np.concatenate([rim, rim[:1], hole[-1:], hole]).astype(np.float32)


SHAPES: dict[str, Outline] = {
    "circle": regular_polygon(48),
    "square": regular_polygon(4, math.pi / 4) * 1.15,
    "triangle": regular_polygon(3) + np.array([0, 0.2], np.float32),
    "star": _star(),
    "heart": _heart(),
    "diamond": regular_polygon(4) * np.array([0.75, 1.0], np.float32),
    "cross": _cross(),
    "ring": _ring(),
    "hexagon": regular_polygon(6, 0.0),
    "crescent": _crescent(),
}


@cache
def pixel_grid(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixel centres as (x [1, W], y [H, 1])."""
    return np.arange(width, dtype=np.float32)[None] + 0.5, np.arange(height, dtype=np.float32)[:, None] + 0.5


def plain(height: int, width: int, colour: Rgb) -> Pixels:
    return np.broadcast_to(np.asarray(colour, np.float32), (height, width, 3)).copy()


def coverage(
    outline: Outline,
    height: int,
    width: int,
    centre: tuple[float, float],
    radius: float | tuple[float, float],
) -> Mask:
    """The share of each pixel that the outline covers, at `centre` (x, y) with `radius` (or x, y) pixels."""
    corners = (outline * np.asarray(radius, np.float32) + np.asarray(centre, np.float32)) * OVERSAMPLING
    large = Image.new("L", (width * OVERSAMPLING, height * OVERSAMPLING))
    ImageDraw.Draw(large).polygon([tuple(corner) for corner in corners.tolist()], fill=255)
    return np.asarray(large.reduce(OVERSAMPLING), np.float32) / 255.0


def paint(image: Pixels, mask: Mask, fill: Rgb | Pixels) -> None:
    """Blend a colour, or another image, into `image` by the mask."""
    image += mask[:, :, None] * (np.asarray(fill, np.float32) - image)


def paint_shape(
    image: Pixels, shape: str, centre: tuple[float, float], radius: float | tuple[float, float], fill: Rgb | Pixels
) -> None:
    """Paint one of ``SHAPES`` around ``centre`` (x, y), upright."""
    paint(image, coverage(SHAPES[shape], *image.shape[:2], centre, radius), fill)


def mix(colour: Rgb, other: Rgb, share: float) -> Rgb:
    """`share` of `other` in `colour`."""
    return tuple(a + (b - a) * share for a, b in zip(colour, other, strict=True))


def companion(colour: Rgb) -> Rgb:
    """The second colour of a one-coloured pattern: lighter than a dark colour, darker than a light one."""
    luminance = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2]
    return mix(colour, (1.0, 1.0, 1.0) if luminance < 0.55 else (0.0, 0.0, 0.0), 0.35 if luminance < 0.55 else 0.25)


def pick_colour(rng: np.random.Generator, avoid: tuple[str, ...] = ()) -> str:
    return str(rng.choice([name for name in COLOURS if name not in avoid]))


def jitter(colour: Rgb, rng: np.random.Generator, amount: float = 0.03) -> Rgb:
    """The colour with a little chance in it, so that a name means a neighbourhood and not a point."""
    return tuple(float(np.clip(c + rng.uniform(-amount, amount), 0.0, 1.0)) for c in colour)


def _soft_square_wave(phase: np.ndarray, period: float) -> np.ndarray:
    """0 and 1 by turns with one period per unit of phase; edges one pixel wide when `period` is in pixels."""
    distance = np.abs((phase % 1.0) - 0.5) * 2.0  # 1 at the wave's start, 0 at its middle
    return np.clip((distance - 0.5) * period / 2.0 + 0.5, 0.0, 1.0)


def stripes(height: int, width: int, first: Rgb, second: Rgb, period: float, angle: float) -> Pixels:
    x, y = pixel_grid(height, width)
    wave = _soft_square_wave((x * math.cos(angle) + y * math.sin(angle)) / period, period)
    image = plain(height, width, first)
    paint(image, wave, second)
    return image


def checkers(height: int, width: int, first: Rgb, second: Rgb, period: float) -> Pixels:
    x, y = pixel_grid(height, width)
    across, down = _soft_square_wave(x / period, period), _soft_square_wave(y / period, period)
    image = plain(height, width, first)
    paint(image, across * (1 - down) + down * (1 - across), second)
    return image


def dots(height: int, width: int, first: Rgb, second: Rgb, period: float) -> Pixels:
    x, y = pixel_grid(height, width)
    off_x, off_y = (x / period) % 1.0 - 0.5, (y / period) % 1.0 - 0.5
    distance = np.sqrt(off_x**2 + off_y**2) * period
    image = plain(height, width, first)
    paint(image, np.clip(0.28 * period - distance + 0.5, 0.0, 1.0), second)
    return image


def gradient(height: int, width: int, top: Rgb, bottom: Rgb) -> Pixels:
    share = np.linspace(0.0, 1.0, height, dtype=np.float32)[:, None, None]
    rows = np.asarray(top, np.float32) * (1 - share) + np.asarray(bottom, np.float32) * share
    return np.broadcast_to(rows, (height, width, 3)).copy()


def to_image(image: Pixels) -> Image.Image:
    return Image.fromarray((np.clip(image, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8))


SKIES = {
    "blue": ((0.35, 0.65, 0.98), (0.75, 0.90, 1.00)),
    "night": ((0.03, 0.04, 0.16), (0.12, 0.14, 0.36)),
    "sunset": ((0.98, 0.45, 0.35), (1.00, 0.82, 0.45)),
}
STARS = ((0.1, 0.1), (0.3, 0.22), (0.45, 0.08), (0.12, 0.4), (0.6, 0.3), (0.94, 0.42))  # shares of the image
GROUNDS = {"green grass": (0.25, 0.68, 0.25), "yellow sand": (0.93, 0.82, 0.50), "white snow": (0.95, 0.97, 1.00)}


def paint_outdoors(rng: np.random.Generator, height: int, width: int) -> tuple[str, Pixels]:
    """(words, image): sky, ground and one or two things on it."""
    sky = str(rng.choice(list(SKIES)))
    image = gradient(height, width, *SKIES[sky])
    ground = "the sea" if rng.random() < 0.2 else str(rng.choice(list(GROUNDS)))
    above = _paint_sky_things(rng, image, sky)
    horizon = height * 0.6875
    if ground != "the sea" and rng.random() < 0.25:
        _paint_mountains(image, horizon)
        above = f"{above} and mountains" if above else " with mountains"
    ground_colour = (0.10, 0.40, 0.75) if ground == "the sea" else GROUNDS[ground]
    dim = 0.55 if sky == "night" else 0.0
    image[int(horizon) :] = mix(jitter(ground_colour, rng), (0.05, 0.05, 0.15), dim)
    scale = min(height, width) / 128.0
    things = ["boat"] if ground == "the sea" else list(rng.permutation(["house", "tree", "car"])[: rng.integers(1, 3)])
    shifts = [0.5] if len(things) == 1 else [0.28, 0.72]
    phrases = []
    for thing, shift in zip(things, shifts, strict=True):
        colour = pick_colour(rng, ("black",))
        base = (width * shift, horizon + 8 * scale)
        {"house": _house, "tree": _tree, "car": _car, "boat": _boat}[str(thing)](
            image, base, scale, jitter(COLOURS[colour], rng)
        )
        phrases.append("a tree" if thing == "tree" else f"a {colour} {thing}")
    return f"{' and '.join(phrases)} on {ground} under a {sky} sky{above}", image


def _paint_sky_things(rng: np.random.Generator, image: Pixels, sky: str) -> str:
    """Sun, clouds, moon or stars, and the words for them (with a leading blank), often none."""
    height, width = image.shape[:2]
    scale = min(height, width) / 128.0
    if rng.random() < 0.25:
        return ""
    if sky == "night":
        for x, y in STARS:
            paint_shape(image, "star", (x * width, y * height), 4 * scale, (1.0, 1.0, 0.85))
        if rng.random() < 0.5:
            return " with stars"
        paint_shape(image, "crescent", (width * 0.8, height * 0.2), 12 * scale, (1.0, 0.97, 0.75))
        return " with stars and a moon"
    if sky == "blue" and rng.random() < 0.4:
        for x, y in ((0.25, 0.18), (0.7, 0.27)):
            for dx, dy, r in ((-9, 2, 7), (0, -2, 10), (10, 2, 7)):
                place = (width * x + dx * scale, height * y + dy * scale)
                paint_shape(image, "circle", place, r * scale, (1.0, 1.0, 1.0))
        return " with clouds"
    paint_shape(image, "circle", (width * 0.2, height * 0.22), 13 * scale, (1.0, 0.90, 0.15))
    return " with a sun"


def _paint_mountains(image: Pixels, horizon: float) -> None:
    height, width = image.shape[:2]
    for x, peak in ((0.22, 0.34), (0.75, 0.28)):
        top, half = peak * height, 0.42 * width
        snow = top + 0.25 * (horizon - top)
        rock, cap = [(-half, horizon), (0, top), (half, horizon)], [(-half / 4, snow), (0, top), (half / 4, snow)]
        _polygon(image, (width * x, 0), 1, rock, (0.45, 0.45, 0.52))
        _polygon(image, (width * x, 0), 1, cap, (0.96, 0.97, 1.0))


def _polygon(
    image: Pixels, base: tuple[float, float], scale: float, corners: list[tuple[float, float]], fill: Rgb
) -> None:
    """A polygon given in pixels of a 128-pixel image, from where the thing stands (up is negative)."""
    paint(image, coverage(np.array(corners, np.float32), *image.shape[:2], base, scale), fill)


def _disc(
    image: Pixels, base: tuple[float, float], scale: float, place: tuple[float, float], radius: float, fill: Rgb
) -> None:
    paint_shape(image, "circle", (base[0] + place[0] * scale, base[1] + place[1] * scale), radius * scale, fill)


def _box(x0: float, y0: float, x1: float, y1: float) -> list[tuple[float, float]]:
    return [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]


def _house(image: Pixels, base: tuple[float, float], scale: float, colour: Rgb) -> None:
    _polygon(image, base, scale, _box(-18, -28, 18, 0), colour)
    _polygon(image, base, scale, [(-23, -27), (0, -48), (23, -27)], mix(colour, (0.1, 0.05, 0.05), 0.55))
    _polygon(image, base, scale, _box(-12, -16, -3, 0), (0.30, 0.18, 0.10))
    _polygon(image, base, scale, _box(3, -20, 13, -10), (1.0, 0.95, 0.60))


def _tree(image: Pixels, base: tuple[float, float], scale: float, colour: Rgb) -> None:
    _polygon(image, base, scale, _box(-4, -20, 4, 0), (0.42, 0.26, 0.13))
    for x, y, r in ((-9, -26, 11), (9, -26, 11), (0, -37, 13)):
        _disc(image, base, scale, (x, y), r, (0.10, 0.48, 0.16))


def _car(image: Pixels, base: tuple[float, float], scale: float, colour: Rgb) -> None:
    _polygon(image, base, scale, [(-14, -16), (-9, -28), (10, -28), (16, -16)], colour)
    _polygon(image, base, scale, [(-9, -16), (-6, -24), (8, -24), (11, -16)], (0.80, 0.93, 1.0))
    _polygon(image, base, scale, _box(-25, -17, 25, -5), colour)
    for x in (-14, 14):
        _disc(image, base, scale, (x, -4), 6.5, (0.08, 0.08, 0.08))
        _disc(image, base, scale, (x, -4), 2.6, (0.75, 0.75, 0.75))


def _boat(image: Pixels, base: tuple[float, float], scale: float, colour: Rgb) -> None:
    _polygon(image, base, scale, _box(-1.5, -50, 1.5, -12), (0.40, 0.25, 0.12))
    _polygon(image, base, scale, [(3, -48), (3, -17), (24, -17)], (0.98, 0.98, 0.98))
    _polygon(image, base, scale, [(-28, -14), (28, -14), (18, 4), (-18, 4)], colour)
