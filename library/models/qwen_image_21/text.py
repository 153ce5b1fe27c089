"""Qwen-Image-2.1's text encoder, Qwen3-VL-8B: captions, and reference images with them, to one vector a token.

A caption is put into a template, with a place for each reference image, and the system's message is dropped again. What
is read is what the last layer gives, before the final norm. Captions of any length are taken. Images are seen at the
size at which their latents are made, 32 x 32 pixels to a token, and have places in a grid in the rotary positions; the
vectors of their tokens are not kept: latents take their places in the transformer. So the text is kept in parts, what
stands before each image in ``before_image_<i>`` and what is left in ``prompt_embeds``.

Without images only the language model is loaded (``library.models.qwen3``). The weights come from a transformers folder
or ComfyUI's ``qwen3vl_8b_bf16.safetensors``, whose configuration follows from its shapes, but for a few constants that
no tensor shows: those of Qwen3-VL-8B, and which layers of the vision tower are read besides its last.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen3VLConfig, Qwen3VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from library.errors import UserError
from library.models.layer_names import count_blocks
from library.models.qwen3 import VL_THETA, published_qwen3, sizes, without_norm
from library.models.qwen_image.text import IMAGE_TOKEN, PromptTemplate, QwenTextEncoder, vl_key_map, vl_name, vl_sizes
from library.models.text import byte_tokenizer
from library.models.weights import load_into, read_config_of
from library.precision.checkpoint import WeightFiles
from library.precision.recipe import Recipe, WeightLoader

_TASK = "Comprehend and analyze the provided prompt."
_VISION_HEADS = 16
_MROPE = [24, 20, 20]  # config.json of Qwen/Qwen3-VL-8B-Instruct; of 64 pairs of a head
_SIDE = 32  # pixels to a token


class QwenImage21TextEncoder(QwenTextEncoder):
    """Qwen3-VL: the language model, or the whole model where reference images are seen."""

    title = "Qwen3-VL, 8 billion weights"

    def __init__(
        self, load: Callable[[], Any], tokenizer: PreTrainedTokenizerBase, fingerprint: str, sees: bool
    ) -> None:
        """``load`` gives the language model, or what ``sees`` images."""
        template = PromptTemplate(_TASK, 0, "<image{}>" if sees else None, between=" ", most_tokens=None)
        super().__init__(load, tokenizer, template, fingerprint, image_processor() if sees else None)
        self.dropped = len(tokenizer(template.system).input_ids)
        self._image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)

    def inputs(self, captions: list[str], references: list[list[Image.Image]] | None) -> dict[str, Tensor]:
        """As Qwen-Image's; an empty caption is a space, as in the pipeline."""
        return super().inputs([caption or " " for caption in captions], references)

    def conditioning(self, row: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """Return a caption's text in parts, ``before_image_<i>`` and ``prompt_embeds``."""
        if not self.sees_references:
            return super().conditioning(row, ids)
        words = (ids != self._image_token).tolist()
        ends = [i for i in range(1, len(words)) if words[i - 1] and not words[i]]  # of a text, where an image begins
        begins = [0, *(i for i in range(1, len(words)) if words[i] and not words[i - 1])]
        before = {f"before_image_{i}": row[a:b].clone() for i, (a, b) in enumerate(zip(begins, ends, strict=False))}
        return before | super().conditioning(row[begins[-1] :], ids[begins[-1] :])


def image_processor() -> Qwen2VLImageProcessorPil:
    """Return what prepares images for the vision tower, without torchvision; sizes stay as they are."""
    # processor/preprocessor_config.json of Qwen/Qwen3-VL-8B-Instruct, but for the sizes
    settings: dict[str, Any] = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Qwen2VLImageProcessorPil(**settings, min_pixels=_SIDE**2, max_pixels=1 << 30)


def published_text(sees: bool) -> dict[str, Callable[[], Any]]:
    """Return what builds Qwen3-VL-8B, or its language model, and a tokenizer of single bytes, by folder."""
    language = published_qwen3("8B", 36, VL_THETA)["text_encoder"]
    config = _whole(sizes(151936, 4096, 12288, 36, 32, 8, 128), {"out_hidden_size": 4096})
    return {"text_encoder": (lambda: _without_norm(config)) if sees else language, "processor": byte_tokenizer}


def load_qwen3_vl(
    path: Path, image_token: int, dtype: torch.dtype, device: torch.device | str = "cpu", recipe: Recipe | None = None
) -> Qwen3VLModel:
    """Load the whole model, without the norm behind its layers.

    Args:
        path: a transformers folder or a file.
        image_token: id of the token that stands for images.
        dtype, device: of the weights.
        recipe: how linear weights become fp8; None leaves them as the file has them.
    """
    weights = WeightFiles(path)
    config = _config(weights)
    config.image_token_id = image_token
    key_map = vl_key_map(weights)
    key_map.pop("language_model.norm.weight", None)
    loader = WeightLoader(recipe, compute="dequant")
    return load_into(lambda: _without_norm(config), weights, key_map, dtype, device, fp8=loader)


def check_qwen3_vl(path: Path) -> None:
    """Raise a UserError if ``path`` holds no Qwen3-VL that sees; reads headers only."""
    weights = WeightFiles(path)
    if not any(vl_name(name).startswith("visual.deepstack_merger_list.") for name in weights.names):
        raise UserError(
            f"{path}: no Qwen3-VL with its vision tower (no visual.deepstack_merger_list); for a model that edits "
            "images give qwen3vl_8b_bf16.safetensors as text_encoder"
        )
    _config(weights)


def _without_norm(config: Qwen3VLConfig) -> Qwen3VLModel:
    model = Qwen3VLModel(config)
    without_norm(model.language_model)
    return model


def _config(weights: WeightFiles) -> Qwen3VLConfig:
    """Return the model's configuration, from its folder or from its shapes."""
    if weights.path.is_dir():
        return Qwen3VLConfig.from_dict(read_config_of("qwen3_vl", weights.path, "give Qwen3-VL-8B as text_encoder"))
    text, tower = vl_sizes(weights, "linear_fc1")
    names = {vl_name(name): name for name in weights.names}
    read = count_blocks(names, "visual.deepstack_merger_list.")
    every = max(1, tower["depth"] // 3 - 1)  # of 27 blocks 8, 16 and 24
    tower |= {
        "num_heads": _VISION_HEADS,
        "num_position_embeddings": weights.shape(names["visual.pos_embed.weight"])[0],
        "deepstack_visual_indexes": [every * (i + 1) for i in range(read)],
    }
    return _whole(text, tower)


def _whole(text: dict[str, int], tower: dict[str, Any]) -> Qwen3VLConfig:
    """Return a configuration of such sizes; what no tensor shows is Qwen3-VL-8B's."""
    rope = {"rope_type": "default", "rope_theta": VL_THETA, "mrope_section": _MROPE}
    fixed = {"max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_parameters": rope}
    return Qwen3VLConfig(text_config=text | fixed, vision_config=tower)
