"""Krea 2 (https://github.com/krea-ai/krea-2): Raw, which is trained, and Turbo, which is used, one architecture.

The transformer sees one sequence: the caption's tokens, at the origin of the rotary positions, then the image's, 2 x 2
latents of Qwen-Image's autoencoder each. Of each caption's token it takes the vectors of twelve layers of Qwen3-VL. It
takes the noise level sigma and returns the velocity noise - image per token. There is no guidance input: images of Raw
are steered by a negative prompt and true classifier-free guidance, Turbo takes none.

Raw's noise levels are shifted by the image's size, Turbo's always as those of 1.15 (``is_distilled`` in the folder's
``model_index.json``); a single file is taken for Turbo where its name says so, and as ``sample_model``.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Transformer2DModel
from PIL.Image import Image
from torch import Tensor

import library.models.krea2.model as krea2_model
from library.conditions import Conditions
from library.errors import UserError
from library.models.qwen3 import VL_THETA, Qwen3Family
from library.models.qwen_image.text import TEMPLATES
from library.models.qwen_image.vae import QwenImageEncoder
from library.models.text import LanguageModelEncoder, padded
from library.models.vae import image_positions, pack_latents, token_grid

_TURBO_SHIFT = math.exp(1.15)  # diffusers' Krea2Pipeline: mu of a distilled model

LAYERS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)  # of diffusers' pipeline, where a folder says no others
MOST_TOKENS = 512  # of a caption with the template's end; longer captions are cut, as in the pipeline
_TEMPLATE = TEMPLATES["qwen_image"]
_BEFORE, _AFTER = _TEMPLATE.fill("\0", ()).split("\0")
_END = 5  # tokens of the template's end


class Krea2TextEncoder(LanguageModelEncoder):
    """Captions to the vectors of several layers of Qwen3-VL-4B, side by side; ``prompt_embeds`` [L, layers * D].

    A caption is put into Qwen-Image's template, and what the language model says about the template's own beginning is
    dropped again (34 tokens). diffusers' pipeline fills captions up to a fixed length *before* the template's end,
    masks what it filled up and counts positions without it: the vectors of the real tokens are those of a caption by
    itself, and these are read here. No images are looked at.

    Which layers are read, a model's folder says: the family sets ``layers``.
    """

    title = "Qwen3-VL, 4 billion weights"
    prompt = f"{_BEFORE}{{}}"
    most_tokens, reserved, dropped = MOST_TOKENS, _END, _TEMPLATE.dropped

    def inputs(self, captions: list[str], references: list[list[Image]] | None) -> dict[str, Tensor]:
        """Return ids and mask [B, T], filled up at the end."""
        assert references is None
        end = self.tokens(_AFTER)
        return padded([self.cut(self.prompt_of(caption))[0] + end for caption in captions])


class Krea2Family(Qwen3Family):
    """Krea 2 Raw and Turbo."""

    name = "krea2"
    transformer_class = Krea2Transformer2DModel
    depths = ("num_layers", "num_layerwise_text_blocks", "num_refiner_text_blocks")
    image_encoder = QwenImageEncoder
    text_encoder = Krea2TextEncoder
    text_layers, read_layers = LAYERS[-1], LAYERS
    text_argument = "text_hidden_dim"
    text_model = "Qwen3-VL-4B"
    theta = VL_THETA
    published_scheduler = {  # Raw's, as Krea2Pipeline describes it  # noqa: RUF012
        "use_dynamic_shifting": True,
        "base_image_seq_len": 256,
        "max_image_seq_len": 6400,
        "base_shift": 0.5,
        "max_shift": 1.15,
    }
    timestep_sampling = "krea2_shift"
    distilled_steps = 8
    chained_args = ("hidden_states",)
    tail = ("final_layer",)
    optimise_forward = staticmethod(krea2_model.optimise_forward)

    def check_variant(self) -> None:
        """Read what a folder says of the text encoder's layers."""
        super().check_variant()
        self.read_layers = tuple(self.folder_settings().get("text_encoder_select_layers") or LAYERS)
        self.text_layers = max(self.read_layers)
        self.text_settings = ("krea2", MOST_TOKENS, *self.read_layers)
        if len(self.read_layers) != (wanted := self.argument("num_text_layers")):
            raise UserError(
                f"{self.files.transformer}: takes {wanted} layers of the text encoder, {len(self.read_layers)} are "
                "read; give a folder whose model_index.json names them (text_encoder_select_layers)"
            )

    def scheduler(self) -> Any:
        """Return the scheduler; Turbo's shift does not follow the size."""
        scheduler = super().scheduler()
        if not self.distilled:
            return scheduler
        return FlowMatchEulerDiscreteScheduler.from_config(
            scheduler.config, use_dynamic_shifting=False, shift=_TURBO_SHIFT
        )

    def transformer_inputs(
        self, latents: Tensor, sigmas: Tensor, text: dict[str, Tensor], guidance: float, conditions: Conditions
    ) -> dict[str, Any]:
        """Return the arguments of Krea2Transformer2DModel; of several layers of the text encoder, each by itself."""
        embeds, places = text["prompt_embeds"], image_positions(*token_grid(latents), latents.device)
        return {
            "hidden_states": pack_latents(latents),
            "encoder_hidden_states": embeds.unflatten(-1, (len(self.read_layers), -1)),
            "timestep": sigmas,
            "position_ids": F.pad(places, (0, 0, embeds.shape[1], 0)),  # text stands at the origin
            "encoder_attention_mask": text.get("prompt_embeds_mask"),
        }
