"""Captioned images: the domain of the tiny models, from one shape to a house at night.

`random_scene` draws words first and paints what they say, so a caption is true by construction. Four kinds:
    one      "a big red circle on a striped green background", "a yellow star in the top left corner on ..."
    pair     "a red circle above a blue square on a white background"
    group    "three pink hearts on a black background"
    outdoor  "a red house and a tree on green grass under a night sky with a moon"
A scene also lists its `items`: which named shape in which named colour lies where.

Words fix sizes and places to the pixel; only colours vary a little. A model this small paints crisply what the
words settle: after 5,000 steps with places and sizes left to chance it had the colours right, but no outlines.

A few captions carry an invented word that changes nothing in the image, and a few leave something out:
the text encoders see every character that way, and a word that they do not know (a LoRA's trigger word)
does not throw them.

The demo's subject is a zorbo, a creature that the base model has never seen, painted from the same primitives: a
round purple body with an orange belly, one antenna with an orange ball, two white eyes with
black pupils, orange feet and a mouth. `random_zorbo` puts one on a background of the base's own domain and
says so in a caption with the trigger word; `write_demo_images` paints those that `make demo` trains a
LoRA on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from dev.tiny_models.painting import (
    COLOURS,
    SHAPES,
    Pixels,
    Rgb,
    checkers,
    companion,
    coverage,
    dots,
    gradient,
    jitter,
    mix,
    paint,
    paint_outdoors,
    paint_shape,
    pick_colour,
    plain,
    stripes,
    to_image,
)
from library.files import write_text

PATTERNS = ("striped", "checkered", "dotted")
COUNTS = {2: "two", 3: "three", 4: "four"}
PLACES = {  # where "one" may stand, as shares of the image's width and height
    "on the left": (0.25, 0.5),
    "on the right": (0.75, 0.5),
    "at the top": (0.5, 0.25),
    "at the bottom": (0.5, 0.75),
    "in the top left corner": (0.25, 0.25),
    "in the top right corner": (0.75, 0.25),
    "in the bottom left corner": (0.25, 0.75),
    "in the bottom right corner": (0.75, 0.75),
}
RELATIONS = {  # the first shape's offset from the middle; the second one gets the opposite
    "above": (0.0, -0.25),
    "below": (0.0, 0.25),
    "left of": (-0.25, 0.0),
    "right of": (0.25, 0.0),
}
RADII = {"": 0.25, "small": 0.125, "big": 0.375}  # shares of the shorter side
PLACED_RADIUS = 0.17
OPENINGS = ("a picture of ", "a drawing of ", "an image of ", "a photo of ")
SYLLABLES = ["ba", "ru", "mi", "tok", "vu", "lex", "qua", "fni", "jo", "sy", "wub", "dra", "pel", "ghi", "cht", "xo"]


@dataclass(frozen=True)
class Item:
    """One named shape: its outline's centre and radius in pixels."""

    shape: str
    colour: str
    centre: tuple[float, float]
    radius: float


@dataclass(frozen=True)
class Scene:
    caption: str
    image: Pixels
    background_colour: str | None  # the named colour of a plain background, None for any other
    items: list[Item] = field(default_factory=list)


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def random_scene(rng: np.random.Generator, height: int = 128, width: int = 128) -> Scene:
    kind = str(rng.choice(["one", "pair", "group", "outdoor"], p=[0.42, 0.28, 0.08, 0.22]))
    if kind == "outdoor":
        caption, image = paint_outdoors(rng, height, width)
        return Scene(_disguise(rng, caption), image, None)
    scene = {"one": _one, "pair": _pair, "group": _group}[kind](rng, height, width)
    return replace(scene, caption=_disguise(rng, scene.caption))


def invented_word(rng: np.random.Generator) -> str:
    if rng.random() < 0.5:
        return "".join(rng.choice(SYLLABLES, size=rng.integers(2, 4)))
    return "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz0123456789"), size=rng.integers(2, 8)))


def background(
    rng: np.random.Generator, height: int, width: int, avoid: tuple[str, ...]
) -> tuple[str, Pixels, str | None]:
    """(its words, its pixels, its colour's name if it is plain); never in an `avoid` colour."""
    colour = pick_colour(rng, avoid)
    first = jitter(COLOURS[colour], rng)
    pattern = rng.choice(["plain", "gradient", *PATTERNS], p=[0.52, 0.06, 0.14, 0.14, 0.14])
    if pattern == "plain":
        return f"a {colour} background", plain(height, width, first), colour
    if pattern == "gradient":
        return f"a gradient {colour} background", gradient(height, width, first, mix(first, (1, 1, 1), 0.7)), None
    words, second = f"a {pattern} {colour} background", companion(first)
    if pattern == "striped":
        angle = float(rng.choice([0.0, np.pi / 2]))
        return words, stripes(height, width, first, second, period=16.0, angle=angle), None
    painter = {"checkered": checkers, "dotted": dots}[str(pattern)]
    return words, painter(height, width, first, second, 32.0 if pattern == "checkered" else 16.0), None


def _put(rng: np.random.Generator, image: Pixels, item: Item) -> None:
    paint_shape(image, item.shape, item.centre, item.radius, jitter(COLOURS[item.colour], rng))


def _face(image: Pixels, item: Item) -> None:
    """Two eyes and a smile, black, or white on a dark shape."""
    colour = (0.05, 0.05, 0.05) if item.colour not in ("black", "blue", "purple", "brown") else (1.0, 1.0, 1.0)
    (x, y), r = item.centre, item.radius
    for side in (-1, 1):
        paint_shape(image, "circle", (x + side * 0.33 * r, y - 0.2 * r), 0.13 * r, colour)
    t = np.linspace(0.12 * np.pi, 0.88 * np.pi, 16)
    arc = np.stack([np.cos(t), np.sin(t)], axis=1)
    smile = np.concatenate([arc * 0.6, arc[::-1] * 0.44])
    paint(image, coverage(smile.astype(np.float32), *image.shape[:2], (x, y), r), colour)


def _one(rng: np.random.Generator, height: int, width: int) -> Scene:
    side = min(height, width)
    shape, colour = str(rng.choice(list(SHAPES))), pick_colour(rng)
    words, image, plain_colour = background(rng, height, width, (colour,))
    size, place, smiling = "", "", False
    if rng.random() < 0.35:
        place = str(rng.choice(list(PLACES)))
    elif rng.random() < 0.4:
        size = str(rng.choice(["small", "big"]))
        smiling = size == "big" and shape in ("circle", "square", "hexagon") and rng.random() < 0.5
    x, y = PLACES.get(place, (0.5, 0.5))
    item = Item(shape, colour, (x * width, y * height), side * (PLACED_RADIUS if place else RADII[size]))
    _put(rng, image, item)
    if smiling:
        _face(image, item)
    noun = " ".join(filter(None, ["a", size, "smiling" if smiling else "", colour, shape, place]))
    return Scene(f"{noun} on {words}", image, plain_colour, [] if smiling else [item])


def _pair(rng: np.random.Generator, height: int, width: int) -> Scene:
    side = min(height, width)
    colours = [pick_colour(rng)]
    colours.append(pick_colour(rng, tuple(colours)))
    shapes = [str(rng.choice(list(SHAPES))) for _ in range(2)]
    words, image, plain_colour = background(rng, height, width, tuple(colours))
    relation = str(rng.choice([*RELATIONS, "inside"], p=[0.22, 0.22, 0.22, 0.22, 0.12]))
    if relation == "inside":
        shapes[1] = str(rng.choice(["circle", "square", "hexagon", "diamond", "heart"]))
        places, shares = [(width / 2, height / 2)] * 2, [0.15, 0.40]
    else:
        dx, dy = RELATIONS[relation]
        places = [(width * (0.5 + s * dx), height * (0.5 + s * dy)) for s in (1, -1)]
        shares = [0.18, 0.18]
    items = [Item(*named) for named in zip(shapes, colours, places, [s * side for s in shares], strict=True)]
    for item in reversed(items):
        _put(rng, image, item)
    spoken = f"a {colours[0]} {shapes[0]} {relation} a {colours[1]} {shapes[1]} on {words}"
    if relation.endswith(" of") and rng.random() < 0.3:
        spoken = spoken.replace(relation, f"to the {relation}")
    return Scene(spoken, image, plain_colour, items if relation != "inside" else items[:1])


def _group(rng: np.random.Generator, height: int, width: int) -> Scene:
    """Two to four equal shapes: side by side, or four as two rows of two."""
    shape, colour, count = str(rng.choice(list(SHAPES))), pick_colour(rng), int(rng.integers(2, 5))
    words, image, plain_colour = background(rng, height, width, (colour,))
    if count == 4:
        places = [(x, y) for y in (0.28, 0.72) for x in (0.28, 0.72)]
    else:
        places = [((i + 0.5) / count * 0.92 + 0.04, 0.5) for i in range(count)]
    radius = min(height, width) * {2: 0.18, 3: 0.135, 4: 0.16}[count]
    items = [Item(shape, colour, (x * width, y * height), radius) for x, y in places]
    for item in items:
        _put(rng, image, item)
    return Scene(f"{COUNTS[count]} {colour} {plural(shape)} on {words}", image, plain_colour, items)


def _disguise(rng: np.random.Generator, caption: str) -> str:
    """The caption as people write: with an opening, a word of their own, a full stop, or shortened."""
    caption = f" {caption}".replace(" a orange", " an orange").strip()
    chance = rng.random()
    if chance < 0.08:
        caption = str(rng.choice(OPENINGS)) + caption
    elif chance < 0.12:
        words = caption.split()
        words.insert(int(rng.integers(0, len(words))), invented_word(rng))
        caption = " ".join(words)
    elif chance < 0.16 and " on " in caption:
        caption = caption.rsplit(" on ", 1)[0]
    if rng.random() < 0.06:
        caption = caption[0].upper() + caption[1:]
    return caption + "." if rng.random() < 0.05 else caption


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


def random_zorbo(
    rng: np.random.Generator, height: int = 128, width: int = 128, place: str = "", avoid: tuple[str, ...] = ()
) -> Scene:
    """A zorbo in the middle, big or not, or at a named place; `avoid` names colours not to use behind it."""
    words, image, plain_colour = background(rng, height, width, BODY_COLOURS + avoid)
    side = min(height, width)
    size, share = "", 0.25
    x, y = 0.5, 0.55
    if place:
        x, y = PLACES[place]
        share = 0.17
    elif rng.random() < 0.3:
        size, share = "big ", 0.32
    y = float(np.clip(y, 1.8 * share * side / height, 1 - 1.2 * share * side / height))
    paint_zorbo(image, (x * width, y * height), share * side)
    phrase = " ".join(filter(None, [f"a {size}{TRIGGER}", place, "on", words]))
    return Scene(phrase, image, plain_colour)


def write_demo_images(folder: Path, seed: int = 11) -> None:
    """Paint the demo's images, with a caption beside each."""
    rng = np.random.default_rng(seed)
    sizes = [(128, 128)] * 14 + [(160, 96), (96, 160)]
    places = ["", "", "on the left", "", "on the right", "", "", "at the bottom"] * 2
    recent: list[str] = []  # no background colour twice in a row of eight
    for number, ((height, width), place) in enumerate(zip(sizes, places, strict=True)):
        scene = random_zorbo(rng, height, width, place if height == width else "", tuple(recent[-8:]))
        recent.append(next(word for word in reversed(scene.caption.split()) if word in COLOURS))
        to_image(scene.image).save(folder / f"{TRIGGER}_{number:02d}.png", "PNG", optimize=True)
        write_text(folder / f"{TRIGGER}_{number:02d}.txt", scene.caption + "\n")
