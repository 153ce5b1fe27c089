"""The autoencoders of FLUX: FLUX.1's (Z-Image's too) and FLUX.2's (FLUX.3's too).

Each is read from a diffusers folder (``AutoencoderKL``, ``AutoencoderKLFlux2``) or from BFL's file
(``ae.safetensors``, ``flux2-vae.safetensors``), whose keys follow the latent-diffusion code
base (https://github.com/CompVis/latent-diffusion): ``encoder.down.i.block.j``, up blocks counted from the
image side, attention as 1 x 1 convolutions. diffusers counts up blocks from the latent side and uses linears.
Latents leave here normalised.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from torch import Tensor

from library.errors import UserError
from library.models.vae import ImageEncoder
from library.models.weights import KeyMap, identity_map
from library.precision.checkpoint import WeightFiles
from library.safetensors_io import RowRange

PUBLISHED: dict[str, Any] = {  # as config.json of black-forest-labs/FLUX.1-dev has it
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 16,
    "layers_per_block": 2,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "sample_size": 1024,
}
PUBLISHED_FLUX2: dict[str, Any] = {
    key: value for key, value in PUBLISHED.items() if key not in ("scaling_factor", "shift_factor")
} | {"latent_channels": 32, "use_quant_conv": True, "use_post_quant_conv": True}


class FluxImageEncoder(ImageEncoder):
    """FLUX.1's autoencoder: latents are normalised by one shift and one scale, (mean - shift) * scale.

    Attributes:
        file: what it is published as. channels: of its latents.
        published: arguments of ``autoencoder`` that no tensor shows, and all others of the published one.
    """

    autoencoder: Any = AutoencoderKL
    title = "FLUX's VAE"
    file = "ae.safetensors"
    channels = 16
    published: Mapping[str, Any] = PUBLISHED

    @classmethod
    def describe_file(cls, weights: WeightFiles) -> tuple[dict[str, Any], KeyMap]:
        """Return config and key map of a file in BFL's layout, or in diffusers' without its config.json."""
        bfl = "encoder.down.0.block.0.conv1.weight" in weights
        down = "encoder.down.{}.block.{}.conv1.weight" if bfl else "encoder.down_blocks.{}.resnets.{}.conv1.weight"
        for name in ("encoder.conv_in.weight", "decoder.conv_in.weight", down.format(0, 0)):
            if name not in weights:
                raise UserError(f"{weights.path}: not {cls.title} (no {name}); give {cls.file}")
        levels = next(i for i in itertools.count() if down.format(i, 0) not in weights)
        channels = [weights.shape(down.format(i, 0))[0] for i in range(levels)]
        attention = "encoder.mid.attn_1.q.weight" if bfl else "encoder.mid_block.attentions.0.to_q.weight"
        latent_channels = weights.shape("decoder.conv_in.weight")[1]
        if latent_channels != cls.channels:
            raise UserError(
                f"{weights.path}: {latent_channels} latent channels, {cls.title} has {cls.channels}; give {cls.file}"
            )
        quant, post_quant = cls.quant_convolutions(bfl)
        config = dict(cls.published) | {
            "in_channels": weights.shape("encoder.conv_in.weight")[1],
            "out_channels": weights.shape("decoder.conv_out.weight")[0],
            "down_block_types": ["DownEncoderBlock2D"] * levels,
            "up_block_types": ["UpDecoderBlock2D"] * levels,
            "block_out_channels": channels,
            "layers_per_block": next(i for i in itertools.count() if down.format(0, i) not in weights),
            "norm_num_groups": 32 if all(count % 32 == 0 for count in channels) else 8,
            "use_quant_conv": f"{quant}.weight" in weights,
            "use_post_quant_conv": f"{post_quant}.weight" in weights,
            "mid_block_add_attention": attention in weights,
        }
        if not bfl:
            return config, identity_map(weights.names)
        return config, {_diffusers_name(name, levels): [RowRange(name)] for name in weights.names}

    @staticmethod
    def quant_convolutions(bfl: bool) -> tuple[str, str]:
        """Return the names of the convolutions behind the encoder and before the decoder, where a file has them."""
        return "quant_conv", "post_quant_conv"

    def set_latents(self, config: dict[str, Any]) -> None:
        """Read channels, factor, shift and scale."""
        self.latent_channels = int(config["latent_channels"])
        self.latent_factor = 2 ** (len(config["block_out_channels"]) - 1)
        self.scaling, self.shift = float(config["scaling_factor"]), float(config.get("shift_factor") or 0.0)

    def normalise(self, latents: Tensor) -> Tensor:
        """Return (latents - shift) * scaling."""
        return (latents - self.shift) * self.scaling

    def denormalise(self, latents: Tensor) -> Tensor:
        """Return latents / scaling + shift."""
        return latents / self.scaling + self.shift


_RENAMES = (
    (r"^(encoder|decoder)\.((post_)?quant_conv)\.", r"\2."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"^encoder\.norm_out\.", "encoder.conv_norm_out."),
    (r"^decoder\.norm_out\.", "decoder.conv_norm_out."),
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.norm\.", ".mid_block.attentions.0.group_norm."),
    (r"\.mid\.attn_1\.([qkv])\.", r".mid_block.attentions.0.to_\1."),
    (r"\.mid\.attn_1\.proj_out\.", ".mid_block.attentions.0.to_out.0."),
    (r"\.down\.(\d+)\.block\.", r".down_blocks.\1.resnets."),
    (r"\.down\.(\d+)\.downsample\.", r".down_blocks.\1.downsamplers.0."),
)


def _diffusers_name(name: str, levels: int) -> str:
    """Translate one key of BFL's autoencoder."""
    for pattern, replacement in _RENAMES:
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
    channels = 32
    published = PUBLISHED_FLUX2

    @staticmethod
    def quant_convolutions(bfl: bool) -> tuple[str, str]:
        """Return BFL's names, which lie inside encoder and decoder, or diffusers'."""
        return ("encoder.quant_conv", "decoder.post_quant_conv") if bfl else ("quant_conv", "post_quant_conv")

    def set_latents(self, config: dict[str, Any]) -> None:
        """Read channels and factor."""
        self.latent_channels = int(config["latent_channels"])
        self.latent_factor = 2 ** (len(config["block_out_channels"]) - 1)

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
        return mean, torch.sqrt(variance + norm.eps)
