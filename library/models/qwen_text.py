"""Qwen-Image's text encoder, Qwen2.5-VL: captions, and for edit models the reference pictures, to one vector a token.

A caption is put into the model's chat template, and what the language model says about the template's own beginning is
dropped again (34 tokens; 64 with edit models). Captions keep their own lengths; a batch fills them up and carries the
mask. Edit models see the reference pictures through Qwen2.5-VL's vision tower, resized to the area that the diffusers
pipelines use.

Pictures take places in a grid (3-D rotary positions), for which transformers 5 must be told which tokens are
pictures. diffusers 0.42's edit pipelines do not tell it (https://github.com/huggingface/diffusers/issues/14194) and
so give pictures the places of plain text, unlike older versions, ComfyUI and the model's own training. Tandem tells it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from library.errors import UserError

MOST_TOKENS = 1024  # of a caption without pictures; longer ones are cut, as in the pipeline
_PICTURE = "<|image_pad|>"
_DESCRIBE = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:"
)
_ALTER = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate."
)


@dataclass(frozen=True)
class PromptTemplate:
    """How captions are put to the language model.

    Attributes:
        task: the system's message.
        dropped: tokens of the template's beginning whose vectors are dropped.
        picture: what stands before a picture, ``{}`` for its number; None: pictures are not seen.
        area: pixels that a picture is resized to, about.
        references: how many pictures a caption may have, from and to (None: any number).
    """

    task: str
    dropped: int
    picture: str | None = None
    area: int = 0
    references: tuple[int, int | None] = (0, 0)

    def fill(self, caption: str, pictures: Sequence[int]) -> str:
        """Return the whole prompt; ``pictures`` says how many tokens each picture takes."""
        shown = "".join(
            f"{(self.picture or '').format(i)}<|vision_start|>{_PICTURE * count}<|vision_end|>"
            for i, count in enumerate(pictures, start=1)
        )
        return (
            f"<|im_start|>system\n{self.task}<|im_end|>\n<|im_start|>user\n{shown}{caption}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


TEMPLATES = {
    "qwen_image": PromptTemplate(_DESCRIBE, 34),
    "qwen_image_edit": PromptTemplate(_ALTER, 64, "", 1024 * 1024, (1, 1)),
    "qwen_image_edit_plus": PromptTemplate(_ALTER, 64, "Picture {}: ", 384 * 384, (0, None)),
}


class QwenTextEncoder:
    """Captions in, ``prompt_embeds`` [L, D] and ``prompt_embeds_mask`` [L] (all true) out, on the CPU.

    The model is loaded at the first caption, so a run whose captions are all cached never loads it.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        tokenizer: PreTrainedTokenizerBase,
        template: PromptTemplate,
        fingerprint: str,
        pictures: Qwen2VLImageProcessorPil | None = None,
    ) -> None:
        """``load`` gives the language model; with ``pictures``, the whole model, for pictures it prepares."""
        self._load, self._model = load, None
        self.tokenizer, self.template = tokenizer, template
        self.fingerprint = fingerprint
        self._pictures = pictures
        self.sees_references = pictures is not None

    @torch.no_grad()
    def encode(self, captions: list[str], references: list[list[Image.Image]] | None = None) -> list[dict[str, Tensor]]:
        """Encode ``captions`` in one batch.

        Args:
            captions: texts of any length; without pictures they are cut at ``MOST_TOKENS``.
            references: RGB pictures of each caption, where the encoder sees them.

        Raises:
            UserError: a caption has more or fewer pictures than the model takes.
        """
        if not captions:
            return []
        shown = references if references is not None else [[] for _ in captions]
        self._check_references(shown)
        if self._model is None:
            self._model = self._load()
        model: Any = self._model
        inputs = {name: tensor.to(model.device) for name, tensor in self._inputs(captions, shown).items()}
        hidden = model(**inputs, use_cache=False).last_hidden_state.to(model.dtype).cpu()
        lengths = inputs["attention_mask"].sum(dim=1).tolist()
        kept = [row[self.template.dropped : length].clone() for row, length in zip(hidden, lengths, strict=True)]
        return [{"prompt_embeds": e, "prompt_embeds_mask": torch.ones(len(e), dtype=torch.bool)} for e in kept]

    def _check_references(self, shown: Sequence[Sequence[Image.Image]]) -> None:
        least, most = self.template.references
        for pictures in shown:
            if len(pictures) < least or (most is not None and len(pictures) > most):
                takes = f"{least}" if least == most else f"at least {least}"
                remedy = '; use model_type = "qwen_image_edit_plus"' if pictures and most == 1 else ""
                raise UserError(
                    f"control_directory: {len(pictures)} reference pictures of one caption, this model takes "
                    f"{takes}{remedy or '; give each picture its own'}"
                )

    def _inputs(self, captions: Sequence[str], shown: Sequence[Sequence[Image.Image]]) -> dict[str, Tensor]:
        """Return what the model is called with: ids and mask [B, T], filled up at the end; pictures' patches."""
        counts: list[list[int]] = [[] for _ in captions]
        inputs: dict[str, Tensor] = {}
        flat = [self._resized(picture) for pictures in shown for picture in pictures]
        if self._pictures is not None and flat:
            inputs |= dict(self._pictures(images=flat, return_tensors="pt"))
            tokens = iter((inputs["image_grid_thw"].prod(dim=1) // self._pictures.merge_size**2).tolist())
            counts = [[next(tokens) for _ in pictures] for pictures in shown]
        prompts = [self.template.fill(caption, count) for caption, count in zip(captions, counts, strict=True)]
        ids = [self.tokenizer(prompt).input_ids for prompt in prompts]
        if not self.sees_references:
            ids = [row[: MOST_TOKENS + self.template.dropped] for row in ids]
        longest = max(map(len, ids))
        # What stands at the end is seen by no real token: attention looks back only.
        filled = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
        inputs |= {"input_ids": filled, "attention_mask": mask}
        if flat:
            inputs["mm_token_type_ids"] = (filled == self.tokenizer.convert_tokens_to_ids(_PICTURE)).int()
        return inputs

    def _resized(self, picture: Image.Image) -> Image.Image:
        size = reference_size(self.template.area, *picture.size)
        return picture if picture.size == size else picture.resize(size, Image.Resampling.LANCZOS)

    def release(self) -> None:
        """Let go of the model's weights; the next caption loads them again."""
        self._model = None

    def load_modules(self, names: Collection[str]) -> nn.Module:
        """Refuse: Qwen2.5-VL is not trained."""
        raise UserError("text_encoder_lr: Qwen2.5-VL, 7 billion weights, is not trained; remove text_encoder_lr")


def reference_size(area: int, width: int, height: int) -> tuple[int, int]:
    """Return width and height of about ``area`` pixels in a picture's proportions, multiples of 32, as the pipelines'.

    Args:
        area: pixels wanted.
        width, height: of the picture.
    """
    ratio = width / height
    wide = math.sqrt(area * ratio)
    return round(wide / 32) * 32, round(wide / ratio / 32) * 32
