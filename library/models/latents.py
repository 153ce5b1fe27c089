"""Latents as a transformer's tokens: 2 x 2 of them are one, as FLUX.1 and Qwen-Image have it, or each is its own.

Where tokens stand is what rotary embeddings turn them by (``library.nn.rope``).

The published code is https://github.com/black-forest-labs/flux/blob/main/src/flux/sampling.py; diffusers' pipelines do
the same and are what the tests compare with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


def token_grid(latents: Tensor, patch: int = 2) -> tuple[int, int]:
    """Return rows and columns of the tokens of ``latents`` [B, C, h, w]."""
    return latents.shape[-2] // patch, latents.shape[-1] // patch


def grid_positions(rows: int, columns: int, device: torch.device | str = "cpu", step: float = 1.0) -> Tensor:
    """Return (row, column) of an image's tokens, times ``step``, fp32 [rows * columns, 2]."""
    axes = [torch.arange(count, device=device, dtype=torch.float32) * step for count in (rows, columns)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 2)


def image_positions(rows: int, columns: int, device: torch.device | str = "cpu", index: int = 0) -> Tensor:
    """Return (index, row, column) of every image token, fp32 [rows * columns, 3], as of FLUX.1 and Krea 2."""
    return F.pad(grid_positions(rows, columns, device), (1, 0), value=index)


def text_numbers(tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """Return (0, 0, 0, number) of every text token, fp32 [tokens, 4], as of FLUX.2 and FLUX.3."""
    return F.pad(torch.arange(tokens, device=device, dtype=torch.float32).unsqueeze(1), (3, 0))
