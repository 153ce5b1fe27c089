"""FLUX.3 klein (https://github.com/black-forest-labs/flux-3-image-klein), base and distilled; editing after references.

The transformer sees an image as a sequence: 2 x 2 latents of 32 channels are one token of 128 numbers. It takes the
noise level and the text, and returns the velocity noise - image per token. There is no guidance input: images are
steered by a negative prompt and true classifier-free guidance. Reference images are tokens of a mode of their own,
clean at every noise level; one model generates and edits.

The *distilled* model is a flow map: it is told the noise level that a step jumps to, besides where it begins, and
returns the mean velocity between the two. It samples in 16 steps without a negative prompt and is not trained; LoRAs
for it are trained on the base. Where its velocity is asked for outside of sampling, the jump is a step of the published
schedule.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers import Flux3Transformer2DModel
from PIL.Image import Image
from torch import Tensor, nn

import library.models.flux3.model as flux3_model
from library.conditions import Conditions
from library.models.flux.vae import Flux2ImageEncoder
from library.models.flux3.model import DISTILLED_STEPS, SHIFT, positions_of
from library.models.qwen3 import VL_THETA, Qwen3Family
from library.models.text import LanguageModelEncoder
from library.models.vae import pack_latents, text_numbers, token_grid

_BY_MODE = ("mode_blocks", "x_embedders", "early_stream_modulations", "single_stream_modulations")

LAYERS = (4, 8, 12, 16, 20, 24, 28, 32)  # after which the vectors are read
MOST_TOKENS = 8192  # of a caption with its template; longer ones are cut, as in the pipeline
_MULTIPLE, _PADDING_PLACE = 80, 1


class Flux3TextEncoder(LanguageModelEncoder):
    """Captions to 8 vectors a token, side by side, by Qwen3-VL-4B's language model.

    A caption is put into the chat template as a user's message. It is filled up at its end to a multiple of 80 tokens,
    and this padding is a part of the text: the transformer attends to it. A padding token sees the real ones and not
    its like, at position 1, as transformers counted when the model was trained (diffusers'
    ``modular_pipelines/flux3/encoders.py``). So captions of a batch have 80, 160, ... vectors each, and those filled up
    further are masked.
    """

    title = "Qwen3-VL, 4 billion weights"
    prompt = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    most_tokens = MOST_TOKENS
    layers = LAYERS

    def inputs(self, captions: list[str], references: list[list[Image]] | None) -> dict[str, Tensor]:
        """Return ids, mask and positions [B, T], T being what the longest caption keeps. No images are looked at."""
        made = super().inputs(captions, references)
        mask = made["attention_mask"]
        places = torch.arange(mask.shape[1]).expand_as(mask).masked_fill(mask == 0, _PADDING_PLACE)
        return made | {"position_ids": places}

    def kept(self, length: int) -> int:
        """Return the multiple of 80 that a prompt of ``length`` tokens is filled up to."""
        return min(math.ceil(length / _MULTIPLE) * _MULTIPLE, MOST_TOKENS)


class Flux3KleinFamily(Qwen3Family):
    """FLUX.3 klein, text to image."""

    name = "flux3_klein"
    transformer_class = Flux3Transformer2DModel
    depths = ("num_layers", "num_single_layers")
    image_encoder = Flux2ImageEncoder
    text_encoder = Flux3TextEncoder
    text_layers = LAYERS[-1]
    text_settings = ("flux3", MOST_TOKENS)
    text_model = "Qwen3-VL-4B"
    theta = VL_THETA
    published_scheduler = {"shift": SHIFT}  # noqa: RUF012
    noise_patch = 2
    distilled_steps = DISTILLED_STEPS
    chained_args = ("hidden_states",)  # no tail: modes run beside one another
    unused_parts: tuple[str, ...] = tuple(f"{part}.image_cond" for part in _BY_MODE)
    optimise_forward = staticmethod(flux3_model.optimise_forward)

    @staticmethod
    def blocks(transformer: Any) -> list[nn.Module]:
        """Return blocks of the image, of the text, then joint ones, in running order."""
        return [*transformer.mode_blocks["image"], *transformer.txt_mode_blocks, *transformer.single_transformer_blocks]

    def transformer_inputs(
        self, latents: Tensor, sigmas: Tensor, text: dict[str, Tensor], guidance: float, conditions: Conditions
    ) -> dict[str, Any]:
        """Return the arguments of Flux3Transformer2DModel; references are latents [B, 32, h_i, w_i] each."""
        embeds = text["prompt_embeds"]
        inputs = {
            "hidden_states": pack_latents(latents),
            "encoder_hidden_states": embeds,
            "encoder_hidden_states_mask": text.get("prompt_embeds_mask"),
            "timestep": sigmas,
            "img_ids": positions_of((token_grid(latents),), latents.device),
            "txt_ids": text_numbers(embeds.shape[1], latents.device),
        }
        if references := conditions.references:
            tokens = [pack_latents(each.to(latents.dtype)) for each in references]
            inputs["image_cond_hidden_states"] = torch.cat(tokens, dim=1)
            inputs["image_cond_ids"] = positions_of(tuple(map(token_grid, references)), latents.device, first=-1)
        return inputs

    def says_distilled(self) -> bool:
        """Whether the transformer jumps between noise levels."""
        return bool(self.argument("flow_map"))

    @property
    def negative_text(self) -> bool:  # type: ignore[override]
        """Whether it is the base; the distilled model takes none."""
        return not self.argument("flow_map")

    def step_inputs(self, following: Tensor) -> dict[str, Any]:
        """Return where a jump of the distilled model ends."""
        return {"target_timestep": following} if self.argument("flow_map") else {}


class Flux3KleinEditFamily(Flux3KleinFamily):
    """FLUX.3 klein with reference images, any number of them."""

    name = "flux3_klein_edit"
    unused_parts = ()

    @staticmethod
    def blocks(transformer: Any) -> list[nn.Module]:
        """Return blocks of the image, of the text, of the references, then joint ones, in running order."""
        own = [*transformer.mode_blocks["image"], *transformer.txt_mode_blocks, *transformer.mode_blocks["image_cond"]]
        return [*own, *transformer.single_transformer_blocks]
