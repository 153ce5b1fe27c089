"""Z-Image's files: where their parts lie, what they call the layers, and which of these get a LoRA.

A transformer file is ComfyUI's ``z_image_bf16.safetensors``, which stacks q, k and v and has shorter names for the
first and the last layer (``z_image_convert_original_to_comfy.py`` makes it), or one with diffusers' own names; ``vae``
(FLUX's ``ae.safetensors``) and ``text_encoder`` lie beside it.

In LoRA files every layout has diffusers' names. musubi-tuner knows no others, and diffusers splits a stacked ``qkv``
below ``lora_unet_`` only; ComfyUI knows them below ``diffusion_model.`` and ``transformer.``, but not below
``lora_unet_``, where it wants the stacked ones. So no kohya file suits both, and kohya's is musubi-tuner's.

*LoRA.* Attention and MLP of the main layers are trained, as musubi-tuner's ``networks/lora_zimage.py`` does; the
refiners in front of them, modulation and the inputs only where their options say so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes
from library.models.layer_names import count_blocks, read_names

_KEYS, _NORMS, _, LORA_TARGETS = read_names(Path(__file__).parent)
Z_IMAGE_TARGETS = LORA_TARGETS[0]


def _arguments(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``ZImageTransformer2DModel`` that fit a file."""
    width, inputs = shapes["all_x_embedder.2-1.weight"]
    (head_dim,) = shapes["layers.0.attention.norm_q.weight"]
    return {
        "in_channels": inputs // 4,
        "dim": width,
        "n_layers": count_blocks(shapes, "layers."),
        "n_refiner_layers": count_blocks(shapes, "noise_refiner."),
        "n_heads": width // head_dim,
        "n_kv_heads": width // head_dim,
        "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
        # transformer/config.json of Tongyi-MAI/Z-Image; no tensor shows how a head is shared among the axes
        "axes_dims": [head_dim // 4, head_dim * 3 // 8, head_dim * 3 // 8],
        "axes_lens": [1536, 512, 512],
    }


FILES = FamilyFiles(
    model_type="z_image",
    arguments=_arguments,
    keys=_KEYS,
    norms=_NORMS,
    vae=Part("vae", "vae", "ae.safetensors"),
    text_encoders=(Part("text_encoder", "text_encoder", "qwen_3_4b.safetensors"),),
    tokenizers=(Part("qwen_tokenizer", "tokenizer", "Qwen/Qwen3-4B"),),
    unused=(r"norm_final\.weight",),  # Lumina's
    variants={"siglip_pad_token": "Z-Image-Omni"},
)
