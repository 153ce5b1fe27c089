"""Z-Image's text encoder, Qwen3: captions to one vector a token.

A caption is put into Qwen3's chat template as a user's message, with thinking allowed, and cut at 512 tokens. What
Z-Image sees is what enters the *last* layer of the language model: that layer, the norm behind it and the head are
never loaded. Captions keep their own lengths; a batch fills them up and carries the mask.

The file is a transformers folder or ComfyUI's ``qwen_3_4b.safetensors``, whose configuration follows from its shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3Model

from library.errors import UserError
from library.models.layer_names import count_blocks
from library.models.text import LanguageModelEncoder, byte_tokenizer, padded
from library.models.weights import load_into, read_config_of
from library.precision.checkpoint import WeightFiles
from library.precision.recipe import Recipe, WeightLoader
from library.safetensors_io import RowRange

MOST_TOKENS = 512  # of a caption with its template; longer ones are cut, as in the pipeline
_TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def published_text() -> dict[str, Callable[[], Any]]:
    """Return what builds Qwen3-4B, and a tokenizer of single bytes for it, by folder."""
    config = Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6,
    )  # fmt: skip
    return {"text_encoder": lambda: Qwen3Model(config), "tokenizer": byte_tokenizer}


class ZImageTextEncoder(LanguageModelEncoder):
    """Qwen3 without its last layer."""

    title = "Qwen3, 4 billion weights"

    def inputs(self, captions: list[str], references: list[list[Image]] | None) -> dict[str, Tensor]:
        """Return ids and mask [B, T], filled up at the end. No images are looked at."""
        assert references is None
        prompts = [_TEMPLATE.replace("{}", caption) for caption in captions]
        return padded([self.tokenizer(prompt).input_ids[:MOST_TOKENS] for prompt in prompts])


def load_z_image_text(
    path: Path, dtype: torch.dtype, device: torch.device | str = "cpu", recipe: Recipe | None = None
) -> Qwen3Model:
    """Load Qwen3 without its last layer, whose output is the model's; ``recipe`` makes it fp8."""
    weights = WeightFiles(path)
    config = _config(weights)
    unused = ("lm_head.", "norm.", f"layers.{config.num_hidden_layers}.")
    names = {name.removeprefix("model."): [RowRange(name)] for name in weights.names}
    key_map = {name: pieces for name, pieces in names.items() if not name.startswith(unused)}

    def build() -> Qwen3Model:
        model = Qwen3Model(config)
        model.norm = nn.Identity()
        return model

    return load_into(build, weights, key_map, dtype, device, fp8=WeightLoader(recipe, compute="dequant"))


def text_width(path: Path) -> int:
    """Return the width of the vectors that the Qwen3 in ``path`` gives; reads headers only."""
    return _config(WeightFiles(path)).hidden_size


def _config(weights: WeightFiles) -> Qwen3Config:
    """Return the configuration of all layers but the last, from the folder or from the shapes."""
    if weights.path.is_dir():
        known = read_config_of("qwen3", weights.path, "give Z-Image's text encoder")
        known |= {"num_hidden_layers": known["num_hidden_layers"] - 1, "layer_types": None}
        return Qwen3Config.from_dict(known)
    first = "model.layers.0"
    if f"{first}.self_attn.q_norm.weight" not in weights or f"{first}.mlp.gate_proj.weight" not in weights:
        raise UserError(
            f"{weights.path}: not Qwen3 (no {first}.self_attn.q_norm); give qwen_3_4b.safetensors as text_encoder"
        )
    vocabulary, width = weights.shape("model.embed_tokens.weight")
    (head_dim,) = weights.shape(f"{first}.self_attn.q_norm.weight")
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=weights.shape(f"{first}.mlp.gate_proj.weight")[0],
        num_hidden_layers=count_blocks(weights.names, "model.layers.") - 1,
        num_attention_heads=weights.shape(f"{first}.self_attn.q_proj.weight")[0] // head_dim,
        num_key_value_heads=weights.shape(f"{first}.self_attn.k_proj.weight")[0] // head_dim,
        head_dim=head_dim,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},  # Qwen/Qwen3-4B, config.json
    )
