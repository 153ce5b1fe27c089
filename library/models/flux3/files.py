"""FLUX.3 klein's files: where their parts lie, what they call the layers, and which of these get a LoRA.

A transformer file has BFL's names (ComfyUI's and the quantised files too) or diffusers'; nothing is stacked, only the
last modulation's halves come in the other order. ``FLUX3_KEYS`` says so; its source is diffusers'
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

from dataclasses import replace
from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes, block_sizes
from library.models.flux.files import embedder_rows
from library.models.layer_names import Architecture, KeyNames, KeyRow, LayerGroup, LoraTargets

_LAYERS = {
    **{f"{x}_proj": f"attn.to_{x}" for x in "qkv"},
    "attn_out": "attn.to_out.0",
    "mlp_in": "ff.linear_in",
    "mlp_out": "ff.linear_out",
}
_STACKS = {  # BFL's name -> diffusers'
    "content_mode_blocks.image": "mode_blocks.image",
    "content_mode_blocks.image_cond": "mode_blocks.image_cond",
    "txt_mode_blocks": "txt_mode_blocks",
    "single_blocks": "single_transformer_blocks",
}

FLUX3_KEYS = KeyNames(
    rows=(
        *(
            KeyRow(f"{theirs}.{{i}}.{layer}", (f"{ours}.{{i}}.{name}",))
            for theirs, ours in _STACKS.items()
            for layer, name in _LAYERS.items()
        ),
        *(
            KeyRow(f"{stage}_stream_modulations.{mode}.lin", (f"{stage}_stream_modulations.{mode}.linear",))
            for stage in ("early", "single")
            for mode in ("image", "image_cond", "txt")
        ),
        *(KeyRow(f"emb_in.{mode}", (f"x_embedders.{mode}",)) for mode in ("image", "image_cond")),
        KeyRow("txt_in", ("context_embedder",)),
        *embedder_rows("time_in", "timestep_embedder"),
        *embedder_rows("ref_time_in", "target_timestep_embedder"),
        KeyRow("final_layer.image.linear", ("proj_out",)),
        KeyRow("final_layer.image.adaLN_modulation.1", ("norm_out.linear",), halves_swapped=True),
    )
)

# Norms of queries and keys, as regular expressions: BFL's names against diffusers'.
FLUX3_NORMS = tuple(
    (theirs.replace(".", r"\.") + rf"\.(\d+)\.norm\.{kind}_norm\.scale", rf"{ours}.\1.attn.norm_{kind[0]}.weight")
    for theirs, ours in _STACKS.items()
    for kind in ("query", "key")
)


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
    title="FLUX.3",
    model_type="flux3_klein",
    transformer="Flux3Transformer2DModel",
    arguments=_arguments,
    keys=FLUX3_KEYS,
    norms=FLUX3_NORMS,
    vae=Part("vae", "vae", "flux2-vae.safetensors"),
    text_encoders=(Part("text_encoder", "text_encoder", "qwen3vl_4b_bf16.safetensors"),),
    tokenizers=(Part("qwen_tokenizer", "tokenizer", "Qwen/Qwen3-VL-4B-Instruct"),),
    unused=(r"repa_projectors\..*",),  # of its training
)

_BLOCK = r"\.\d+\.(attn\.(to_q|to_k|to_v|to_out\.0)|ff\.linear_(in|out))"
_MODULATION = r"(early|single)_stream_modulations\."
FLUX3_TARGETS = LoraTargets(
    family="flux3_klein",
    layer_groups=(
        LayerGroup("img", r"mode_blocks\.image" + _BLOCK),
        LayerGroup("txt", "txt_mode_blocks" + _BLOCK),
        LayerGroup("single", "single_transformer_blocks" + _BLOCK),
        LayerGroup("img_mod", _MODULATION + r"image\.linear", default=False),
        LayerGroup("txt_mod", _MODULATION + r"txt\.linear", default=False),
        LayerGroup("img_in", r"x_embedders\.image", default=False),
        LayerGroup("txt_in", "context_embedder", default=False),
        LayerGroup("time_in", r"timestep_embedder\.linear_[12]", default=False),
    ),
    block_options={
        "train_mode_block_indices": r"(?:txt_mode_blocks|mode_blocks\.\w+)\.(\d+)\..*",
        "train_single_block_indices": r"single_transformer_blocks\.(\d+)\..*",
    },
    keys=FLUX3_KEYS,
    kohya_base="flux3",
    architecture="flux-3-klein",
    implementation="https://github.com/black-forest-labs/flux-3-image-klein",
    folded_layouts=("comfy",),
)
FLUX3_EDIT_TARGETS = replace(
    FLUX3_TARGETS,
    family="flux3_klein_edit",
    layer_groups=(
        *FLUX3_TARGETS.layer_groups,
        LayerGroup("ref", r"mode_blocks\.image_cond" + _BLOCK),
        LayerGroup("ref_mod", _MODULATION + r"image_cond\.linear", default=False),
        LayerGroup("ref_in", r"x_embedders\.image_cond", default=False),
    ),
)
LORA_TARGETS = (FLUX3_TARGETS, FLUX3_EDIT_TARGETS)

ARCHITECTURES = (
    Architecture(
        "FLUX.3 transformer (diffusers' names)",
        (r"early_stream_modulations\.image\.linear\.weight", r"single_transformer_blocks\.0\.attn\.to_q\.weight"),
        facts=(
            ("width", "context_embedder.weight", 0),
            ("distilled", "target_timestep_embedder.linear_1.weight", None),
        ),
        model_type="flux3_klein",
    ),
    Architecture(
        "FLUX.3 transformer (Black Forest Labs' names)",
        (r"early_stream_modulations\.image\.lin\.weight", r"single_blocks\.0\.q_proj\.weight"),
        facts=(("width", "txt_in.weight", 0), ("distilled", "ref_time_in.in_layer.weight", None)),
        model_type="flux3_klein",
    ),
)
