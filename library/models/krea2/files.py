"""Krea 2's files: where their parts lie, what they call the layers, and which of these get a LoRA.

A transformer file has the names of the published code (https://github.com/krea-ai/krea-2, ``raw.safetensors`` and
``turbo.safetensors``; ComfyUI's are the same, also below ``model.diffusion_model.``) or diffusers'. It keeps the six
vectors of a block's modulation as one. ``vae`` (Qwen-Image's) and ``text_encoder`` lie beside it.

*LoRA.* Every linear layer is trained, as the model's authors recommend and musubi-tuner's ``networks/lora_krea2.py``
does; each group can be left out by its option. For long runs the authors recommend attention alone, of a larger rank.
Modulation is a shared vector and a table a block: its layer is one of the inputs, ``time_in``; tables get no LoRA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes, block_sizes
from library.models.layer_names import read_names

_KEYS, _NORMS, _, LORA_TARGETS = read_names(Path(__file__).parent)
KREA2_TARGETS = LORA_TARGETS[0]


def _arguments(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``Krea2Transformer2DModel`` that fit a file."""
    text_width = shapes["txt_in.linear_1.weight"][1]
    block, fusion = "transformer_blocks.0", "text_fusion.layerwise_blocks.0"
    (text_head_dim,) = shapes[f"{fusion}.attn.norm_q.weight"]
    sizes = block_sizes(
        shapes,
        "img_in",
        f"{block}.attn.norm_q",
        num_layers="transformer_blocks",
        num_layerwise_text_blocks="text_fusion.layerwise_blocks",
        num_refiner_text_blocks="text_fusion.refiner_blocks",
    )
    head_dim = sizes["attention_head_dim"]
    return sizes | {
        "num_key_value_heads": shapes[f"{block}.attn.to_k.weight"][0] // head_dim,
        "intermediate_size": shapes[f"{block}.ff.gate.weight"][0],
        "timestep_embed_dim": shapes["time_embed.linear_1.weight"][1],
        "text_hidden_dim": text_width,
        "num_text_layers": shapes["text_fusion.projector.weight"][-1],  # GGUF keeps a single row as a vector
        "text_num_attention_heads": text_width // text_head_dim,
        "text_num_key_value_heads": shapes[f"{fusion}.attn.to_k.weight"][0] // text_head_dim,
        "text_intermediate_size": shapes[f"{fusion}.ff.gate.weight"][0],
        # diffusers' default; no tensor shows how a head is shared among the axes
        "axes_dims_rope": (head_dim // 4, head_dim * 3 // 8, head_dim * 3 // 8),
    }


FILES = FamilyFiles(
    model_type="krea2",
    arguments=_arguments,
    keys=_KEYS,
    norms=_NORMS,
    vae=Part("vae", "vae", "qwen_image_vae.safetensors"),
    text_encoders=(Part("text_encoder", "text_encoder", "qwen3vl_4b_bf16.safetensors"),),
    tokenizers=(Part("qwen_tokenizer", "tokenizer", "Qwen/Qwen3-VL-4B-Instruct"),),
)
