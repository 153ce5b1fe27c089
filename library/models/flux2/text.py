"""FLUX.2's text encoders: captions to one vector a token, made of three layers side by side.

klein reads Qwen3 (4B or 8B) after layers 9, 18 and 27 of 36. A caption is a user's message in Qwen3's chat template
with thinking switched off, which leaves an empty thought in front of the answer. It is cut at 512 tokens and filled up
to as many: the transformer sees the vectors of the filling too, there is no mask.

dev reads Mistral Small 3 after layers 10, 20 and 30 of 40; of a file that sees images too, the language model alone. A
system message stands before the caption, and the filling before both.
"""

from __future__ import annotations

from typing import Any

from PIL.Image import Image
from torch import Tensor
from transformers import MistralConfig, MistralModel

from library.models.mistral import HEAD_DIM, MistralKind
from library.models.text import LanguageModelEncoder

MOST_TOKENS = 512  # of a caption with its template; all have as many
QWEN_LAYERS, MISTRAL_LAYERS = (9, 18, 27), (10, 20, 30)


class PaddedEncoder(LanguageModelEncoder):
    """A language model whose captions are all of :data:`MOST_TOKENS`; no mask is given."""

    most_tokens = MOST_TOKENS

    def encode(self, captions: list[str], references: list[list[Image]] | None = None) -> list[dict[str, Tensor]]:
        """Return ``prompt_embeds`` [512, 3 W] of each caption. No images are looked at."""
        assert references is None
        return [{"prompt_embeds": each["prompt_embeds"]} for each in super().encode(captions)]

    def fill_other_end(self) -> None:
        """As a tokenizer with the other ``padding_side`` does in diffusers' pipelines."""
        self.fills_first = not self.fills_first

    def kept(self, length: int) -> int:
        """Return 512, whatever the caption's own length."""
        return MOST_TOKENS


class KleinTextEncoder(PaddedEncoder):
    """Qwen3 up to its 27th layer."""

    title = "Qwen3"
    layers = QWEN_LAYERS
    prompt = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


_SYSTEM_TOKEN, _PAD = "[SYSTEM_PROMPT]", "<pad>"
# system_messages.py of https://github.com/black-forest-labs/flux2: a line ends in the middle of a sentence there
_SYSTEM = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)
_MISTRAL_TEMPLATE = f"<s>{_SYSTEM_TOKEN}{_SYSTEM}[/SYSTEM_PROMPT][INST]{{}}[/INST]"


class DevTextEncoder(PaddedEncoder):
    """Mistral Small 3 up to its 30th layer."""

    title = "Mistral Small 3"
    layers = MISTRAL_LAYERS
    prompt, adds_specials, fills_first = _MISTRAL_TEMPLATE, False, True

    @property
    def filling(self) -> Any:
        """Mistral's own token for that, which not every tokenizer of it names."""
        return self.tokenizer.convert_tokens_to_ids(_PAD)

    def prompt_of(self, caption: str) -> str:
        """As others'; [IMG] would stand for an image and is taken out."""
        return super().prompt_of(caption.replace("[IMG]", ""))


MISTRAL = MistralKind(
    "Mistral Small 3",
    "FLUX.2 dev",
    "mistral_3_small_flux2_bf16.safetensors",
    MistralModel,
    MistralConfig,
    {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
    },
    (131072, 5120, 32768, MISTRAL_LAYERS[-1], 32, 8, HEAD_DIM),
    (_SYSTEM_TOKEN, "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
)
