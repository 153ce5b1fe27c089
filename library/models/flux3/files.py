"""FLUX.3 klein's files: where their parts lie, what they call the layers, and which of these get a LoRA.

A transformer file has BFL's names (ComfyUI's and the quantised files too) or diffusers'; nothing is stacked, only the
last modulation's halves come in the other order. ``names.toml`` says so; its source is diffusers'
``convert_flux3_transformer_checkpoint_to_diffusers``. Beside the file lie ``vae`` (FLUX.2's) and ``text_encoder``
(Qwen3-VL-4B). The distilled model is known by one embedder more, ``ref_time_in``.

*LoRA.* Attention and feed-forward of all blocks are trained; the modulation, which all blocks of a mode share, and the
inputs only where their options say so. The blocks of the reference images (``ref``) run where there are references:
trained on text alone they would have no gradient, so they are no targets of ``flux3_klein``. What the last block makes
of text and references is not used, but its layers are those of the image, so that every layer has a gradient.

diffusers reads BFL's names below ``diffusion_model.`` too, of the blocks, as ``lora_A`` and ``lora_B`` alone: a file
with ``.alpha`` it refuses. ComfyUI reads every spelling. So the comfy layout is written the way that both read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes, block_sizes
from library.models.layer_names import read_names

_KEYS, _NORMS, _, LORA_TARGETS = read_names(Path(__file__).parent)
FLUX3_TARGETS, FLUX3_EDIT_TARGETS = LORA_TARGETS


def _arguments(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``Flux3Transformer2DModel`` that fit a file."""
    sizes = block_sizes(
        shapes,
        "x_embedders.image",
        "single_transformer_blocks.0.attn.norm_q",
        num_layers="txt_mode_blocks",
        num_single_layers="single_transformer_blocks",
    )
    width, inner = shapes["single_transformer_blocks.0.ff.linear_out.weight"]
    return sizes | {
        # a file may leave out what only reference images go through
        "cond_in_channels": shapes.get("x_embedders.image_cond.weight", shapes["x_embedders.image.weight"])[1],
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "timestep_channels": shapes["timestep_embedder.linear_1.weight"][1],
        "mlp_ratio": inner / width,
        "axes_dims_rope": (sizes["attention_head_dim"] // 4,) * 4,  # no tensor shows it
        "flow_map": "target_timestep_embedder.linear_1.weight" in shapes,
    }


FILES = FamilyFiles(
    model_type="flux3_klein",
    arguments=_arguments,
    keys=_KEYS,
    norms=_NORMS,
    vae=Part("vae", "vae", "flux2-vae.safetensors"),
    text_encoders=(Part("text_encoder", "text_encoder", "qwen3vl_4b_bf16.safetensors"),),
    tokenizers=(Part("qwen_tokenizer", "tokenizer", "Qwen/Qwen3-VL-4B-Instruct"),),
    unused=(r"repa_projectors\..*",),  # of its training
)
