"""FLUX.2's autoencoder, FLUX.3's too: diffusers' ``AutoencoderKLFlux2``.

FLUX.1's with 32 channels. It is read from a diffusers folder or from ``flux2-vae.safetensors``, which has BFL's names.
Latents are normalised by the statistics of a batch norm over patches of 2 x 2: one mean and one variance for each
channel and place in a patch (https://github.com/black-forest-labs/flux2, ``autoencoder.py``). They stay latents of
32 channels here, 8 pixels each; diffusers' pipelines carry the patches, 128 channels of 16 pixels, whose numbers are
in the order in which :func:`library.models.latents.pack_latents` makes a token of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLFlux2
from torch import Tensor

from library.models.flux.vae import PUBLISHED, FluxImageEncoder

PUBLISHED_FLUX2: dict[str, Any] = {
    key: value for key, value in PUBLISHED.items() if key not in ("scaling_factor", "shift_factor")
} | {"latent_channels": 32, "use_quant_conv": True, "use_post_quant_conv": True}


class Flux2ImageEncoder(FluxImageEncoder):
    """Latents are normalised by a batch norm's statistics, which come with the weights."""

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
