"""FLUX.1's files: where their parts lie, what they call the layers, and which of these get a LoRA.

A transformer file has one of two layouts of the same numbers. *BFL's* (https://github.com/black-forest-labs/flux), read
by ComfyUI too, fuses q, k and v (in single blocks also the MLP's first matrix), names modulations differently, and
orders the last modulation (shift, scale) where *diffusers'* has (scale, shift). ``names.toml`` says so; its source is
diffusers' ``convert_flux_transformer_checkpoint_to_diffusers`` and BFL's reference implementation. Beside the file lie
``ae``, ``clip_l`` and ``t5xxl``.

*LoRA.* As in kohya's sd-scripts (``networks/lora_flux.py``) every linear layer inside the double and single blocks is
trained by default, attention, MLP and modulation alike; the layers in front of the blocks (image, time, vector,
guidance and text input) only when ``in_dims`` gives them a rank; the final layer never. kohya's fused ``qkv`` and
``linear1`` are separate layers here, each with a LoRA of the full rank. Text encoders have their linear layers of
attention and feed-forward trained, as in sd-scripts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes, block_sizes, rope_axes
from library.models.layer_names import read_names

FLUX_STACKS = {"num_layers": "transformer_blocks", "num_single_layers": "single_transformer_blocks"}
FLUX_KEYS, FLUX_NORMS, VAE_NAMES, LORA_TARGETS = read_names(Path(__file__).parent)
FLUX_TARGETS = LORA_TARGETS[0]


def _arguments(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``FluxTransformer2DModel`` that fit a file; schnell has no guidance input."""
    sizes = block_sizes(shapes, "x_embedder", "transformer_blocks.0.attn.norm_q", **FLUX_STACKS)
    return sizes | {
        "patch_size": 1,
        "out_channels": shapes["proj_out.weight"][0],
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
        "axes_dims_rope": rope_axes(sizes["attention_head_dim"]),
    }


FILES = FamilyFiles(
    model_type="flux",
    arguments=_arguments,
    keys=FLUX_KEYS,
    norms=FLUX_NORMS,
    vae=Part("ae", "vae", "ae.safetensors"),
    text_encoders=(
        Part("clip_l", "text_encoder", "clip_l.safetensors"),
        Part("t5xxl", "text_encoder_2", "t5xxl_fp16.safetensors"),
    ),
    tokenizers=(Part("clip_l_tokenizer", "tokenizer"), Part("t5xxl_tokenizer", "tokenizer_2")),
)
