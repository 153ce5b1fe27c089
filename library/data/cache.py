"""Latents and text embeddings on disk, each encoded once.

A cache file's name is a hash of everything its content depends on, so there is nothing to invalidate: a
changed image, mask, size, crop, orientation, encoder or setting is another name, and what lies under the
old name is never looked at again.

- ``latents/<key>.safetensors``: ``latents`` [C, h, w] as the encoder returned them and, with masks, ``mask``
  [1, h, w] fp32. One file an orientation: a VAE's latents of the mirrored image are not the mirrored latents.
- ``text/<key>.safetensors``: what the text encoder returned for one caption; equal captions share a file.

Files are written in one step. At the start a folder is listed once; a file counts only if its size is that
of a file whose header was read and agrees with it, which costs one open for each distinct size instead of
one a sample. What is truncated or empty is thereby encoded again.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor

from library.data.file_index import content_hash, read_bytes
from library.data.images import (
    DEFAULT_INTERPOLATION,
    PIXELS_VERSION,
    decode,
    decode_mask,
    fit_image,
    to_latent_mask,
    to_pixels,
)
from library.data.samples import Sample
from library.errors import UserError
from library.files import read_safetensors_header, write_safetensors

_DECODERS = 4  # threads that decode and resize ahead while the encoder works

Progress = Callable[[str, int], Callable[[int], None]]  # progress(description, total) -> advance(by)


class ImageEncoder(Protocol):
    """What this package needs of a VAE."""

    fingerprint: str  # changes when weights or settings do
    pixel_multiple: int  # image sides must be multiples of this
    latent_factor: int  # pixels per latent

    def encode(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] fp32 in [-1, 1] -> normalised latents [B, C, h, w]."""
        ...


class TextEncoder(Protocol):
    """What this package needs of the text encoders."""

    fingerprint: str

    def encode(self, captions: list[str]) -> list[dict[str, Tensor]]:
        """One dict a caption, without a batch dimension."""
        ...


@dataclass(frozen=True, slots=True)
class LatentJob:
    """One file to be in the cache."""

    path: Path
    sample: Sample
    flipped: bool


def latent_file(sample: Sample, flipped: bool, fingerprint: str) -> str:
    """Return the name of a sample's latents in one orientation; image and mask must have been hashed."""
    settings = sample.group.subset.settings
    content = sample.image.content
    mask = sample.mask.content if sample.mask is not None else "alpha" if settings.alpha_mask else ""
    assert content is not None, "contents are hashed first"
    assert mask is not None, "contents are hashed first"
    fit = sample.fit
    parts = (PIXELS_VERSION, fingerprint, content, mask, fit.resized, fit.offset, fit.encoded)
    return f"{_key(*parts, settings.resize_interpolation or DEFAULT_INTERPOLATION, flipped)}.safetensors"


def latent_path(sample: Sample, flipped: bool, fingerprint: str) -> Path:
    """Return the cache file of a sample's latents in one orientation."""
    return sample.group.cache / "latents" / latent_file(sample, flipped, fingerprint)


def text_file(caption: str, fingerprint: str) -> str:
    """Return the name of a caption's embeddings."""
    return f"{_key(fingerprint, caption)}.safetensors"


def text_path(folder: Path, caption: str, fingerprint: str) -> Path:
    """Return the cache file of a caption's embeddings below the cache ``folder``."""
    return folder / "text" / text_file(caption, fingerprint)


def _key(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def readable_files(folder: Path) -> set[str]:
    """Return the names of a folder's complete safetensors files; empty where there is no folder."""
    by_size: dict[int, list[str]] = defaultdict(list)
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".safetensors") and not entry.name.startswith("."):
                    by_size[entry.stat().st_size].append(entry.name)
    except FileNotFoundError:
        return set()
    complete: set[str] = set()
    for size, names in by_size.items():
        if _is_complete(folder / names[0], size):
            complete.update(names)
        else:
            complete.update(name for name in names[1:] if _is_complete(folder / name, size))
    return complete


def _is_complete(path: Path, size: int) -> bool:
    try:
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
        header = read_safetensors_header(path)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return bool(ends) and 8 + header_bytes + max(ends) == size
    except (UserError, OSError, KeyError, TypeError, IndexError, AttributeError):
        return False


def missing_latents(samples: Iterable[Sample], fingerprint: str) -> list[LatentJob]:
    """Return the files that are not in the cache yet, each once, in a fixed order."""
    present: dict[Path, set[str]] = {}
    jobs: dict[Path, LatentJob] = {}
    for sample in samples:
        cache = sample.group.cache
        if cache not in present:
            present[cache] = readable_files(cache / "latents")
        for flipped in (False, True) if sample.flips else (False,):
            if latent_file(sample, flipped, fingerprint) not in present[cache]:
                path = latent_path(sample, flipped, fingerprint)
                jobs.setdefault(path, LatentJob(path, sample, flipped))
    return list(jobs.values())


def missing_captions(folder: Path, captions: Iterable[str], fingerprint: str) -> list[str]:
    """Return those captions whose embeddings are not in the cache yet, each once, in their order."""
    present = readable_files(folder / "text")
    return [c for c in dict.fromkeys(captions) if text_file(c, fingerprint) not in present]


def encode_latents(
    jobs: Sequence[LatentJob], encoder: ImageEncoder, batch_size: int, advance: Callable[[int], None]
) -> None:
    """Encode and write ``jobs``, ``batch_size`` images of one size at a time; images are decoded ahead in
    threads.

    Raises:
        UserError: an image is damaged or changed meanwhile, or its latents are not finite.
    """
    with ThreadPoolExecutor(_DECODERS) as pool:
        batches = _batches_by_size(jobs, batch_size)
        upcoming = [pool.submit(_load_batch, batch, encoder.latent_factor) for batch in islice(batches, _DECODERS)]
        while upcoming:
            batch, pixels, masks = upcoming.pop(0).result()
            upcoming += [pool.submit(_load_batch, later, encoder.latent_factor) for later in islice(batches, 1)]
            with torch.no_grad():
                latents = encoder.encode(pixels)
            _check_latents(latents, pixels, encoder, batch)
            for job, latent, mask in zip(batch, latents, masks, strict=True):
                tensors = {"latents": latent} if mask is None else {"latents": latent, "mask": mask}
                write_safetensors(job.path, tensors, {"image": Path(job.sample.image.path).name})
            advance(len(batch))


def encode_captions(
    folder: Path,
    captions: Sequence[str],
    encoder: TextEncoder,
    batch_size: int,
    advance: Callable[[int], None],
) -> None:
    """Encode and write the embeddings of ``captions``.

    Raises:
        UserError: an embedding is not finite.
    """
    for start in range(0, len(captions), batch_size):
        batch = list(captions[start : start + batch_size])
        with torch.no_grad():
            outputs = encoder.encode(batch)
        for caption, tensors in zip(batch, outputs, strict=True):
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    raise UserError(f"caption {caption!r}: {name} is not finite; encode text in bf16 or fp32")
            write_safetensors(text_path(folder, caption, encoder.fingerprint), tensors)
        advance(len(batch))


def read_cached(path: Path, crop: tuple[int, int, int, int] | None = None) -> dict[str, Tensor]:
    """Return a cache file's tensors; with ``crop`` (top, left, height, width) only that part of each [_, h,
    w].

    Raises:
        UserError: the file is gone or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            if crop is None:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            top, left, height, width = crop
            return {
                name: file.get_slice(name)[:, top : top + height, left : left + width].contiguous()
                for name in file.keys()  # noqa: SIM118
            }
    except FileNotFoundError:
        raise UserError(f"{path}: removed while training; start again: it is encoded anew") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged ({error}); delete it and start again: it is encoded anew") from error


def _batches_by_size(jobs: Sequence[LatentJob], batch_size: int) -> Iterator[list[LatentJob]]:
    by_size: dict[tuple[int, int], list[LatentJob]] = defaultdict(list)
    for job in jobs:
        by_size[job.sample.fit.encoded].append(job)
    for size in sorted(by_size, key=lambda size: (-size[0] * size[1], size)):  # the largest first: memory fails early
        same = by_size[size]
        for start in range(0, len(same), batch_size):
            yield same[start : start + batch_size]


def _load_batch(batch: list[LatentJob], latent_factor: int) -> tuple[list[LatentJob], Tensor, list[Tensor | None]]:
    loaded = [_load(job, latent_factor) for job in batch]
    return batch, torch.stack([pixels for pixels, _ in loaded]), [mask for _, mask in loaded]


def _load(job: LatentJob, latent_factor: int) -> tuple[Tensor, Tensor | None]:
    """Pixels [3, H, W] and, where the sample has one, mask [1, h, w] of a job."""
    sample, settings = job.sample, job.sample.group.subset.settings
    image, mask = decode(
        _checked_bytes(sample.image.path, sample.image.content), sample.image.path, settings.alpha_mask
    )
    if image.size != sample.image.size:
        raise UserError(f"{sample.image.path}: changed while it was being cached; start again")
    if sample.mask is not None:
        mask = decode_mask(_checked_bytes(sample.mask.path, sample.mask.content), sample.mask.path)
    elif mask is None and settings.alpha_mask:
        mask = Image.new("L", image.size, 255)
    image = fit_image(image, sample.fit, settings.resize_interpolation)
    mask = None if mask is None else fit_image(mask, sample.fit, "area")
    if job.flipped:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        mask = None if mask is None else mask.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return to_pixels(image), None if mask is None else to_latent_mask(mask, latent_factor)


def _checked_bytes(path: str, expected: str | None) -> bytes:
    data = read_bytes(path)
    if content_hash(data) != expected:
        raise UserError(f"{path}: changed while it was being cached; start again")
    return data


def _check_latents(latents: Tensor, pixels: Tensor, encoder: ImageEncoder, batch: list[LatentJob]) -> None:
    height, width = (side // encoder.latent_factor for side in pixels.shape[-2:])
    assert (latents.shape[0], *latents.shape[-2:]) == (len(batch), height, width), latents.shape
    for job, latent in zip(batch, latents, strict=True):
        if not torch.isfinite(latent).all():
            raise UserError(f"{job.sample.image.path}: its latents are not finite; encode images in bf16 or fp32")
