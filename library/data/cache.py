"""Latents on disk, each encoded once; what all caches have in common.

A cache file's name is a hash of everything its content depends on, so there is nothing to invalidate: a
changed image, mask, size, crop, orientation, encoder or setting is another name, and what lies under the
old name is never looked at again.

- ``latents/<key>.safetensors``: ``latents`` [C, h, w] as the encoder returned them and, with masks, ``mask``
  [1, h, w] fp32. One file an orientation: a VAE's latents of the mirrored image are not the mirrored latents.
- ``conditions/<key>.safetensors``: see :mod:`library.data.condition_cache`.
- ``text/<key>.safetensors``: see :mod:`library.data.text_cache`.

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

from library.data.buckets import Size
from library.data.controls import checked_bytes
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


class EncodeJob(Protocol):
    """One file to be in a cache: pixels go through the image encoder, what comes out and more is written."""

    @property
    def path(self) -> Path:
        """Of the cache file."""
        ...

    @property
    def tensor_name(self) -> str:
        """What the latents are called in it."""
        ...

    @property
    def source(self) -> str:
        """The picture's path, for messages."""
        ...

    @property
    def size(self) -> Size:
        """Of the pixels."""
        ...

    def load(self, latent_factor: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Pixels [3, H, W] in [-1, 1], and what is written beside their latents."""
        ...


@dataclass(frozen=True, slots=True)
class LatentJob:
    """A sample's latents and, where it has one, its mask."""

    path: Path
    sample: Sample
    flipped: bool
    tensor_name: str = "latents"

    @property
    def source(self) -> str:
        return self.sample.image.path

    @property
    def size(self) -> Size:
        return self.sample.fit.encoded

    def load(self, latent_factor: int) -> tuple[Tensor, dict[str, Tensor]]:
        sample = self.sample
        image, mask = load_image(sample)
        if sample.mask is not None:
            mask = decode_mask(checked_bytes(sample.mask), sample.mask.path)
        elif not sample.group.subset.settings.alpha_mask:
            mask = None
        elif mask is None:
            mask = Image.new("L", image.size, 255)
        pixels = to_pixels(fitted(image, sample, self.flipped))
        if mask is None:
            return pixels, {}
        return pixels, {"mask": to_latent_mask(fitted(mask, sample, self.flipped), latent_factor)}


def load_image(sample: Sample) -> tuple[Image.Image, Image.Image | None]:
    """Return a sample's RGB picture and, where its subset reads the transparency and it has some, its alpha (mode L).

    Raises:
        UserError: it is damaged, or changed since it was hashed.
    """
    settings, path = sample.group.subset.settings, sample.image.path
    keeps_alpha = settings.alpha_mask or settings.inpaint_alpha_mask
    image, alpha = decode(checked_bytes(sample.image), path, keeps_alpha)
    if image.size != sample.image.size:
        raise UserError(f"{path}: changed while it was being cached; start again")
    return image, alpha


def fitted(image: Image.Image, sample: Sample, flipped: bool) -> Image.Image:
    """Return a sample's picture, or a mask (mode L) of it, resized, cropped and turned as it is encoded."""
    filter_name = "area" if image.mode == "L" else sample.group.subset.settings.resize_interpolation
    fit = fit_image(image, sample.fit, filter_name)
    return fit.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flipped else fit


def latent_file(sample: Sample, flipped: bool, fingerprint: str) -> str:
    """Return the name of a sample's latents in one orientation; image and mask must have been hashed."""
    settings = sample.group.subset.settings
    content = sample.image.content
    alpha = "alpha" if settings.alpha_mask else "colours under alpha" if settings.inpaint_alpha_mask else ""
    mask = sample.mask.content if sample.mask is not None else alpha
    assert content is not None, "contents are hashed first"
    assert mask is not None, "contents are hashed first"
    fit = sample.fit
    parts = (PIXELS_VERSION, fingerprint, content, mask, fit.resized, fit.offset, fit.encoded)
    return cache_file(*parts, settings.resize_interpolation or DEFAULT_INTERPOLATION, flipped)


def latent_path(sample: Sample, flipped: bool, fingerprint: str) -> Path:
    """Return the cache file of a sample's latents in one orientation."""
    return sample.group.cache / "latents" / latent_file(sample, flipped, fingerprint)


def cache_file(*parts: object) -> str:
    """Return the name of the cache file whose content follows from ``parts``."""
    return f"{hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()}.safetensors"


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
        for flipped in sample.orientations:
            if latent_file(sample, flipped, fingerprint) not in present[cache]:
                path = latent_path(sample, flipped, fingerprint)
                jobs.setdefault(path, LatentJob(path, sample, flipped))
    return list(jobs.values())


def encode_latents(
    jobs: Sequence[EncodeJob], encoder: ImageEncoder, batch_size: int, advance: Callable[[int], None]
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
            batch, pixels, besides = upcoming.pop(0).result()
            upcoming += [pool.submit(_load_batch, later, encoder.latent_factor) for later in islice(batches, 1)]
            with torch.no_grad():
                latents = encoder.encode(pixels)
            _check_latents(latents, pixels, encoder, batch)
            for job, latent, more in zip(batch, latents, besides, strict=True):
                write_safetensors(job.path, {job.tensor_name: latent, **more}, {"image": Path(job.source).name})
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


def _batches_by_size(jobs: Sequence[EncodeJob], batch_size: int) -> Iterator[list[EncodeJob]]:
    by_size: dict[Size, list[EncodeJob]] = defaultdict(list)
    for job in jobs:
        by_size[job.size].append(job)
    for size in sorted(by_size, key=lambda size: (-size[0] * size[1], size)):  # the largest first: memory fails early
        same = by_size[size]
        for start in range(0, len(same), batch_size):
            yield same[start : start + batch_size]


def _load_batch(batch: list[EncodeJob], latent_factor: int) -> tuple[list[EncodeJob], Tensor, list[dict[str, Tensor]]]:
    loaded = [job.load(latent_factor) for job in batch]
    return batch, torch.stack([pixels for pixels, _ in loaded]), [more for _, more in loaded]


def _check_latents(latents: Tensor, pixels: Tensor, encoder: ImageEncoder, batch: list[EncodeJob]) -> None:
    height, width = (side // encoder.latent_factor for side in pixels.shape[-2:])
    assert (latents.shape[0], *latents.shape[-2:]) == (len(batch), height, width), latents.shape
    for job, latent in zip(batch, latents, strict=True):
        if not torch.isfinite(latent).all():
            raise UserError(f"{job.source}: its latents are not finite; encode images in bf16 or fp32")
