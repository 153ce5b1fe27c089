"""Latents as a transformer's tokens: 2 x 2 of them are one, as FLUX.1 and Qwen-Image have it, or each is its own.

The published code is https://github.com/black-forest-labs/flux/blob/main/src/flux/sampling.py; diffusers' pipelines do
the same and are what the tests compare with.
"""

from __future__ import annotations

from torch import Tensor


def pack_latents(latents: Tensor, patch: int = 2) -> Tensor:
    """Return tokens [B, h/p * w/p, p²C] of ``latents`` [B, C, h, w]; a token is channel by row by column."""
    batch, channels, height, width = latents.shape
    rows, columns = height // patch, width // patch
    patches = latents.view(batch, channels, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, rows * columns, patch * patch * channels)


def unpack_latents(tokens: Tensor, height: int, width: int, patch: int = 2) -> Tensor:
    """Return latents [B, C, height, width] of ``tokens``; undoes :func:`pack_latents`."""
    batch, _, numbers = tokens.shape
    channels = numbers // patch**2
    patches = tokens.view(batch, height // patch, width // patch, channels, patch, patch).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, channels, height, width)
