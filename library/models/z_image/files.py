"""Where the parts of a Z-Image model lie and what its transformer's file holds; no weights are read.

A diffusers folder with everything in it, or a transformer file with ``vae`` (FLUX's ``ae.safetensors``) and
``text_encoder`` beside it: ComfyUI's ``z_image_bf16.safetensors``, which stacks q, k and v and has shorter names for
the first and the last layer (``z_image_convert_original_to_comfy.py`` makes it), or one with diffusers' own names. With
a folder ``vae`` and ``text_encoder`` replace the folder's own parts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.flux.files import COMFY_PREFIX
from library.models.inspection import UNKNOWN, recognise
from library.models.layer_names import KeyNames, KeyRow, LayerGroup, LoraTargets, count_blocks, original_key_map
from library.models.vae import vae_config
from library.models.weights import KeyMap, read_config
from library.models.z_image.text import text_width
from library.precision.checkpoint_layouts import WeightFiles

_TOKENIZER = "Qwen/Qwen3-4B"


@dataclass(frozen=True)
class ZImageFiles:
    """Checked locations. ``transformer_config`` holds the arguments of ``ZImageTransformer2DModel``."""

    transformer: Path
    transformer_config: dict[str, Any]
    vae: Path
    text_encoder: Path
    tokenizer: str | Path
    scheduler: Path | None

    def key_map(self, weights: WeightFiles) -> KeyMap:
        """Return where each transformer parameter lies in ``weights``."""
        found = original_key_map(weights, _prefix(weights), Z_IMAGE_KEYS, Z_IMAGE_NORMS)
        return {name: pieces for name, pieces in found.items() if name != "norm_final.weight"}  # Lumina's, unused


def locate(config: ModelConfig) -> ZImageFiles:
    """Find and check every part of the model.

    Raises:
        UserError: a part is missing, unreadable or of another architecture.
    """
    root = Path(config.pretrained_model_name_or_path).expanduser()
    tokenizer: str | Path = config.qwen_tokenizer or _TOKENIZER
    if root.is_dir():
        transformer, transformer_config = root / "transformer", _folder_config(root)
        tokenizer = root / "tokenizer" if (root / "tokenizer").is_dir() else tokenizer
    elif root.is_file():
        transformer, transformer_config = root, _file_config(WeightFiles(root))
    else:
        raise UserError(
            f"pretrained_model_name_or_path {str(root)!r} does not exist; give a local diffusers folder or a "
            ".safetensors file"
        )
    vae, text = (_part(root, config, *part) for part in (("vae", "ae"), ("text_encoder", "qwen_3_4b")))
    vae_config(vae)
    if (width := text_width(text)) != (wanted := transformer_config.get("cap_feat_dim", 2560)):
        raise UserError(f"{text}: text {width} wide, the transformer takes {wanted}; give Qwen3-4B as text_encoder")
    scheduler = root / "scheduler"
    has_scheduler = (scheduler / "scheduler_config.json").is_file()
    return ZImageFiles(transformer, transformer_config, vae, text, tokenizer, scheduler if has_scheduler else None)


def _part(root: Path, config: ModelConfig, option: str, published: str) -> Path:
    """Return where a part lies: what its option names (of a pipeline's folder its own part), or the model's folder."""
    value = getattr(config, option)
    if value is None:
        if root.is_file():
            raise UserError(
                f"{root}: a transformer file needs {option} beside it; set {option} to {published}.safetensors"
            )
        return root / option
    path = Path(value).expanduser()
    if not path.exists():
        raise UserError(f"{option} {str(path)!r} does not exist; give a .safetensors file or a model folder")
    return path / option if (path / option).is_dir() else path


def _folder_config(root: Path) -> dict[str, Any]:
    pipeline = read_config(root, "model_index.json").get("_class_name", "")
    if pipeline != "ZImagePipeline":
        raise UserError(f"{root}: a {pipeline or 'model'}, not ZImagePipeline; give a Z-Image folder")
    return read_config(root / "transformer")


def _file_config(weights: WeightFiles) -> dict[str, Any]:
    """Return the arguments of ``ZImageTransformer2DModel`` that fit a file, from its shapes.

    Raises:
        UserError: it is another model.
    """
    prefix = _prefix(weights)
    names = {"first": "x_embedder", "norm": "q_norm"}
    if not _is_comfy(weights, prefix):
        names = {"first": "all_x_embedder.2-1", "norm": "norm_q"}
    if f"{prefix}siglip_pad_token" in weights:
        raise UserError(f"{weights.path}: Z-Image-Omni, not a model family of this version; give Z-Image")
    width, inputs = weights.shape(f"{prefix}{names['first']}.weight")
    (head_dim,) = weights.shape(f"{prefix}layers.0.attention.{names['norm']}.weight")
    return {
        "in_channels": inputs // 4,
        "dim": width,
        "n_layers": count_blocks(weights, f"{prefix}layers."),
        "n_refiner_layers": count_blocks(weights, f"{prefix}noise_refiner."),
        "n_heads": width // head_dim,
        "n_kv_heads": width // head_dim,
        "cap_feat_dim": weights.shape(f"{prefix}cap_embedder.1.weight")[1],
        # transformer/config.json of Tongyi-MAI/Z-Image; no tensor shows how a head is shared among the axes
        "axes_dims": [head_dim // 4, head_dim * 3 // 8, head_dim * 3 // 8],
        "axes_lens": [1536, 512, 512],
    }


def _is_comfy(weights: WeightFiles, prefix: str) -> bool:
    return f"{prefix}layers.0.attention.qkv.weight" in weights


def _prefix(weights: WeightFiles) -> str:
    """Return what stands before the names of the Z-Image transformer in ``weights``.

    Raises:
        UserError: says what it is instead.
    """
    for prefix in ("", COMFY_PREFIX):
        if f"{prefix}cap_pad_token" in weights and f"{prefix}layers.0.adaLN_modulation.0.weight" in weights:
            return prefix
    if any(re.search(r"\.lora_(A|B|up|down)\b|lora_unet_", name) for name in weights.names):
        raise UserError(
            f"{weights.path}: a LoRA, not a base model; give it as network_weights, and a Z-Image model as "
            "pretrained_model_name_or_path"
        )
    found = recognise({name.removeprefix(COMFY_PREFIX) for name in weights.names})
    what = "of no known layout (no cap_pad_token)" if found is UNKNOWN else f"a {found.name}"
    raise UserError(f"{weights.path}: {what}, not Z-Image; give a Z-Image transformer, or set model_type")


_STACKS = ("layers.{i}", "noise_refiner.{i}", "context_refiner.{i}")
_SAME = (*(f"feed_forward.w{i}" for i in (1, 2, 3)), "adaLN_modulation.0")


def _block(stack: str) -> tuple[KeyRow, ...]:
    attention = f"{stack}.attention"
    return (
        KeyRow(f"{attention}.qkv", tuple(f"{attention}.to_{x}" for x in "qkv"), rows=(1, 1, 1)),
        KeyRow(f"{attention}.out", (f"{attention}.to_out.0",)),
        *(KeyRow(f"{stack}.{layer}", (f"{stack}.{layer}",)) for layer in _SAME),
    )


Z_IMAGE_KEYS = KeyNames(
    rows=(
        *(row for stack in _STACKS for row in _block(stack)),
        *(KeyRow(name, (name,)) for name in ("cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2")),
        KeyRow("x_embedder", ("all_x_embedder.2-1",)),
        KeyRow("final_layer.linear", ("all_final_layer.2-1.linear",)),
        KeyRow("final_layer.adaLN_modulation.1", ("all_final_layer.2-1.adaLN_modulation.1",)),
    )
)

# Norms of queries and keys, as regular expressions: ComfyUI's names against diffusers'.
Z_IMAGE_NORMS = (
    (r"(.*\.attention)\.q_norm\.weight", r"\1.norm_q.weight"),
    (r"(.*\.attention)\.k_norm\.weight", r"\1.norm_k.weight"),
)

_Z_LAYER = r"layers\.\d+\."
_Z_REFINER = r"(noise|context)_refiner\.\d+\."
_Z_PARTS = (r"attention\.(to_q|to_k|to_v|to_out\.0)", r"feed_forward\.w[123]")

Z_IMAGE_TARGETS = LoraTargets(
    family="z_image",
    kinds=(
        LayerGroup("attn", _Z_LAYER + _Z_PARTS[0]),
        LayerGroup("mlp", _Z_LAYER + _Z_PARTS[1]),
        LayerGroup("mod", _Z_LAYER + r"adaLN_modulation\.0", default=False),
        LayerGroup("refiner", rf"{_Z_REFINER}({_Z_PARTS[0]}|{_Z_PARTS[1]})", default=False),
        LayerGroup("refiner_mod", _Z_REFINER + r"adaLN_modulation\.0", default=False),
        LayerGroup("img_in", r"all_x_embedder\.2-1", default=False),
        LayerGroup("txt_in", r"cap_embedder\.1", default=False),
        LayerGroup("time_in", r"t_embedder\.mlp\.[02]", default=False),
    ),
    block_options={"train_block_indices": r"layers\.(\d+)\..*"},
    keys=Z_IMAGE_KEYS,
    kohya_module="networks.lora_zimage",
    kohya_base="z_image",
    architecture="Z-Image",
    implementation="https://github.com/Tongyi-MAI/Z-Image",
    plain_layouts=("comfy",),
)
LORA_TARGETS = (Z_IMAGE_TARGETS,)
