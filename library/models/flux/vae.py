"""FLUX's autoencoder, Z-Image's too: diffusers' ``AutoencoderKL``.

Read from a diffusers folder or from BFL's ``ae.safetensors``, whose keys follow the latent-diffusion code
base (https://github.com/CompVis/latent-diffusion): ``encoder.down.i.block.j``, up blocks counted from the
image side, attention as 1 x 1 convolutions. diffusers counts up blocks from the latent side and uses linears.
Latents leave here normalised: (mean - shift) * scale.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from diffusers import AutoencoderKL
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


class FluxImageEncoder(ImageEncoder):
    """Latents are normalised by one shift and one scale.

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
