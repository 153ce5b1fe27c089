"""What a sample is painted from besides its caption, on disk: regions to fill, and reference pictures.

``conditions/<key>.safetensors`` in the folder of the latents holds either

- of a fill model, for one sample, orientation and mask: ``masked_latents`` [C, h, w], the latents of the picture with
  the region to fill blanked, pixels * (1 - mask) in [-1, 1], and ``mask`` [1, H, W / 8] uint8, eight pixels a byte; or
- of an edit model, for one control picture at one size and orientation: ``latents`` [C, h, w]; samples share it.

Masks are of two values, as FluxFillPipeline makes them: a pixel is filled from half white on. A sample may have several
generated masks; which one an epoch sees is a function of (seed, epoch, sample), and held-out samples see the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageChops
from torch import Tensor

from library.conditions import NO_CONDITIONS, Conditions
from library.data.buckets import Size
from library.data.cache import EncodeJob, cache_file, fitted, latent_file, load_image, read_cached, readable_files
from library.data.controls import Control, checked_bytes
from library.data.images import PIXELS_VERSION, decode_mask, to_pixels
from library.data.inpaint_masks import MASKS_VERSION, Mask, generated_mask
from library.data.samples import Sample
from library.errors import UserError
from library.randomness import python_random

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
