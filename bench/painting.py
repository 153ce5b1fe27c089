"""Images of invented subjects on backgrounds that the tiny models know: what the benchmarks train and measure on.

An image is a float32 array [H, W, 3] in 0..1. A shape is an outline, a polygon around the origin that fits into the
unit circle, with y pointing down. `coverage` draws an outline OVERSAMPLING times too large with Pillow and averages
down, which gives for every pixel the share that the shape covers; `paint` blends a colour or a pattern in by that
share. Everything random comes from the numpy generator that the caller passes, so a seed fixes the image.

The demo's subject is a zorbo, a creature that the base model has never seen: a round purple body with an orange belly,
one antenna with an orange ball, two white eyes with black pupils, orange feet and a mouth.
"""

from __future__ import annotations

import math

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


def _heart() -> Outline:
    t = np.linspace(0, 2 * math.pi, 48, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
    return (np.stack([x, y - 2.5], axis=1) / 17.0).astype(np.float32)


SHAPES: dict[str, Outline] = {
    "circle": regular_polygon(48),
    "square": regular_polygon(4, math.pi / 4) * 1.15,
    "star": _star(),
    "heart": _heart(),
}


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


def _soft_square_wave(phase: np.ndarray, period: float) -> np.ndarray:
    """0 and 1 by turns with one period per unit of phase; edges one pixel wide when `period` is in pixels."""
    distance = np.abs((phase % 1.0) - 0.5) * 2.0  # 1 at the wave's start, 0 at its middle
    return np.clip((distance - 0.5) * period / 2.0 + 0.5, 0.0, 1.0)


def _pattern(kind: str, x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> Mask:
    """Where a pattern has its second colour; ``x`` [1, W] and ``y`` [H, 1] are pixel centres."""
    if kind == "striped":
        angle = float(rng.choice([0.0, np.pi / 2]))
        return _soft_square_wave((x * math.cos(angle) + y * math.sin(angle)) / 16.0, 16.0)
    if kind == "checkered":
        across, down = _soft_square_wave(x / 32.0, 32.0), _soft_square_wave(y / 32.0, 32.0)
        return across * (1 - down) + down * (1 - across)
    off_x, off_y = (x / 16.0) % 1.0 - 0.5, (y / 16.0) % 1.0 - 0.5
    return np.clip(0.28 * 16.0 - np.sqrt(off_x**2 + off_y**2) * 16.0 + 0.5, 0.0, 1.0)


def to_image(image: Pixels) -> Image.Image:
    return Image.fromarray((np.clip(image, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8))


def background(rng: np.random.Generator, side: int, avoid: tuple[str, ...]) -> tuple[str, Pixels]:
    """The words and the pixels of a square background, never in an `avoid` colour."""
    colour = str(rng.choice([name for name in COLOURS if name not in avoid]))
    # a little chance, so that a name means a neighbourhood and not a point
    first = tuple(float(np.clip(value + rng.uniform(-0.03, 0.03), 0.0, 1.0)) for value in COLOURS[colour])
    pattern = str(rng.choice(["plain", "gradient", "striped", "checkered", "dotted"], p=[0.52, 0.06, 0.14, 0.14, 0.14]))
    image = np.broadcast_to(np.asarray(first, np.float32), (side, side, 3)).copy()
    if pattern == "plain":
        return f"a {colour} background", image
    words, centres = f"a {pattern} {colour} background", np.arange(side, dtype=np.float32) + 0.5
    if pattern == "gradient":
        down = np.broadcast_to(np.linspace(0.0, 1.0, side, dtype=np.float32)[:, None], (side, side))
        paint(image, down, mix(first, (1.0, 1.0, 1.0), 0.7))
    else:
        paint(image, _pattern(pattern, centres[None], centres[:, None], rng), companion(first))
    return words, image


TRIGGER = "zorbo"
PURPLE, ORANGE = (0.46, 0.13, 0.72), (1.00, 0.58, 0.08)
WHITE, BLACK = (1.0, 1.0, 1.0), (0.05, 0.03, 0.08)
BODY_COLOURS = ("purple", "orange")  # a background in one of these would swallow half of it


def paint_zorbo(image: Pixels, centre: tuple[float, float], radius: float) -> None:
    """Paint one around `centre`; from antenna to feet it is about 2.9 radii high."""

    def disc(x: float, y: float, rx: float, ry: float, fill: Rgb) -> None:
        place = (centre[0] + x * radius, centre[1] + y * radius)
        paint_shape(image, "circle", place, (rx * radius, ry * radius), fill)

    for side in (-1, 1):
        disc(side * 0.45, 0.98, 0.36, 0.2, ORANGE)
    stalk = np.array([(-0.07, -1.5), (0.07, -1.5), (0.07, -0.9), (-0.07, -0.9)], np.float32)
    paint(image, coverage(stalk, *image.shape[:2], centre, radius), BLACK)
    disc(0.0, -1.5, 0.24, 0.24, ORANGE)
    disc(0.0, 0.0, 1.0, 1.0, PURPLE)
    disc(0.0, 0.48, 0.56, 0.42, ORANGE)
    for side in (-1, 1):
        disc(side * 0.4, -0.32, 0.34, 0.36, WHITE)
        disc(side * 0.34, -0.28, 0.15, 0.17, BLACK)
    disc(0.0, 0.3, 0.2, 0.08, BLACK)


def random_zorbo(rng: np.random.Generator) -> tuple[str, Pixels]:
    """Return the caption and the image of a zorbo in the middle, big or not."""
    side = 128
    words, image = background(rng, side, BODY_COLOURS)
    size, share = ("big ", 0.32) if rng.random() < 0.3 else ("", 0.25)
    y = float(np.clip(0.55, 1.8 * share, 1 - 1.2 * share))
    paint_zorbo(image, (0.5 * side, y * side), share * side)
    return f"a {size}{TRIGGER} on {words}", image
