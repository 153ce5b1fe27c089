"""Qwen-Image-2.1's files: where their parts lie, what they call the layers, and which of these get a LoRA.

A transformer file is ComfyUI's ``qwen_image_2.1_bf16.safetensors``, which may stack the feed-forward's gate and factor
in ``gate_up``, or one with diffusers' own names; ``vae`` and ``text_encoder`` lie beside it
(``qwen_image_2.1_vae_bf16.safetensors``, ``qwen3vl_8b_bf16.safetensors``). Turbo is the same architecture; its noise
levels stand in the folder's ``model_index.json``, and no tensor of a file tells it apart.

*LoRA files.* ComfyUI knows the halves of ``gate_up`` by diffusers' names below ``transformer.``, not below
``diffusion_model.``, where it wants the whole (``comfy/lora.py``, ``model_lora_keys_unet``). What musubi-tuner writes
(``networks/lora_qwen_image_21.py``), diffusers' names of the blocks' layers with underscores, ComfyUI reads but for the
two halves, and diffusers but for ``gate_layer``.

*LoRA.* Attention and feed-forward are trained, as by musubi-tuner. Text and images go through the same layers, so all
that are trained have a part in the image, in the last block too. The modulation is one layer for all blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes, block_sizes, rope_axes
from library.models.layer_names import read_names

_KEYS, _, _, LORA_TARGETS = read_names(Path(__file__).parent)
QWEN_21_TARGETS = LORA_TARGETS[0]


def _arguments(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``QwenImage21Transformer2DModel`` that fit a file."""
    sizes = block_sizes(shapes, "img_in", "transformer_blocks.0.attn.norm_q", num_layers="transformer_blocks")
    width, inner = shapes["transformer_blocks.0.img_mlp.out.weight"]
    return sizes | {
        "patch_size": 1,
        "out_channels": shapes["proj_out.weight"][0],
        "context_in_dim": shapes["txt_in.in_layer.weight"][1],
        "mlp_ratio": inner // width,
        "axes_dims_rope": rope_axes(sizes["attention_head_dim"]),
    }


FILES = FamilyFiles(
    model_type="qwen_image_21",
    arguments=_arguments,
    keys=_KEYS,
    vae=Part("vae", "vae", "qwen_image_2.1_vae_bf16.safetensors"),
    text_encoders=(Part("text_encoder", "text_encoder", "qwen3vl_8b_bf16.safetensors"),),
    tokenizers=(Part("qwen_tokenizer", "processor", "Qwen/Qwen3-VL-8B-Instruct"),),
)
