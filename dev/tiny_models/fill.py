"""The tiny fill model: the tiny FLUX goes on, with a blanked image and a mask beside the noise.

Regions to fill are what people erase, and what they paint beyond an image's edge:

rectangle  a box anywhere, also over the edge
border     all outside a box: outpainting
strokes    a brush that wanders
half       all on one side of a straight line
all        the full image, so that the model still paints from words alone

The training set is painted scenes with one region blanked (``latent_pool``). As in FLUX.1 Fill, the transformer's first
layer also takes the blanked image's latents and the mask, packed as FluxFillPipeline packs them. Its new columns start
at zero, so training starts from the text-to-image model. The text encoders stay as they are. The target is the velocity
noise - image, as in `training`; positions in the region count more, or its loss would drown in that of the known part,
which is soon copied. The guidance input is random over a wide range and says nothing, so that any guidance scale,
Fill's default of 30 among them, samples alike.

The result is a FluxFillPipeline folder, a sheet of its work, and how well it fills. Held-out scenes are painted with a
seed that training never uses. The yardstick is what the pixels around the region already say: grey, and the known
colours spread inwards (`spread`), which is what a blur would give.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FluxFillPipeline, FluxTransformer2DModel
from torch import Tensor

from dev.tiny_models.latent_pool import MID_GREY, blanked
from dev.tiny_models.scenes import random_scene
from dev.tiny_models.training import Batch
from dev.tiny_models.transformer import LATENT_FACTOR, TextToImage, load_pipeline, write_sheet

KINDS = {"rectangle": 0.34, "border": 0.2, "strokes": 0.22, "half": 0.2, "all": 0.04}  # kind: share
LEAST_FILLED = 0.08  # a share of the image; a smaller region teaches little for the same cost


def random_mask(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return [height, width] bool, true where the image is to be filled."""
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


REGION_WEIGHT = 2.0


def widened(base: TextToImage) -> TextToImage:
    """`base`, frozen, with a transformer that is trained and also takes blanked image and mask.

    So far it does not look at them.
    """
    channels = base.transformer.config.in_channels
    inputs = {"in_channels": 2 * channels + 4 * LATENT_FACTOR**2, "out_channels": channels}
    # Without diffusers' own entries: its list of what was left to a default would drop out_channels again.
    shape = {name: value for name, value in base.transformer.config.items() if not name.startswith("_")}
    transformer = FluxTransformer2DModel.from_config(shape | inputs)
    state = base.transformer.state_dict()
    state["x_embedder.weight"] = F.pad(state["x_embedder.weight"], (0, inputs["in_channels"] - channels))
    transformer.load_state_dict(state)
    base = base.requires_grad_(False).eval()
    return TextToImage(transformer, base.t5, base.clip)


def fill_losses(batch: Batch, velocity: Tensor) -> dict[str, Tensor]:
    errors = (velocity - (batch.noise - batch.latents)).pow(2).mean(dim=1, keepdim=True)
    assert batch.mask is not None
    # A latent partly in the region is as hard to paint as one wholly in it.
    region = F.max_pool2d(batch.mask, LATENT_FACTOR)
    weights = 1 + (REGION_WEIGHT - 1) * region
    return {
        "loss": (errors * weights).sum() / weights.sum(),
        "inside": (errors * region).sum() / region.sum(),
        "outside": (errors * (1 - region)).sum() / (1 - region).sum().clamp_min(1),
    }


HELD_OUT_SEED = 4711


@dataclass(frozen=True)
class HeldOut:
    captions: list[str]
    images: np.ndarray  # [N, H, W, 3] in 0..1
    masks: np.ndarray  # [N, H, W] bool


def held_out(count: int) -> HeldOut:
    """Scenes and regions that training has not seen."""
    rng = np.random.default_rng(HELD_OUT_SEED)
    scenes = [random_scene(rng) for _ in range(count)]
    masks = np.stack([random_mask(rng, 128, 128) for _ in scenes])
    return HeldOut([scene.caption for scene in scenes], np.stack([scene.image for scene in scenes]), masks)


def text_to_image_of(base: Path) -> TextToImage:
    """The three trained modules of a FluxPipeline folder, in fp32."""
    pipeline = load_pipeline(base)
    return TextToImage(pipeline.transformer, pipeline.text_encoder_2, pipeline.text_encoder)


def build_fill_pipeline(base: Path, model: TextToImage) -> FluxFillPipeline:
    """A pipeline of a copy of `model`'s transformer and the other parts of `base`."""
    parts = {name: part for name, part in load_pipeline(base).components.items() if part is not None}
    return FluxFillPipeline(**parts | {"transformer": copy.deepcopy(model.transformer)})


def filled(pipeline: FluxFillPipeline, scenes: HeldOut, steps: int) -> np.ndarray:
    """What the pipeline paints, [N, H, W, 3] in 0..1: full images, nothing pasted back."""
    height, width = scenes.masks.shape[1:]
    return pipeline(
        prompt=scenes.captions,
        image=torch.from_numpy(scenes.images).permute(0, 3, 1, 2),
        mask_image=torch.from_numpy(scenes.masks).float().unsqueeze(1),
        height=height,
        width=width,
        num_inference_steps=steps,
        max_sequence_length=32,
        generator=torch.Generator().manual_seed(7),
        output_type="np",
    ).images


def spread(scenes: HeldOut) -> np.ndarray:
    """The known colours spread into the regions: each unknown pixel becomes the mean of its known neighbours."""
    images = torch.from_numpy(scenes.images).permute(0, 3, 1, 2)
    known = torch.from_numpy(~scenes.masks).float().unsqueeze(1)
    neighbours = torch.tensor([[0.0, 1, 0], [1, 0, 1], [0, 1, 0]]).expand(3, 1, 3, 3)
    while True:
        count = F.conv2d(known, neighbours[:1], padding=1)
        new = (known == 0) & (count > 0)
        if not new.any():  # nothing is known of an image that is to be filled wholly: it stays grey
            return torch.where(known > 0, images, MID_GREY).permute(0, 2, 3, 1).numpy()
        images = torch.where(new, F.conv2d(images * known, neighbours, padding=1, groups=3) / count, images)
        known = torch.where(new, 1.0, known)


def region_error(images: np.ndarray, scenes: HeldOut) -> float:
    """Mean absolute difference from the scenes inside their regions, colours in 0..1."""
    return float(np.abs(images - scenes.images).mean(axis=-1)[scenes.masks].mean())


def write_fill_sheet(pipeline: FluxFillPipeline, path: Path, count: int, steps: int) -> dict[str, float]:
    """Write one PNG, for each scene the blanked, the filled and the true image; return the errors in the regions."""
    scenes = held_out(count)
    painted, partly = filled(pipeline, scenes, steps), ~scenes.masks.all(axis=(1, 2))
    some = HeldOut(scenes.captions, scenes.images[partly], scenes.masks[partly])
    write_sheet(path, scenes.captions, blanked(scenes.images, scenes.masks), painted, scenes.images)
    return {
        "model": region_error(painted[partly], some),
        "spread": region_error(spread(some), some),
        "grey": region_error(np.full_like(some.images, MID_GREY), some),
    }
