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
"""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from diffusers import FluxFillPipeline, FluxPipeline, FluxTransformer2DModel
from torch import Tensor

from dev.tiny_models.training import Batch
from dev.tiny_models.transformer import LATENT_FACTOR, TextToImage

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


def fill_loss(batch: Batch, velocity: Tensor) -> Tensor:
    errors = (velocity - (batch.noise - batch.latents)).pow(2).mean(dim=1, keepdim=True)
    assert batch.mask is not None
    # A latent partly in the region is as hard to paint as one wholly in it.
    weights = 1 + (REGION_WEIGHT - 1) * F.max_pool2d(batch.mask, LATENT_FACTOR)
    return (errors * weights).sum() / weights.sum()


def build_fill_pipeline(base: FluxPipeline, model: TextToImage) -> FluxFillPipeline:
    """A pipeline of `model`'s transformer and the other parts of `base`."""
    parts = {name: part for name, part in base.components.items() if part is not None}
    return FluxFillPipeline(**parts | {"transformer": model.transformer})
