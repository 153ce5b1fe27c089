"""The tiny fill model: the tiny FLUX goes on, with a blanked image and a mask beside the noise.

Regions to fill are those of the trainer's generated masks (``library.data.masks``), and in one image of 25 the full
image, so that the model still paints from words alone.

The training set is painted scenes with one region blanked (``latent_pool``). As in FLUX.1 Fill, the transformer's first
layer also takes the blanked image's latents and the mask, packed as FluxFillPipeline packs them. Its new columns start
at zero, so training starts from the text-to-image model. The text encoders stay as they are. The target is the velocity
noise - image, as in `training`; positions in the region count more, or its loss would drown in that of the known part,
which is soon copied. The guidance input is random over a wide range and says nothing, so that any guidance scale,
Fill's default of 30 among them, samples alike.
"""

from __future__ import annotations

import random

import numpy as np
import torch.nn.functional as F
from diffusers import FluxFillPipeline, FluxPipeline, FluxTransformer2DModel
from torch import Tensor

from dev.tiny_models.training import Batch
from dev.tiny_models.transformer import LATENT_FACTOR, TextToImage
from library.data.masks import MASK_KINDS, draw_mask

EVERYTHING = 0.04  # share of images that are filled in full


def random_mask(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return [height, width] bool, true where the image is to be filled."""
    if rng.random() < EVERYTHING:
        return np.ones((height, width), dtype=bool)
    own = random.Random(int(rng.integers(2**62)))
    return draw_mask(own.choice(MASK_KINDS), width, height, own) == 1


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
