"""The transformer's training set: scenes painted once, encoded once, kept as latents and token ids on disk.

Three sizes of image (128 x 128 and both 5:3 formats) so that aspect buckets work later. 16,000
scenes take about 140 MB and a few minutes.

The tokenizers are those of the assets: every word of the scenes is one piece. A word that they do not know, a LoRA's
trigger for example, becomes a row of single characters (T5) or bytes (CLIP), all of which training has seen inside
invented words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from tqdm import tqdm
from transformers import CLIPTokenizer, T5TokenizerFast

from dev.tiny_models.scenes import random_scene

TINY_FLUX = Path(__file__).resolve().parents[2] / "assets/tiny-flux"

# (height, width): share of the pool and of the batches
SIZES = {(128, 128): 0.8, (160, 96): 0.1, (96, 160): 0.1}
T5_LENGTH = 32  # the longest caption has 31 pieces
CLIP_LENGTH = 40  # a pipeline pads to 77, but nothing after the end token matters: CLIP looks back only
ENCODER_BATCH = 50


@dataclass(frozen=True)
class Captions:
    """Token ids of captions: t5 [N, 32], padded with 0; clip [N, 40]."""

    t5: torch.Tensor
    clip: torch.Tensor

    def __getitem__(self, rows: torch.Tensor) -> Captions:
        return Captions(self.t5[rows], self.clip[rows])

    def emptied(self, empty: Captions, where: torch.Tensor) -> Captions:
        """Caption dropout: the empty prompt in the rows where `where` [N] is true."""
        return Captions(
            torch.where(where[:, None], empty.t5, self.t5), torch.where(where[:, None], empty.clip, self.clip)
        )

    def padded(self, length: int) -> Captions:
        """The same with T5 padded to `length`, as a pipeline with that max_sequence_length does."""
        return Captions(torch.nn.functional.pad(self.t5, (0, length - self.t5.shape[1])), self.clip)


def tokenizers() -> tuple[T5TokenizerFast, CLIPTokenizer]:
    """Return the tokenizers of T5 and CLIP."""
    return (
        T5TokenizerFast.from_pretrained(TINY_FLUX / "tokenizer_2"),
        CLIPTokenizer.from_pretrained(TINY_FLUX / "tokenizer"),
    )


_own_tokenizers = cache(tokenizers)  # a call leaves its padding behind, which no saved one may have


def tokenize(texts: list[str]) -> Captions:
    t5, clip = _own_tokenizers()
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    return Captions(
        t5(texts, max_length=T5_LENGTH, **options).input_ids,
        clip(texts, max_length=CLIP_LENGTH, **options).input_ids,
    )


Pool = dict[str, dict[str, torch.Tensor]]  # "HxW" -> what `paint_and_encode` makes of scenes of that size
MID_GREY = 0.5  # of pixels in 0..1; 0 in [-1, 1], as FLUX.1 Fill sees it


def paint_and_encode(
    vae: AutoencoderKL,
    count: int,
    rng: np.random.Generator,
    random_mask: Callable[[np.random.Generator, int, int], np.ndarray] | None = None,
) -> Pool:
    """Return `count` scenes, with one region of each blanked if `random_mask` draws it.

    Returns:
        Of each size: latents [N, 16, h, w] bf16, and the captions' t5 and clip. With regions also masked, the latents
        of the images with their region at mid-grey, and masks [N, H, W] bool, true where the image is to be filled.
    """
    sizes = [size for size, share in SIZES.items() for _ in range(max(1, int(count * share) // ENCODER_BATCH))]
    pool: dict[str, dict[str, list]] = {}
    for height, width in tqdm(sizes, "encode"):
        scenes = [random_scene(rng, height, width) for _ in range(ENCODER_BATCH)]
        images, captions = np.stack([scene.image for scene in scenes]), tokenize([scene.caption for scene in scenes])
        tensors = {"latents": encode_images(vae, images), "t5": captions.t5, "clip": captions.clip}
        if random_mask is not None:
            masks = np.stack([random_mask(rng, height, width) for _ in scenes])
            tensors |= {"masked": encode_images(vae, blanked(images, masks)), "masks": torch.from_numpy(masks)}
        part = pool.setdefault(f"{height}x{width}", {name: [] for name in tensors})
        for name, tensor in tensors.items():
            part[name].append(tensor)
    return {size: {name: torch.cat(parts) for name, parts in part.items()} for size, part in pool.items()}


def blanked(images: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """[N, H, W, 3] in 0..1 with mid-grey where `masks` [N, H, W] are true."""
    return np.where(masks[..., None], np.float32(MID_GREY), images)


@torch.no_grad()
def encode_images(vae: AutoencoderKL, images: np.ndarray) -> torch.Tensor:
    """[N, H, W, 3] in 0..1 to latent means [N, 16, H/8, W/8] in bf16, shifted and scaled to mean 0 and deviation 1."""
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2) * 2 - 1
    with torch.autocast("cpu", torch.bfloat16):
        means = vae.encoder(pixels).float().chunk(2, dim=1)[0]
    return ((means - vae.config.shift_factor) * vae.config.scaling_factor).bfloat16()
