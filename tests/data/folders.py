"""Folders of images for tests, and encoders that are quick and easy to predict."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from library.config.model_types import ConditionKind
from library.config.schema import DatasetArguments
from library.data.batches import CachedDataset, Item
from library.data.config import load_dataset_config
from library.data.dataset import TrainingData, build_dataset, check_masks

LONG_AGO = time.time() - 3600  # files younger than two seconds are not remembered


def make_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """A random RGB image: no two places and no two orientations are alike."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def add_image(
    folder: Path, name: str, size: tuple[int, int] = (64, 64), caption: str | None = "a, b, c", seed: int = 0
) -> Path:
    """Write a random image and, unless None, its caption; both look an hour old."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    make_image(*size, seed=seed).save(path)
    make_old(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption)
        make_old(path.with_suffix(".txt"))
    return path


def make_old(path: Path) -> None:
    """Set a file's time to an hour ago."""
    os.utime(path, (LONG_AGO, LONG_AGO))


def write_toml(folder: Path, dataset: str = "", subset: str = "image_dir = 'img'", general: str = "") -> Path:
    """Write a TOML of one dataset at 64 pixels with one subset; return its path."""
    path = folder / "dataset.toml"
    path.write_text(
        f"[general]\ncaption_extension = '.txt'\n{general}\n[[datasets]]\nresolution = 64\n{dataset}\n"
        f"[[datasets.subsets]]\n{subset}\n"
    )
    return path


def build(
    toml: Path,
    seed: int = 0,
    masked_loss: bool = False,
    prior: float = 1.0,
    conditioning: ConditionKind = "none",
    **arguments: object,
) -> TrainingData:
    """``build_dataset`` with FLUX's sizes."""
    settings = DatasetArguments.model_validate({"dataset_config": str(toml)} | arguments)
    data = build_dataset(load_dataset_config(toml, settings, conditioning), seed, 16, 8, prior)
    check_masks(data, masked_loss)
    return data


class AverageEncoder:
    """Stands for a VAE: the mean colour of each 8 x 8 square, so latents can be checked against pixels."""

    pixel_multiple = 16
    latent_factor = 8

    def __init__(self, fingerprint: str = "vae-1") -> None:
        self.fingerprint = fingerprint
        self.batches: list[tuple[int, ...]] = []

    def encode(self, pixels: Tensor) -> Tensor:
        self.batches.append(tuple(pixels.shape))
        return torch.nn.functional.avg_pool2d(pixels, 8)

    def release(self) -> None: ...


class LettersEncoder:
    """Stands for text encoders: one row a letter, and a pooled vector in bf16."""

    def __init__(self, fingerprint: str = "text-1") -> None:
        self.fingerprint = fingerprint
        self.sees_references = False
        self.seen: list[str] = []

    def encode(self, captions: list[str], references: list[list[Image.Image]] | None = None) -> list[dict[str, Tensor]]:
        assert references is None
        self.seen += captions
        return [
            {
                "prompt_embeds": torch.tensor([[float(ord(c)), 1.0] for c in text]).reshape(-1, 2),
                "pooled_prompt_embeds": torch.tensor([float(len(text))], dtype=torch.bfloat16),
            }
            for text in captions
        ]

    def release(self) -> None: ...


def spelled(text: dict[str, Tensor]) -> str:
    """The caption a :class:`LettersEncoder` was given."""
    return "".join(chr(int(code)) for code in text["prompt_embeds"][:, 0])


def silent(description: str, total: int) -> Callable[[int], None]:
    """A progress that shows nothing."""
    return lambda done: None


def cache_all(data: TrainingData, image_batch: int = 2) -> tuple[AverageEncoder, LettersEncoder]:
    """Fill both caches; return the encoders with what they were asked for."""
    images, texts = AverageEncoder(), LettersEncoder()
    data.cache_latents(images, image_batch, silent)
    data.cache_text(texts, [], 4, silent)
    return images, texts


def pixels_of(path: Path) -> Tensor:
    """Return an image [3, H, W] in [-1, 1]."""
    return torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1).float() / 127.5 - 1


def averaged(pixels: Tensor) -> Tensor:
    """[C, H, W] -> [C, H/8, W/8], by reshaping: independent of the encoder's pooling."""
    channels, height, width = pixels.shape
    return pixels.reshape(channels, height // 8, 8, width // 8, 8).mean(dim=(2, 4))


def items(data: CachedDataset, epoch: int = 0) -> list[Item]:
    """Return every sample of an epoch."""
    return [data[(epoch, index)] for index in range(len(data))]
