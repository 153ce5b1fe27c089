"""Z-Image (https://github.com/Tongyi-MAI/Z-Image).

The transformer sees one sequence: an image's tokens, 2 x 2 latents of FLUX's autoencoder each, then the caption's.
It takes 1 - sigma, 0 for noise and 1 for the image, and returns image - noise, the velocity's negative. There is no
guidance input: images are steered by a negative prompt and true classifier-free guidance (Turbo, which is distilled,
takes none).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from torch import Tensor, nn

import library.models.z_image.model as z_image_model
from library.conditions import Conditions
from library.models.flux.vae import FluxImageEncoder
from library.models.qwen3 import Qwen3Family
from library.models.text import LanguageModelEncoder
from library.models.weights import read_config

MOST_TOKENS = 512  # of a caption with its template; longer ones are cut, as in the pipeline


class ZImageTextEncoder(LanguageModelEncoder):
    """Captions to one vector a token, by Qwen3-4B without its last layer.

    A caption is put into Qwen3's chat template as a user's message, with thinking allowed, and cut at 512 tokens. What
    Z-Image sees is what enters the *last* layer of the language model. Captions keep their own lengths; a batch fills
    them up and carries the mask.
    """

    title = "Qwen3, 4 billion weights"
    prompt = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    most_tokens = MOST_TOKENS


_BASE_SHIFT, _TURBO_SHIFT = 6.0, 3.0  # of Tongyi-MAI's scheduler_config.json


class ZImageFamily(Qwen3Family):
    """Z-Image and Z-Image-Turbo."""

    name = "z_image"
    transformer_class = ZImageTransformer2DModel
    depths = ("n_layers",)
    image_encoder = FluxImageEncoder
    text_encoder = ZImageTextEncoder
    text_layers = -1
    text_settings = ("z_image", MOST_TOKENS)
    text_argument = "cap_feat_dim"
    distilled_steps = 8  # Turbo's card: num_inference_steps=9, whose last step is from 0 to 0
    chained_args = ("x",)  # no tail: microbatches' captions differ in length
    int8_passes_bypass = True
    optimise_forward = staticmethod(z_image_model.optimise_forward)

    @staticmethod
    def blocks(transformer: Any) -> list[nn.Module]:
        """Return the main layers in running order; the four refiners in front of them are left where they are."""
        return [*transformer.layers]

    def check_variant(self) -> None:
        """Read the latents' channels; base and Turbo are one architecture."""
        self.latent_channels = self.argument("in_channels")

    def says_distilled(self) -> bool:
        """Whether the scheduler's shift is Turbo's; as every family where there is none."""
        folder = self.files.scheduler
        told = None if folder is None else read_config(folder, "scheduler_config.json").get("shift")
        return super().says_distilled() if told is None else told == _TURBO_SHIFT

    @property
    def published_scheduler(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The scheduler of the model that this is taken for."""
        return {"shift": _TURBO_SHIFT if self.distilled else _BASE_SHIFT}

    def transformer_inputs(
        self, latents: Tensor, sigmas: Tensor, text: dict[str, Tensor], guidance: float, conditions: Conditions
    ) -> dict[str, Any]:
        """Return the arguments of ZImageTransformer2DModel."""
        captions = {"cap_feats": text["prompt_embeds"], "cap_mask": text.get("prompt_embeds_mask")}
        return {"x": list(latents.unsqueeze(2)), "t": 1 - sigmas, **captions}

    def velocity(self, output: Any, latents: Tensor) -> Tensor:
        """Return the velocity of its negative, a list of [16, 1, h, w]."""
        return -torch.stack([each.float() for each in output]).squeeze(2)
