"""FLUX.2's text encoders: captions to one vector a token, made of three layers side by side.

klein reads Qwen3 (4B or 8B) after layers 9, 18 and 27 of 36. A caption is a user's message in Qwen3's chat template
with thinking switched off, which leaves an empty thought in front of the answer. It is cut at 512 tokens and filled up
to as many: the transformer sees the vectors of the filling too, there is no mask.
"""

from __future__ import annotations

from PIL.Image import Image
from torch import Tensor

from library.models.text import LanguageModelEncoder

MOST_TOKENS = 512  # of a caption with its template; all have as many
QWEN_LAYERS = (9, 18, 27)
_TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class PaddedEncoder(LanguageModelEncoder):
    """A language model whose captions are all of :data:`MOST_TOKENS`; no mask is given."""

    def encode(self, captions: list[str], references: list[list[Image]] | None = None) -> list[dict[str, Tensor]]:
        """Return ``prompt_embeds`` [512, 3 W] of each caption. No images are looked at."""
        assert references is None
        return [{"prompt_embeds": each["prompt_embeds"]} for each in super().encode(captions)]

    def kept(self, length: int) -> int:
        """Return 512, whatever the caption's own length."""
        return MOST_TOKENS


class KleinTextEncoder(PaddedEncoder):
    """Qwen3 up to its 27th layer."""

    title = "Qwen3"
    layers = QWEN_LAYERS

    def inputs(self, captions: list[str], references: list[list[Image]] | None) -> dict[str, Tensor]:
        """Return ids and mask [B, 512], filled up at the end."""
        prompts = [_TEMPLATE.replace("{}", caption) for caption in captions]
        made = self.tokenizer(
            prompts, padding="max_length", truncation=True, max_length=MOST_TOKENS, return_tensors="pt"
        )
        return {name: made[name] for name in ("input_ids", "attention_mask")}
