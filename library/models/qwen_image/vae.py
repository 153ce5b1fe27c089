"""Qwen-Image's autoencoder: pixels to latents (while caching) and back (while sampling).

It is Wan's video autoencoder, further trained, and takes an image as a video of one frame. Read from a diffusers
folder or from ``qwen_image_vae.safetensors`` as ComfyUI has it, whose keys are Wan's
(https://github.com/Wan-Video/Wan2.1/blob/main/wan/modules/vae.py): numbered places in flat lists
(``decoder.upsamples.7``) where diffusers has blocks with parts (``decoder.up_blocks.1.upsamplers.0``).

As with FLUX's, training uses the *mean* of the posterior. Latents leave here normalised by a mean and a standard
deviation for each channel.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor

from library.errors import UserError
from library.models.family_files import Shapes
from library.models.layer_names import count_blocks
from library.models.registry import family_names
from library.models.vae import ImageEncoder
from library.models.weights import KeyMap
from library.precision.checkpoint import WeightFiles


class QwenImageEncoder(ImageEncoder):
    """Latents are normalised by a mean and a standard deviation for each channel."""

    autoencoder = AutoencoderKLQwenImage
    title = "Qwen-Image's VAE"
    file = "qwen_image_vae.safetensors"
    marks: tuple[str, ...] = ("decoder.conv_in.weight", "encoder.down_blocks.0.conv1.weight")
    is_video = True

    @classmethod
    def describe(cls, weights: WeightFiles) -> tuple[dict[str, Any], KeyMap]:
        """As everywhere; an autoencoder with another number of channels is refused."""
        config, key_map = super().describe(weights)
        if (channels := config.get("input_channels", 3)) != 3:
            raise UserError(
                f"{weights.path}: an autoencoder of {channels} channels, as Qwen-Image-Layered has, which is not a "
                "model family of this version; give qwen_image_vae.safetensors"
            )
        return config, key_map

    @staticmethod
    def renamed(names: Collection[str]) -> dict[str, str]:
        """Translate Wan's names."""
        resamples = (re.match(r"encoder\.downsamples\.(\d+)\.resample\.", name) for name in names)
        per_level = min((int(match[1]) for match in resamples if match), default=0) + 2
        return {name: _diffusers_name(name, per_level) for name in names}

    @classmethod
    def arguments(cls, shapes: Shapes) -> dict[str, Any]:
        """Return what the shapes show; the rest is as published."""
        base, channels = shapes["encoder.conv_in.weight"][:2]
        down, count = "encoder.down_blocks.{}.{}.weight".format, count_blocks(shapes, "encoder.down_blocks.")
        samplers = [i for i in range(count) if down(i, "resample.1") in shapes]  # blocks that change the size
        residuals = samplers[0] if samplers else count
        return {
            "base_dim": base,
            "input_channels": channels,
            "z_dim": shapes["decoder.conv_in.weight"][1],
            "dim_mult": [shapes[down(i, "conv1")][0] // base for i in range(0, count, residuals + 1)],
            "num_res_blocks": residuals,
            "temperal_downsample": [down(i, "time_conv") in shapes for i in samplers],
        }

    def set_latents(self, config: dict[str, Any]) -> None:
        """Read channels, factor, means and deviations, each [1, C, 1, 1]; the published ones where it does not say."""
        parameters = inspect.signature(self.autoencoder.__init__).parameters
        settings = {name: parameter.default for name, parameter in parameters.items()} | config
        self.latent_channels, self.latent_factor = int(settings["z_dim"]), 2 ** len(settings["temperal_downsample"])
        self._mean = torch.tensor(settings["latents_mean"]).view(1, -1, 1, 1)
        self._std = torch.tensor(settings["latents_std"]).view(1, -1, 1, 1)

    def normalise(self, latents: Tensor) -> Tensor:
        """Return (latents - mean) / std."""
        return (latents - self._mean.to(latents.device)) / self._std.to(latents.device)

    def denormalise(self, latents: Tensor) -> Tensor:
        """Return latents * std + mean."""
        return latents * self._std.to(latents.device) + self._mean.to(latents.device)


def _diffusers_name(name: str, per_level: int) -> str:
    """Translate one of Wan's keys; a level of the decoder has ``per_level`` places, the last one its upsampler."""
    for pattern, replacement in family_names("qwen_image").vae:
        name = re.sub(pattern, replacement, name)

    def of_level(match: re.Match[str]) -> str:
        level, part = divmod(int(match[1]), per_level)
        return f".up_blocks.{level}." + ("upsamplers.0." if part == per_level - 1 else f"resnets.{part}.")

    return re.sub(r"\.upsamples\.(\d+)\.", of_level, name)
