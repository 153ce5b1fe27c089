"""Z-Image's text encoder, Qwen3-4B: captions to one vector a token.

A caption is put into Qwen3's chat template as a user's message, with thinking allowed, and cut at 512 tokens. What
Z-Image sees is what enters the *last* layer of the language model. Captions keep their own lengths; a batch fills them
up and carries the mask.
"""

from __future__ import annotations

from PIL.Image import Image
from torch import Tensor

from library.models.text import LanguageModelEncoder, padded

MOST_TOKENS = 512  # of a caption with its template; longer ones are cut, as in the pipeline
_TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class ZImageTextEncoder(LanguageModelEncoder):
    """Qwen3 without its last layer."""

    title = "Qwen3, 4 billion weights"

    def inputs(self, captions: list[str], references: list[list[Image]] | None) -> dict[str, Tensor]:
        """Return ids and mask [B, T], filled up at the end. No images are looked at."""
        assert references is None
        prompts = [_TEMPLATE.replace("{}", caption) for caption in captions]
        return padded([self.tokenizer(prompt).input_ids[:MOST_TOKENS] for prompt in prompts])
