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
from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes, block_sizes
from library.models.flux.files import FLUX_BLOCK_OPTIONS, FLUX_NORMS, FLUX_STACKS, embedder_rows
from library.models.layer_names import Architecture, KeyNames, KeyRow, LayerGroup, LoraTargets


def _double(stream: str, qkv: tuple[str, ...], out: str, mlp: str) -> tuple[KeyRow, ...]:
    theirs, ours = f"double_blocks.{{i}}.{stream}", "transformer_blocks.{i}."
    return (
        KeyRow(f"{theirs}_attn.qkv", tuple(f"{ours}attn.{name}" for name in qkv), (1, 1, 1)),
        KeyRow(f"{theirs}_attn.proj", (f"{ours}attn.{out}",)),
        KeyRow(f"{theirs}_mlp.0", (f"{ours}{mlp}.linear_in",)),
        KeyRow(f"{theirs}_mlp.2", (f"{ours}{mlp}.linear_out",)),
    )


_MODULATIONS = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")

FLUX2_KEYS = KeyNames(
    rows=(
        *_double("img", ("to_q", "to_k", "to_v"), "to_out.0", "ff"),
        *_double("txt", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "ff_context"),
        KeyRow("single_blocks.{i}.linear1", ("single_transformer_blocks.{i}.attn.to_qkv_mlp_proj",)),
        KeyRow("single_blocks.{i}.linear2", ("single_transformer_blocks.{i}.attn.to_out",)),
        *(KeyRow(f"{name}.lin", (f"{name}.linear",)) for name in _MODULATIONS),
        *embedder_rows("time_in", "time_guidance_embed.timestep_embedder"),
        *embedder_rows("guidance_in", "time_guidance_embed.guidance_embedder"),
        KeyRow("img_in", ("x_embedder",)),
        KeyRow("txt_in", ("context_embedder",)),
        KeyRow("final_layer.linear", ("proj_out",)),
        KeyRow("final_layer.adaLN_modulation.1", ("norm_out.linear",), halves_swapped=True),
    )
)


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
    title="FLUX.2",
    model_type="flux2_klein",
    transformer="Flux2Transformer2DModel",
    arguments=_arguments,
    keys=FLUX2_KEYS,
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

_DOUBLE = r"transformer_blocks\.\d+\."
FLUX2_TARGETS = LoraTargets(
    family="flux2_klein",
    layer_groups=(
        LayerGroup("img_attn", _DOUBLE + r"attn\.(to_q|to_k|to_v|to_out\.0)"),
        LayerGroup("txt_attn", _DOUBLE + r"attn\.(add_q_proj|add_k_proj|add_v_proj|to_add_out)"),
        LayerGroup("img_mlp", _DOUBLE + r"ff\.linear_(in|out)"),
        LayerGroup("txt_mlp", _DOUBLE + r"ff_context\.linear_(in|out)"),
        LayerGroup("single", r"single_" + _DOUBLE + r"attn\.(to_qkv_mlp_proj|to_out)"),
        LayerGroup("img_mod", r"double_stream_modulation_img\.linear", default=False),
        LayerGroup("txt_mod", r"double_stream_modulation_txt\.linear", default=False),
        LayerGroup("single_mod", r"single_stream_modulation\.linear", default=False),
        LayerGroup("img_in", r"x_embedder", default=False),
        LayerGroup("txt_in", r"context_embedder", default=False),
        LayerGroup("time_in", r"time_guidance_embed\.timestep_embedder\.linear_[12]", default=False),
    ),
    block_options=FLUX_BLOCK_OPTIONS,
    keys=FLUX2_KEYS,
    kohya_base="flux_2",
    architecture="flux-2-klein",
    implementation="https://github.com/black-forest-labs/flux2",
    folded_layouts=("comfy",),
)
_DEV_TARGETS = replace(
    FLUX2_TARGETS,
    family="flux2_dev",
    layer_groups=(
        *FLUX2_TARGETS.layer_groups,
        LayerGroup("guidance_in", r"time_guidance_embed\.guidance_embedder\.linear_[12]", default=False),
    ),
    architecture="flux-2-dev",
)
LORA_TARGETS = tuple(
    replace(row, family=row.family + variant) for row in (FLUX2_TARGETS, _DEV_TARGETS) for variant in ("", "_edit")
)

ARCHITECTURES = (
    Architecture(
        "FLUX.2 transformer (diffusers' names)",
        (
            r"double_stream_modulation_img\.linear\.weight",
            r"single_transformer_blocks\.0\.attn\.to_qkv_mlp_proj\.weight",
        ),
        facts=(
            ("width", "x_embedder.weight", 0),
            ("guidance", "time_guidance_embed.guidance_embedder.linear_1.weight", None),
        ),
        model_type="flux2_klein",
    ),
    Architecture(
        "FLUX.2 transformer (Black Forest Labs' names)",
        (r"double_stream_modulation_img\.lin\.weight", r"single_blocks\.0\.linear1\.weight"),
        facts=(("width", "img_in.weight", 0), ("guidance", "guidance_in.in_layer.weight", None)),
        model_type="flux2_klein",
    ),
)
