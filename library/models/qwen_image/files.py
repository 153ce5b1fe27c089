"""Where the parts of a Qwen-Image model lie: ``[model]`` options in, checked paths out, no weights read.

Two ways of keeping a model are understood: a diffusers folder with everything in it, and ComfyUI's split files
(``qwen_image_bf16.safetensors``, with ``vae`` and ``text_encoder`` beside it; musubi-tuner reads the same). With a
folder ``vae`` and ``text_encoder`` replace the folder's own parts.

The tokenizer of split files is Qwen2.5-VL's, from the hub or a local folder.

What a Qwen-Image transformer file holds: its prefix, its configuration, and where each parameter comes from.

Every published file has diffusers' names, ComfyUI's optionally below ``model.diffusion_model.``. The configuration
follows from the shapes, so a file needs no sidecar. One thing no weight shows: whether reference pictures are modulated
as at timestep 0 (Edit-2511, diffusers' ``zero_cond_t``). ComfyUI's files say so by an empty tensor
``__index_timestep_zero__``; for others there is the option ``zero_cond_t``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.flux.files import COMFY_PREFIX, rope_axes
from library.models.inspection import UNKNOWN, recognise
from library.models.layer_names import KeyNames, KeyRow, LayerGroup, LoraTargets, count_blocks, original_key_map
from library.models.qwen_image.text import check_qwen_text
from library.models.qwen_image.vae import qwen_vae_config
from library.models.weights import KeyMap, read_config
from library.precision.checkpoint_layouts import WeightFiles

_TOKENIZER = "Qwen/Qwen2.5-VL-7B-Instruct"
_PIPELINES = {  # the pipelines of a model_type
    "qwen_image": ("QwenImagePipeline",),
    "qwen_image_edit": ("QwenImageEditPipeline",),
    "qwen_image_edit_plus": ("QwenImageEditPlusPipeline",),
}


@dataclass(frozen=True)
class QwenFiles:
    """Checked locations. ``transformer_config`` holds the arguments of ``QwenImageTransformer2DModel``."""

    transformer: Path
    transformer_config: dict[str, Any]
    prefix: str | None  # of a single file's names; None for a folder
    vae: Path
    text_encoder: Path
    tokenizer: str | Path
    processor: Path | None
    scheduler: Path | None

    def key_map(self, weights: WeightFiles) -> KeyMap:
        """Return where each transformer parameter lies in ``weights``."""
        found = original_key_map(weights, self.prefix or "", QWEN_KEYS)
        return {name: pieces for name, pieces in found.items() if name != ZERO_COND_MARKER}


def locate(config: ModelConfig) -> QwenFiles:
    """Find and check every part of the model.

    Raises:
        UserError: a part is missing, unreadable or of another architecture.
    """
    root = Path(config.pretrained_model_name_or_path).expanduser()
    if root.is_dir():
        files = _locate_in_folder(root, config)
    elif root.is_file():
        files = _locate_single_file(root, config)
    else:
        raise UserError(
            f"pretrained_model_name_or_path {str(root)!r} does not exist; give a local diffusers folder or a "
            ".safetensors file"
        )
    qwen_vae_config(files.vae)
    check_qwen_text(files.text_encoder)
    return files


def _locate_in_folder(root: Path, config: ModelConfig) -> QwenFiles:
    pipeline = _pipeline_of(root)
    if not (root / "transformer").is_dir():
        raise UserError(f"{root}: a {pipeline or 'pipeline'} without a transformer folder; give a Qwen-Image folder")
    transformer_config = read_config(root / "transformer")
    kind = transformer_config.get("_class_name")
    if kind != "QwenImageTransformer2DModel":
        remedy = '; set model_type = "flux"' if str(kind).startswith("Flux") else "; give a Qwen-Image folder"
        raise UserError(f"{root / 'transformer'}: {kind!r}, not QwenImageTransformer2DModel{remedy}")
    if pipeline not in _PIPELINES[config.model_type]:
        meant = next((name for name, known in _PIPELINES.items() if pipeline in known), None)
        remedy = f'set model_type = "{meant}"' if meant else f"give a {_PIPELINES[config.model_type][0]}"
        raise UserError(f"{root}: a {pipeline}, which model_type {config.model_type} does not fit; {remedy}")
    return QwenFiles(
        transformer=root / "transformer",
        transformer_config=_with_zero_cond(transformer_config, config),
        prefix=None,
        vae=_part(config.vae, "vae", "vae") if config.vae else root / "vae",
        text_encoder=_part(config.text_encoder, "text_encoder", "text_encoder")
        if config.text_encoder
        else root / "text_encoder",
        tokenizer=root / "tokenizer" if (root / "tokenizer").is_dir() else config.qwen_tokenizer or _TOKENIZER,
        processor=root / "processor",
        scheduler=root / "scheduler" if (root / "scheduler" / "scheduler_config.json").is_file() else None,
    )


def _pipeline_of(root: Path) -> str:
    index = root / "model_index.json"
    if not index.is_file():
        raise UserError(f"{root}: no model_index.json, so no diffusers pipeline; give the folder that holds it")
    try:
        return json.loads(index.read_text(encoding="utf-8")).get("_class_name", "")
    except ValueError as error:
        raise UserError(f"{index}: not valid JSON ({error}); download it again") from error


def _locate_single_file(root: Path, config: ModelConfig) -> QwenFiles:
    weights = WeightFiles(root)
    prefix = find_prefix(weights)
    for option, published in (("vae", "qwen_image_vae.safetensors"), ("text_encoder", "qwen_2.5_vl_7b.safetensors")):
        if not getattr(config, option):
            raise UserError(f"{root}: a transformer file needs {option} beside it; set {option} to {published}")
    return QwenFiles(
        transformer=root,
        transformer_config=_with_zero_cond(file_config(weights, prefix), config),
        prefix=prefix,
        vae=_part(config.vae, "vae", "vae"),
        text_encoder=_part(config.text_encoder, "text_encoder", "text_encoder"),
        tokenizer=config.qwen_tokenizer or _TOKENIZER,
        processor=None,
        scheduler=None,
    )


def _with_zero_cond(transformer: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Let the option decide how reference pictures are modulated, where it is set."""
    found = bool(transformer.get("zero_cond_t", False))
    if config.zero_cond_t is False and found:
        raise UserError("zero_cond_t: the model's files say it is Edit-2511, which was trained with it; remove it")
    if found and config.model_type != "qwen_image_edit_plus":
        raise UserError(
            f'{config.pretrained_model_name_or_path}: Qwen-Image-Edit-2511; set model_type = "qwen_image_edit_plus"'
        )
    return transformer | {"zero_cond_t": found or bool(config.zero_cond_t)}


def _part(value: str | None, option: str, subfolder: str) -> Path:
    """Return the file or model folder that ``option`` names; a pipeline's folder stands for its part."""
    path = Path(value or "").expanduser()
    if not path.exists():
        raise UserError(f"{option} {str(path)!r} does not exist; give a .safetensors file or a model folder")
    return path / subfolder if (path / subfolder).is_dir() else path


ZERO_COND_MARKER = "__index_timestep_zero__"
_LAYERED = "time_text_embed.addition_t_embedding.weight"


def qwen_prefix(weights: WeightFiles) -> str | None:
    """Return what stands before the names of a Qwen-Image transformer in ``weights``; None if there is none."""
    for prefix in ("", COMFY_PREFIX):
        if f"{prefix}transformer_blocks.0.img_mod.1.weight" in weights and f"{prefix}txt_norm.weight" in weights:
            return prefix
    return None


def find_prefix(weights: WeightFiles) -> str:
    """Return the prefix of the Qwen-Image transformer in ``weights``.

    Raises:
        UserError: says what it is instead.
    """
    prefix = qwen_prefix(weights)
    if prefix is not None:
        if prefix + _LAYERED in weights:
            raise UserError(
                f"{weights.path}: Qwen-Image-Layered, not a model family of this version; give Qwen-Image or "
                "Qwen-Image-Edit"
            )
        return prefix
    if any(re.search(r"\.lora_(A|B|up|down)\b|lora_unet_", name) for name in weights.names):
        raise UserError(
            f"{weights.path}: a LoRA, not a base model; give it as network_weights, and a Qwen-Image model as "
            "pretrained_model_name_or_path"
        )
    found = recognise({name.removeprefix(COMFY_PREFIX) for name in weights.names})
    what = "of no known layout (no transformer_blocks.0.img_mod.1)" if found is UNKNOWN else f"a {found.name}"
    remedy = '; set model_type = "flux"' if found.name.startswith("FLUX.1") else "; give a Qwen-Image transformer"
    raise UserError(f"{weights.path}: {what}, not Qwen-Image{remedy}")


def file_config(weights: WeightFiles, prefix: str) -> dict[str, Any]:
    """Return the arguments of ``QwenImageTransformer2DModel`` that fit a file.

    Raises:
        UserError: a tensor that must be there is missing.
    """
    width, in_channels = weights.shape(f"{prefix}img_in.weight")
    head_dim = weights.shape(f"{prefix}transformer_blocks.0.attn.norm_q.weight")[0]
    return {
        "patch_size": 2,
        "in_channels": in_channels,
        "out_channels": weights.shape(f"{prefix}proj_out.weight")[0] // 4,
        "num_layers": count_blocks(weights, f"{prefix}transformer_blocks."),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "joint_attention_dim": weights.shape(f"{prefix}txt_in.weight")[1],
        "axes_dims_rope": rope_axes(head_dim),
        "zero_cond_t": prefix + ZERO_COND_MARKER in weights,
    }


_BLOCK = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(f"{stream}_mlp.net.{layer}" for stream in ("img", "txt") for layer in ("0.proj", "2")),
    *(f"{stream}_mod.1" for stream in ("img", "txt")),
)
_TOP = (
    "img_in",
    "txt_in",
    *(f"time_text_embed.timestep_embedder.linear_{i}" for i in (1, 2)),
    "norm_out.linear",
    "proj_out",
)

QWEN_KEYS = KeyNames(
    tuple(KeyRow(n, (n,)) for n in (*(f"transformer_blocks.{{i}}.{layer}" for layer in _BLOCK), *_TOP))
)

_DOUBLE = r"transformer_blocks\.\d+\."
QWEN_TARGETS = LoraTargets(
    family="qwen_image",
    kinds=(
        LayerGroup("img_attn", _DOUBLE + r"attn\.(to_q|to_k|to_v|to_out\.0)"),
        LayerGroup("txt_attn", _DOUBLE + r"attn\.(add_q_proj|add_k_proj|add_v_proj|to_add_out)"),
        LayerGroup("img_mlp", _DOUBLE + r"img_mlp\.net\.(0\.proj|2)"),
        LayerGroup("txt_mlp", _DOUBLE + r"txt_mlp\.net\.(0\.proj|2)"),
        LayerGroup("img_mod", _DOUBLE + r"img_mod\.1", default=False),
        LayerGroup("txt_mod", _DOUBLE + r"txt_mod\.1", default=False),
        LayerGroup("img_in", r"img_in", default=False),
        LayerGroup("txt_in", r"txt_in", default=False),
        LayerGroup("time_in", r"time_text_embed\.timestep_embedder\.linear_[12]", default=False),
    ),
    block_options={"train_block_indices": r"transformer_blocks\.(\d+)\..*"},
    keys=QWEN_KEYS,
    unused_modules=r"transformer_blocks\.(\d+)\.(attn\.(add_q_proj|to_add_out)|txt_mlp\.net\.(0\.proj|2))",
    kohya_module="networks.lora_qwen_image",
    kohya_base="qwen_image",
    architecture="Qwen-Image",
    implementation="https://github.com/QwenLM/Qwen-Image",
)

QWEN_EDIT_TARGETS = replace(QWEN_TARGETS, family="qwen_image_edit", architecture="Qwen-Image-Edit")
QWEN_EDIT_PLUS_TARGETS = replace(QWEN_TARGETS, family="qwen_image_edit_plus", architecture="Qwen-Image-Edit-Plus")
LORA_TARGETS = (QWEN_TARGETS, QWEN_EDIT_TARGETS, QWEN_EDIT_PLUS_TARGETS)
