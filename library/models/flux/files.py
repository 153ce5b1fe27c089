"""Where the parts of a FLUX.1 model lie: ``[model]`` options in, checked paths out, no weights read.

Three ways of keeping a model are understood:

- a diffusers folder with everything in it (``model_index.json``, ``transformer/``, ``vae/``, ...);
- BFL's single file (``flux1-dev.safetensors``) with ``ae``, ``clip_l`` and ``t5xxl`` beside it;
- ComfyUI's split files, the same with or without ``model.diffusion_model.`` before each name. A file that
  also holds the other parts is read for its transformer; the others still come from ``ae``, ``clip_l`` and
  ``t5xxl``.

With a folder ``ae``, ``clip_l`` and ``t5xxl`` replace the folder's own parts.

What a FLUX.1 transformer file holds: its layout, its configuration, and where each parameter comes from.

Two layouts of the same numbers are in use. *BFL's* (https://github.com/black-forest-labs/flux), read by
ComfyUI too, there optionally under ``model.diffusion_model.``; and *diffusers'*. BFL fuses q, k and v (in
single blocks also the MLP's first matrix), names modulations differently, and orders the last modulation
(shift, scale) where diffusers has (scale, shift). :func:`bfl_key_map` says for each diffusers parameter which
rows of which BFL tensor it is.

The configuration follows from the shapes, so a file needs no sidecar: widths, numbers of blocks and heads,
guidance (dev) or none (schnell).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.layer_names import (
    KeyNames,
    KeyRow,
    LayerGroup,
    LoraTargets,
    TextEncoderTargets,
    count_blocks,
    original_key_map,
)
from library.models.text_encoders import check_t5, clip_positions
from library.models.vae import vae_config
from library.models.weights import KeyMap, read_config
from library.precision.checkpoint_layouts import WeightFiles


@dataclass(frozen=True)
class FluxFiles:
    """Checked locations. ``transformer_config`` holds the arguments of ``FluxTransformer2DModel``."""

    transformer: Path
    transformer_config: dict[str, Any]
    transformer_prefix: str | None  # of a BFL-layout file; None for diffusers' layout
    vae: Path
    clip: Path
    t5: Path
    clip_tokenizer: str | Path
    t5_tokenizer: str | Path
    scheduler: Path | None

    def key_map(self, weights: WeightFiles) -> KeyMap:
        """Return where each transformer parameter lies in ``weights``."""
        return original_key_map(weights, self.transformer_prefix or "", FLUX_KEYS, FLUX_NORMS)


def locate(config: ModelConfig) -> FluxFiles:
    """Find and check every part of the model.

    Raises:
        UserError: a part is missing, unreadable, quantised with scales, of another architecture, or the transformer is
            of another variant than ``model_type`` says.
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
    check_inputs(files.transformer, {"in_channels": 64} | files.transformer_config, config.model_type)
    vae_config(files.vae)
    clip_positions(files.clip)
    check_t5(files.t5)
    return files


def _locate_in_folder(root: Path, config: ModelConfig) -> FluxFiles:
    index = root / "model_index.json"
    if not index.is_file():
        raise UserError(f"{root}: no model_index.json, so no diffusers pipeline; give the folder that holds it")
    try:
        pipeline = json.loads(index.read_text(encoding="utf-8")).get("_class_name", "")
    except ValueError as error:
        raise UserError(f"{index}: not valid JSON ({error}); download it again") from error
    if not (root / "transformer").is_dir():
        raise UserError(f"{root}: a {pipeline or 'pipeline'} without a transformer folder; give a FLUX.1 folder")
    transformer_config = read_config(root / "transformer")
    kind = transformer_config.get("_class_name")
    if kind != "FluxTransformer2DModel":
        remedy = 'set model_type = "qwen_image"' if str(kind).startswith("Qwen") else "give a FLUX.1 folder"
        raise UserError(f"{root / 'transformer'}: {kind!r}, not FluxTransformer2DModel; {remedy}")
    own_clip, own_t5 = config.clip_l is None, config.t5xxl is None
    return FluxFiles(
        transformer=root / "transformer",
        transformer_config=transformer_config,
        transformer_prefix=None,
        vae=_vae_path(config.ae) if config.ae else root / "vae",
        clip=root / "text_encoder" if own_clip else _part(config.clip_l, "clip_l", "text_encoder"),
        t5=root / "text_encoder_2" if own_t5 else _part(config.t5xxl, "t5xxl", "text_encoder_2"),
        # The folder's tokenizers fit CLIP-L and T5-XXL wherever their weights come from.
        clip_tokenizer=_own_tokenizer(root / "tokenizer", config.clip_l_tokenizer),
        t5_tokenizer=_own_tokenizer(root / "tokenizer_2", config.t5xxl_tokenizer),
        scheduler=root / "scheduler" if (root / "scheduler" / "scheduler_config.json").is_file() else None,
    )


def _locate_single_file(root: Path, config: ModelConfig) -> FluxFiles:
    weights = WeightFiles(root)
    refuse_other_architectures(weights)
    prefix = bfl_prefix(weights)
    transformer_config = diffusers_config(weights) if prefix is None else bfl_config(weights, prefix)
    return FluxFiles(
        transformer=root,
        transformer_config=transformer_config,
        transformer_prefix=prefix,
        vae=_vae_path(_needed(config.ae, "ae", "ae.safetensors", root)),
        clip=_part(_needed(config.clip_l, "clip_l", "clip_l.safetensors", root), "clip_l", "text_encoder"),
        t5=_part(_needed(config.t5xxl, "t5xxl", "t5xxl_fp16.safetensors", root), "t5xxl", "text_encoder_2"),
        clip_tokenizer=config.clip_l_tokenizer,
        t5_tokenizer=config.t5xxl_tokenizer,
        scheduler=None,
    )


def _needed(value: str | None, option: str, published: str, root: Path) -> str:
    if not value:
        raise UserError(f"{root}: a transformer file needs {option} beside it; set {option} to {published}")
    return value


def _part(value: str | None, option: str, subfolder: str) -> Path:
    """Return the file or model folder that ``option`` names; a pipeline's folder stands for its part."""
    path = Path(value or "").expanduser()
    if not path.exists():
        raise UserError(f"{option} {str(path)!r} does not exist; give a .safetensors file or a model folder")
    return path / subfolder if (path / subfolder).is_dir() else path


def _vae_path(value: str) -> Path:
    return _part(value, "ae", "vae")


def _own_tokenizer(folder: Path, otherwise: str) -> str | Path:
    return folder if folder.is_dir() else otherwise


COMFY_PREFIX = "model.diffusion_model."
_LATENT_CHANNELS = 64  # of a token: 16 latent channels x 2 x 2
_MASK_CHANNELS = 256  # of a Fill token: 16 x 16 pixels of the mask


# Norms of queries and keys, as regular expressions: BFL's names against diffusers'.
FLUX_NORMS = (
    (r"double_blocks\.(\d+)\.img_attn\.norm\.query_norm\.scale", r"transformer_blocks.\1.attn.norm_q.weight"),
    (r"double_blocks\.(\d+)\.img_attn\.norm\.key_norm\.scale", r"transformer_blocks.\1.attn.norm_k.weight"),
    (r"double_blocks\.(\d+)\.txt_attn\.norm\.query_norm\.scale", r"transformer_blocks.\1.attn.norm_added_q.weight"),
    (r"double_blocks\.(\d+)\.txt_attn\.norm\.key_norm\.scale", r"transformer_blocks.\1.attn.norm_added_k.weight"),
    (r"single_blocks\.(\d+)\.norm\.query_norm\.scale", r"single_transformer_blocks.\1.attn.norm_q.weight"),
    (r"single_blocks\.(\d+)\.norm\.key_norm\.scale", r"single_transformer_blocks.\1.attn.norm_k.weight"),
)


def _double(image: str, block: str) -> KeyRow:
    return KeyRow(f"double_blocks.{{i}}.{image}", (f"transformer_blocks.{{i}}.{block}",))


FLUX_KEYS = KeyNames(
    rows=(
        KeyRow(
            "double_blocks.{i}.img_attn.qkv",
            tuple(f"transformer_blocks.{{i}}.attn.{name}" for name in ("to_q", "to_k", "to_v")),
            rows=(1, 1, 1),
        ),
        KeyRow(
            "double_blocks.{i}.txt_attn.qkv",
            tuple(f"transformer_blocks.{{i}}.attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj")),
            rows=(1, 1, 1),
        ),
        _double("img_attn.proj", "attn.to_out.0"),
        _double("txt_attn.proj", "attn.to_add_out"),
        _double("img_mlp.0", "ff.net.0.proj"),
        _double("img_mlp.2", "ff.net.2"),
        _double("txt_mlp.0", "ff_context.net.0.proj"),
        _double("txt_mlp.2", "ff_context.net.2"),
        _double("img_mod.lin", "norm1.linear"),
        _double("txt_mod.lin", "norm1_context.linear"),
        KeyRow(
            "single_blocks.{i}.linear1",
            tuple(
                f"single_transformer_blocks.{{i}}.{name}"
                for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
            ),
            rows=(1, 1, 1, 4),
        ),
        KeyRow("single_blocks.{i}.linear2", ("single_transformer_blocks.{i}.proj_out",)),
        KeyRow("single_blocks.{i}.modulation.lin", ("single_transformer_blocks.{i}.norm.linear",)),
        KeyRow("img_in", ("x_embedder",)),
        KeyRow("txt_in", ("context_embedder",)),
        KeyRow("time_in.in_layer", ("time_text_embed.timestep_embedder.linear_1",)),
        KeyRow("time_in.out_layer", ("time_text_embed.timestep_embedder.linear_2",)),
        KeyRow("vector_in.in_layer", ("time_text_embed.text_embedder.linear_1",)),
        KeyRow("vector_in.out_layer", ("time_text_embed.text_embedder.linear_2",)),
        KeyRow("guidance_in.in_layer", ("time_text_embed.guidance_embedder.linear_1",)),
        KeyRow("guidance_in.out_layer", ("time_text_embed.guidance_embedder.linear_2",)),
        KeyRow("final_layer.linear", ("proj_out",)),
        KeyRow("final_layer.adaLN_modulation.1", ("norm_out.linear",), halves_swapped=True),
    )
)


def bfl_prefix(weights: WeightFiles) -> str | None:
    """Return the prefix of a BFL-layout transformer in ``weights`` ("": bare), None without one."""
    for prefix in ("", COMFY_PREFIX):
        if f"{prefix}double_blocks.0.img_attn.qkv.weight" in weights and f"{prefix}img_in.weight" in weights:
            return prefix
    return None


def refuse_other_architectures(weights: WeightFiles) -> None:
    """Raise a UserError that says what ``weights`` are, if they are no FLUX.1 transformer."""
    names = weights.names
    what: str | None = None
    if any(re.search(r"\.lora_(A|B|up|down)\b|lora_unet_", name) for name in names):
        raise UserError(
            f"{weights.path}: a LoRA, not a base model; give it as network_weights, and a FLUX.1 model as "
            "pretrained_model_name_or_path"
        )
    if any(".input_blocks." in name for name in names):
        what = "a Stable Diffusion or SDXL checkpoint"
    elif any("double_stream_modulation" in name for name in names):
        what = "a FLUX.2 checkpoint"
    elif any("distilled_guidance_layer" in name for name in names):
        what = "a Chroma checkpoint"
    elif any("joint_blocks." in name for name in names):
        what = "a Stable Diffusion 3 checkpoint"
    elif any("img_mod.1." in name for name in names):
        raise UserError(f'{weights.path}: a Qwen-Image checkpoint, not FLUX.1; set model_type = "qwen_image"')
    elif any(name.endswith("cap_pad_token") for name in names):
        raise UserError(f'{weights.path}: a Z-Image checkpoint, not FLUX.1; set model_type = "z_image"')
    elif bfl_prefix(weights) is None and "single_transformer_blocks.0.attn.to_q.weight" not in weights:
        what = "of no known layout (no double_blocks.0.img_attn.qkv, no single_transformer_blocks.0)"
    if what:
        raise UserError(f"{weights.path}: {what}, not FLUX.1; give a FLUX.1 transformer")


def bfl_config(weights: WeightFiles, prefix: str) -> dict[str, Any]:
    """Return the arguments of ``FluxTransformer2DModel`` that fit a BFL-layout file.

    Raises:
        UserError: a tensor that must be there is missing.
    """
    width, in_channels = weights.shape(f"{prefix}img_in.weight")
    head_dim = weights.shape(f"{prefix}double_blocks.0.img_attn.norm.query_norm.scale")[0]
    return _config(
        width,
        head_dim,
        in_channels=in_channels,
        out_channels=weights.shape(f"{prefix}final_layer.linear.weight")[0],
        num_layers=count_blocks(weights, f"{prefix}double_blocks."),
        num_single_layers=count_blocks(weights, f"{prefix}single_blocks."),
        joint_attention_dim=weights.shape(f"{prefix}txt_in.weight")[1],
        pooled_projection_dim=weights.shape(f"{prefix}vector_in.in_layer.weight")[1],
        guidance_embeds=f"{prefix}guidance_in.in_layer.weight" in weights,
    )


def diffusers_config(weights: WeightFiles) -> dict[str, Any]:
    """Return the arguments of ``FluxTransformer2DModel`` that fit a lone diffusers-layout file."""
    width, in_channels = weights.shape("x_embedder.weight")
    head_dim = weights.shape("single_transformer_blocks.0.attn.norm_q.weight")[0]
    return _config(
        width,
        head_dim,
        in_channels=in_channels,
        out_channels=weights.shape("proj_out.weight")[0],
        num_layers=count_blocks(weights, "transformer_blocks."),
        num_single_layers=count_blocks(weights, "single_transformer_blocks."),
        joint_attention_dim=weights.shape("context_embedder.weight")[1],
        pooled_projection_dim=weights.shape("time_text_embed.text_embedder.linear_1.weight")[1],
        guidance_embeds="time_text_embed.guidance_embedder.linear_1.weight" in weights,
    )


def check_inputs(path: object, config: dict[str, Any], model_type: str) -> None:
    """Refuse a transformer whose inputs are not those of ``model_type``.

    dev, schnell and Kontext take what they return; Fill also takes the blanked picture and the mask; Depth and Canny,
    which no family here is, a second picture. Kontext has dev's shapes: nothing in a file tells the two apart.

    Raises:
        UserError: another variant of FLUX.1.
    """
    taken, returned = config["in_channels"], output_channels(config)
    fill = taken == 2 * returned + _MASK_CHANNELS
    if not fill and taken != returned:
        raise UserError(
            f"{path}: the transformer takes {taken} channels and returns {returned}, as FLUX.1 Depth and Canny do; "
            "give FLUX.1 dev, schnell, Fill or Kontext"
        )
    if fill and model_type != "flux_fill":
        raise UserError(f"{path}: a FLUX.1 Fill transformer ({taken} channels); set model_type = flux_fill")
    if not fill and model_type == "flux_fill":
        raise UserError(
            f"{path}: the transformer takes {taken} channels and no mask, so it is not FLUX.1 Fill; set model_type = "
            "flux (Kontext: flux_kontext), or give flux1-fill-dev"
        )


def output_channels(config: dict[str, Any]) -> int:
    """Return the numbers a token of the velocity has: 4 a latent channel."""
    return config.get("out_channels") or config.get("in_channels", _LATENT_CHANNELS)


def _config(width: int, head_dim: int, **rest: Any) -> dict[str, Any]:
    return {
        "patch_size": 1,
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "axes_dims_rope": rope_axes(head_dim),
        **rest,
    }


def rope_axes(head_dim: int) -> tuple[int, int, int]:
    """Return how a head is shared among index, row and column: (16, 56, 56) for FLUX.1's 128.

    No tensor shows the split. An eighth for the index is FLUX.1's; for narrower heads, which only small test
    models have, at least 8, so 32 gives (8, 12, 12).
    """
    first = max(8, head_dim // 8)
    return (first, (head_dim - first) // 2, (head_dim - first) // 2)


_CLIP_LAYERS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.out_proj",
    "mlp.fc1",
    "mlp.fc2",
)
_T5_LAYERS = (
    *(f"layer.0.SelfAttention.{name}" for name in "qkvo"),
    *(f"layer.1.DenseReluDense.{name}" for name in ("wi_0", "wi_1", "wo")),
)

CLIP_KEYS = KeyNames(
    tuple(
        KeyRow(f"text_model.encoder.layers.{{i}}.{layer}", (f"encoder.layers.{{i}}.{layer}",)) for layer in _CLIP_LAYERS
    )
)
T5_KEYS = KeyNames(
    tuple(KeyRow(f"encoder.block.{{i}}.{layer}", (f"encoder.block.{{i}}.{layer}",)) for layer in _T5_LAYERS)
)

CLIP_PREFIXES = {
    "diffusers": ("text_encoder.",),
    "kohya": ("lora_te1_", "lora_te_"),
    "comfy": ("lora_te1_", "text_encoders.clip_l.transformer."),
}
T5_PREFIXES = {
    "diffusers": ("text_encoder_2.",),
    "kohya": ("lora_te3_", "lora_te2_"),
    "comfy": ("lora_te3_", "text_encoders.t5xxl.transformer."),
}

_CLIP = r"text_encoder\.encoder\.layers\.\d+\."
_T5 = r"text_encoder_2\.encoder\.block\.\d+\.layer\."

FLUX_CLIP = TextEncoderTargets(
    name="text_encoder",
    group="text_encoder",
    kinds=(
        LayerGroup("clip_attn", _CLIP + r"self_attn\.(q_proj|k_proj|v_proj|out_proj)"),
        LayerGroup("clip_mlp", _CLIP + r"mlp\.(fc1|fc2)"),
    ),
    keys=CLIP_KEYS,
    prefixes=CLIP_PREFIXES,
)
FLUX_T5 = TextEncoderTargets(
    name="text_encoder_2",
    group="text_encoder_t5",
    kinds=(
        LayerGroup("t5_attn", _T5 + r"0\.SelfAttention\.(q|k|v|o)"),
        LayerGroup("t5_mlp", _T5 + r"1\.DenseReluDense\.(wi_0|wi_1|wo)"),
    ),
    keys=T5_KEYS,
    prefixes=T5_PREFIXES,
)

_DOUBLE = r"transformer_blocks\.\d+\."
_SINGLE = r"single_transformer_blocks\.\d+\."

FLUX_TARGETS = LoraTargets(
    family="flux",
    kinds=(
        LayerGroup("img_attn", _DOUBLE + r"attn\.(to_q|to_k|to_v|to_out\.0)"),
        LayerGroup("txt_attn", _DOUBLE + r"attn\.(add_q_proj|add_k_proj|add_v_proj|to_add_out)"),
        LayerGroup("img_mlp", _DOUBLE + r"ff\.net\.(0\.proj|2)"),
        LayerGroup("txt_mlp", _DOUBLE + r"ff_context\.net\.(0\.proj|2)"),
        LayerGroup("img_mod", _DOUBLE + r"norm1\.linear"),
        LayerGroup("txt_mod", _DOUBLE + r"norm1_context\.linear"),
        LayerGroup("single", _SINGLE + r"(attn\.(to_q|to_k|to_v)|proj_mlp|proj_out)"),
        LayerGroup("single_mod", _SINGLE + r"norm\.linear"),
        LayerGroup("img_in", r"x_embedder", default=False),
        LayerGroup("time_in", r"time_text_embed\.timestep_embedder\.linear_[12]", default=False),
        LayerGroup("vector_in", r"time_text_embed\.text_embedder\.linear_[12]", default=False),
        LayerGroup("guidance_in", r"time_text_embed\.guidance_embedder\.linear_[12]", default=False),
        LayerGroup("txt_in", r"context_embedder", default=False),
    ),
    block_options={
        "train_double_block_indices": r"transformer_blocks\.(\d+)\..*",
        "train_single_block_indices": r"single_transformer_blocks\.(\d+)\..*",
    },
    keys=FLUX_KEYS,
    dim_lists={"in_dims": ("img_in", "time_in", "vector_in", "guidance_in", "txt_in")},
    text_encoders=(FLUX_CLIP, FLUX_T5),
)

# Fill and Kontext have dev's layers; Fill's x_embedder is wider, which no option or key shows.
FLUX_FILL_TARGETS = replace(FLUX_TARGETS, family="flux_fill")
FLUX_KONTEXT_TARGETS = replace(FLUX_TARGETS, family="flux_kontext")
LORA_TARGETS = (FLUX_TARGETS, FLUX_FILL_TARGETS, FLUX_KONTEXT_TARGETS)
