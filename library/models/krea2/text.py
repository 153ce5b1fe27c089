"""Krea 2's text encoder, Qwen3-VL-4B: captions to the vectors of several of its layers, side by side.

A caption is put into Qwen-Image's template, and what the language model says about the template's own beginning is
dropped again (34 tokens). diffusers' pipeline fills captions up to a fixed length *before* the template's end, masks
what it filled up and counts positions without it: the vectors of the real tokens are those of a caption by itself,
and these are read here. No images are looked at.
"""

from __future__ import annotations

from PIL.Image import Image
from torch import Tensor

from library.models.qwen_image.text import TEMPLATES
from library.models.text import LanguageModelEncoder, padded

LAYERS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)  # of diffusers' pipeline, where a folder says no others
MOST_TOKENS = 512  # of a caption with the template's end; longer captions are cut, as in the pipeline
_TEMPLATE = TEMPLATES["qwen_image"]
_BEFORE, _AFTER = _TEMPLATE.fill("\0", ()).split("\0")
_END = 5  # tokens of the template's end


class Krea2TextEncoder(LanguageModelEncoder):
    """Qwen3-VL's language model as far as the last layer that is read; ``prompt_embeds`` [L, layers * D].

    Which are read, a model's folder says: ``layers`` are set by the family.
    """

    title = "Qwen3-VL, 4 billion weights"
    dropped = _TEMPLATE.dropped

    def inputs(self, captions: list[str], references: list[list[Image]] | None) -> dict[str, Tensor]:
        """Return ids and mask [B, T], filled up at the end."""
        assert references is None
        most, end = self.dropped + MOST_TOKENS - _END, self.tokenizer(_AFTER).input_ids
        return padded([self.tokenizer(_BEFORE + caption).input_ids[:most] + end for caption in captions])
