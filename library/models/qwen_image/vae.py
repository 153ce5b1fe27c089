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
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor

from library.errors import UserError
from library.models.vae import ImageEncoder
from library.models.weights import KeyMap, identity_map
from library.precision.checkpoint import WeightFiles
from library.safetensors_io import RowRange


class QwenImageEncoder(ImageEncoder):
    """Latents are normalised by a mean and a standard deviation for each channel."""

    autoencoder = AutoencoderKLQwenImage
    title = "Qwen-Image's VAE"
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

    @classmethod
    def describe_file(cls, weights: WeightFiles) -> tuple[dict[str, Any], KeyMap]:
        """Return config and key map of a file in Wan's layout, or in diffusers' without its config.json."""
        if "decoder.conv1.weight" in weights and "encoder.downsamples.0.residual.2.weight" in weights:
            per_level = _residuals(weights, "encoder.downsamples.{}.resample.1.weight") + 2
            key_map: KeyMap = {_diffusers_name(name, per_level): [RowRange(name)] for name in weights.names}
        elif "decoder.conv_in.weight" in weights and "encoder.down_blocks.0.conv1.weight" in weights:
            key_map = identity_map(weights.names)
        else:
            raise UserError(
                f"{weights.path}: not Qwen-Image's autoencoder (no decoder.conv1.weight); give "
                "qwen_image_vae.safetensors"
            )
        return _config(weights, key_map), key_map

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


def _config(weights: WeightFiles, key_map: KeyMap) -> dict[str, Any]:
    """Return the arguments of ``AutoencoderKLQwenImage`` that fit a file's shapes; the rest is as published."""

    def shape(name: str) -> tuple[int, ...]:
        return weights.shape(key_map[name][0].source if name in key_map else name)

    base, channels = shape("encoder.conv_in.weight")[:2]
    block, widths, temporal = 0, [], []
    residuals = 0
    while f"encoder.down_blocks.{block + residuals}.conv1.weight" in key_map:
        residuals += 1
    while f"encoder.down_blocks.{block}.conv1.weight" in key_map:
        widths.append(shape(f"encoder.down_blocks.{block}.conv1.weight")[0])
        if f"encoder.down_blocks.{block + residuals}.resample.1.weight" in key_map:
            temporal.append(f"encoder.down_blocks.{block + residuals}.time_conv.weight" in key_map)
        block += residuals + 1
    return {
        "base_dim": base,
        "input_channels": channels,
        "z_dim": shape("decoder.conv_in.weight")[1],
        "dim_mult": [width // base for width in widths],
        "num_res_blocks": residuals,
        "temperal_downsample": temporal,
    }


def _residuals(weights: WeightFiles, resample: str) -> int:
    """Return how many residual blocks come before the first that changes the size."""
    return next((i for i in range(len(weights.names)) if resample.format(i) in weights), 0)


RENAMES = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"\.head\.0\.", ".norm_out."),
    (r"\.head\.2\.", ".conv_out."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
    (r"\.downsamples\.", ".down_blocks."),
)


def _diffusers_name(name: str, per_level: int) -> str:
    """Translate one of Wan's keys; a level of the decoder has ``per_level`` places, the last one its upsampler."""
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return re.sub(r"\.upsamples\.(\d+)\.", lambda match: _up_block(int(match[1]), per_level), name)


def _up_block(place: int, per_level: int) -> str:
    level, part = divmod(place, per_level)
    return f".up_blocks.{level}.upsamplers.0." if part == per_level - 1 else f".up_blocks.{level}.resnets.{part}."
