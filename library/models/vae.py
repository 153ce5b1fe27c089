"""The image autoencoders of all families: pixels to latents (while caching) and back (while sampling).

An encoder gives a mean and a variance for each latent number. Training uses the *mean*: a fixed latent makes
caches reusable, runs repeatable and validation losses comparable, and the noise that a draw would add is small
beside the noise that training adds itself. Latents leave here normalised, each family's way.

Latents are a transformer's tokens: 2 x 2 of them are one, as FLUX.1 and Qwen-Image have it, or each is its own. Where
tokens stand is what rotary embeddings turn them by (``library.nn.rope``). The published code is
https://github.com/black-forest-labs/flux/blob/main/src/flux/sampling.py; diffusers' pipelines do the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from library.checksums import fingerprint
from library.errors import UserError
from library.models.family_files import Shapes
from library.models.weights import KeyMap, identity_map, load_into, read_config_of
from library.precision.checkpoint import WeightFiles
from library.safetensors_io import RowRange

_PREFIXES = ("first_stage_model.", "vae.", "")  # before its names in a file, the first in all-in-one files
_PARTS = ("encoder", "decoder", "quant_conv", "post_quant_conv", "bn")  # of diffusers' classes; trainers leave others


def _is_of_it(name: str) -> bool:
    return name.partition(".")[0] in _PARTS


class ImageEncoder:
    """Pixels in, normalised latents out, and back. The weights are loaded at the first use.

    Attributes:
        autoencoder: diffusers' class. title: what people call it. file: what it is published as.
        marks: tensors that every file of it has, by diffusers' names.
        published: arguments of ``autoencoder`` as published that are not its defaults.
        kind: of latents, for their fingerprint: the mean of the distribution.
        is_video: it takes an image as a video of one frame.
        fingerprint: of weights, dtype and kind of latents; a part of the names of cached latents.
        latent_channels, latent_factor: of the latents, and pixels per latent.
        pixel_multiple: sides of images are multiples of it.
    """

    autoencoder: Any
    title: str
    file: str
    marks: tuple[str, ...]
    published: Mapping[str, Any] = {}
    kind = "mean"
    is_video = False
    latent_channels: int
    latent_factor: int

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device | str = "cpu", patch: int = 2) -> None:
        """Describe the autoencoder in ``path``; ``patch`` latents a side make one transformer token.

        On a CPU it computes in fp32 whatever ``dtype`` is: bf16 convolutions save no time there and cost precision that
        every cached latent would keep.
        """
        self._path, self._device, self._vae = path, device, None
        self._dtype = torch.float32 if torch.device(device).type == "cpu" else dtype
        self.fingerprint = f"{fingerprint(path)}-{self.kind}-{str(self._dtype).removeprefix('torch.')}"
        self.set_latents(self.describe(WeightFiles(path))[0])
        self.pixel_multiple = self.latent_factor * patch

    @classmethod
    def describe(cls, weights: WeightFiles) -> tuple[dict[str, Any], KeyMap]:
        """Return the arguments of ``autoencoder`` and where its parameters lie, in a diffusers folder or in a file.

        No weights are read.
        """
        if weights.path.is_dir():
            config = read_config_of(cls.autoencoder.__name__, weights.path, f"give {cls.title}")
            return config, identity_map(filter(_is_of_it, weights.names))
        prefix = next(each for each in _PREFIXES if any(name.startswith(each) for name in weights.names))
        inside = [name.removeprefix(prefix) for name in weights.names if name.startswith(prefix)]
        renamed = cls.renamed(inside).items()
        key_map = {ours: [RowRange(prefix + theirs)] for theirs, ours in renamed if _is_of_it(ours)}
        if lacking := [name for name in cls.marks if name not in key_map]:
            raise UserError(f"{weights.path}: not {cls.title} (no {lacking[0]}); give {cls.file}")
        try:
            return cls.arguments({name: weights.shape_of(rows) for name, rows in key_map.items()}), key_map
        except KeyError as error:
            raise UserError(f"{weights.path}: tensor {error} is missing; give {cls.file}") from None

    @staticmethod
    def renamed(names: Collection[str]) -> dict[str, str]:
        """Return a single file's name of each tensor -> diffusers'; a file may have those already."""
        raise NotImplementedError

    @classmethod
    def arguments(cls, shapes: Shapes) -> dict[str, Any]:
        """Return the arguments of ``autoencoder`` that fit a single file's ``shapes``, under diffusers' names."""
        raise NotImplementedError

    def set_latents(self, config: dict[str, Any]) -> None:
        """Set what ``config`` says of the latents: channels, factor, normalisation."""
        raise NotImplementedError

    def normalise(self, latents: Tensor) -> Tensor:
        """Return the latents [B, C, h, w] that the transformer sees, of the autoencoder's."""
        raise NotImplementedError

    def denormalise(self, latents: Tensor) -> Tensor:
        """Undo :meth:`normalise`."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
        """Return the autoencoder in ``path``."""
        weights = WeightFiles(path)
        config, key_map = cls.describe(weights)
        return load_into(lambda: cls.autoencoder.from_config(config), weights, key_map, dtype, device)

    @property
    def vae(self) -> Any:
        """The autoencoder, loaded now if it was not."""
        if self._vae is None:
            self._vae = self.load(self._path, self._dtype, self._device)
        return self._vae

    def compute_in(self, dtype: torch.dtype) -> None:
        """Compute in ``dtype`` from the next loading of the weights on, on a CPU too: to see what that does."""
        self._dtype, self._vae = dtype, None

    def release(self) -> None:
        """Free the weights; the next use loads them again."""
        self._vae = None

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Return latents [B, C, H/8, W/8], fp32, on the device of ``pixels`` [B, 3, H, W] in [-1, 1]."""
        height, width = pixels.shape[-2:]
        if height % self.pixel_multiple or width % self.pixel_multiple:
            raise UserError(
                f"image of {width} x {height} pixels: sides must be multiples of {self.pixel_multiple}; "
                "set bucket_reso_steps or resolution accordingly"
            )
        pixels_in = pixels.to(device=self.vae.device, dtype=self.vae.dtype)
        with torch.autocast(self.vae.device.type, enabled=False):
            mean = self.vae.encode(pixels_in.unsqueeze(2) if self.is_video else pixels_in).latent_dist.mode().float()
        return self.normalise(mean.squeeze(2) if self.is_video else mean).to(pixels.device)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return pixels [B, 3, H, W] fp32 in about [-1, 1] of normalised ``latents`` [B, C, h, w]."""
        plain = self.denormalise(latents.float()).to(device=self.vae.device, dtype=self.vae.dtype)
        with torch.autocast(self.vae.device.type, enabled=False):
            pixels = self.vae.decode(plain.unsqueeze(2) if self.is_video else plain).sample.float()
        return pixels.squeeze(2) if self.is_video else pixels


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
