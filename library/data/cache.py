"""Latents, conditions and text embeddings on disk, each encoded once.

    latents/<key>.safetensors      of a sample in one orientation: ``latents`` [C, h, w] as the encoder returned them,
                                   and a loss mask ``mask`` [1, h, w] fp32 where there is one (a VAE's latents of the
                                   mirrored image are not the mirrored latents)
    conditions/<key>.safetensors   of a fill model, for one sample, orientation and inpainting mask: ``masked_latents``
                                   [C, h, w], the latents of the pixels with the masked region blanked, and ``mask``
                                   [1, H, W / 8] uint8, eight pixels a byte; of an edit model, for one control image at
                                   one size and orientation: ``latents`` [C, h, w], shared among samples
    text/<key>.safetensors         what the text encoder returned for one caption; the encoders of edit models see the
                                   control images too, whose contents and sizes then belong to the key

A key is a hash of everything the content depends on, so there is nothing to invalidate: a changed image, mask, size,
crop, orientation, encoder or setting is another name, and what lies under the old name is never looked at again. Files
are written in one step. At the start a folder is listed once; a file counts only if its size is that of a file whose
header was read and agrees with it: one open for each distinct size instead of one a sample. What is truncated or empty
is thereby encoded again. Every file carries a checksum, which is compared whenever it is read: a file that does not fit
it is deleted and ends the run, whose next start encodes it again.

Inpainting masks have two values, as FluxFillPipeline makes them: a pixel is filled from half white on. A sample may
have several generated masks; which one an epoch sees is a function of (seed, epoch, sample), and held-out samples see
the first.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from PIL import Image, ImageChops
from torch import Tensor

from library.conditions import NO_CONDITIONS, Conditions
from library.data.buckets import Size
from library.data.file_index import SourceFile, checked_bytes
from library.data.images import (
    DEFAULT_INTERPOLATION,
    PIXELS_VERSION,
    blanked,
    decode,
    fit_image,
    to_image,
    to_latent_mask,
    to_pixels,
)
from library.data.mask_files import MASK_READING, binary_mask, read_mask
from library.data.masks import MASKS_VERSION, Mask, generated_mask
from library.data.samples import ControlImage, Sample
from library.errors import UserError, counted, names_in_short
from library.randomness import generator, python_random
from library.safetensors_io import is_complete, read_checked, write_safetensors

_MOST_CHECKED = 4 << 30  # bytes of cache files that are read at the start of a run
_DECODERS = 4  # threads that decode and resize ahead while the encoder works
_PREVIEWED = 4  # masks of an image that are shown

_Job = TypeVar("_Job")
Progress = Callable[[str, int], Callable[[int], None]]  # progress(description, total) -> advance(by)


class ImageEncoder(Protocol):
    """What caching needs of ``library.models.vae.ImageEncoder``."""

    fingerprint: str  # changes when weights or settings do
    pixel_multiple: int  # image sides must be multiples of this
    latent_factor: int  # pixels per latent

    def encode(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] fp32 in [-1, 1] -> normalised latents [B, C, h, w]."""
        ...

    def release(self) -> None:
        """Free the weights; the next image loads them again."""
        ...


class ShownImage(Protocol):
    """An image that a text encoder is shown."""

    def key(self) -> tuple[object, ...]:
        """Return what its pixels follow from."""
        ...

    def load(self, flipped: bool = False) -> Image.Image:
        """Return the RGB image at the size at which its latents are made."""
        ...


class TextEncoder(Protocol):
    """What caching needs of ``library.models.text.TextEncoder``."""

    fingerprint: str
    sees_references: bool  # whether the embeddings depend on the reference images too

    def encode(self, captions: list[str], references: list[list[Image.Image]] | None = None) -> list[dict[str, Tensor]]:
        """One dict a caption, without a batch dimension; ``references``: each caption's images, if it sees them."""
        ...

    def release(self) -> None:
        """Free the weights; the next caption loads them again."""
        ...


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One file to be in a cache: pixels go through the image encoder, what comes out and more is written.

    Attributes:
        path: of the cache file.
        tensor_name: what the latents are called in it.
        source: the image's path, for messages.
        size: of the pixels.
        load: latent factor -> pixels [3, H, W] in [-1, 1], and what is written beside their latents.
    """

    path: Path
    tensor_name: str
    source: str
    size: Size
    load: Callable[[int], tuple[Tensor, dict[str, Tensor]]]


def absent(jobs: Iterable[tuple[Path, _Job]]) -> list[_Job]:
    """Return the jobs whose files are not in the cache yet, each once, in their order."""
    present: dict[Path, set[str]] = {}
    found: dict[Path, _Job] = {}
    for path, job in jobs:
        if (folder := path.parent) not in present:
            present[folder] = readable_files(folder)
        if path.name not in present[folder]:
            found.setdefault(path, job)
    return [*found.values()]


def latent_jobs(samples: Iterable[Sample], seed: int, fingerprint: str) -> Iterator[EncodeJob]:
    """Yield the files of latents and conditions that samples need, in a fixed order; samples may share one.

    Contents must have been hashed. ``seed`` is what generated masks follow from, ``fingerprint`` the encoder's.
    """
    for sample, flipped in ((each, flipped) for each in samples for flipped in each.orientations):
        image, size, conditions = sample.image.path, sample.fit.encoded, sample.group.cache / "conditions"
        for each in sample.pair:
            load: Callable = functools.partial(_load_sample, each, flipped)
            yield EncodeJob(latent_path(each, flipped, fingerprint), "latents", each.image.path, size, load)
        for variant in range(sample.mask_variants):
            load = functools.partial(_load_masked, sample, flipped, variant, seed)
            path = conditions / _masked_name(sample, flipped, variant, seed, fingerprint)
            yield EncodeJob(path, "masked_latents", image, size, load)
        for control in sample.control_images:
            load = functools.partial(_load_control, control, flipped)
            path = conditions / _control_name(control, flipped, fingerprint)
            yield EncodeJob(path, "latents", control.file.path, control.fit.encoded, load)


def _load_sample(sample: Sample, flipped: bool, latent_factor: int) -> tuple[Tensor, dict[str, Tensor]]:
    image, mask = _decode_sample(sample)
    if sample.mask is not None:
        mask, *_ = read_mask(checked_bytes(sample.mask), sample.mask.path)
    elif not sample.settings.alpha_mask:
        mask = None
    elif mask is None:
        mask = Image.new("L", image.size, 255)
    pixels = to_pixels(_fitted(image, sample, flipped))
    if mask is None:
        return pixels, {}
    return pixels, {"mask": to_latent_mask(_fitted(mask, sample, flipped), latent_factor)}


def _load_masked(
    sample: Sample, flipped: bool, variant: int, seed: int, latent_factor: int
) -> tuple[Tensor, dict[str, Tensor]]:
    pixels, mask, colour = _region(sample, flipped, variant, seed)
    bits = np.packbits(mask[0].to(torch.uint8).numpy(), axis=-1)
    return pixels * (1 - mask) + colour * mask, {"mask": torch.from_numpy(bits)[None]}


def _region(sample: Sample, flipped: bool, variant: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a fill model's image [3, H, W], its region [1, H, W] fp32, and what that is blanked with, [3, H, W]."""
    image, alpha = _decode_sample(sample)
    masks, mask = sample.group.subset.inpainting, _inpaint_mask(sample, alpha, variant, seed)
    assert masks is not None
    pixels = to_pixels(_fitted(image, sample, flipped=False))
    rng = generator("inpaint blank", seed, sample.identity, variant)
    parts = (pixels, torch.from_numpy(mask)[None].float(), blanked(pixels, torch.ones(()), masks.blank, rng))
    return (parts[0].flip(-1), parts[1].flip(-1), parts[2].flip(-1)) if flipped else parts


def _load_control(control: ControlImage, flipped: bool, latent_factor: int) -> tuple[Tensor, dict[str, Tensor]]:
    return to_pixels(control.load(flipped)), {}


@dataclass(frozen=True)
class Pixels:
    """What a sample's latents and conditions are encoded from, fp32.

    Attributes:
        image: [3, H, W] in [-1, 1].
        mask: [1, H, W]: a fill model's region, 0 or 1, else the loss mask, 0 to 1; None without one.
        blank: what a fill model's region is blanked with, [3, H, W].
        references: control images, [3, H_i, W_i] each.
    """

    image: Tensor
    mask: Tensor | None = None
    blank: Tensor | None = None
    references: tuple[Tensor, ...] = ()


def load_pixels(sample: Sample, flipped: bool, epoch: int, sample_id: int, seed: int) -> Pixels:
    """Return the pixels of a sample as the latents and conditions of ``epoch`` are encoded from them.

    Contents must have been hashed. Arguments as for :func:`read_conditions`.
    """
    if sample.group.subset.inpainting is not None:
        return Pixels(*_region(sample, flipped, inpaint_variant(sample, seed, epoch, sample_id), seed))
    image, more = _load_sample(sample, flipped, 1)
    references = tuple(to_pixels(control.load(flipped)) for control in sample.control_images)
    return Pixels(image, more.get("mask"), references=references)


def previews(sample: Sample, seed: int) -> list[tuple[str, Image.Image]]:
    """Return what a sample's model is given besides the image, as it is encoded, with a word for each.

    Contents must have been hashed; ``seed`` is what generated masks follow from. Empty for plain text to image.
    """
    found: list[tuple[str, Image.Image]] = []
    if sample.mask is not None or sample.settings.alpha_mask:
        mask = _load_sample(sample, False, 1)[1]["mask"]
        found.append(("loss mask", Image.fromarray((mask[0] * 255).to(torch.uint8).numpy())))
    for variant in range(min(_PREVIEWED, sample.mask_variants)):
        pixels, _ = _load_masked(sample, False, variant, seed, 1)
        found.append(("given to fill", to_image(pixels)))
    found += [("other of the pair", to_image(_load_sample(each, False, 1)[0])) for each in sample.pair[1:]]
    return found + [("control image", control.load()) for control in sample.control_images]


def preview_names(sample: Sample) -> list[str]:
    """Return the words that :func:`previews` will have, without opening an image."""
    masks = ["loss mask"] if sample.mask is not None or sample.settings.alpha_mask else []
    fills = ["given to fill"] * min(_PREVIEWED, sample.mask_variants)
    pairs = ["other of the pair"] * (sample.paired is not None)
    return masks + fills + pairs + ["control image"] * len(sample.control_images)


def _decode_sample(sample: Sample) -> tuple[Image.Image, Image.Image | None]:
    """Return a sample's RGB image and, where its subset reads the transparency and it has some, its alpha (mode L)."""
    settings, path = sample.settings, sample.image.path
    keeps_alpha = settings.alpha_mask or settings.inpaint_alpha_mask
    image, alpha = decode(checked_bytes(sample.image), path, keeps_alpha)
    if image.size != sample.image.size:
        raise UserError(f"{path}: changed while it was being cached; start again")
    return image, alpha


def _fitted(image: Image.Image, sample: Sample, flipped: bool) -> Image.Image:
    """Return a sample's image, or a mask (mode L) of it, resized, cropped and mirrored as it is encoded."""
    filter_name = "area" if image.mode == "L" else sample.settings.resize_interpolation
    fit = fit_image(image, sample.fit, filter_name)
    return fit.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flipped else fit


def _inpaint_mask(sample: Sample, alpha: Image.Image | None, variant: int, seed: int) -> Mask:
    """A sample's inpainting mask [H, W] as encoded, not mirrored."""
    masks = sample.group.subset.inpainting
    assert masks is not None
    if masks.source == "generated":
        return generated_mask(masks.kinds, *sample.fit.encoded, seed, sample.identity, variant)
    if sample.inpaint_mask is not None:
        white, *_ = read_mask(checked_bytes(sample.inpaint_mask), sample.inpaint_mask.path)
    else:
        assert alpha is not None, "scan() refuses an opaque image"
        white = ImageChops.invert(alpha)
    mask = binary_mask(_fitted(white, sample, flipped=False))
    if not mask.any():  # what scan() saw of it is lost at this size
        raise UserError(f"{(sample.inpaint_mask or sample.image).path}: nothing to fill at this size; fill more of it")
    return mask


def latent_path(sample: Sample, flipped: bool, fingerprint: str) -> Path:
    """Return the cache file of a sample's latents in one orientation; image and mask must have been hashed."""
    return sample.group.cache / "latents" / _latent_name(sample, flipped, fingerprint)


def _latent_name(sample: Sample, flipped: bool, fingerprint: str) -> str:
    settings, fit, content = sample.settings, sample.fit, sample.image.content
    alpha = "alpha" if settings.alpha_mask else "colours under alpha" if settings.inpaint_alpha_mask else ""
    assert content is not None, "contents are hashed first"
    mask = alpha if sample.mask is None else _mask_part(sample.mask)
    parts = (PIXELS_VERSION, fingerprint, content, mask, fit.resized, fit.offset, fit.encoded)
    return file_name(*parts, settings.resize_interpolation or DEFAULT_INTERPOLATION, flipped)


def _masked_name(sample: Sample, flipped: bool, variant: int, seed: int, fingerprint: str) -> str:
    masks = sample.group.subset.inpainting
    assert masks is not None
    mask: object = masks.source
    if masks.source == "generated":
        mask = (MASKS_VERSION, masks.kinds, seed, sample.identity, variant)
    elif sample.inpaint_mask is not None:
        mask = _mask_part(sample.inpaint_mask)
    latents = _latent_name(sample, flipped, fingerprint)  # names content, size and settings
    blank: tuple[object, ...] = () if masks.blank == "grey" else (masks.blank,)  # grey's name is that of old caches
    if masks.blank == "noise":
        blank += (seed, sample.identity, variant)
    return file_name("fill", latents, mask, *blank)


def _mask_part(file: SourceFile) -> str:
    assert file.content is not None, "contents are hashed first"
    return f"{file.content} {MASK_READING}"


def _control_name(control: ControlImage, flipped: bool, fingerprint: str) -> str:
    return file_name("reference", PIXELS_VERSION, fingerprint, control.key(), flipped)


def file_name(*parts: object) -> str:
    """Return the name of the cache file whose content follows from ``parts``."""
    return f"{hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()}.safetensors"


def readable_files(folder: Path) -> set[str]:
    """Return the names of a folder's complete safetensors files; empty where there is no folder."""
    by_size: dict[int, list[str]] = defaultdict(list)
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".safetensors") and not entry.name.startswith("."):
                    with suppress(OSError):  # a link that leads nowhere
                        found = entry.stat()
                        if stat.S_ISREG(found.st_mode):
                            by_size[found.st_size].append(entry.name)
    except FileNotFoundError:
        return set()
    complete: set[str] = set()
    for first, *others in by_size.values():
        is_usual = is_complete(folder / first)
        complete.update([first] * is_usual, (name for name in others if is_usual or is_complete(folder / name)))
    return complete


def discard_damaged(paths: Iterable[Path], say: Callable[[str], object]) -> None:
    """Delete the files among ``paths`` that are not what was written, so that they are made again; say which.

    Missing ones are passed over. Four GiB are read, which takes some seconds; what lies behind is checked when it is
    used.
    """
    damaged, read = list[Path](), 0
    for path in dict.fromkeys(paths):
        with suppress(OSError):
            read += path.stat().st_size
            if read > _MOST_CHECKED:
                break
            try:
                read_checked(path)
            except UserError:
                damaged.append(path)
    if damaged:
        names = names_in_short([path.name for path in damaged], shown=2)
        say(f"note: {damaged[0].parent}: {counted(len(damaged), 'damaged file')} made again: {names}")


def encode_latents(
    jobs: Sequence[EncodeJob], encoder: ImageEncoder, batch_size: int, advance: Callable[[int], None]
) -> None:
    """Encode and write ``jobs``, ``batch_size`` images of one size at a time; images are decoded ahead in threads."""
    with ThreadPoolExecutor(_DECODERS) as pool:
        batches = _batches_by_size(jobs, batch_size)
        upcoming = [pool.submit(_load_batch, batch, encoder.latent_factor) for batch in islice(batches, _DECODERS)]
        while upcoming:
            batch, pixels, besides = upcoming.pop(0).result()
            upcoming += [pool.submit(_load_batch, later, encoder.latent_factor) for later in islice(batches, 1)]
            with torch.no_grad():
                latents = encoder.encode(pixels)
            height, width = (side // encoder.latent_factor for side in pixels.shape[-2:])
            assert (latents.shape[0], *latents.shape[-2:]) == (len(batch), height, width), latents.shape
            for job, latent, more in zip(batch, latents, besides, strict=True):
                if not torch.isfinite(latent).all():
                    raise UserError(f"{job.source}: its latents are not finite; encode images in bf16 or fp32")
                tensors, source = {job.tensor_name: latent, **more}, {"image": Path(job.source).name}
                write_safetensors(job.path, tensors, source, checked=True)
            advance(len(batch))


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


def read_cached(path: Path, crop: tuple[int, int, int, int] | None = None) -> dict[str, Tensor]:
    """Return a cache file's tensors; with ``crop`` (top, left, height, width) only that part of each [_, h, w].

    Raises:
        UserError: it is gone, or not what was written.
    """
    tensors = read_checked(path)
    if crop is None:
        return tensors
    top, left, height, width = crop
    return {name: tensor[:, top : top + height, left : left + width].clone() for name, tensor in tensors.items()}


def inpaint_variant(sample: Sample, seed: int, epoch: int, sample_id: int) -> int:
    """Return which of a sample's masks is seen in ``epoch``."""
    return python_random("mask variant", seed, epoch, sample_id).randrange(sample.mask_variants)


def condition_files(
    sample: Sample, flipped: bool, epoch: int, sample_id: int, seed: int, fingerprint: str
) -> list[Path]:
    """Return the files of a sample's conditions in ``epoch``."""
    folder = sample.group.cache / "conditions"
    if sample.group.subset.inpainting is not None:
        variant = inpaint_variant(sample, seed, epoch, sample_id)
        return [folder / _masked_name(sample, flipped, variant, seed, fingerprint)]
    return [folder / _control_name(control, flipped, fingerprint) for control in sample.control_images]


def read_conditions(
    sample: Sample, flipped: bool, epoch: int, sample_id: int, seed: int, fingerprint: str
) -> Conditions:
    """Return a sample's conditions in ``epoch``, without a batch axis."""
    cached = [read_cached(path) for path in condition_files(sample, flipped, epoch, sample_id, seed, fingerprint)]
    if sample.group.subset.inpainting is not None:
        bits = np.unpackbits(cached[0]["mask"].numpy(), axis=-1, count=sample.fit.encoded[0])  # [1, H, W]
        return Conditions(cached[0]["masked_latents"], torch.from_numpy(bits).float())
    return Conditions(references=tuple(each["latents"] for each in cached)) if cached else NO_CONDITIONS


@dataclass(frozen=True, slots=True)
class TextJob:
    """A caption, and the images that the text encoder is shown with it."""

    caption: str
    images: tuple[ShownImage, ...] = ()
    flipped: bool = False  # the images, all of them

    def file(self, fingerprint: str) -> str:
        """Return the name of its embeddings' cache file; the images must have been hashed."""
        if not self.images:
            return file_name(fingerprint, self.caption)
        images = tuple(image.key() for image in self.images)
        return file_name(fingerprint, self.caption, PIXELS_VERSION, images, self.flipped)

    def path(self, folder: Path, fingerprint: str) -> Path:
        """Return its embeddings' cache file below the cache ``folder``."""
        return folder / "text" / self.file(fingerprint)


def encode_texts(
    folder: Path, jobs: Sequence[TextJob], encoder: TextEncoder, batch_size: int, advance: Callable[[int], None]
) -> None:
    """Encode and write the embeddings of ``jobs``."""
    for start in range(0, len(jobs), batch_size):
        batch = jobs[start : start + batch_size]
        for job, tensors in zip(batch, encode_text_batch(batch, encoder), strict=True):
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    raise UserError(f"caption {job.caption!r}: {name} is not finite; encode text in bf16 or fp32")
            write_safetensors(job.path(folder, encoder.fingerprint), tensors, checked=True)
        advance(len(batch))


@torch.no_grad()
def encode_text_batch(jobs: Sequence[TextJob], encoder: TextEncoder) -> list[dict[str, Tensor]]:
    """Return the embeddings of ``jobs``, encoded in one batch."""
    captions = [job.caption for job in jobs]
    if not encoder.sees_references:
        return encoder.encode(captions)
    return encoder.encode(captions, [[image.load(job.flipped) for image in job.images] for job in jobs])
