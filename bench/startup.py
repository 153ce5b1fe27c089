"""What ``bench/scaling.py --only starts`` measures: a run's start, and how fast caching goes.

Images are 64 x 64 PNGs of one colour each, with captions; encoders answer at once, with latents and embeddings of the
sizes of FLUX at 64 x 64 and of a short text. What is left is Tandem's own work: finding and hashing files, buckets,
reading and resizing images, writing caches, and at the next start looking at all of it again. Each start is a process
of its own; time is the clock's, memory the process's peak.

``write_cached_dataset`` writes a large dataset with everything cached in a minute. A start lists folders, remembers
each file's size and content from ``index.json``, and trusts cache files by their names, lengths and headers
(``library.data.file_index``, ``library.data.cache``). So images are empty files that the index describes, and cache
files are a true header with a hole behind it, as long as FLUX's latents and embeddings of 512 tokens are. An image that
was opened or encoded after all would fail at once.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from bench.measure import resident, run_alone
from library.accelerator import build_accelerator
from library.config.schema import (
    AccelerateConfig,
    DatasetArguments,
    FlowConfig,
    LoggingConfig,
    SavingConfig,
    TrainingConfig,
)
from library.data.cache import TextJob, latent_path
from library.data.dataset import TrainingData, build_dataset
from library.data.file_index import content_hash
from library.files import write_checked_json
from library.safetensors_io import write_safetensors
from library.training.tasks.image_lora import cache_data, read_data, training_loader

_TEXT = {"prompt_embeds": torch.zeros(16, 64), "pooled_prompt_embeds": torch.zeros(64)}
COLUMNS = {"read_s": "8.2f", "cache_s": "8.2f", "first_batch_s": "13.2f", "start_s": "8.2f", "cpu_s": "8.2f"}
COLUMNS |= {"peak_mib": "8.0f"}


class InstantImages:
    """An image encoder without weights."""

    fingerprint, pixel_multiple, latent_factor = "bench-startup", 16, 8

    def encode(self, pixels: Tensor) -> Tensor:
        """Return zeros, [B, 16, H/8, W/8]."""
        return torch.zeros(pixels.shape[0], 16, pixels.shape[2] // 8, pixels.shape[3] // 8)

    def release(self) -> None:
        """Nothing to let go of."""


class InstantTexts:
    """A text encoder without weights."""

    fingerprint, sees_references = "bench-startup", False

    def encode(self, captions: list[str], references: Any = None) -> list[dict[str, Tensor]]:
        """Return the same embeddings for every caption."""
        return [_TEXT for _ in captions]

    def release(self) -> None:
        """Nothing to let go of."""


def write_dataset(folder: Path, images: int) -> Path:
    """Write images, each of another colour, with captions of which some are shared; return their dataset TOML."""
    (folder / "images").mkdir(parents=True)
    for number in range(images):
        colour = number & 255, number >> 8 & 255, number >> 16 & 255
        Image.new("RGB", (64, 64), colour).save(folder / "images" / f"{number:07d}.png", compress_level=1)
        (folder / "images" / f"{number:07d}.txt").write_text(f"image {number % 1000}")
    path = folder / "dataset.toml"
    path.write_text(
        '[general]\ncaption_extension = ".txt"\n[[datasets]]\nresolution = 64\nbatch_size = 4\n'
        '[[datasets.subsets]]\nimage_dir = "images"\n'
    )
    return path


def start(dataset: Path, output: Path, images: InstantImages | None = None) -> dict[str, float]:
    """Do what a run does until its first batch is there; return seconds and the peak of memory in MiB."""
    begun, worked = time.perf_counter(), time.process_time()
    arguments, training = DatasetArguments(dataset_config=str(dataset)), TrainingConfig()
    accelerator = build_accelerator(AccelerateConfig(), training, SavingConfig(output_dir=str(output)), LoggingConfig())
    console = Console(quiet=True)
    images, texts = images or InstantImages(), InstantTexts()
    loaded = time.perf_counter()
    data = read_data(arguments, training, FlowConfig(), images, accelerator, console)  # type: ignore[arg-type]
    read = time.perf_counter()
    cache_data(data, arguments, images, texts, accelerator, [], console)  # type: ignore[arg-type]
    cached = time.perf_counter()
    batches, loader = training_loader(data, arguments, accelerator)
    batches.set_position(0)
    next(iter(loader))
    return {
        "read_s": read - loaded,
        "cache_s": cached - read,
        "first_batch_s": time.perf_counter() - cached,
        "start_s": time.perf_counter() - begun,
        "cpu_s": time.process_time() - worked,
        "peak_mib": resident("VmHWM") / 2**20,  # ru_maxrss begins at that of the parent
    }


def start_alone(dataset: Path) -> dict[str, float]:
    """Return what :func:`start` returns in a process of its own."""
    return run_alone(start, dataset, dataset.parent / "out")


_SIDES = ((4000, 3000), (3000, 4000), (1920, 1080), (1080, 1920), (1024, 1024), (832, 1216), (1500, 1000), (2048, 1365))
_WORDS = "a red fox sits under an old oak tree in soft morning light while two children watch from the wooden bridge"
_TOML = """[general]
caption_extension = ".txt"
[[datasets]]
resolution = 1024
batch_size = 4
enable_bucket = true
[[datasets.subsets]]
image_dir = "images"
"""
_Shapes = tuple[tuple[str, tuple[int, ...]], ...]
_TEXT_SHAPES: _Shapes = (("prompt_embeds", (512, 4096)), ("pooled_prompt_embeds", (768,)))
_WRITERS = 4  # threads; the work is the file system's


def write_cached_dataset(folder: Path, images: int) -> Path:
    """Write images of many sizes, each with a caption of its own, and their cache; return the TOML's path."""
    images_folder = folder / "images"
    caches = images_folder / ".tandem_cache"
    for each in (images_folder, caches / "latents", caches / "text"):
        each.mkdir(parents=True)
    known: dict[str, list] = {}
    captions: dict[str, list] = {}
    for number in range(images):
        name, text = f"{number:07d}", _caption(number)
        (images_folder / f"{name}.png").touch()
        (images_folder / f"{name}.txt").write_text(text)
        image, caption = ((images_folder / f"{name}{suffix}").stat() for suffix in (".png", ".txt"))
        known[f"{name}.png"] = [0, image.st_mtime_ns, *_SIDES[number % len(_SIDES)], content_hash(name.encode()), 1]
        captions[f"{name}.txt"] = [caption.st_size, caption.st_mtime_ns, text]
    write_checked_json(caches / "index.json", {"version": 2, "images": known, "captions": captions})
    toml = folder / "dataset.toml"
    toml.write_text(_TOML)
    arguments = DatasetArguments(dataset_config=str(toml))
    data = build_dataset(
        arguments, seed=0, pixel_multiple=16, latent_factor=8, prior_loss_weight=1.0, masked_loss=False
    )
    with ThreadPoolExecutor(_WRITERS) as pool:
        for _ in pool.map(lambda file: _write_hollow(*file), _cache_files(data), chunksize=256):
            pass
    return toml


def _cache_files(data: TrainingData) -> Iterable[tuple[Path, _Shapes]]:
    for sample in data.train.samples:
        width, height = sample.fit.encoded
        yield latent_path(sample, False, InstantImages.fingerprint), (("latents", (16, height // 8, width // 8)),)
        yield TextJob(sample.caption).path(data.text_folder, InstantTexts.fingerprint), _TEXT_SHAPES


def _caption(number: int) -> str:
    words = _WORDS.split()
    random.Random(number).shuffle(words)
    return f"image {number}: {' '.join(words)}"


def _write_hollow(path: Path, shapes: _Shapes) -> None:
    header, length = _hollow(shapes)
    path.write_bytes(header)
    os.truncate(path, length)


@cache
def _hollow(shapes: _Shapes) -> tuple[bytes, int]:
    """Return the header of a safetensors file of bf16 zeros, and the file's length."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hollow.safetensors"
        write_safetensors(
            path, {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes}, checked=True
        )
        file = path.read_bytes()
    return file[: 8 + int.from_bytes(file[:8], "little")], len(file)
