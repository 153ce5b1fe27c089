"""Qwen-Image-2.1 (https://github.com/QwenLM/Qwen-Image): images from text, and from other images.

One latent of 64 channels, 16 x 16 pixels, is one token. The transformer sees one sequence: the caption, in which
reference images stand where the caption's template names them, then the image that is painted; it takes the noise level
sigma, which the painted image alone is modulated by, and returns the velocity noise - image. There is no guidance
input; it is made to be sampled without guidance, and takes a negative prompt and true classifier-free guidance.

One model does both. ``qwen_image_21`` trains on captions alone, for which the text encoder's vision tower is never
loaded; ``qwen_image_21_edit`` with any number of reference images, of any sizes, clean at every noise level.

Turbo is the same architecture, distilled to eight steps, whose noise levels its ``model_index.json`` has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import QwenImage21Transformer2DModel
from torch import Tensor

import library.models.qwen_image_21.model as qwen_model
from library.conditions import Conditions
from library.models.family import Family
from library.models.qwen3 import VL_THETA, load_qwen3, qwen3_width
from library.models.qwen_image.spec import QwenImageFamily
from library.models.qwen_image.text import IMAGE_TOKEN
from library.models.qwen_image_21.text import QwenImage21TextEncoder, check_qwen3_vl, load_qwen3_vl, published_text
from library.models.qwen_image_21.vae import QwenImage21Encoder
from library.models.text import load_qwen_tokenizer
from library.models.vae import pack_latents, token_grid
from library.precision.recipe import Recipe


class QwenImage21Family(Family):
    """Qwen-Image-2.1, of captions."""

    name = "qwen_image_21"
    transformer_class = QwenImage21Transformer2DModel
    depths = ("num_layers",)
    image_encoder = QwenImage21Encoder
    published_scheduler = QwenImageFamily.published_scheduler  # Qwen/Qwen-Image-2.1 has the same file
    patch_size = 1
    timestep_sampling = "qwen_shift"
    distilled_steps = 8  # sample_sigmas in model_index.json of Qwen/Qwen-Image-2.1-Turbo
    chained_args = ("hidden_states",)
    tail = ("norm_out", "proj_out")
    optimise_forward = staticmethod(qwen_model.optimise_forward)

    @classmethod
    def published_texts(cls) -> dict[str, Callable[[], Any]]:
        """Return of Qwen3-VL what is used."""
        return published_text(cls.conditioning == "references")

    def check_text_encoders(self) -> None:
        """Compare the width of Qwen3-VL with what the transformer takes."""
        self.check_text_width(qwen3_width(self.files.text_encoders[0], VL_THETA), "context_in_dim", "Qwen3-VL-8B")

    def load_text_encoder(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, recipe: Recipe | None = None
    ) -> QwenImage21TextEncoder:
        """Return Qwen3-VL; with the vision tower where reference images are seen."""
        (path,), sees = self.files.text_encoders, self.conditioning == "references"
        tokenizer = load_qwen_tokenizer(self.files.tokenizers[0], IMAGE_TOKEN, "Qwen3-VL")
        token: Any = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)

        def load() -> Any:
            if sees:
                return load_qwen3_vl(path, token, dtype, device, recipe)
            return load_qwen3(path, None, dtype, device, recipe, VL_THETA)

        return QwenImage21TextEncoder(load, tokenizer, self.text_fingerprint(dtype, recipe, self.name), sees)

    def transformer_inputs(
        self, latents: Tensor, sigmas: Tensor, text: dict[str, Tensor], guidance: float, conditions: Conditions
    ) -> dict[str, Any]:
        """Return the arguments of the transformer; references are latents [B, 64, h_i, w_i] each."""
        images, runs = [*(image.to(latents.dtype) for image in conditions.references), latents], text_runs(text)
        embeds, mask = all_text(text), text.get("prompt_embeds_mask")
        if mask is not None:
            mask = torch.cat([mask.new_ones(len(mask), sum(runs)), mask], dim=1)
        return {
            "hidden_states": torch.cat([pack_latents(image, 1) for image in images], dim=1),
            "timestep": sigmas,
            "encoder_hidden_states": embeds,
            "encoder_hidden_states_mask": mask,
            "img_shapes": [[_grid(image) for image in images]] * len(latents),
            "text_runs": runs,
        }

    def first_sigmas(self, steps: int) -> list[float] | None:
        """Return Turbo's own noise levels, which its folder has for one number of steps."""
        levels = self.folder_settings().get("sample_sigmas")
        return levels if levels is not None and len(levels) == steps else None


def text_runs(text: dict[str, Tensor]) -> tuple[int, ...]:
    """Return how many tokens of ``text``, with a batch axis or without, stand before each reference image."""
    return tuple(part.shape[-2] for part in _before(text))


def all_text(text: dict[str, Tensor]) -> Tensor:
    """Return the vectors of all parts of ``text`` [B, T, D]."""
    return torch.cat([*_before(text), text["prompt_embeds"]], dim=-2)


def _before(text: dict[str, Tensor]) -> list[Tensor]:
    count = sum(name.startswith("before_image_") for name in text)
    return [text[f"before_image_{i}"] for i in range(count)]


def _grid(latents: Tensor) -> tuple[int, int, int]:
    return 1, *token_grid(latents, 1)  # frames, rows, columns


class QwenImage21EditFamily(QwenImage21Family):
    """Qwen-Image-2.1 with any number of reference images."""

    name = "qwen_image_21_edit"

    def check_text_encoders(self) -> None:
        """As of captions alone; the vision tower must be there too."""
        check_qwen3_vl(self.files.text_encoders[0])
        super().check_text_encoders()
