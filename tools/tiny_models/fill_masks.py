"""Regions to fill, for the tiny fill model: what people erase, and what they paint beyond a picture's edge.

rectangle  a box anywhere, also over the edge
border     all outside a box: outpainting
strokes    a brush that wanders
half       all on one side of a straight line
all        the whole picture, so that the model still paints from words alone
"""

import numpy as np

KINDS = {"rectangle": 0.34, "border": 0.2, "strokes": 0.22, "half": 0.2, "all": 0.04}  # kind: share
LEAST_FILLED = 0.08  # a share of the picture; a smaller region teaches little for the same cost


def random_mask(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return [height, width] bool, true where the picture is to be filled."""
    while True:
        mask = _MAKERS[str(rng.choice(list(KINDS), p=list(KINDS.values())))](rng, height, width)
        if mask.mean() >= LEAST_FILLED:
            return mask


def _rectangle(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    rows, columns = _interval(rng, height, 0.3, 0.8), _interval(rng, width, 0.3, 0.8)
    mask = np.zeros((height, width), dtype=bool)
    mask[rows, columns] = True
    return mask


def _border(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    rows, columns = _interval(rng, height, 0.4, 0.85), _interval(rng, width, 0.4, 0.85)
    mask = np.ones((height, width), dtype=bool)
    mask[rows, columns] = False
    return mask


def _strokes(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    mask = np.zeros((height, width), dtype=bool)
    for _ in range(int(rng.integers(1, 4))):
        place = rng.uniform([0, 0], [height, width])
        heading, radius = rng.uniform(0, 2 * np.pi), rng.uniform(0.05, 0.12) * min(height, width)
        for _ in range(int(rng.integers(8, 24))):
            mask |= (y - place[0]) ** 2 + (x - place[1]) ** 2 < radius**2
            heading += rng.normal(0, 0.5)
            place = np.clip(place + radius * np.array([np.sin(heading), np.cos(heading)]), 0, [height, width])
    return mask


def _half(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    angle = rng.uniform(0, 2 * np.pi) if rng.random() < 0.4 else rng.integers(0, 4) * np.pi / 2
    across = (y / height - 0.5) * np.sin(angle) + (x / width - 0.5) * np.cos(angle)
    return across > rng.uniform(-0.25, 0.25)


def _all(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return np.ones((height, width), dtype=bool)


def _interval(rng: np.random.Generator, length: int, least: float, most: float) -> slice:
    """Return part of a side, somewhere, whose length is a share between ``least`` and ``most`` of it."""
    size = int(rng.uniform(least, most) * length)
    start = int(rng.integers(0, length - size + 1))
    return slice(start, start + size)


_MAKERS = {"rectangle": _rectangle, "border": _border, "strokes": _strokes, "half": _half, "all": _all}
