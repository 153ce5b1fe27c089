"""How FLUX.1 sees pictures: 2 x 2 latents as one token, each token at (index, row, column).

The published code is https://github.com/black-forest-labs/flux/blob/main/src/flux/sampling.py; diffusers' pipelines
do the same and are what the tests compare with. ``index`` is 0 for the picture that is painted and larger for
reference pictures. The mask of a Fill model has no encoder: the pixels under a token become its channels.
"""

from __future__ import annotations

import functools

import torch
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


def pack_mask(mask: Tensor, factor: int) -> Tensor:
    """Return a mask [B, 1, H, W] in pixels as tokens [B, H/2f * W/2f, 4f²]; ``factor`` f is the encoder's.

    The f x f pixels under one latent become f² channels, row by row, which are then packed as latents are: 256
    numbers a token for FLUX.1's factor of 8.
    """
    batch, _, height, width = mask.shape
    cells = mask.reshape(batch, height // factor, factor, width // factor, factor).permute(0, 2, 4, 1, 3)
    return pack_latents(cells.reshape(batch, factor * factor, height // factor, width // factor))


@functools.lru_cache(maxsize=256)
@torch.inference_mode(mode=False)  # what is drawn with serves training too
def text_positions(tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """Return (0, 0, 0) for every text token, fp32 [tokens, 3]; the same tensor each time, not to be changed."""
    return torch.zeros(tokens, 3, device=device)


@functools.lru_cache(maxsize=256)
@torch.inference_mode(mode=False)  # what is drawn with serves training too
def image_positions(rows: int, columns: int, device: torch.device | str = "cpu", index: int = 0) -> Tensor:
    """Return (index, row, column) of every image token, fp32 [rows * columns, 3].

    The same tensor each time, not to be changed: tables of sines are remembered by it (``library.nn.rope``).
    """
    row = torch.arange(rows, device=device, dtype=torch.float32)
    column = torch.arange(columns, device=device, dtype=torch.float32)
    grid = torch.stack(torch.meshgrid(row, column, indexing="ij"), dim=-1).reshape(-1, 2)
    return torch.nn.functional.pad(grid, (1, 0), value=index)
