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

from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes
from library.models.layer_names import Architecture, KeyNames, KeyRow, LayerGroup, LoraTargets, count_blocks

_STACKS = ("layers.{i}", "noise_refiner.{i}", "context_refiner.{i}")
_SAME = (*(f"feed_forward.w{i}" for i in (1, 2, 3)), "adaLN_modulation.0")


def _block(stack: str) -> tuple[KeyRow, ...]:
    attention = f"{stack}.attention"
    return (
        KeyRow(f"{attention}.qkv", tuple(f"{attention}.to_{x}" for x in "qkv"), rows=(1, 1, 1)),
        KeyRow(f"{attention}.out", (f"{attention}.to_out.0",)),
        *(KeyRow(f"{stack}.{layer}", (f"{stack}.{layer}",)) for layer in _SAME),
    )


Z_IMAGE_KEYS = KeyNames(
    rows=(
        *(row for stack in _STACKS for row in _block(stack)),
        *(KeyRow(name, (name,)) for name in ("cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2")),
        KeyRow("x_embedder", ("all_x_embedder.2-1",)),
        KeyRow("final_layer.linear", ("all_final_layer.2-1.linear",)),
        KeyRow("final_layer.adaLN_modulation.1", ("all_final_layer.2-1.adaLN_modulation.1",)),
    )
)

# Norms of queries and keys, as regular expressions: ComfyUI's names against diffusers'.
Z_IMAGE_NORMS = (
    (r"(.*\.attention)\.q_norm\.weight", r"\1.norm_q.weight"),
    (r"(.*\.attention)\.k_norm\.weight", r"\1.norm_k.weight"),
)


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
    title="Z-Image",
    model_type="z_image",
    transformer="ZImageTransformer2DModel",
    arguments=_arguments,
    keys=Z_IMAGE_KEYS,
    norms=Z_IMAGE_NORMS,
    vae=Part("vae", "vae", "ae.safetensors"),
    text_encoders=(Part("text_encoder", "text_encoder", "qwen_3_4b.safetensors"),),
    tokenizers=(Part("qwen_tokenizer", "tokenizer", "Qwen/Qwen3-4B"),),
    unused=(r"norm_final\.weight",),  # Lumina's
    variants={"siglip_pad_token": "Z-Image-Omni"},
)

_Z_LAYER = r"layers\.\d+\."
_Z_REFINER = r"(noise|context)_refiner\.\d+\."
_Z_PARTS = (r"attention\.(to_q|to_k|to_v|to_out\.0)", r"feed_forward\.w[123]")

Z_IMAGE_TARGETS = LoraTargets(
    family="z_image",
    layer_groups=(
        LayerGroup("attn", _Z_LAYER + _Z_PARTS[0]),
        LayerGroup("mlp", _Z_LAYER + _Z_PARTS[1]),
        LayerGroup("mod", _Z_LAYER + r"adaLN_modulation\.0", default=False),
        LayerGroup("refiner", rf"{_Z_REFINER}({_Z_PARTS[0]}|{_Z_PARTS[1]})", default=False),
        LayerGroup("refiner_mod", _Z_REFINER + r"adaLN_modulation\.0", default=False),
        LayerGroup("img_in", r"all_x_embedder\.2-1", default=False),
        LayerGroup("txt_in", r"cap_embedder\.1", default=False),
        LayerGroup("time_in", r"t_embedder\.mlp\.[02]", default=False),
    ),
    block_options={"train_block_indices": r"layers\.(\d+)\..*"},
    keys=Z_IMAGE_KEYS,
    kohya_base="z_image",
    architecture="Z-Image",
    implementation="https://github.com/Tongyi-MAI/Z-Image",
    plain_layouts=("kohya", "comfy"),
)
LORA_TARGETS = (Z_IMAGE_TARGETS,)

ARCHITECTURES = (
    Architecture(
        "Z-Image transformer",
        (r"cap_pad_token", r"layers\.0\.adaLN_modulation\.0\.weight"),
        facts=(("width", "cap_embedder.1.weight", 0),),
        model_type="z_image",
    ),
)
