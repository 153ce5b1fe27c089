"""Latents as a transformer's tokens: 2 x 2 of them are one, as FLUX.1 and Qwen-Image have it.

The published code is https://github.com/black-forest-labs/flux/blob/main/src/flux/sampling.py; diffusers' pipelines do
the same and are what the tests compare with.
"""

from __future__ import annotations

from torch import Tensor


def pack_latents(latents: Tensor) -> Tensor:
    """Return tokens [B, h/2 * w/2, 4C] of ``latents`` [B, C, h, w]; a token is channel by row by column."""
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, (height // 2) * (width // 2), 4 * channels)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """Return latents [B, C, height, width] of ``tokens``; undoes :func:`pack_latents`."""
    batch, _, numbers = tokens.shape
    patches = tokens.view(batch, height // 2, width // 2, numbers // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, numbers // 4, height, width)
