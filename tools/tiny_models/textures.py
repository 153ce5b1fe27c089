"""Pictures for the VAE alone: any colour, any angle, any detail, so that it keeps what a user's images may
hold.

The transformer learns the narrow domain of `scenes`; the VAE must also carry what a LoRA brings along
later. So half of its pictures are scenes, the rest are random outlines and lines, patterns at any angle,
soft noise, and creatures built like the demo's subject in random colours.
"""

import numpy as np

from tools.tiny_models.mascot import paint_zorbo, random_zorbo
from tools.tiny_models.painting import (
    SHAPES,
    Picture,
    Rgb,
    checkers,
    coverage,
    dots,
    gradient,
    paint,
    plain,
    stripes,
)
from tools.tiny_models.scenes import random_scene


def random_texture_picture(rng: np.random.Generator, height: int = 128, width: int = 128) -> Picture:
    """One picture of the VAE's training set."""
    chance = rng.random()
    if chance < 0.5:
        return random_scene(rng, height, width).picture
    if chance < 0.58:
        return random_zorbo(rng, height, width).picture
    picture = _ground(rng, height, width)
    if chance < 0.68:
        centre = (rng.uniform(0.2, 0.8) * width, rng.uniform(0.2, 0.8) * height)
        paint_zorbo(picture, centre, rng.uniform(0.12, 0.4) * min(height, width), _rgb(rng), _rgb(rng))
        return picture
    for _ in range(int(rng.integers(1, 9))):
        _throw(rng, picture)
    if rng.random() < 0.2:
        picture += _soft_noise(rng, height, width) * rng.uniform(0.05, 0.3)
    return np.clip(picture, 0.0, 1.0)


def _rgb(rng: np.random.Generator) -> Rgb:
    """Any colour, half of the time pushed towards the corners of the cube, where flat drawings live."""
    colour = rng.random(3)
    return tuple(np.round(colour * 2) / 2) if rng.random() < 0.3 else tuple(colour)


def _ground(rng: np.random.Generator, height: int, width: int) -> Picture:
    first, second, period = _rgb(rng), _rgb(rng), rng.uniform(5.0, 40.0)
    match rng.integers(0, 6):
        case 0:
            return gradient(height, width, first, second)
        case 1:
            return stripes(height, width, first, second, period, rng.uniform(0, np.pi))
        case 2:
            return checkers(height, width, first, second, period)
        case 3:
            return dots(height, width, first, second, max(period, 7.0))
        case 4:
            return np.clip(plain(height, width, first) + _soft_noise(rng, height, width) * 0.5, 0.0, 1.0)
    return plain(height, width, first)


def _throw(rng: np.random.Generator, picture: Picture) -> None:
    """A random shape, stretched and turned, or a line, in one colour or filled with a pattern."""
    height, width = picture.shape[:2]
    centre = (rng.uniform(0, width), rng.uniform(0, height))
    if rng.random() < 0.3:
        outline, radius = SHAPES["square"], (rng.uniform(10, 80), rng.uniform(0.6, 3.0))
    else:
        outline = SHAPES[str(rng.choice(list(SHAPES)))]
        radius = tuple(rng.uniform(2, 40) * rng.uniform(0.6, 1.4, size=2))
    fill = _ground(rng, height, width) if rng.random() < 0.2 else _rgb(rng)
    paint(picture, coverage(outline, height, width, centre, radius, rng.uniform(0, 2 * np.pi)), fill)


def _soft_noise(rng: np.random.Generator, height: int, width: int) -> Picture:
    """Coloured noise, -0.5..0.5, blurred by stretching a coarse grid (bilinear)."""
    cell = int(rng.choice([4, 8, 16]))
    coarse = rng.random((height // cell + 2, width // cell + 2, 3)).astype(np.float32) - 0.5
    y, x = np.arange(height) / cell, np.arange(width) / cell
    top, left = y.astype(int), x.astype(int)
    dy, dx = (y - top)[:, None, None].astype(np.float32), (x - left)[None, :, None].astype(np.float32)
    upper = coarse[top][:, left] * (1 - dx) + coarse[top][:, left + 1] * dx
    lower = coarse[top + 1][:, left] * (1 - dx) + coarse[top + 1][:, left + 1] * dx
    return upper * (1 - dy) + lower * dy
