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

from dataclasses import replace
from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes, block_sizes, rope_axes
from library.models.layer_names import Architecture, KeyNames, KeyRow, LayerGroup, LoraTargets

_BLOCK = "transformer_blocks.{i}."
_HALVES = ("img_mlp.gate_layer", "img_mlp.proj")
_SAME = (
    *(f"{_BLOCK}{name}" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "img_mlp.out")),
    *("img_in", "txt_in.in_layer", "txt_in.out_layer", "modulation.1"),
    *(f"time_text_embed.timestep_embedder.linear_{i}" for i in (1, 2)),
    *("norm_out.linear", "proj_out"),
)
QWEN_21_KEYS = KeyNames(
    (
        *(KeyRow(name, (name,)) for name in _SAME),
        KeyRow(f"{_BLOCK}img_mlp.gate_up", tuple(_BLOCK + half for half in _HALVES), rows=(3, 3)),  # mlp_ratio
    )
)


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
    title="Qwen-Image-2.1",
    model_type="qwen_image_21",
    transformer="QwenImage21Transformer2DModel",
    arguments=_arguments,
    keys=QWEN_21_KEYS,
    vae=Part("vae", "vae", "qwen_image_2.1_vae_bf16.safetensors"),
    text_encoders=(Part("text_encoder", "text_encoder", "qwen3vl_8b_bf16.safetensors"),),
    tokenizers=(Part("qwen_tokenizer", "processor", "Qwen/Qwen3-VL-8B-Instruct"),),
)

_LAYER = r"transformer_blocks\.\d+\."
QWEN_21_TARGETS = LoraTargets(
    family="qwen_image_21",
    layer_groups=(
        LayerGroup("attn", _LAYER + r"attn\.(to_q|to_k|to_v|to_out\.0)"),
        LayerGroup("mlp", _LAYER + r"img_mlp\.(gate_layer|proj|out)"),
        LayerGroup("mod", r"modulation\.1", default=False),
        LayerGroup("img_in", r"img_in", default=False),
        LayerGroup("txt_in", r"txt_in\.(in|out)_layer", default=False),
        LayerGroup("time_in", r"time_text_embed\.timestep_embedder\.linear_[12]", default=False),
    ),
    block_options={"train_block_indices": r"transformer_blocks\.(\d+)\..*"},
    keys=QWEN_21_KEYS,
    kohya_base="qwen_image_21",
    architecture="Qwen-Image-2.1",
    implementation="https://github.com/QwenLM/Qwen-Image",
    plain_layouts=("kohya",),
)
LORA_TARGETS = (QWEN_21_TARGETS, replace(QWEN_21_TARGETS, family="qwen_image_21_edit"))

ARCHITECTURES = (
    Architecture(
        "Qwen-Image-2.1 transformer",
        (r"modulation\.1\.weight", r"transformer_blocks\.0\.img_mlp\.(gate_up|gate_layer)\.weight"),
        facts=(("width", "img_in.weight", 0),),
        model_type="qwen_image_21",
    ),
    Architecture(
        "Qwen-Image-2.1 autoencoder (diffusers' names)",
        (r"encoder\.down_blocks\.0\.resnets\.0\.norm1\.gamma",),
        facts=(("latent channels", "decoder.conv_in.weight", 1),),
    ),
    Architecture(
        "Qwen-Image-2.1 autoencoder (Wan's names)",
        (r"encoder\.downsamples\.0\.downsamples\.0\.residual\.0\.gamma",),
        facts=(("latent channels", "decoder.conv1.weight", 1),),
    ),
    Architecture(
        "Qwen3-VL text encoder",
        (r"(model\.)?visual\.deepstack_merger_list\.0\.norm\.weight", r"(.*\.)?layers\.0\.self_attn\.q_norm\.weight"),
    ),
)
