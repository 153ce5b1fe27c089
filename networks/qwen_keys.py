"""Qwen-Image's linear layers.

The original checkpoint has diffusers' own names, so the layouts of LoRA files differ by prefix and separator only:
``transformer.transformer_blocks.0.attn.to_q``, ``diffusion_model.transformer_blocks.0.attn.to_q``,
``lora_unet_transformer_blocks_0_attn_to_q``; Lightning's files have no prefix. All of them load in diffusers and in
ComfyUI.
"""

from __future__ import annotations

from networks.key_map import KeyMap, KeyRow

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

QWEN_KEYS = KeyMap(tuple(KeyRow(n, (n,)) for n in (*(f"transformer_blocks.{{i}}.{layer}" for layer in _BLOCK), *_TOP)))
