"""The fill model's training set: painted scenes, each with one region blanked, as latents on disk.

A row holds the latents of the whole scene, the latents of the scene with its region at mid-grey (0 in [-1, 1], as
FLUX.1 Fill sees it), the region's mask in pixels and the caption's token ids.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL

from tools.tiny_models.fill_masks import random_mask
from tools.tiny_models.latent_pool import ENCODER_BATCH, SIZES, Captions, encode_pictures, tokenize
from tools.tiny_models.run_state import Progress, save_state
from tools.tiny_models.scenes import random_scene

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
            latents.append(encode_pictures(vae, pictures))
            masked.append(encode_pictures(vae, blanked(pictures, regions)))
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
