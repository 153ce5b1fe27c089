"""Regions to fill, for the tiny fill model: what people erase, and what they paint beyond a picture's edge.

rectangle  a box anywhere, also over the edge
border     all outside a box: outpainting
strokes    a brush that wanders
half       all on one side of a straight line
all        the whole picture, so that the model still paints from words alone

The fill model's training set: painted scenes, each with one region blanked, as latents on disk.

A row holds the latents of the whole scene, the latents of the scene with its region at mid-grey (0 in [-1, 1], as
FLUX.1 Fill sees it), the region's mask in pixels and the caption's token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL

from dev.tiny_models.latent_pool import ENCODER_BATCH, SIZES, Captions, encode_prompt_images, tokenize
from dev.tiny_models.run_state import Progress, save_state
from dev.tiny_models.scenes import random_scene

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


MID_GREY = 0.5  # of pixels in 0..1; 0 in [-1, 1]


@dataclass(frozen=True)
class FillRows:
    latents: torch.Tensor  # [N, 16, h, w] bf16
    masked: torch.Tensor  # the same shape
    masks: torch.Tensor  # [N, H, W] bool, true where the picture is to be filled
    captions: Captions


FillPool = dict[tuple[int, int], FillRows]  # by (height, width) of the pictures


def blanked(pictures: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """[N, H, W, 3] in 0..1 with mid-grey where ``masks`` [N, H, W] are true."""
    return np.where(masks[..., None], np.float32(MID_GREY), pictures)


def paint_fill_pool(vae: AutoencoderKL, count: int, seed: int, path: Path) -> None:
    """Write `count` rows, shared among the sizes as in the pool of `latent_pool`, to `path`."""
    rng = np.random.default_rng([seed, 78])
    batches = [(size, max(1, int(count * share) // ENCODER_BATCH)) for size, share in SIZES.items()]
    progress, done = Progress("fill_encode", 0, sum(number for _, number in batches), every=20), 0
    state = {}
    for (height, width), number in batches:
        latents, masked, masks, texts = [], [], [], []
        for _ in range(number):
            scenes = [random_scene(rng, height, width) for _ in range(ENCODER_BATCH)]
            pictures = np.stack([scene.picture for scene in scenes])
            regions = np.stack([random_mask(rng, height, width) for _ in scenes])
            latents.append(encode_prompt_images(vae, pictures))
            masked.append(encode_prompt_images(vae, blanked(pictures, regions)))
            masks.append(torch.from_numpy(regions))
            texts += [scene.caption for scene in scenes]
            progress.report(done, {})
            done += 1
        captions = tokenize(texts)
        tensors = {"latents": torch.cat(latents), "masked": torch.cat(masked), "masks": torch.cat(masks)}
        state[f"{height}x{width}"] = tensors | {"t5": captions.t5, "clip": captions.clip}
    save_state(path, state)


def load_fill_pool(path: Path) -> FillPool:
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return {
        tuple(int(side) for side in name.split("x")): FillRows(
            part["latents"], part["masked"], part["masks"], Captions(part["t5"], part["clip"])
        )
        for name, part in state.items()
    }
