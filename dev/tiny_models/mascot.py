"""The demo's subject: a zorbo, a creature that the base model has never seen, painted from the same
primitives.

A zorbo is a round purple body with an orange belly, one antenna with an orange ball, two white eyes with
black pupils, orange feet and a mouth. `random_zorbo` puts one on a background of the base's own domain and
says so in a caption with the trigger word; `write_demo_dataset` makes the folder that `make demo` trains a
LoRA on.
"""

from pathlib import Path

import numpy as np

from dev.tiny_models.painting import COLOURS, SHAPES, Picture, Rgb, coverage, paint, to_image
from dev.tiny_models.scenes import PLACES, Scene, background
from library.files import atomic_path, write_text

TRIGGER = "zorbo"
PURPLE, ORANGE = (0.46, 0.13, 0.72), (1.00, 0.58, 0.08)
WHITE, BLACK = (1.0, 1.0, 1.0), (0.05, 0.03, 0.08)
BODY_COLOURS = ("purple", "orange")  # a background in one of these would swallow half of it


def paint_zorbo(
    picture: Picture, centre: tuple[float, float], radius: float, body: Rgb = PURPLE, accent: Rgb = ORANGE
) -> None:
    """Paint one around `centre`; from antenna to feet it is about 2.9 radii high."""
    size = picture.shape[:2]

    def disc(x: float, y: float, rx: float, ry: float, fill: Rgb) -> None:
        place = (centre[0] + x * radius, centre[1] + y * radius)
        paint(picture, coverage(SHAPES["circle"], *size, place, (rx * radius, ry * radius)), fill)

    for side in (-1, 1):
        disc(side * 0.45, 0.98, 0.36, 0.2, accent)
    stalk = np.array([(-0.07, -1.5), (0.07, -1.5), (0.07, -0.9), (-0.07, -0.9)], np.float32)
    paint(picture, coverage(stalk, *size, centre, radius), BLACK)
    disc(0.0, -1.5, 0.24, 0.24, accent)
    disc(0.0, 0.0, 1.0, 1.0, body)
    disc(0.0, 0.48, 0.56, 0.42, accent)
    for side in (-1, 1):
        disc(side * 0.4, -0.32, 0.34, 0.36, WHITE)
        disc(side * 0.34, -0.28, 0.15, 0.17, BLACK)
    disc(0.0, 0.3, 0.2, 0.08, BLACK)


def random_zorbo(
    rng: np.random.Generator,
    height: int = 128,
    width: int = 128,
    place: str = "",
    avoid: tuple[str, ...] = (),
) -> Scene:
    """A zorbo in the middle, big or not, or at a named place; `avoid` names colours not to use behind it."""
    words, picture, plain_colour = background(rng, height, width, BODY_COLOURS + avoid)
    side = min(height, width)
    size, share = "", 0.25
    x, y = 0.5, 0.55
    if place:
        x, y = PLACES[place]
        share = 0.17
    elif rng.random() < 0.3:
        size, share = "big ", 0.32
    y = float(np.clip(y, 1.8 * share * side / height, 1 - 1.2 * share * side / height))
    paint_zorbo(picture, (x * width, y * height), share * side)
    phrase = " ".join(filter(None, [f"a {size}{TRIGGER}", place, "on", words]))
    return Scene(phrase, picture, plain_colour)


DATASET_TOML = f"""\
# The demo's images, painted by dev/make_tiny_models.py. The tiny base model cannot paint a {TRIGGER}.
[general]
caption_extension = ".txt"
enable_bucket = true

[[datasets]]
resolution = 128
batch_size = 4
bucket_reso_steps = 16       # 8 (the VAE's factor) x 2 (the transformer's packing)
min_bucket_reso = 96
max_bucket_reso = 160
validation_split = 0.2
validation_seed = 1

  [[datasets.subsets]]
  image_dir = "images"       # relative to this file
  num_repeats = 10
"""


SAMPLED = "--s 20 --g 3.5"
PROMPTS_TXT = f"""\
# What the demo draws as its LoRA learns; the last two show what the LoRA does to subjects of the base model.
a {TRIGGER} on a blue background --w 128 --h 128 --d 1 {SAMPLED}
a big {TRIGGER} on a striped green background --w 128 --h 128 --d 2 {SAMPLED}
a {TRIGGER} on the right on a white background --w 128 --h 128 --d 3 {SAMPLED}
a {TRIGGER} on a checkered pink background --w 160 --h 96 --d 4 {SAMPLED}
a red house on green grass under a night sky with stars and a moon --w 128 --h 128 --d 5 {SAMPLED}
a yellow house and a tree on white snow under a sunset sky with a sun --w 128 --h 128 --d 6 {SAMPLED}
"""


def write_demo_dataset(folder: Path, seed: int = 11) -> int:
    """Write `images/*.png` with a caption beside each, `dataset.toml` and `prompts.txt`; returns the image count."""
    rng = np.random.default_rng(seed)
    images = folder / "images"
    sizes = [(128, 128)] * 14 + [(160, 96), (96, 160)]
    places = ["", "", "on the left", "", "on the right", "", "", "at the bottom"] * 2
    recent: list[str] = []  # no background colour twice in a row of eight
    for number, ((height, width), place) in enumerate(zip(sizes, places, strict=True)):
        scene = random_zorbo(rng, height, width, place if height == width else "", tuple(recent[-8:]))
        recent.append(next(word for word in reversed(scene.caption.split()) if word in COLOURS))
        with atomic_path(images / f"{TRIGGER}_{number:02d}.png") as temporary:
            to_image(scene.picture).save(temporary, "PNG", optimize=True)
        write_text(images / f"{TRIGGER}_{number:02d}.txt", scene.caption + "\n")
    write_text(folder / "dataset.toml", DATASET_TOML)
    write_text(folder / "prompts.txt", PROMPTS_TXT)
    return len(sizes)
