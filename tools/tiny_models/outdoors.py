"""Outdoor pictures: "a red house and a tree on green grass under a night sky with stars and a moon".

Every thing is a few polygons and discs in pixels of a 128-pixel picture, measured from where it stands.
"""

import numpy as np

from tools.tiny_models.painting import (
    COLOURS,
    SHAPES,
    Picture,
    Rgb,
    coverage,
    gradient,
    jitter,
    mix,
    paint,
    pick_colour,
)

SKIES = {"blue": ((0.35, 0.65, 0.98), (0.75, 0.90, 1.00)), "night": ((0.03, 0.04, 0.16), (0.12, 0.14, 0.36)),
         "sunset": ((0.98, 0.45, 0.35), (1.00, 0.82, 0.45))}  # fmt: skip
STARS = ((0.1, 0.1), (0.3, 0.22), (0.45, 0.08), (0.12, 0.4), (0.6, 0.3), (0.94, 0.42))  # shares of the picture
GROUNDS = {
    "green grass": (0.25, 0.68, 0.25),
    "yellow sand": (0.93, 0.82, 0.50),
    "white snow": (0.95, 0.97, 1.00),
}


def paint_outdoors(rng: np.random.Generator, height: int, width: int) -> tuple[str, Picture]:
    """(words, picture): sky, ground and one or two things on it."""
    sky = str(rng.choice(list(SKIES)))
    picture = gradient(height, width, *SKIES[sky])
    ground = "the sea" if rng.random() < 0.2 else str(rng.choice(list(GROUNDS)))
    above = _paint_sky_things(rng, picture, sky)
    horizon = height * 0.6875
    if ground != "the sea" and rng.random() < 0.25:
        _paint_mountains(picture, horizon)
        above = f"{above} and mountains" if above else " with mountains"
    ground_colour = (0.10, 0.40, 0.75) if ground == "the sea" else GROUNDS[ground]
    dim = 0.55 if sky == "night" else 0.0
    picture[int(horizon) :] = mix(jitter(ground_colour, rng), (0.05, 0.05, 0.15), dim)
    scale = min(height, width) / 128.0
    things = ["boat"] if ground == "the sea" else list(rng.permutation(["house", "tree", "car"])[: rng.integers(1, 3)])
    shifts = [0.5] if len(things) == 1 else [0.28, 0.72]
    phrases = []
    for thing, shift in zip(things, shifts, strict=True):
        colour = pick_colour(rng, ("black",))
        base = (width * shift, horizon + 8 * scale)
        {"house": _house, "tree": _tree, "car": _car, "boat": _boat}[str(thing)](
            picture, base, scale, jitter(COLOURS[colour], rng)
        )
        phrases.append("a tree" if thing == "tree" else f"a {colour} {thing}")
    return f"{' and '.join(phrases)} on {ground} under a {sky} sky{above}", picture


def _paint_sky_things(rng: np.random.Generator, picture: Picture, sky: str) -> str:
    """Sun, clouds, moon or stars, and the words for them (with a leading blank), often none."""
    height, width = picture.shape[:2]
    scale = min(height, width) / 128.0
    if rng.random() < 0.25:
        return ""
    if sky == "night":
        for x, y in STARS:
            place = (x * width, y * height)
            paint(picture, coverage(SHAPES["star"], height, width, place, 4 * scale), (1.0, 1.0, 0.85))
        if rng.random() < 0.5:
            return " with stars"
        place = (width * 0.8, height * 0.2)
        paint(picture, coverage(SHAPES["crescent"], height, width, place, 12 * scale), (1.0, 0.97, 0.75))
        return " with stars and a moon"
    if sky == "blue" and rng.random() < 0.4:
        for x, y in ((0.25, 0.18), (0.7, 0.27)):
            for dx, dy, r in ((-9, 2, 7), (0, -2, 10), (10, 2, 7)):
                place = (width * x + dx * scale, height * y + dy * scale)
                paint(picture, coverage(SHAPES["circle"], height, width, place, r * scale), (1.0, 1.0, 1.0))
        return " with clouds"
    place = (width * 0.2, height * 0.22)
    paint(picture, coverage(SHAPES["circle"], height, width, place, 13 * scale), (1.0, 0.90, 0.15))
    return " with a sun"


def _paint_mountains(picture: Picture, horizon: float) -> None:
    height, width = picture.shape[:2]
    for x, peak in ((0.22, 0.34), (0.75, 0.28)):
        top, half = peak * height, 0.42 * width
        outline = np.array([(-half, horizon), (0.0, top), (half, horizon)], np.float32)
        cap = np.array(
            [
                (-half * 0.25, top + 0.25 * (horizon - top)),
                (0.0, top),
                (half * 0.25, top + 0.25 * (horizon - top)),
            ]
        )
        place = (width * x, 0.0)
        paint(picture, coverage(outline, height, width, place, 1.0), (0.45, 0.45, 0.52))
        paint(picture, coverage(cap.astype(np.float32), height, width, place, 1.0), (0.96, 0.97, 1.0))


def _polygon(
    picture: Picture, base: tuple[float, float], scale: float, corners: list[tuple[float, float]], fill: Rgb
) -> None:
    """A polygon given in pixels of a 128-pixel picture, from where the thing stands (up is negative)."""
    paint(picture, coverage(np.array(corners, np.float32), *picture.shape[:2], base, scale), fill)


def _disc(
    picture: Picture,
    base: tuple[float, float],
    scale: float,
    place: tuple[float, float],
    radius: float,
    fill: Rgb,
) -> None:
    centre = (base[0] + place[0] * scale, base[1] + place[1] * scale)
    paint(picture, coverage(SHAPES["circle"], *picture.shape[:2], centre, radius * scale), fill)


def _box(x0: float, y0: float, x1: float, y1: float) -> list[tuple[float, float]]:
    return [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]


def _house(picture: Picture, base: tuple[float, float], scale: float, colour: Rgb) -> None:
    _polygon(picture, base, scale, _box(-18, -28, 18, 0), colour)
    _polygon(picture, base, scale, [(-23, -27), (0, -48), (23, -27)], mix(colour, (0.1, 0.05, 0.05), 0.55))
    _polygon(picture, base, scale, _box(-12, -16, -3, 0), (0.30, 0.18, 0.10))
    _polygon(picture, base, scale, _box(3, -20, 13, -10), (1.0, 0.95, 0.60))


def _tree(picture: Picture, base: tuple[float, float], scale: float, colour: Rgb) -> None:
    _polygon(picture, base, scale, _box(-4, -20, 4, 0), (0.42, 0.26, 0.13))
    for x, y, r in ((-9, -26, 11), (9, -26, 11), (0, -37, 13)):
        _disc(picture, base, scale, (x, y), r, (0.10, 0.48, 0.16))


def _car(picture: Picture, base: tuple[float, float], scale: float, colour: Rgb) -> None:
    _polygon(picture, base, scale, [(-14, -16), (-9, -28), (10, -28), (16, -16)], colour)
    _polygon(picture, base, scale, [(-9, -16), (-6, -24), (8, -24), (11, -16)], (0.80, 0.93, 1.0))
    _polygon(picture, base, scale, _box(-25, -17, 25, -5), colour)
    for x in (-14, 14):
        _disc(picture, base, scale, (x, -4), 6.5, (0.08, 0.08, 0.08))
        _disc(picture, base, scale, (x, -4), 2.6, (0.75, 0.75, 0.75))


def _boat(picture: Picture, base: tuple[float, float], scale: float, colour: Rgb) -> None:
    _polygon(picture, base, scale, _box(-1.5, -50, 1.5, -12), (0.40, 0.25, 0.12))
    _polygon(picture, base, scale, [(3, -48), (3, -17), (24, -17)], (0.98, 0.98, 0.98))
    _polygon(picture, base, scale, [(-28, -14), (28, -14), (18, 4), (-18, 4)], colour)
