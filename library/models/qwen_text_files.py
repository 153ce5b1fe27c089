"""Loading Qwen2.5-VL as Qwen-Image's text encoder: from a transformers folder or ComfyUI's single file.

Its tensors were published as ``model.layers...`` and ``visual...``; later transformers say
``model.language_model.layers...`` and ``model.visual...``. Both are read. Only what is used is loaded: without pictures
the language model alone, and never the head that would predict words.

A single file needs no sidecar: its configuration follows from its shapes, but for head widths and a few constants that
no tensor shows; these are those of Qwen2.5-VL-7B.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2Tokenizer
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLRotaryEmbedding,
    Qwen2_5_VLTextModel,
    Qwen2_5_VLVisionRotaryEmbedding,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from library.errors import UserError
from library.models.text_encoders import load_tokenizer
from library.models.weights import Piece, WeightFiles, load_into, read_config
from library.precision.loading import Fp8Loading
from library.precision.recipe import Fp8Recipe

_HEAD_DIM, _VISION_HEAD_DIM = 128, 80
_MROPE = [16, 24, 24]
# processor/preprocessor_config.json of Qwen/Qwen-Image-Edit
_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 12845056}


def load_qwen_text(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    recipe: Fp8Recipe | None = None,
    *,
    picture_token: int | None = None,
) -> Qwen2_5_VLTextModel | Qwen2_5_VLModel:
    """Load the language model; ``recipe`` makes it fp8.

    Args:
        path: a transformers folder or a file.
        dtype, device: of the weights.
        recipe: how linear weights become fp8; None leaves them as the file has them.
        picture_token: id of the token that stands for pictures; None: the vision tower is not loaded.

    Raises:
        UserError: another model, incomplete or unreadable.
    """
    weights = WeightFiles(path)
    config, pictures = _config(weights), picture_token is not None
    config.image_token_id = picture_token if pictures else config.image_token_id
    names = {_name(name): name for name in weights.names if not name.startswith("lm_head.")}
    if not pictures:
        inside = "language_model."
        names = {name.removeprefix(inside): source for name, source in names.items() if name.startswith(inside)}
    key_map = {name: [Piece(source)] for name, source in names.items()}

    def build() -> Any:
        model: Any = Qwen2_5_VLModel(config) if pictures else Qwen2_5_VLTextModel(config.text_config)
        with torch.device("cpu"):  # frequencies are computed, no file has them
            language = model.language_model if pictures else model
            language.rotary_emb = Qwen2_5_VLRotaryEmbedding(config.text_config)
            if pictures:
                model.visual.rotary_pos_emb = Qwen2_5_VLVisionRotaryEmbedding(config.vision_config)
        return model

    model: Any = load_into(build, weights, key_map, dtype, device, fp8=Fp8Loading(recipe, compute="dequant"))
    for module in model.modules():
        if isinstance(module, (Qwen2_5_VLRotaryEmbedding, Qwen2_5_VLVisionRotaryEmbedding)):
            module.to(device)
    return model


def load_qwen_tokenizer(folder_or_name: str | Path) -> PreTrainedTokenizerBase:
    """Load Qwen2.5-VL's tokenizer from a folder or the hub (cache first).

    Raises:
        UserError: neither a folder nor to be had from the hub; or it knows no pictures, so it is another model's.
    """
    tokenizer = load_tokenizer(Qwen2Tokenizer.from_pretrained, folder_or_name, "qwen_tokenizer")
    if "<|image_pad|>" not in tokenizer.get_vocab():
        raise UserError(f"qwen_tokenizer: {folder_or_name} has no <|image_pad|>; give the tokenizer of Qwen2.5-VL")
    return tokenizer


def check_qwen_text(path: Path) -> None:
    """Raise a UserError if ``path`` holds no Qwen2.5-VL; reads headers only."""
    _config(WeightFiles(path))


def picture_processor(folder: Path | None) -> Qwen2VLImageProcessorPil:
    """Return what prepares pictures for the vision tower, without torchvision.

    Args:
        folder: with ``preprocessor_config.json``; None, or without one: the published settings.
    """
    settings: dict[str, Any] = dict(_PIXELS)
    if folder is not None and (folder / "preprocessor_config.json").is_file():
        known = ("min_pixels", "max_pixels", "size", "patch_size", "temporal_patch_size", "merge_size")
        found = read_config(folder, "preprocessor_config.json")
        settings = {key: found[key] for key in known if found.get(key) is not None} or settings
    return Qwen2VLImageProcessorPil(**settings)


def _name(name: str) -> str:
    """Return the name in ``Qwen2_5_VLModel`` of a file's tensor."""
    bare = name.removeprefix("model.")
    return bare if bare.startswith(("visual.", "language_model.")) else f"language_model.{bare}"


def _config(weights: WeightFiles) -> Qwen2_5_VLConfig:
    """Return the model's configuration, from its folder or from its shapes.

    Raises:
        UserError: it is another model.
    """
    if weights.path.is_dir():
        config = read_config(weights.path)
        if config.get("model_type") != "qwen2_5_vl":
            raise UserError(
                f"{weights.path / 'config.json'}: {config.get('model_type')!r}, not qwen2_5_vl; give Qwen-Image's text "
                "encoder"
            )
        return Qwen2_5_VLConfig.from_dict(config)
    names = {_name(name): name for name in weights.names}
    if "language_model.layers.0.self_attn.q_proj.bias" not in names or "visual.patch_embed.proj.weight" not in names:
        raise UserError(
            f"{weights.path}: not Qwen2.5-VL (no model.layers.0.self_attn.q_proj.bias or visual.patch_embed); give "
            "qwen_2.5_vl_7b.safetensors as text_encoder"
        )

    def shape(name: str) -> tuple[int, ...]:
        return weights.shape(names[name])

    first, vision = "language_model.layers.0", "visual.blocks.0"
    vocabulary, width = shape("language_model.embed_tokens.weight")
    vision_width, _, frames, patch, _ = shape("visual.patch_embed.proj.weight")
    depth = _count(names, "visual.blocks.")
    every = max(1, depth // 4)  # of the 7B's 32 blocks 7, 15, 23 and 31 see the whole picture
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": shape(f"{first}.mlp.gate_proj.weight")[0],
            "num_hidden_layers": _count(names, "language_model.layers."),
            "num_attention_heads": width // _HEAD_DIM,
            "num_key_value_heads": shape(f"{first}.self_attn.k_proj.weight")[0] // _HEAD_DIM,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": _MROPE},
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={
            "depth": depth,
            "hidden_size": vision_width,
            "intermediate_size": shape(f"{vision}.mlp.gate_proj.weight")[0],
            "num_heads": vision_width // _VISION_HEAD_DIM,
            "out_hidden_size": width,
            "patch_size": patch,
            "temporal_patch_size": frames,
            "fullatt_block_indexes": list(range(every - 1, depth, every)),
            "tokens_per_second": 2,
        },
    )


def _count(names: dict[str, str], prefix: str) -> int:
    numbers = [int(name[len(prefix) :].split(".", 1)[0]) for name in names if name.startswith(prefix)]
    return 1 + max(numbers, default=-1)
