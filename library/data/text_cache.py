"""Text embeddings on disk: ``text/<key>.safetensors`` holds what the text encoder returned for one caption.

Equal captions share a file. The text encoders of edit models look at the reference pictures too; what they return
then belongs to a caption together with the pictures' contents and sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from PIL import Image
from torch import Tensor

from library.data.cache import cache_file, readable_files
from library.data.controls import Control
from library.data.images import PIXELS_VERSION
from library.errors import UserError
from library.files import write_safetensors


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
