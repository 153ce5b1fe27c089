"""The autoencoders of FLUX: FLUX.1's (Z-Image's too) and FLUX.2's (FLUX.3's too).

Each is read from a diffusers folder (``AutoencoderKL``, ``AutoencoderKLFlux2``) or from BFL's file
(``ae.safetensors``, ``flux2-vae.safetensors``), whose keys follow the latent-diffusion code
base (https://github.com/CompVis/latent-diffusion): ``encoder.down.i.block.j``, up blocks counted from the
image side, attention as 1 x 1 convolutions. diffusers counts up blocks from the latent side and uses linears.
Latents leave here normalised.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from torch import Tensor

from library.errors import UserError
from library.models.family_files import Shapes
from library.models.layer_names import count_blocks
from library.models.registry import family_names
from library.models.vae import ImageEncoder
from library.models.weights import KeyMap
from library.precision.checkpoint import WeightFiles

PUBLISHED: dict[str, Any] = {  # as config.json of black-forest-labs/FLUX.1-dev and FLUX.2-dev have it
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 1024,
}


class FluxImageEncoder(ImageEncoder):
    """FLUX.1's autoencoder: latents are normalised by one shift and one scale, (mean - shift) * scale.

    Attributes:
        published: arguments of ``autoencoder`` that no tensor shows, and all others of the published one.
    """

    autoencoder: Any = AutoencoderKL
    title = "FLUX's VAE"
    file = "ae.safetensors"
    marks = ("encoder.conv_in.weight", "decoder.conv_in.weight", "encoder.down_blocks.0.resnets.0.conv1.weight")
    published: Mapping[str, Any] = PUBLISHED | {
        "latent_channels": 16,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
    }

    @classmethod
    def describe(cls, weights: WeightFiles) -> tuple[dict[str, Any], KeyMap]:
        """As everywhere; an autoencoder with another number of latent channels is refused."""
        config, key_map = super().describe(weights)
        if (found := config["latent_channels"]) != (own := cls.published["latent_channels"]):
            raise UserError(f"{weights.path}: {found} latent channels, {cls.title} has {own}; give {cls.file}")
        return config, key_map

    @staticmethod
    def renamed(names: Collection[str]) -> dict[str, str]:
        """Translate BFL's names."""
        levels = count_blocks(names, "encoder.down.")
        return {name: _diffusers_name(name, levels) for name in names}

    @classmethod
    def arguments(cls, shapes: Shapes) -> dict[str, Any]:
        """Return what the shapes show; the rest is as published."""
        levels = count_blocks(shapes, "encoder.down_blocks.")
        channels = [shapes[f"encoder.down_blocks.{i}.resnets.0.conv1.weight"][0] for i in range(levels)]
        return dict(cls.published) | {
            "latent_channels": shapes["decoder.conv_in.weight"][1],
            "in_channels": shapes["encoder.conv_in.weight"][1],
            "out_channels": shapes["decoder.conv_out.weight"][0],
            "down_block_types": ["DownEncoderBlock2D"] * levels,
            "up_block_types": ["UpDecoderBlock2D"] * levels,
            "block_out_channels": channels,
            "layers_per_block": count_blocks(shapes, "encoder.down_blocks.0.resnets."),
            "norm_num_groups": 32 if all(count % 32 == 0 for count in channels) else 8,
            "use_quant_conv": "quant_conv.weight" in shapes,
            "use_post_quant_conv": "post_quant_conv.weight" in shapes,
            "mid_block_add_attention": "encoder.mid_block.attentions.0.to_q.weight" in shapes,
        }

    def set_latents(self, config: dict[str, Any]) -> None:
        """Read channels and factor; shift and scale, where the statistics are not in the weights."""
        self.latent_channels = int(config["latent_channels"])
        self.latent_factor = 2 ** (len(config["block_out_channels"]) - 1)
        self.scaling, self.shift = float(config.get("scaling_factor", 1.0)), float(config.get("shift_factor") or 0.0)

    def normalise(self, latents: Tensor) -> Tensor:
        """Return (latents - shift) * scaling."""
        return (latents - self.shift) * self.scaling

    def denormalise(self, latents: Tensor) -> Tensor:
        """Return latents / scaling + shift."""
        return latents / self.scaling + self.shift


def _diffusers_name(name: str, levels: int) -> str:
    """Translate one key of BFL's autoencoder."""
    for pattern, replacement in family_names("flux").vae:
        name = re.sub(pattern, replacement, name)
    name = re.sub(r"\.up\.(\d+)\.block\.", lambda m: f".up_blocks.{levels - 1 - int(m[1])}.resnets.", name)
    return re.sub(r"\.up\.(\d+)\.upsample\.", lambda m: f".up_blocks.{levels - 1 - int(m[1])}.upsamplers.0.", name)


class Flux2ImageEncoder(FluxImageEncoder):
    """FLUX.2's autoencoder, FLUX.3's too: FLUX.1's with 32 channels.

    Latents are normalised by the statistics of a batch norm over patches of 2 x 2, which come with the weights: one
    mean and one variance for each channel and place in a patch (https://github.com/black-forest-labs/flux2,
    ``autoencoder.py``). They stay latents of 32 channels here, 8 pixels each; diffusers' pipelines carry the patches,
    128 channels of 16 pixels, whose numbers are in the order in which :func:`library.models.vae.pack_latents` makes
    a token of them.
    """

    autoencoder = AutoencoderKLFlux2
    title = "FLUX.2's VAE"
    file = "flux2-vae.safetensors"
    eps: float | None = None  # of the variance; None: as the config says
    published = PUBLISHED | {"latent_channels": 32, "use_quant_conv": True, "use_post_quant_conv": True}

    def normalise(self, latents: Tensor) -> Tensor:
        """Return (patch - mean) / sqrt(variance + eps) of every patch."""
        mean, deviation = self._statistics(latents)
        return F.pixel_shuffle((F.pixel_unshuffle(latents, 2) - mean) / deviation, 2)

    def denormalise(self, latents: Tensor) -> Tensor:
        """Return patch * sqrt(variance + eps) + mean."""
        mean, deviation = self._statistics(latents)
        return F.pixel_shuffle(F.pixel_unshuffle(latents, 2) * deviation + mean, 2)

    def _statistics(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.vae.bn
        mean, variance = (each.to(latents).view(1, -1, 1, 1) for each in (norm.running_mean, norm.running_var))
        return mean, torch.sqrt(variance + (self.eps or norm.eps))
