"""How long a run takes to begin on a large dataset, cold and with everything cached, and how fast caching goes.

    python bench/startup.py [--json PATH] [--images 100000]

Images are 64 x 64 PNGs of one colour each, with captions; encoders answer at once, with latents and embeddings of the
sizes of FLUX at 64 x 64 and of a short text. What is left is Tandem's own work: finding and hashing files, buckets,
reading and resizing pictures, writing caches, and at the next start looking at all of it again. Each start is a process
of its own; time is the clock's, memory the process's peak.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from bench.measure import resident, write_report
from library.accelerator import build_accelerator
from library.config.schema import (
    AccelerateConfig,
    DatasetArguments,
    FlowConfig,
    LoggingConfig,
    SavingConfig,
    TrainingConfig,
)
from library.training.tasks.image_lora import cache_data, read_data, training_loader

_TEXT = {"prompt_embeds": torch.zeros(16, 64), "pooled_prompt_embeds": torch.zeros(64)}
_PART = 1000  # images that a process writes at a time


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


def write_images(folder: Path, first: int, count: int) -> None:
    """Write images ``first`` to ``first + count``, each of another colour, with captions of which some are shared."""
    for number in range(first, first + count):
        colour = number & 255, number >> 8 & 255, number >> 16 & 255
        Image.new("RGB", (64, 64), colour).save(folder / f"{number:07d}.png", compress_level=1)
        (folder / f"{number:07d}.txt").write_text(f"picture {number % 1000}")


def write_dataset(folder: Path, images: int) -> Path:
    """Write the images and their dataset TOML; return its path."""
    (folder / "images").mkdir(parents=True)
    starts = range(0, images, _PART)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        sizes = [min(_PART, images - start) for start in starts]
        list(pool.map(write_images, [folder / "images"] * len(starts), starts, sizes))
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
    command = [sys.executable, __file__, "--once", str(dataset)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(said.splitlines()[-1])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--once", type=Path, metavar="DATASET", help="start once and print the figures as JSON")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(start(options.once, options.once.parent / "out")))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        dataset = write_dataset(Path(temporary), options.images)
        for name in ("cold", "cached"):
            rows.append({"start": name, **start_alone(dataset)})
    print(f"{options.images} images{'read s':>12}{'cache s':>10}{'first batch s':>15}{'all s':>8}{'peak MiB':>10}")
    for row in rows:
        figures = f"{row['read_s']:>12.1f}{row['cache_s']:>10.1f}{row['first_batch_s']:>15.2f}{row['start_s']:>8.1f}"
        print(f"{row['start']:<{len(str(options.images)) + 7}}{figures}{row['peak_mib']:>10.0f}")
    rate = options.images / rows[0]["cache_s"]
    print(f"cached {rate:.0f} images a second beside what encoders take")
    if options.json:
        write_report(options.json, rows, {"cached_start_s": rows[1]["start_s"], "cached_images_per_s": rate})


if __name__ == "__main__":
    main()
