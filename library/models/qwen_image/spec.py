"""Qwen-Image (https://github.com/QwenLM/Qwen-Image) and its edit models.

The transformer sees an image as a sequence: 2 x 2 latents of 16 channels are one token of 64 numbers, placed at its
row and column counted from the image's middle; text goes on where the image ends. It takes the noise level sigma
and the text with its mask, and returns the velocity noise - image per token. There is no guidance input: images are
steered by a negative prompt and true classifier-free guidance.

*Qwen-Image-Edit* and *Edit-2509 / 2511* ("Edit Plus") see reference images, which come in twice: their latents stand
behind the tokens of the image that is sampled, clean at every noise level, each with its own rows and columns; and the
text encoder looks at them while it reads the caption. Edit takes one, Edit Plus any number (it was trained with up to
three), of any sizes. The loss counts the sampled image alone. Edit-2511 is Edit Plus with ``zero_cond_t`` set:
reference tokens are modulated as at timestep 0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import QwenImageTransformer2DModel
from torch import Tensor

import library.models.qwen_image.model as qwen_model
from library.conditions import Conditions
from library.errors import UserError
from library.models.family import Family
from library.models.qwen_image.text import (
    IMAGE_TOKEN,
    MOST_TOKENS,
    TEMPLATES,
    QwenTextEncoder,
    check_qwen_text,
    image_processor,
    load_qwen_text,
    published_text,
)
from library.models.qwen_image.vae import QwenImageEncoder
from library.models.text import load_qwen_tokenizer
from library.models.vae import pack_latents, token_grid
from library.precision.recipe import Recipe


class QwenImageFamily(Family):
    """Qwen-Image."""

    name = "qwen_image"
    transformer_class = QwenImageTransformer2DModel
    depths = ("num_layers",)
    image_encoder = QwenImageEncoder
    published_scheduler = {  # noqa: RUF012
        "shift": 1.0,
        "use_dynamic_shifting": True,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "shift_terminal": 0.02,
        "time_shift_type": "exponential",
    }
    timestep_sampling = "qwen_shift"
    tail = ("norm_out", "proj_out")
    published_texts = staticmethod(published_text)
    optimise_forward = staticmethod(qwen_model.optimise_forward)

    def check_variant(self) -> None:
        """Let the option decide how references are modulated, where it is set."""
        config = self.files.transformer_config
        found = bool(config.get("zero_cond_t", False))
        if self.config.zero_cond_t is False and found:
            raise UserError("zero_cond_t: the model's files say it is Edit-2511, which was trained with it; remove it")
        config["zero_cond_t"] = found or bool(self.config.zero_cond_t)
        super().check_variant()

    def check_text_encoders(self) -> None:
        """Read the headers of Qwen2.5-VL."""
        check_qwen_text(self.files.text_encoders[0], TEMPLATES[self.name].label is not None)

    def load_text_encoder(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, recipe: Recipe | None = None
    ) -> QwenTextEncoder:
        """Return Qwen2.5-VL; with the vision tower where the template shows images."""
        (path,), template = self.files.text_encoders, TEMPLATES[self.name]
        fingerprint = self.text_fingerprint(dtype, recipe, self.name, MOST_TOKENS)
        tokenizer = load_qwen_tokenizer(self.files.tokenizers[0], IMAGE_TOKEN, "Qwen2.5-VL")
        processor = image_processor(self.files.processor) if template.label is not None else None
        token: Any = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN) if processor is not None else None
        load = partial(load_qwen_text, path, dtype, device, recipe, image_token=token)
        return QwenTextEncoder(load, tokenizer, template, fingerprint, processor)

    def transformer_inputs(
        self, latents: Tensor, sigmas: Tensor, text: dict[str, Tensor], guidance: float, conditions: Conditions
    ) -> dict[str, Any]:
        """Return the arguments of QwenImageTransformer2DModel; references are latents [B, 16, h_i, w_i] each."""
        self.check_references(conditions)
        images = [latents, *conditions.references]
        return {
            "hidden_states": torch.cat([pack_latents(image.to(latents.dtype)) for image in images], dim=1),
            "timestep": sigmas,
            "encoder_hidden_states": text["prompt_embeds"],
            "encoder_hidden_states_mask": text.get("prompt_embeds_mask"),
            "img_shapes": [[(1, *token_grid(image)) for image in images]] * len(latents),
        }

    def guided(self, velocity: Tensor, negative: Tensor, cfg: float) -> Tensor:
        """As of every family; each token is as long as without guidance, as in diffusers' pipelines."""
        found = super().guided(velocity, negative, cfg)
        lengths = (F.pixel_unshuffle(each, self.patch_size).norm(dim=1, keepdim=True) for each in (velocity, found))
        return found * F.interpolate(torch.div(*lengths), scale_factor=self.patch_size)

    def check_references(self, conditions: Conditions) -> None:
        """Raise a UserError where there are more images than the model takes, or none where it takes one."""
        count = len(conditions.references)
        if self.most_references is not None and count != self.most_references:
            remedy = 'use model_type = "qwen_image_edit_plus"' if count else "give control_directory"
            raise UserError(f"{self.name}: takes one reference image a sample, found {count}; {remedy}")


class QwenImageEditFamily(QwenImageFamily):
    """Qwen-Image-Edit: one reference image a caption."""

    name = "qwen_image_edit"
    most_references: int | None = 1


class QwenImageEditPlusFamily(QwenImageEditFamily):
    """Qwen-Image-Edit-2509 and 2511: any number of reference images."""

    name = "qwen_image_edit_plus"
    most_references: int | None = None

    def check_variant(self) -> None:
        """As Qwen-Image's; 2509 or 2511."""
        super().check_variant()
        if self.files.transformer_config["zero_cond_t"]:
            self.modelspec_architecture = "Qwen-Image-Edit-2511"
