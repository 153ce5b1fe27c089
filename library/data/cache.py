"""Latents on disk, each encoded once; what all caches have in common.

A cache file's name is a hash of everything its content depends on, so there is nothing to invalidate: a
changed image, mask, size, crop, orientation, encoder or setting is another name, and what lies under the
old name is never looked at again.

- ``latents/<key>.safetensors``: ``latents`` [C, h, w] as the encoder returned them and, with masks, ``mask``
  [1, h, w] fp32. One file an orientation: a VAE's latents of the mirrored image are not the mirrored latents.
- ``conditions/<key>.safetensors``: see :mod:`library.data.cache`.
- ``text/<key>.safetensors``: see :mod:`library.data.cache`.

Files are written in one step. At the start a folder is listed once; a file counts only if its size is that
of a file whose header was read and agrees with it, which costs one open for each distinct size instead of
one a sample. What is truncated or empty is thereby encoded again.

Text embeddings on disk: ``text/<key>.safetensors`` holds what the text encoder returned for one caption.

Equal captions share a file. The text encoders of edit models look at the reference pictures too; what they return
then belongs to a caption together with the pictures' contents and sizes.

What a sample is painted from besides its caption, on disk: regions to fill, and reference pictures.

``conditions/<key>.safetensors`` in the folder of the latents holds either

- of a fill model, for one sample, orientation and mask: ``masked_latents`` [C, h, w], the latents of the picture with
  the region to fill blanked, pixels * (1 - mask) in [-1, 1], and ``mask`` [1, H, W / 8] uint8, eight pixels a byte; or
- of an edit model, for one control picture at one size and orientation: ``latents`` [C, h, w]; samples share it.

Masks are of two values, as FluxFillPipeline makes them: a pixel is filled from half white on. A sample may have several
generated masks; which one an epoch sees is a function of (seed, epoch, sample), and held-out samples see the first.
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

import numpy as np
import torch
from PIL import Image, ImageChops
from safetensors import SafetensorError, safe_open
from torch import Tensor

from library.conditions import NO_CONDITIONS, Conditions
from library.data.buckets import Size
from library.data.images import (
    DEFAULT_INTERPOLATION,
    PIXELS_VERSION,
    decode,
    decode_mask,
    fit_image,
    to_latent_mask,
    to_pixels,
)
from library.data.masks import MASKS_VERSION, Mask, generated_mask
from library.data.samples import Sample
from library.data.sidecars import Control, checked_bytes
from library.errors import UserError
from library.randomness import python_random
from library.safetensors_io import read_safetensors_header, write_safetensors

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


class TextEncoder(Protocol):
    """What this package needs of the text encoders."""

    fingerprint: str
    sees_references: bool  # whether the embeddings depend on the reference pictures too

    def encode(self, captions: list[str], references: list[list[Image.Image]] | None = None) -> list[dict[str, Tensor]]:
        """One dict a caption, without a batch dimension; ``references``: each caption's pictures, if it sees them."""
        ...


@dataclass(frozen=True, slots=True)
class TextJob:
    """A caption, and the pictures that the text encoder is shown with it."""

    caption: str
    pictures: tuple[Control, ...] = ()
    flipped: bool = False  # the pictures, all of them

    def file(self, fingerprint: str) -> str:
        """Return the name of its embeddings' cache file; the pictures must have been hashed."""
        if not self.pictures:
            return cache_file(fingerprint, self.caption)
        pictures = tuple(picture.key() for picture in self.pictures)
        return cache_file(fingerprint, self.caption, PIXELS_VERSION, pictures, self.flipped)

    def path(self, folder: Path, fingerprint: str) -> Path:
        """Return its embeddings' cache file below the cache ``folder``."""
        return folder / "text" / self.file(fingerprint)


def missing_texts(folder: Path, jobs: Iterable[TextJob], fingerprint: str) -> list[TextJob]:
    """Return those jobs whose embeddings are not in the cache yet, each once, in their order."""
    present = readable_files(folder / "text")
    by_file: dict[str, TextJob] = {}
    for job in jobs:
        by_file.setdefault(job.file(fingerprint), job)
    return [job for name, job in by_file.items() if name not in present]


def encode_texts(
    folder: Path, jobs: Sequence[TextJob], encoder: TextEncoder, batch_size: int, advance: Callable[[int], None]
) -> None:
    """Encode and write the embeddings of ``jobs``.

    Raises:
        UserError: a picture is damaged or changed meanwhile, or an embedding is not finite.
    """
    for start in range(0, len(jobs), batch_size):
        batch = jobs[start : start + batch_size]
        for job, tensors in zip(batch, encode_now(batch, encoder), strict=True):
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    raise UserError(f"caption {job.caption!r}: {name} is not finite; encode text in bf16 or fp32")
            write_safetensors(job.path(folder, encoder.fingerprint), tensors)
        advance(len(batch))


@torch.no_grad()
def encode_now(jobs: Sequence[TextJob], encoder: TextEncoder) -> list[dict[str, Tensor]]:
    """Return the embeddings of ``jobs``, encoded in one batch.

    Raises:
        UserError: a picture is damaged or changed meanwhile.
    """
    captions = [job.caption for job in jobs]
    if not encoder.sees_references:
        return encoder.encode(captions)
    return encoder.encode(captions, [[picture.load(job.flipped) for picture in job.pictures] for job in jobs])


_HALF_WHITE = 128


@dataclass(frozen=True, slots=True)
class FillJob:
    """A sample's picture without the region to fill, and that region."""

    path: Path
    sample: Sample
    flipped: bool
    variant: int
    seed: int
    tensor_name: str = "masked_latents"

    @property
    def source(self) -> str:
        return self.sample.image.path

    @property
    def size(self) -> Size:
        return self.sample.fit.encoded

    def load(self, latent_factor: int) -> tuple[Tensor, dict[str, Tensor]]:
        image, alpha = load_image(self.sample)
        mask = _fill_mask(self.sample, alpha, self.variant, self.seed)
        if self.flipped:
            mask = np.ascontiguousarray(mask[:, ::-1])
        pixels = to_pixels(fitted(image, self.sample, self.flipped))
        packed = torch.from_numpy(np.packbits(mask, axis=-1))[None]
        return pixels * (1 - torch.from_numpy(mask).float()), {"mask": packed}


@dataclass(frozen=True, slots=True)
class ReferenceJob:
    """A control picture."""

    path: Path
    control: Control
    flipped: bool
    tensor_name: str = "latents"

    @property
    def source(self) -> str:
        return self.control.file.path

    @property
    def size(self) -> Size:
        return self.control.fit.encoded

    def load(self, latent_factor: int) -> tuple[Tensor, dict[str, Tensor]]:
        return to_pixels(self.control.load(self.flipped)), {}


def _fill_mask(sample: Sample, alpha: Image.Image | None, variant: int, seed: int) -> Mask:
    """A sample's mask [H, W] as encoded, not mirrored."""
    masks = sample.group.subset.fill
    assert masks is not None
    if masks.source == "generated":
        return generated_mask(masks.kinds, *sample.fit.encoded, seed, sample.identity, variant)
    picture: Image.Image | None
    if sample.fill_mask is not None:
        path, remedy = sample.fill_mask.path, "paint what is to be filled white, or remove the image"
        picture = decode_mask(checked_bytes(sample.fill_mask), path)
    else:
        path, remedy = sample.image.path, "inpaint_alpha_mask fills what is transparent: erase some, or remove it"
        picture = None if alpha is None else ImageChops.invert(alpha)
    mask = None if picture is None else to_fill_mask(fitted(picture, sample, flipped=False))
    if mask is None or not mask.any():
        raise UserError(f"{path}: nothing to fill in what is trained on; {remedy}")
    return mask


def to_fill_mask(picture: Image.Image) -> Mask:
    """Return the region [H, W] that a mask of mode L shows: 1, to be filled, from half white on."""
    return (np.asarray(picture) >= _HALF_WHITE).astype(np.uint8)


def fill_variant(sample: Sample, seed: int, epoch: int, sample_id: int) -> int:
    """Return which of a sample's masks is seen in ``epoch``."""
    masks = sample.group.subset.fill
    assert masks is not None
    if sample.held_out:
        return 0
    return python_random("mask variant", seed, epoch, sample_id).randrange(masks.variants)


def _fill_path(sample: Sample, flipped: bool, variant: int, seed: int, fingerprint: str) -> Path:
    masks = sample.group.subset.fill
    assert masks is not None
    mask: object = masks.source
    if masks.source == "generated":
        mask = (MASKS_VERSION, masks.kinds, seed, sample.identity, variant)
    elif sample.fill_mask is not None:
        mask = sample.fill_mask.content
        assert mask is not None, "contents are hashed first"
    picture = latent_file(sample, flipped, fingerprint)  # names content, size and settings
    return sample.group.cache / "conditions" / cache_file("fill", picture, mask)


def _reference_path(folder: Path, control: Control, flipped: bool, fingerprint: str) -> Path:
    return folder / "conditions" / cache_file("reference", PIXELS_VERSION, fingerprint, control.key(), flipped)


def missing_conditions(samples: Iterable[Sample], seed: int, fingerprint: str) -> list[EncodeJob]:
    """Return the files that are not in the cache yet, each once, in a fixed order; contents must have been hashed."""
    present: dict[Path, set[str]] = {}
    jobs: dict[Path, EncodeJob] = {}
    for sample in samples:
        for job in _jobs(sample, seed, fingerprint):
            folder = job.path.parent
            if folder not in present:
                present[folder] = readable_files(folder)
            if job.path.name not in present[folder]:
                jobs.setdefault(job.path, job)
    return list(jobs.values())


def _jobs(sample: Sample, seed: int, fingerprint: str) -> Iterable[EncodeJob]:
    masks = sample.group.subset.fill
    variants = 0 if masks is None else 1 if sample.held_out else masks.variants
    for flipped in sample.orientations:
        for variant in range(variants):
            path = _fill_path(sample, flipped, variant, seed, fingerprint)
            yield FillJob(path, sample, flipped, variant, seed)
        for control in sample.controls:
            yield ReferenceJob(_reference_path(sample.group.cache, control, flipped, fingerprint), control, flipped)


def read_conditions(
    sample: Sample, flipped: bool, epoch: int, sample_id: int, seed: int, fingerprint: str
) -> Conditions:
    """Return a sample's conditions in ``epoch``, without a batch axis.

    Raises:
        UserError: a cache file is gone or damaged.
    """
    if sample.group.subset.fill is not None:
        variant = fill_variant(sample, seed, epoch, sample_id)
        cached = read_cached(_fill_path(sample, flipped, variant, seed, fingerprint))
        bits = np.unpackbits(cached["mask"].numpy(), axis=-1, count=sample.fit.encoded[0])  # [1, H, W]
        return Conditions(cached["masked_latents"], torch.from_numpy(bits).float())
    if sample.controls:
        paths = [_reference_path(sample.group.cache, control, flipped, fingerprint) for control in sample.controls]
        return Conditions(references=tuple(read_cached(path)["latents"] for path in paths))
    return NO_CONDITIONS
