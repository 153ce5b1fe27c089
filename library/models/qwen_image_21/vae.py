"""Qwen-Image-2.1's autoencoder: images of four channels to latents of 64, one for 16 x 16 pixels, and back.

Wan 2.2's residual autoencoder for single images: convolutions over one frame. It is read from a diffusers folder or
from ``qwen_image_2.1_vae_bf16.safetensors``, which has Wan's names
(https://github.com/Wan-Video/Wan2.2/blob/main/wan/modules/vae2_2.py) and keeps the frame's axis.

The fourth channel is opacity, from -1 to 1 as the colours. diffusers' pipeline gives images without one full opacity,
and so are the images of a dataset, whose transparent pixels were blended onto white. Decoded images are blended onto
white too.
The sides of latents are even: in the text one token stands for 2 x 2 of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage21
from torch import Tensor

from library.models.family_files import Shapes
from library.models.layer_names import count_blocks
from library.models.qwen_image.vae import QwenImageEncoder
from library.models.registry import family_names


class QwenImage21Encoder(QwenImageEncoder):
    """RGB images through an autoencoder of RGBA."""

    autoencoder = AutoencoderKLQwenImage21
    title = "Qwen-Image-2.1's VAE"
    file = "qwen_image_2.1_vae_bf16.safetensors"
    marks = ("encoder.down_blocks.0.resnets.0.conv1.weight",)

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device | str = "cpu", patch: int = 2) -> None:
        """As everywhere; sides are even in latents, although each of these is a token of its own."""
        super().__init__(path, dtype, device, 2 * patch)

    @staticmethod
    def renamed(names: Collection[str]) -> dict[str, str]:
        """Translate Wan's names."""
        return {name: _diffusers_name(name) for name in names}

    @classmethod
    def arguments(cls, shapes: Shapes) -> dict[str, Any]:
        """Return what the shapes show; the rest is as published."""
        base, channels = shapes["encoder.conv_in.weight"][:2]
        down, levels = "encoder.down_blocks.{}.{}.weight".format, count_blocks(shapes, "encoder.down_blocks.")
        return {
            "base_dim": base,
            "decoder_base_dim": shapes["decoder.conv_out.weight"][1],
            "z_dim": shapes["decoder.conv_in.weight"][1],
            "dim_mult": [shapes[down(i, "resnets.0.conv1")][0] // base for i in range(levels)],
            "num_res_blocks": count_blocks(shapes, "encoder.down_blocks.0.resnets."),
            "temperal_downsample": [down(i, "downsampler.time_conv") in shapes for i in range(levels - 1)],
            "in_channels": channels,
            "out_channels": shapes["decoder.conv_out.weight"][0],
        }

    def encode(self, pixels: Tensor) -> Tensor:
        """Return latents [B, C, H/16, W/16], fp32, of opaque ``pixels`` [B, 3, H, W] in [-1, 1]."""
        return super().encode(torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1))

    def decode(self, latents: Tensor) -> Tensor:
        """Return pixels [B, 3, H, W] fp32 in [-1, 1] of normalised ``latents`` [B, C, h, w], blended onto white."""
        pixels = super().decode(latents)
        opacity = (pixels[:, 3:] + 1) / 2
        return pixels[:, :3] * opacity + (1 - opacity)


def _diffusers_name(name: str) -> str:
    """Translate one of Wan's keys; the last place of a level that changes the size is what does so."""
    if match := re.match(r"(.*)\.(down|up)samples\.(\d+)\.\2samples\.(\d+)\.(.*)", name):
        side, way, level, place, rest = match.groups()
        resamples = rest.startswith(("resample.", "time_conv."))
        name = f"{side}.{way}_blocks.{level}." + (f"{way}sampler." if resamples else f"resnets.{place}.") + rest
    for pattern, replacement in family_names("qwen_image").vae:
        name = re.sub(pattern, replacement, name)
    return name
