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

from dataclasses import replace
from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes, block_sizes, rope_axes
from library.models.layer_names import Architecture, KeyNames, KeyRow, LayerGroup, LoraTargets

_ZERO_COND_MARKER = "__index_timestep_zero__"

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

QWEN_KEYS = KeyNames(
    tuple(KeyRow(n, (n,)) for n in (*(f"transformer_blocks.{{i}}.{layer}" for layer in _BLOCK), *_TOP))
)


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
    title="Qwen-Image",
    model_type="qwen_image",
    transformer="QwenImageTransformer2DModel",
    arguments=_arguments,
    keys=QWEN_KEYS,
    vae=Part("vae", "vae", "qwen_image_vae.safetensors"),
    text_encoders=(Part("text_encoder", "text_encoder", "qwen_2.5_vl_7b.safetensors"),),
    tokenizers=(Part("qwen_tokenizer", "tokenizer", "Qwen/Qwen2.5-VL-7B-Instruct"),),
    unused=(_ZERO_COND_MARKER,),
    variants={"time_text_embed.addition_t_embedding.weight": "Qwen-Image-Layered"},
)

_DOUBLE = r"transformer_blocks\.\d+\."
QWEN_TARGETS = LoraTargets(
    family="qwen_image",
    layer_groups=(
        LayerGroup("img_attn", _DOUBLE + r"attn\.(to_q|to_k|to_v|to_out\.0)"),
        LayerGroup("txt_attn", _DOUBLE + r"attn\.(add_q_proj|add_k_proj|add_v_proj|to_add_out)"),
        LayerGroup("img_mlp", _DOUBLE + r"img_mlp\.net\.(0\.proj|2)"),
        LayerGroup("txt_mlp", _DOUBLE + r"txt_mlp\.net\.(0\.proj|2)"),
        LayerGroup("img_mod", _DOUBLE + r"img_mod\.1", default=False),
        LayerGroup("txt_mod", _DOUBLE + r"txt_mod\.1", default=False),
        LayerGroup("img_in", r"img_in", default=False),
        LayerGroup("txt_in", r"txt_in", default=False),
        LayerGroup("time_in", r"time_text_embed\.timestep_embedder\.linear_[12]", default=False),
    ),
    block_options={"train_block_indices": r"transformer_blocks\.(\d+)\..*"},
    keys=QWEN_KEYS,
    unused_modules=r"transformer_blocks\.(\d+)\.(attn\.(add_q_proj|to_add_out)|txt_mlp\.net\.(0\.proj|2))",
    kohya_base="qwen_image",
    architecture="Qwen-Image",
    implementation="https://github.com/QwenLM/Qwen-Image",
)

LORA_TARGETS = (
    QWEN_TARGETS,
    replace(QWEN_TARGETS, family="qwen_image_edit", architecture="Qwen-Image-Edit"),
    replace(QWEN_TARGETS, family="qwen_image_edit_plus", architecture="Qwen-Image-Edit-Plus"),
)

ARCHITECTURES = (
    Architecture(
        "Qwen-Image transformer",
        (r"transformer_blocks\.0\.img_mod\.1\.weight",),
        facts=(("width", "img_in.weight", 0),),
        model_type="qwen_image",
    ),
    Architecture(
        "Qwen-Image autoencoder (diffusers' names)",
        (r"encoder\.down_blocks\.0\.norm1\.gamma",),
        facts=(("latent channels", "decoder.conv_in.weight", 1),),
    ),
    Architecture(
        "Qwen-Image autoencoder (Wan's names)",
        (r"encoder\.downsamples\.0\.residual\.0\.gamma",),
        facts=(("latent channels", "decoder.conv1.weight", 1),),
    ),
    Architecture(
        "Qwen2.5-VL text encoder",
        (r"(model\.)?visual\.blocks\.0\.mlp\.gate_proj\.weight", r"(.*\.)?layers\.0\.self_attn\.q_proj\.bias"),
    ),
)
