"""Krea 2's files: where their parts lie, what they call the layers, and which of these get a LoRA.

A transformer file has the names of the published code (https://github.com/krea-ai/krea-2, ``raw.safetensors`` and
``turbo.safetensors``; ComfyUI's are the same, also below ``model.diffusion_model.``) or diffusers'. It keeps the six
vectors of a block's modulation as one. ``vae`` (Qwen-Image's) and ``text_encoder`` lie beside it.

*LoRA.* Every linear layer is trained, as the model's authors recommend and musubi-tuner's ``networks/lora_krea2.py``
does; each group can be left out by its option. For long runs the authors recommend attention alone, of a larger rank.
Modulation is a shared vector and a table a block: its layer is one of the inputs, ``time_in``; tables get no LoRA.
"""

from __future__ import annotations

import re
from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes, block_sizes
from library.models.layer_names import Architecture, KeyNames, KeyRow, LayerGroup, LoraTargets

_STACKS = {
    "blocks.{i}": "transformer_blocks.{i}",
    "txtfusion.layerwise_blocks.{i}": "text_fusion.layerwise_blocks.{i}",
    "txtfusion.refiner_blocks.{i}": "text_fusion.refiner_blocks.{i}",
}
_IN_BLOCK = {
    "attn.wq": "attn.to_q",
    "attn.wk": "attn.to_k",
    "attn.wv": "attn.to_v",
    "attn.gate": "attn.to_gate",
    "attn.wo": "attn.to_out.0",
    **{f"mlp.{name}": f"ff.{name}" for name in ("gate", "up", "down")},
}
_TOP = {
    "first": "img_in",
    "tmlp.0": "time_embed.linear_1",
    "tmlp.2": "time_embed.linear_2",
    "tproj.1": "time_mod_proj",
    "txtmlp.1": "txt_in.linear_1",
    "txtmlp.3": "txt_in.linear_2",
    "txtfusion.projector": "text_fusion.projector",
    "last.linear": "final_layer.linear",
}
KREA2_KEYS = KeyNames(
    (
        *(KeyRow(f"{a}.{c}", (f"{b}.{d}",)) for a, b in _STACKS.items() for c, d in _IN_BLOCK.items()),
        *(KeyRow(theirs, (ours,)) for theirs, ours in _TOP.items()),
    )
)

_NORMS_IN_BLOCK = {
    "attn.qknorm.qnorm.scale": "attn.norm_q.weight",
    "attn.qknorm.knorm.scale": "attn.norm_k.weight",
    "prenorm.scale": "norm1.weight",
    "postnorm.scale": "norm2.weight",
    "mod.lin": "scale_shift_table",
}
_NORMS_ON_TOP = {
    "txtmlp.0.scale": "txt_in.norm.weight",
    "last.norm.scale": "final_layer.norm.weight",
    "last.modulation.lin": "final_layer.scale_shift_table",
}


def _as_expression(theirs: str, ours: str) -> tuple[str, str]:
    return re.escape(theirs).replace(r"\{i\}", r"(\d+)"), ours.replace("{i}", r"\1")


# Norms and tables: the published names, as regular expressions, against diffusers'.
KREA2_NORMS = (
    *(_as_expression(f"{a}.{c}", f"{b}.{d}") for a, b in _STACKS.items() for c, d in _NORMS_IN_BLOCK.items()),
    *(_as_expression(theirs, ours) for theirs, ours in _NORMS_ON_TOP.items()),
)


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
    title="Krea 2",
    model_type="krea2",
    transformer="Krea2Transformer2DModel",
    arguments=_arguments,
    keys=KREA2_KEYS,
    norms=KREA2_NORMS,
    vae=Part("vae", "vae", "qwen_image_vae.safetensors"),
    text_encoders=(Part("text_encoder", "text_encoder", "qwen3vl_4b_bf16.safetensors"),),
    tokenizers=(Part("qwen_tokenizer", "tokenizer", "Qwen/Qwen3-VL-4B-Instruct"),),
)

_BLOCK = r"transformer_blocks\.\d+\."
_PARTS = (r"attn\.(to_q|to_k|to_v|to_gate|to_out\.0)", r"ff\.(gate|up|down)")

KREA2_TARGETS = LoraTargets(
    family="krea2",
    layer_groups=(
        LayerGroup("attn", _BLOCK + _PARTS[0]),
        LayerGroup("mlp", _BLOCK + _PARTS[1]),
        LayerGroup("txt_fusion", rf"text_fusion\.\w+_blocks\.\d+\.({_PARTS[0]}|{_PARTS[1]})"),
        LayerGroup("projector", r"text_fusion\.projector"),  # [1, layers]: a rank of 1 is all of it
        LayerGroup("img_in", r"img_in"),
        LayerGroup("txt_in", r"txt_in\.linear_[12]"),
        LayerGroup("time_in", r"time_embed\.linear_[12]|time_mod_proj"),
        LayerGroup("final", r"final_layer\.linear"),
    ),
    block_options={"train_block_indices": r"transformer_blocks\.(\d+)\..*"},
    keys=KREA2_KEYS,
    kohya_base="krea2",
    architecture="Krea-2",
    implementation="https://github.com/krea-ai/krea-2",
    folded_layouts=("comfy",),
)
LORA_TARGETS = (KREA2_TARGETS,)

ARCHITECTURES = (
    Architecture(
        "Krea 2 transformer",
        (r"(txtfusion|text_fusion)\.projector\.weight",),
        facts=(("width", "first.weight", 0), ("width", "img_in.weight", 0)),
        model_type="krea2",
    ),
)
