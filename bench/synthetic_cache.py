"""A large dataset with everything cached, written in a minute: what a start looks at is real, the rest are holes.

A start lists folders, remembers each file's size and content from ``index.json``, and trusts cache files by their
names, lengths and headers (``library.data.file_index``, ``library.data.cache``). So images are empty files that the
index describes, and cache files are a true header with a hole behind it, as long as FLUX's latents and embeddings of
512 tokens are. An image that was opened or encoded after all would fail at once.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import safetensors.torch
import torch

from library.config.schema import DatasetArguments
from library.data.cache import TextJob, latent_path
from library.data.dataset import TrainingData, build_dataset
from library.data.file_index import content_hash

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
_TEXT: _Shapes = (("prompt_embeds", (512, 4096)), ("pooled_prompt_embeds", (768,)))
_WRITERS = 4  # threads; the work is the file system's


def write_cached_dataset(folder: Path, images: int, fingerprint: str) -> Path:
    """Write ``images`` images of many sizes, each with a caption of its own, and their cache; return the TOML's path.

    ``fingerprint`` is that of both encoders.
    """
    pictures = folder / "images"
    caches = pictures / ".tandem_cache"
    for each in (pictures, caches / "latents", caches / "text"):
        each.mkdir(parents=True)
    known: dict[str, list] = {}
    captions: dict[str, list] = {}
    for number in range(images):
        name, text = f"{number:07d}", _caption(number)
        (pictures / f"{name}.png").touch()
        (pictures / f"{name}.txt").write_text(text)
        image, caption = ((pictures / f"{name}{suffix}").stat() for suffix in (".png", ".txt"))
        known[f"{name}.png"] = [0, image.st_mtime_ns, *_SIDES[number % len(_SIDES)], content_hash(name.encode())]
        captions[f"{name}.txt"] = [caption.st_size, caption.st_mtime_ns, text]
    index = {"version": 1, "images": known, "captions": captions}
    (caches / "index.json").write_text(json.dumps(index, ensure_ascii=False, separators=(",", ":")))
    toml = folder / "dataset.toml"
    toml.write_text(_TOML)
    arguments = DatasetArguments(dataset_config=str(toml))
    data = build_dataset(
        arguments, seed=0, pixel_multiple=16, latent_factor=8, prior_loss_weight=1.0, masked_loss=False
    )
    with ThreadPoolExecutor(_WRITERS) as pool:
        for _ in pool.map(lambda file: _write_hollow(*file), _cache_files(data, fingerprint), chunksize=256):
            pass
    return toml


def _cache_files(data: TrainingData, fingerprint: str) -> Iterable[tuple[Path, _Shapes]]:
    for sample in data.train.samples:
        width, height = sample.fit.encoded
        yield latent_path(sample, False, fingerprint), (("latents", (16, height // 8, width // 8)),)
        yield TextJob(sample.caption).path(data.text_folder, fingerprint), _TEXT


def _caption(number: int) -> str:
    words = _WORDS.split()
    random.Random(number).shuffle(words)
    return f"picture {number}: {' '.join(words)}"


def _write_hollow(path: Path, shapes: _Shapes) -> None:
    header, length = _hollow(shapes)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(length)


@cache
def _hollow(shapes: _Shapes) -> tuple[bytes, int]:
    """Return the header of a safetensors file of bf16 zeros, and the file's length."""
    tensors: Mapping[str, torch.Tensor] = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes}
    whole = safetensors.torch.save(dict(tensors))
    return whole[: 8 + int.from_bytes(whole[:8], "little")], len(whole)
