"""FLUX.3's text encoder, the language model of Qwen3-VL-4B: captions to 8 vectors a token, side by side.

A caption is put into the chat template as a user's message. It is filled up at its end to a multiple of 80 tokens, and
this padding is a part of the text: the transformer attends to it. A padding token sees the real ones and not its like,
at position 1, as transformers counted when the model was trained (diffusers' ``modular_pipelines/flux3/encoders.py``).
So captions of a batch have 80, 160, ... vectors each, and those filled up further are masked.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from library.models.text import LanguageModelEncoder, padded

LAYERS = (4, 8, 12, 16, 20, 24, 28, 32)  # after which the vectors are read
MOST_TOKENS = 8192  # of a caption with its template; longer ones are cut, as in the pipeline
_MULTIPLE, _PADDING_PLACE = 80, 1
_TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class Flux3TextEncoder(LanguageModelEncoder):
    """Qwen3-VL's language model as far as the last layer that is read."""

    title = "Qwen3-VL, 4 billion weights"
    layers = LAYERS

    def inputs(self, captions: list[str], references: list[list[Image]] | None) -> dict[str, Tensor]:
        """Return ids, mask and positions [B, T], T being what the longest caption keeps. No images are looked at."""
        assert references is None
        rows = [self.tokenizer(_TEMPLATE.replace("{}", caption)).input_ids[:MOST_TOKENS] for caption in captions]
        filled = max(self.kept(len(row)) for row in rows)
        padding: Any = self.tokenizer.pad_token_id
        made = padded(rows, filled, padding)
        mask = made["attention_mask"]
        places = torch.arange(filled).expand_as(mask).masked_fill(mask == 0, _PADDING_PLACE)
        return made | {"position_ids": places}

    def kept(self, length: int) -> int:
        """Return the multiple of 80 that a prompt of ``length`` tokens is filled up to."""
        return min(math.ceil(length / _MULTIPLE) * _MULTIPLE, MOST_TOKENS)
