"""The image autoencoder: pixels to latents (while caching) and back (while sampling).

Read from a diffusers folder or from BFL's ``ae.safetensors``, whose keys follow the latent-diffusion code
base (https://github.com/CompVis/latent-diffusion): ``encoder.down.i.block.j``, up blocks counted from the
image side, attention as 1 x 1 convolutions. diffusers counts up blocks from the latent side and uses linears.

An encoder gives a mean and a variance for each latent number. Training uses the *mean*: a fixed latent makes
caches reusable, runs repeatable and validation losses comparable, and the noise that a draw would add is small
beside the noise that training adds itself. Latents leave here normalised: (mean - shift) * scale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from library.errors import UserError
from library.files import fingerprint
from library.models.family import dtype_name
from library.models.weights import KeyMap, identity_map, load_into, read_config
from library.precision.checkpoint_layouts import WeightFiles
from library.safetensors_io import RowRange

# BFL's constants, https://github.com/black-forest-labs/flux/blob/main/src/flux/util.py
FLUX_SCALING, FLUX_SHIFT = 0.3611, 0.1159


def computed_as(path: Path, dtype: torch.dtype, device: torch.device | str) -> tuple[torch.dtype, str]:
    """Return the dtype in which the autoencoder in ``path`` computes, and what marks latents that it made so.

    On a CPU that is fp32 whatever ``dtype`` is: bf16 convolutions save no time there and cost precision that every
    cached latent would keep.
    """
    used = torch.float32 if torch.device(device).type == "cpu" else dtype
    return used, f"{fingerprint(path)}-mean-{dtype_name(used)}"


class LazyVae:
    """An autoencoder that is loaded at the first use: the half of an image encoder that is the same for every kind.

    Attributes:
        fingerprint: of weights, dtype and kind of latents; a part of the names of cached latents.
        latent_channels, latent_factor: of the latents, and pixels per latent.
        pixel_multiple: sides of pictures are multiples of it.
    """

    def __init__(self, load: Callable[[], Any], fingerprint: str, channels: int, factor: int, patch: int) -> None:
        """Describe an autoencoder; ``patch`` latents a side make one transformer token."""
        self._load = load
        self._vae: Any = None
        self.fingerprint = fingerprint
        self.latent_channels, self.latent_factor = channels, factor
        self.pixel_multiple = factor * patch

    @property
    def vae(self) -> Any:
        """The autoencoder, loaded now if it was not."""
        if self._vae is None:
            self._vae = self._load()
        return self._vae

    def release(self) -> None:
        """Let go of the weights; the next use loads them again."""
        self._vae = None

    def _moved(self, pixels: Tensor) -> Tensor:
        """Return ``pixels`` [B, 3, H, W] on the autoencoder's device, in its dtype.

        Raises:
            UserError: a side is no multiple of ``pixel_multiple``.
        """
        height, width = pixels.shape[-2:]
        if height % self.pixel_multiple or width % self.pixel_multiple:
            raise UserError(
                f"image of {width} x {height} pixels: sides must be multiples of {self.pixel_multiple}; "
                "set bucket_reso_steps or resolution accordingly"
            )
        return pixels.to(device=self.vae.device, dtype=self.vae.dtype)


class VaeImageEncoder(LazyVae):
    """Pixels in, normalised latents out, and back. The weights are loaded at the first use."""

    def __init__(
        self, load: Callable[[], AutoencoderKL], config: Mapping[str, Any], fingerprint: str, patch: int = 2
    ) -> None:
        """Describe an autoencoder by its ``config``; ``patch`` latents a side make one transformer token."""
        factor = 2 ** (len(config["block_out_channels"]) - 1)
        super().__init__(load, fingerprint, int(config["latent_channels"]), factor, patch)
        self.scaling, self.shift = float(config["scaling_factor"]), float(config.get("shift_factor") or 0.0)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Return latents [B, C, H/8, W/8], fp32, on the device of ``pixels`` [B, 3, H, W] in [-1, 1].

        Raises:
            UserError: a side is no multiple of ``pixel_multiple``.
        """
        moved = self._moved(pixels)
        with torch.autocast(self.vae.device.type, enabled=False):
            mean = self.vae.encode(moved).latent_dist.mode().float()
        return ((mean - self.shift) * self.scaling).to(pixels.device)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return pixels [B, 3, H, W] fp32 in about [-1, 1] of normalised ``latents`` [B, C, h, w]."""
        plain = latents.float() / self.scaling + self.shift
        with torch.autocast(self.vae.device.type, enabled=False):
            return self.vae.decode(plain.to(device=self.vae.device, dtype=self.vae.dtype)).sample.float()


def vae_config(path: Path) -> dict[str, Any]:
    """Return the config of the autoencoder in ``path``, a diffusers folder or a file; reads no weights.

    Raises:
        UserError: another kind of model, incomplete or unreadable.
    """
    return _describe(WeightFiles(path))[0]


def load_vae(path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> AutoencoderKL:
    """Load the autoencoder in ``path``: a diffusers VAE folder, or BFL's single file.

    Raises:
        UserError: the file is another kind of autoencoder, incomplete or unreadable.
    """
    weights = WeightFiles(path)
    config, key_map = _describe(weights)
    vae = load_into(lambda: AutoencoderKL.from_config(config), weights, key_map, dtype, device)
    assert isinstance(vae, AutoencoderKL)
    return vae


def _describe(weights: WeightFiles) -> tuple[dict[str, Any], KeyMap]:
    """Return config and key map, from a folder's config.json or from a file's shapes."""
    if not weights.path.is_dir():
        return _describe_file(weights)
    config = read_config(weights.path)
    if config.get("_class_name") != "AutoencoderKL":
        raise UserError(
            f"{weights.path / 'config.json'}: {config.get('_class_name')!r} is no AutoencoderKL; give FLUX's VAE"
        )
    return config, identity_map(weights.names)


def is_vae_file(weights: WeightFiles) -> bool:
    """Whether ``weights`` are an autoencoder, in BFL's or in diffusers' layout."""
    return "encoder.conv_in.weight" in weights and "decoder.conv_in.weight" in weights


def _describe_file(weights: WeightFiles) -> tuple[dict[str, Any], KeyMap]:
    """Return config and key map of a file in BFL's layout, or in diffusers' without its config.json."""
    if not is_vae_file(weights):
        raise UserError(f"{weights.path}: not an autoencoder (no encoder.conv_in.weight); give FLUX's ae.safetensors")
    bfl = "encoder.down.0.block.0.conv1.weight" in weights
    down = "encoder.down.{}.block.{}.conv1.weight" if bfl else "encoder.down_blocks.{}.resnets.{}.conv1.weight"
    levels = _count_up(weights, lambda i: down.format(i, 0))
    channels = [weights.shape(down.format(i, 0))[0] for i in range(levels)]
    attention = "encoder.mid.attn_1.q.weight" if bfl else "encoder.mid_block.attentions.0.to_q.weight"
    latent_channels = weights.shape("decoder.conv_in.weight")[1]
    if latent_channels != 16:
        raise UserError(f"{weights.path}: {latent_channels} latent channels, FLUX has 16; give FLUX's ae.safetensors")
    config: dict[str, Any] = {
        "in_channels": weights.shape("encoder.conv_in.weight")[1],
        "out_channels": weights.shape("decoder.conv_out.weight")[0],
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "block_out_channels": channels,
        "layers_per_block": _count_up(weights, lambda j: down.format(0, j)),
        "latent_channels": latent_channels,
        "norm_num_groups": 32 if all(count % 32 == 0 for count in channels) else 8,
        "sample_size": 1024,
        "scaling_factor": FLUX_SCALING,
        "shift_factor": FLUX_SHIFT,
        "use_quant_conv": "quant_conv.weight" in weights,
        "use_post_quant_conv": "post_quant_conv.weight" in weights,
        "mid_block_add_attention": attention in weights,
        "force_upcast": True,
    }
    if not bfl:
        return config, identity_map(weights.names)
    return config, {_diffusers_name(name, levels): [RowRange(name)] for name in weights.names}


def _count_up(weights: WeightFiles, name: Callable[[int], str]) -> int:
    """Return the first i for which ``name(i)`` is not in the file."""
    i = 0
    while name(i) in weights:
        i += 1
    return i


_RENAMES = (
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
