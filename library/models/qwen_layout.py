"""What a Qwen-Image transformer file holds: its prefix, its configuration, and where each parameter comes from.

Every published file has diffusers' names, ComfyUI's optionally below ``model.diffusion_model.``. The configuration
follows from the shapes, so a file needs no sidecar. One thing no weight shows: whether reference pictures are modulated
as at timestep 0 (Edit-2511, diffusers' ``zero_cond_t``). ComfyUI's files say so by an empty tensor
``__index_timestep_zero__``; for others there is the option ``zero_cond_t``.
"""

from __future__ import annotations

import re
from typing import Any

from library.errors import UserError
from library.models.architectures import UNKNOWN, recognise
from library.models.flux_layout import COMFY_PREFIX, rope_axes
from library.models.weights import KeyMap, Piece, WeightFiles

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
    start = len(f"{prefix}transformer_blocks.")
    blocks = {int(n[start:].split(".", 1)[0]) for n in weights.names if n.startswith(f"{prefix}transformer_blocks.")}
    return {
        "patch_size": 2,
        "in_channels": in_channels,
        "out_channels": weights.shape(f"{prefix}proj_out.weight")[0] // 4,
        "num_layers": 1 + max(blocks),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "joint_attention_dim": weights.shape(f"{prefix}txt_in.weight")[1],
        "axes_dims_rope": rope_axes(head_dim),
        "zero_cond_t": prefix + ZERO_COND_MARKER in weights,
    }


def key_map(weights: WeightFiles, prefix: str) -> KeyMap:
    """Return where each parameter of the transformer lies; other parts of a whole checkpoint are passed over."""
    names = [name for name in weights.names if name.startswith(prefix) and name != prefix + ZERO_COND_MARKER]
    return {name.removeprefix(prefix): [Piece(name)] for name in names}
