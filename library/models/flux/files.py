"""FLUX.1's files: where their parts lie, what they call the layers, and which of these get a LoRA.

A transformer file has one of two layouts of the same numbers. *BFL's* (https://github.com/black-forest-labs/flux), read
by ComfyUI too, fuses q, k and v (in single blocks also the MLP's first matrix), names modulations differently, and
orders the last modulation (shift, scale) where *diffusers'* has (scale, shift). ``FLUX_KEYS`` says so; its source is
diffusers' ``convert_flux_transformer_checkpoint_to_diffusers`` and BFL's reference implementation. Beside the file lie
``ae``, ``clip_l`` and ``t5xxl``.

*LoRA.* As in kohya's sd-scripts (``networks/lora_flux.py``) every linear layer inside the double and single blocks is
trained by default, attention, MLP and modulation alike; the layers in front of the blocks (image, time, vector,
guidance and text input) only when ``in_dims`` gives them a rank; the final layer never. kohya's fused ``qkv`` and
``linear1`` are separate layers here, each with a LoRA of the full rank. Text encoders have their linear layers of
attention and feed-forward trained, as in sd-scripts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from library.models.family_files import FamilyFiles, Part, Shapes, block_sizes, rope_axes
from library.models.layer_names import Architecture, KeyNames, KeyRow, LayerGroup, LoraTargets, TextEncoderTargets


def _double(original: str, *parts: str, **row: Any) -> KeyRow:
    modules = tuple(f"transformer_blocks.{{i}}.{part}" for part in parts)
    return KeyRow(f"double_blocks.{{i}}.{original}", modules, **row)


def embedder_rows(theirs: str, ours: str) -> list[KeyRow]:
    """Return the two layers of an embedder of all FLUX models, by BFL's name of it and diffusers'."""
    return [KeyRow(f"{theirs}.{layer}_layer", (f"{ours}.linear_{i}",)) for i, layer in ((1, "in"), (2, "out"))]


def _single(original: str, *parts: str, **row: Any) -> KeyRow:
    modules = tuple(f"single_transformer_blocks.{{i}}.{part}" for part in parts)
    return KeyRow(f"single_blocks.{{i}}.{original}", modules, **row)


# XLabs-AI's LoRAs are its attention processors (x-flux, ``modules/layers.py``); ComfyUI knows q, k and v of a single
# block by a name of their own (``model_lora_keys_unet``).
_QKV, _ADDED_QKV = [f"attn.to_{x}" for x in "qkv"], [f"attn.add_{x}_proj" for x in "qkv"]
_LORA_ROWS = (
    _double("processor.qkv_lora1", *_QKV, rows=(1, 1, 1), naming="xlabs"),
    _double("processor.qkv_lora2", *_ADDED_QKV, rows=(1, 1, 1), naming="xlabs"),
    _double("processor.proj_lora1", "attn.to_out.0", naming="xlabs"),
    _double("processor.proj_lora2", "attn.to_add_out", naming="xlabs"),
    _single("processor.qkv_lora", *_QKV, rows=(1, 1, 1), naming="xlabs"),
    _single("processor.proj_lora", "proj_out", naming="xlabs"),
    _single("linear1_qkv", *_QKV, rows=(1, 1, 1), naming="comfyui"),
)
FLUX_STACKS = {"num_layers": "transformer_blocks", "num_single_layers": "single_transformer_blocks"}
FLUX_BLOCK_OPTIONS = {
    "train_double_block_indices": r"transformer_blocks\.(\d+)\..*",
    "train_single_block_indices": r"single_transformer_blocks\.(\d+)\..*",
}
FLUX_KEYS = KeyNames(
    rows=(
        _double("img_attn.qkv", *_QKV, rows=(1, 1, 1)),
        _double("txt_attn.qkv", *_ADDED_QKV, rows=(1, 1, 1)),
        _double("img_attn.proj", "attn.to_out.0"),
        _double("txt_attn.proj", "attn.to_add_out"),
        _double("img_mlp.0", "ff.net.0.proj"),
        _double("img_mlp.2", "ff.net.2"),
        _double("txt_mlp.0", "ff_context.net.0.proj"),
        _double("txt_mlp.2", "ff_context.net.2"),
        _double("img_mod.lin", "norm1.linear"),
        _double("txt_mod.lin", "norm1_context.linear"),
        _single("linear1", *_QKV, "proj_mlp", rows=(1, 1, 1, 4)),
        _single("linear2", "proj_out"),
        _single("modulation.lin", "norm.linear"),
        KeyRow("img_in", ("x_embedder",), gains_columns=True),  # Fill's: the blanked image, the mask
        KeyRow("txt_in", ("context_embedder",)),
        *embedder_rows("time_in", "time_text_embed.timestep_embedder"),
        *embedder_rows("vector_in", "time_text_embed.text_embedder"),
        *embedder_rows("guidance_in", "time_text_embed.guidance_embedder"),
        KeyRow("final_layer.linear", ("proj_out",)),
        KeyRow("final_layer.adaLN_modulation.1", ("norm_out.linear",), halves_swapped=True),
    ),
    lora_rows=_LORA_ROWS,
)

# Norms of queries and keys, as regular expressions: BFL's names, of FLUX.2 too, against diffusers'.
_STREAMS = (
    (r"double_blocks\.(\d+)\.img_attn", "transformer_blocks", "norm_"),
    (r"double_blocks\.(\d+)\.txt_attn", "transformer_blocks", "norm_added_"),
    (r"single_blocks\.(\d+)", "single_transformer_blocks", "norm_"),
)
FLUX_NORMS = tuple(
    (rf"{theirs}\.norm\.{name}_norm\.(?:scale|weight)", rf"{blocks}.\1.attn.{norm}{name[0]}.weight")
    for theirs, blocks, norm in _STREAMS
    for name in ("query", "key")
)


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
    title="FLUX.1",
    model_type="flux",
    transformer="FluxTransformer2DModel",
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

# Text encoders, in transformers' names and in those of LoRA files. CLIP's layers lay below ``text_model`` until
# transformers 5; every published file has that in its keys. T5 has one naming. diffusers knows CLIP's keys only and
# passes over T5's.
# Prefixes stand before a module's name, by layout; the first is written, all are read. lora_te2_ is OneTrainer's T5.
# ComfyUI (``model_lora_keys_clip``) and diffusers read kohya's in every version, text_encoders.clip_l... only newer
# ComfyUI does and diffusers raises on it; so comfy's is kohya's.
_CLIP = r"text_encoder\.encoder\.layers\.\d+\."
_T5 = r"text_encoder_2\.encoder\.block\.\d+\.layer\."


def _text_keys(stack: str, layers: Iterable[str], prefix: str = "") -> KeyNames:
    """Return the names of ``layers`` in every block of ``stack``, which have ``prefix`` before them in files."""
    names = [f"{stack}.{{i}}.{layer}" for layer in layers]
    return KeyNames(tuple(KeyRow(prefix + name, (name,)) for name in names))


FLUX_CLIP = TextEncoderTargets(
    name="text_encoder",
    group="text_encoder",
    layer_groups=(
        LayerGroup("clip_attn", _CLIP + r"self_attn\.(q_proj|k_proj|v_proj|out_proj)"),
        LayerGroup("clip_mlp", _CLIP + r"mlp\.(fc1|fc2)"),
    ),
    keys=_text_keys(
        "encoder.layers",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2"),
        prefix="text_model.",
    ),
    prefixes={
        "diffusers": ("text_encoder.",),
        "kohya": ("lora_te1_", "lora_te_"),
        "comfy": ("lora_te1_", "text_encoders.clip_l.transformer."),
    },
)
FLUX_T5 = TextEncoderTargets(
    name="text_encoder_2",
    group="text_encoder_t5",
    layer_groups=(
        LayerGroup("t5_attn", _T5 + r"0\.SelfAttention\.(q|k|v|o)"),
        LayerGroup("t5_mlp", _T5 + r"1\.DenseReluDense\.(wi_0|wi_1|wo)"),
    ),
    keys=_text_keys(
        "encoder.block",
        (
            *(f"layer.0.SelfAttention.{name}" for name in "qkvo"),
            *(f"layer.1.DenseReluDense.{name}" for name in ("wi_0", "wi_1", "wo")),
        ),
    ),
    prefixes={
        "diffusers": ("text_encoder_2.",),
        "kohya": ("lora_te3_", "lora_te2_"),
        "comfy": ("lora_te3_", "text_encoders.t5xxl.transformer."),
    },
)

_DOUBLE = r"transformer_blocks\.\d+\."
_SINGLE = r"single_transformer_blocks\.\d+\."

FLUX_TARGETS = LoraTargets(
    family="flux",
    layer_groups=(
        LayerGroup("img_attn", _DOUBLE + r"attn\.(to_q|to_k|to_v|to_out\.0)"),
        LayerGroup("txt_attn", _DOUBLE + r"attn\.(add_q_proj|add_k_proj|add_v_proj|to_add_out)"),
        LayerGroup("img_mlp", _DOUBLE + r"ff\.net\.(0\.proj|2)"),
        LayerGroup("txt_mlp", _DOUBLE + r"ff_context\.net\.(0\.proj|2)"),
        LayerGroup("img_mod", _DOUBLE + r"norm1\.linear"),
        LayerGroup("txt_mod", _DOUBLE + r"norm1_context\.linear"),
        LayerGroup("single", _SINGLE + r"(attn\.(to_q|to_k|to_v)|proj_mlp|proj_out)"),
        LayerGroup("single_mod", _SINGLE + r"norm\.linear"),
        LayerGroup("img_in", r"x_embedder", default=False),
        LayerGroup("time_in", r"time_text_embed\.timestep_embedder\.linear_[12]", default=False),
        LayerGroup("vector_in", r"time_text_embed\.text_embedder\.linear_[12]", default=False),
        LayerGroup("guidance_in", r"time_text_embed\.guidance_embedder\.linear_[12]", default=False),
        LayerGroup("txt_in", r"context_embedder", default=False),
    ),
    block_options=FLUX_BLOCK_OPTIONS,
    keys=FLUX_KEYS,
    kohya_base="flux1",
    architecture="flux-1-dev",
    implementation="https://github.com/black-forest-labs/flux",
    dim_lists={"in_dims": ("img_in", "time_in", "vector_in", "guidance_in", "txt_in")},
    text_encoders=(FLUX_CLIP, FLUX_T5),
    kohya_facts={"model_type": "flux", "model_prediction_type": "raw", "apply_t5_attn_mask": False},
)

# Fill and Kontext have dev's layers; Fill's x_embedder is wider, which no option or key shows.
LORA_TARGETS = (FLUX_TARGETS, *(replace(FLUX_TARGETS, family=name) for name in ("flux_fill", "flux_kontext")))

_AUTOENCODER = (("latent channels", "decoder.conv_in.weight", 1),)
ARCHITECTURES = (
    Architecture(
        "FLUX.1 transformer (diffusers' names)",
        (r"single_transformer_blocks\.0\.attn\.to_q\.weight", r"transformer_blocks\.0\.norm1_context\.linear\.weight"),
        facts=(
            ("width", "x_embedder.weight", 0),
            ("guidance", "time_text_embed.guidance_embedder.linear_1.weight", None),
        ),
        model_type="flux",
    ),
    Architecture(
        "FLUX.1 transformer (Black Forest Labs' names)",
        (r"double_blocks\.0\.img_attn\.qkv\.weight", r"double_blocks\.0\.img_mod\.lin\.weight"),
        facts=(("width", "img_in.weight", 0), ("guidance", "guidance_in.in_layer.weight", None)),
        model_type="flux",
    ),
    Architecture(
        "image autoencoder, AutoencoderKL (diffusers' names)",
        (r"encoder\.down_blocks\.0\.resnets\.0\.norm1\.weight",),
        with_bias="GroupNorm",
        facts=_AUTOENCODER,
    ),
    Architecture(
        "image autoencoder, AutoencoderKL (Black Forest Labs' names)",
        (r"encoder\.down\.0\.block\.0\.norm1\.weight",),
        with_bias="GroupNorm",
        facts=_AUTOENCODER,
    ),
    Architecture(
        "CLIP text encoder",
        (
            r"(text_model\.)?encoder\.layers\.0\.layer_norm1\.weight",
            r"(text_model\.)?embeddings\.token_embedding\.weight",
        ),
    ),
    Architecture(
        "T5 encoder",
        (r"encoder\.block\.0\.layer\.0\.SelfAttention\.q\.weight",),
        facts=(("width", "shared.weight", 1), ("vocabulary", "shared.weight", 0)),
    ),
)
