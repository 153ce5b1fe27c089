"""ERNIE-Image's files: where their parts lie, what they call the layers, and which of these get a LoRA.

A transformer file (ComfyUI's ``ernie-image.safetensors``, ``ernie-image-turbo.safetensors``, a GGUF file of these) has
diffusers' names; ``vae`` (FLUX.2's) and ``text_encoder`` (``ministral-3-3b.safetensors``) lie beside it.

*LoRA.* Attention and MLP of all blocks are trained, as OneTrainer's presets (``attn-mlp``) and AI toolkit do.
Modulation is one layer of the whole model, which a LoRA changes in every block at once: it, the inputs and the end are
trained only where their options say so. The image's input is a convolution and gets no LoRA. ComfyUI's layout has
``lora_A`` and ``lora_B`` with the scale in B, as AI toolkit writes it: diffusers refuses a file with ``.alpha``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes
from library.models.layer_names import count_blocks, read_names

_KEYS, _, _, LORA_TARGETS = read_names(Path(__file__).parent)
ERNIE_IMAGE_TARGETS = LORA_TARGETS[0]


def _arguments(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``ErnieImageTransformer2DModel`` that fit a file."""
    width, channels, patch, _ = shapes["x_embedder.proj.weight"]
    (head_dim,) = shapes["layers.0.self_attention.norm_q.weight"]
    return {
        "hidden_size": width,
        "num_attention_heads": width // head_dim,
        "num_layers": count_blocks(shapes, "layers."),
        "ffn_hidden_size": shapes["layers.0.mlp.gate_proj.weight"][0],
        "in_channels": channels,
        "out_channels": shapes["final_linear.weight"][0] // patch**2,
        "patch_size": patch,
        "text_in_dim": shapes.get("text_proj.weight", (width, width))[1],
        # diffusers' default, (32, 48, 48); no tensor shows how a head is shared among the axes
        "rope_axes_dim": (head_dim // 4, head_dim * 3 // 8, head_dim * 3 // 8),
    }


FILES = FamilyFiles(
    model_type="ernie_image",
    arguments=_arguments,
    keys=_KEYS,
    vae=Part("vae", "vae", "flux2-vae.safetensors"),
    text_encoders=(Part("text_encoder", "text_encoder", "ministral-3-3b.safetensors"),),
    tokenizers=(Part("mistral_tokenizer", "tokenizer", "mistralai/Ministral-3-3B-Instruct-2512"),),
)
