"""The transformer's training set: scenes painted once, encoded once, kept as latents and token ids on disk.

Three sizes of picture (128 x 128 and both 5:3 formats) so that aspect buckets work later. A pool is a dict
of tensors per size; 16,000 scenes take about 140 MB and a few minutes.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL

from tools.tiny_models.run_state import Progress, save_state
from tools.tiny_models.scenes import random_scene, scene_words
from tools.tiny_models.vocabulary import build_clip_tokenizer, build_t5_tokenizer

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

    def __getitem__(self, rows: torch.Tensor) -> "Captions":
        return Captions(self.t5[rows], self.clip[rows])

    def emptied(self, empty: "Captions", where: torch.Tensor) -> "Captions":
        """Caption dropout: the empty prompt in the rows where `where` [N] is true."""
        return Captions(
            torch.where(where[:, None], empty.t5, self.t5), torch.where(where[:, None], empty.clip, self.clip)
        )

    def padded(self, length: int) -> "Captions":
        """The same with T5 padded to `length`, as a pipeline with that max_sequence_length does."""
        return Captions(torch.nn.functional.pad(self.t5, (0, length - self.t5.shape[1])), self.clip)


def tokenize(texts: list[str]) -> Captions:
    words = scene_words()
    t5, clip = build_t5_tokenizer(words), build_clip_tokenizer(words)
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    return Captions(
        t5(texts, max_length=T5_LENGTH, **options).input_ids,
        clip(texts, max_length=CLIP_LENGTH, **options).input_ids,
    )


Pool = dict[tuple[int, int], tuple[torch.Tensor, Captions]]  # size -> (latents [N, 16, h, w] bf16, their captions)


def paint_and_encode(vae: AutoencoderKL, count: int, seed: int, path: Path) -> None:
    """Fill `path` with `count` scenes: latents shifted and scaled to mean 0 and deviation 1."""
    rng = np.random.default_rng([seed, 77])
    batches = [(size, int(count * share) // ENCODER_BATCH) for size, share in SIZES.items()]
    progress, done = Progress("encode", 0, sum(number for _, number in batches), every=50), 0
    state = {}
    for (height, width), number in batches:
        latents, texts = [], []
        for _ in range(number):
            scenes = [random_scene(rng, height, width) for _ in range(ENCODER_BATCH)]
            latents.append(encode_pictures(vae, np.stack([scene.picture for scene in scenes])))
            texts += [scene.caption for scene in scenes]
            progress.report(done, {})
            done += 1
        captions = tokenize(texts)
        state[f"{height}x{width}"] = {"latents": torch.cat(latents), "t5": captions.t5, "clip": captions.clip}
    save_state(path, state)


@torch.no_grad()
def encode_pictures(vae: AutoencoderKL, pictures: np.ndarray) -> torch.Tensor:
    """[N, H, W, 3] in 0..1 to normalised latent means [N, 16, H/8, W/8] in bf16."""
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2) * 2 - 1
    with torch.autocast("cpu", torch.bfloat16):
        means = vae.encoder(pixels).float().chunk(2, dim=1)[0]
    return ((means - vae.config.shift_factor) * vae.config.scaling_factor).bfloat16()


def load_pool(path: Path) -> Pool:
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return {
        tuple(int(side) for side in name.split("x")): (part["latents"], Captions(part["t5"], part["clip"]))
        for name, part in state.items()
    }
