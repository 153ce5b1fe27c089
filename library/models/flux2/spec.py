"""FLUX.2 (https://github.com/black-forest-labs/flux2): klein 4B and 9B, base and distilled, and dev.

The transformer sees an image as a sequence: 2 x 2 latents of 32 channels are one token of 128 numbers. It takes the
noise level sigma and the text and returns the velocity noise - image per token. klein has no guidance input: base is
steered by a negative text and true classifier-free guidance, the distilled model takes none and four steps. dev, which
is distilled for guidance, takes a guidance scale and no negative text.

Every FLUX.2 also edits. Tokens of reference images, any number of any sizes, follow those of the image, clean at every
noise level; what comes out for them is cut off. diffusers' pipelines scale a reference of more than one megapixel down
to one and leave smaller ones as they are: a dataset's ``no_resize_control`` with ``control_resolution = 1024``. The
text encoder does not look at them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from torch import Tensor

import library.models.flux2.model as flux2_model
from library.conditions import Conditions
from library.models.family import Family
from library.models.flux.vae import Flux2ImageEncoder
from library.models.flux2.model import positions_of
from library.models.flux2.text import (
    MISTRAL,
    MISTRAL_LAYERS,
    MOST_TOKENS,
    QWEN_LAYERS,
    DevTextEncoder,
    KleinTextEncoder,
)
from library.models.mistral import MistralFamily
from library.models.qwen3 import Qwen3Family, published_qwen3
from library.models.vae import pack_latents, text_numbers, token_grid


class Flux2Family(Family):
    """What klein and dev share."""

    transformer_class = Flux2Transformer2DModel
    depths = ("num_layers", "num_single_layers")
    image_encoder = Flux2ImageEncoder
    published_scheduler = {"shift": 3.0, "use_dynamic_shifting": True}  # noqa: RUF012
    latent_channels = 32
    noise_patch = 2
    captions_differ = False
    timestep_sampling = "flux2_shift"
    tail = ("norm_out", "proj_out")
    optimise_forward = staticmethod(flux2_model.optimise_forward)

    def transformer_inputs(
        self, latents: Tensor, sigmas: Tensor, text: dict[str, Tensor], guidance: float, conditions: Conditions
    ) -> dict[str, Any]:
        """Return the arguments of Flux2Transformer2DModel; references are latents [B, 32, h_i, w_i] each."""
        images = [latents, *conditions.references]
        return {
            "hidden_states": torch.cat([pack_latents(image.to(latents.dtype)) for image in images], dim=1),
            "timestep": sigmas,
            "guidance": torch.full_like(sigmas, guidance) if self.guidance_input else None,
            "encoder_hidden_states": text["prompt_embeds"],
            "txt_ids": text_numbers(text["prompt_embeds"].shape[1], latents.device),
            "img_ids": positions_of(tuple(map(token_grid, images)), latents.device),
        }

    def sampling_sigmas(self, steps: int, tokens: int, shift: float | None = None) -> list[float]:
        """As of every family; the pipelines' shift follows the number of steps too (``compute_empirical_mu``)."""
        if shift is None and self.scheduler().config.use_dynamic_shifting:
            shift = math.exp(compute_empirical_mu(tokens, steps))
        return super().sampling_sigmas(steps, tokens, shift)


class KleinFamily(Qwen3Family, Flux2Family):
    """FLUX.2 klein."""

    name = "flux2_klein"
    text_encoder = KleinTextEncoder
    text_layers = QWEN_LAYERS[-1]
    text_settings = ("flux2_klein", MOST_TOKENS)
    text_model = "Qwen3-4B (of klein 9B: Qwen3-8B)"
    published = {  # of 4B  # noqa: RUF012
        "num_layers": 5,
        "num_single_layers": 20,
        "num_attention_heads": 24,
        "joint_attention_dim": 7680,
        "guidance_embeds": False,
    }

    @classmethod
    def published_like(cls, name: str) -> tuple[Mapping[str, Any], dict[str, Callable[[], Any]]]:
        """Return klein 9B with Qwen3-8B for a file that is called so, else 4B with Qwen3-4B."""
        if "9b" not in name.lower():
            return super().published_like(name)
        sizes = {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288}
        _, parts = super().published_like(name)
        return {**cls.published, **sizes}, parts | published_qwen3("8B", QWEN_LAYERS[-1])

    def check_variant(self) -> None:
        """As of every FLUX.2; 4B and 9B have names of their own."""
        super().check_variant()
        size = {7680: "-4b", 12288: "-9b"}.get(self.argument("joint_attention_dim"), "")
        self.modelspec_architecture = self.targets.architecture + size


class KleinEditFamily(KleinFamily):
    """FLUX.2 klein with reference images."""

    name = "flux2_klein_edit"


class DevFamily(MistralFamily, Flux2Family):
    """FLUX.2 dev."""

    name = "flux2_dev"
    mistral = MISTRAL
    text_encoder = DevTextEncoder
    text_layers = MISTRAL_LAYERS[-1]
    text_settings = ("flux2_dev", MOST_TOKENS)
    text_argument = "joint_attention_dim"
    negative_text = False
    guidance_input = True


class DevEditFamily(DevFamily):
    """FLUX.2 dev with reference images."""

    name = "flux2_dev_edit"
