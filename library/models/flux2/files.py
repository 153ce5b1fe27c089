"""FLUX.2's files: where their parts lie, what they call the layers, and which of these get a LoRA.

A transformer file has BFL's names (https://github.com/black-forest-labs/flux2), which ComfyUI reads too, or diffusers';
beside it lie ``vae`` (``flux2-vae.safetensors``) and ``text_encoder``. Only q, k and v of double blocks are fused in
one naming and apart in the other; a single block's one matrix for q, k, v and MLP is that in both. As in FLUX.1 the
last modulation is (shift, scale) in BFL's files and (scale, shift) in diffusers'. There are no biases. dev has a
guidance input and klein has none, which is how the two are told apart.

*LoRA.* Attention and MLP of all blocks are trained, as musubi-tuner's ``networks/lora_flux_2.py`` does. The three
modulations are layers of the whole model, which a LoRA changes in every block at once: they and the inputs are trained
only where their options say so. ComfyUI's layout has ``lora_A`` and ``lora_B`` with the scale in B, as AI toolkit
writes it: diffusers takes a file with ``lora_down`` for one with kohya's underscores, and finds nothing in it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes, block_sizes
from library.models.flux.files import FLUX_NORMS, FLUX_STACKS
from library.models.layer_names import read_names

_KEYS, _, _, LORA_TARGETS = read_names(Path(__file__).parent)
FLUX2_TARGETS = LORA_TARGETS[0]


def _arguments(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``Flux2Transformer2DModel`` that fit a file; klein has no guidance input."""
    sizes = block_sizes(shapes, "x_embedder", "single_transformer_blocks.0.attn.norm_q", **FLUX_STACKS)
    width, inner = shapes["transformer_blocks.0.ff.linear_out.weight"]
    return sizes | {
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "timestep_guidance_channels": shapes["time_guidance_embed.timestep_embedder.linear_1.weight"][1],
        "mlp_ratio": inner / width,
        "axes_dims_rope": [sizes["attention_head_dim"] // 4] * 4,
        "guidance_embeds": "time_guidance_embed.guidance_embedder.linear_1.weight" in shapes,
    }


FILES = FamilyFiles(
    model_type="flux2_klein",
    arguments=_arguments,
    keys=_KEYS,
    norms=FLUX_NORMS,
    vae=Part("vae", "vae", "flux2-vae.safetensors"),
    text_encoders=(Part("text_encoder", "text_encoder", "qwen_3_4b.safetensors (of 9B: qwen_3_8b.safetensors)"),),
    tokenizers=(Part("qwen_tokenizer", "tokenizer", "Qwen/Qwen3-4B"),),
)

DEV_FILES = replace(
    FILES,
    text_encoders=(Part("text_encoder", "text_encoder", "mistral_3_small_flux2_bf16.safetensors"),),
    tokenizers=(Part("mistral_tokenizer", "tokenizer", "mistralai/Mistral-Small-3.1-24B-Instruct-2503"),),
)
