"""Qwen-Image's files: where their parts lie, what they call the layers, and which of these get a LoRA.

Every published transformer file has diffusers' names, ComfyUI's optionally below ``model.diffusion_model.``; ``vae``
and ``text_encoder`` lie beside it (``qwen_image_vae.safetensors``, ``qwen_2.5_vl_7b.safetensors``; musubi-tuner reads
the same). One thing no weight shows: whether reference images are modulated as at timestep 0 (Edit-2511, diffusers'
``zero_cond_t``). ComfyUI's files say so by an empty tensor ``__index_timestep_zero__``; for others there is the option
``zero_cond_t``.

LoRA files differ by prefix and separator only: ``transformer.transformer_blocks.0.attn.to_q``,
``diffusion_model.transformer_blocks.0.attn.to_q``, ``lora_unet_transformer_blocks_0_attn_to_q``; Lightning's files have
no prefix. All of them load in diffusers and in ComfyUI.

*LoRA.* Attention and MLP of both streams are trained, for edit models too. So musubi-tuner's
``networks/lora_qwen_image.py`` means to: its pattern against modulation looks for ``_mod_`` and never matches
``img_mod.1``, so that its LoRAs have modulation; ``img_mod_dim`` and ``txt_mod_dim`` train it here. Of the last block's
text stream only keys, values and modulation reach the image; the layers behind them get no gradient (under DDP a run
would stop) and no LoRA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes, block_sizes, rope_axes
from library.models.layer_names import read_names

_ZERO_COND_MARKER = "__index_timestep_zero__"
_KEYS, _, VAE_NAMES, LORA_TARGETS = read_names(Path(__file__).parent)
QWEN_TARGETS = LORA_TARGETS[0]


def _arguments(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``QwenImageTransformer2DModel`` that fit a file."""
    sizes = block_sizes(shapes, "img_in", "transformer_blocks.0.attn.norm_q", num_layers="transformer_blocks")
    return sizes | {
        "patch_size": 2,
        "out_channels": shapes["proj_out.weight"][0] // 4,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "axes_dims_rope": rope_axes(sizes["attention_head_dim"]),
        "zero_cond_t": _ZERO_COND_MARKER in shapes,
    }


FILES = FamilyFiles(
    model_type="qwen_image",
    arguments=_arguments,
    keys=_KEYS,
    vae=Part("vae", "vae", "qwen_image_vae.safetensors"),
    text_encoders=(Part("text_encoder", "text_encoder", "qwen_2.5_vl_7b.safetensors"),),
    tokenizers=(Part("qwen_tokenizer", "tokenizer", "Qwen/Qwen2.5-VL-7B-Instruct"),),
    unused=(_ZERO_COND_MARKER,),
    variants={"time_text_embed.addition_t_embedding.weight": "Qwen-Image-Layered"},
)
