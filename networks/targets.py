"""Which linear layers of a model family get a LoRA, as a table.

A family is one :class:`LoraTargets` row: the kinds its linear layers fall into (each with the ``*_dim``
option that sets its rank), the options that choose blocks, and the key map of its original checkpoint
layout. Code that injects, saves or merges takes such a row and knows nothing else about the family.

The FLUX row follows kohya's sd-scripts (``networks/lora_flux.py``): every linear layer inside the double and
single blocks is trained by default, attention, MLP and modulation alike; the layers in front of the blocks
(image, time, vector, guidance and text input) only when ``in_dims`` gives them a rank; the final layer never.
kohya's fused ``qkv`` and ``linear1`` are separate layers here, each with a LoRA of the full rank.

The Qwen-Image row, for edit models too, trains attention and MLP of both streams. So musubi-tuner's
``networks/lora_qwen_image.py`` means to: its pattern against modulation looks for ``_mod_`` and never matches
``img_mod.1``, so that its LoRAs have modulation; ``img_mod_dim`` and ``txt_mod_dim`` train it here. Of the last block's
text stream only keys, values and modulation reach the picture; the layers behind them get no gradient (under DDP a run
would stop) and no LoRA.

The Z-Image row trains attention and MLP of the main layers, as musubi-tuner's ``networks/lora_zimage.py`` does; the
refiners in front of them, modulation and the inputs only where their options say so.

The rows of language models train all linear layers of the blocks, a kind each, as the usual recipes for them do
(QLoRA, arXiv 2305.14314); ``q_proj_dim`` gives one a rank of its own, 0 leaves it out.

A family's text encoders are rows of their own in it. Where LoRAs of several networks are kept together, in a file
or in :class:`~networks.network.LoraNetwork`, the transformer's modules have their plain names and a text encoder's
begin with the component's: ``text_encoder.encoder.layers.0.mlp.fc1``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from networks.key_names import (
    CLIP_KEYS,
    CLIP_PREFIXES,
    FLUX_KEYS,
    GPT2_KEYS,
    LLAMA_KEYS,
    QWEN_KEYS,
    T5_KEYS,
    T5_PREFIXES,
    Z_IMAGE_KEYS,
    KeyMap,
)

Weights = TypeVar("Weights")


@dataclass(frozen=True)
class LayerGroup:
    """Linear layers that share a rank option.

    Attributes:
        name: the kind, ``"img_attn"``; counts are reported under it, its rank option is ``"img_attn_dim"``.
        pattern: regular expression that matches the whole of each module's name.
        default: trained with ``network_dim`` unless told otherwise; others only where an option names them.
    """

    name: str
    pattern: str
    default: bool = True


@dataclass(frozen=True)
class TextEncoderTargets:
    """A text encoder as LoRA sees it.

    Attributes:
        name: the component as diffusers calls it, the first part of its modules' names.
        group: its optimizer group; the metrics have ``lr/<group>``.
        kinds: the linear layers that are trained.
        keys: names without the component: files' against transformers'.
        prefixes: layout -> what files put before such a name; the first is written, all are read.
    """

    name: str
    group: str
    kinds: tuple[LayerGroup, ...]
    keys: KeyMap
    prefixes: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class LoraTargets:
    """A model family as LoRA sees it.

    Attributes:
        family: its name, for messages.
        kinds: every linear layer that can be trained; a module belongs to the first kind that matches it.
        block_options: option name -> regular expression whose first group is the block's index.
        dim_lists: option name -> kinds whose ranks it lists, in order (kohya's ``in_dims``).
        keys: modules in diffusers' naming against the original checkpoint's.
        file_prefix: what diffusers' files put before a module's name; the transformer's component.
        unused_modules: regular expression whose first group is the block's index; in the last block nothing that is
            computed from these layers is used, so they get no gradient and no LoRA.
        kohya_module, kohya_base: what kohya's metadata call the network module and the base (``ss_...``).
        architecture: what ModelSpec calls the base, where the model itself does not say it more closely.
        implementation: where the base's own code is, for ModelSpec.
        text_encoders: those that can be trained, in the order of ``text_encoder_lr``.
        plain_layouts: layouts whose files have diffusers' module names although the original checkpoint has others.
        own_names: modules of the model have the key map's original names; those in files are transformers'.
    """

    family: str
    kinds: tuple[LayerGroup, ...]
    block_options: Mapping[str, str]
    keys: KeyMap
    dim_lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    file_prefix: str = "transformer"
    text_encoders: tuple[TextEncoderTargets, ...] = ()
    unused_modules: str = ""
    kohya_module: str = "networks.lora_flux"
    kohya_base: str = "flux1"
    architecture: str = "flux-1-dev"
    implementation: str = "https://github.com/black-forest-labs/flux"
    plain_layouts: tuple[str, ...] = ()
    own_names: bool = False

    @property
    def fan_in_fan_out(self) -> bool:
        """Whether transformers keeps these layers' weights as [in, out], which PEFT has to be told."""
        return any(row.transposed for row in self.keys.rows)

    def path_in_model(self, module_name: str) -> str:
        """Return where the module that files call ``module_name`` is in the model."""
        place = self.keys.find(module_name) if self.own_names else None
        return place.original if place else module_name

    def name_of(self, path: str) -> str:
        """Return what files call the module at ``path`` of the model."""
        place = self.keys.find(path) if self.own_names else None
        return place.modules[0] if place else path

    def kind_of(self, module_name: str) -> LayerGroup | None:
        """Return the kind that ``module_name`` belongs to, or None if it is no target."""
        encoder = self.text_encoder_of(module_name)
        kinds = encoder.kinds if encoder else self.kinds
        return next((kind for kind in kinds if re.fullmatch(kind.pattern, module_name)), None)

    def text_encoder_of(self, module_name: str) -> TextEncoderTargets | None:
        """Return the text encoder that ``module_name`` lies in, None for the transformer."""
        component = module_name.split(".", 1)[0]
        return next((encoder for encoder in self.text_encoders if encoder.name == component), None)

    def component_of(self, module_name: str) -> str:
        """Return "transformer", or the name of the text encoder that ``module_name`` lies in."""
        encoder = self.text_encoder_of(module_name)
        return encoder.name if encoder else self.file_prefix

    def by_component(self, weights: Mapping[str, Weights]) -> dict[str, dict[str, Weights]]:
        """Return component -> its modules' weights, under the names they had."""
        parts: dict[str, dict[str, Weights]] = {}
        for name, module in weights.items():
            parts.setdefault(self.component_of(name), {})[name] = module
        return parts

    def dim_options(self) -> dict[str, str]:
        """Return option name -> kind for every ``*_dim`` option."""
        listed = {kind for kinds in self.dim_lists.values() for kind in kinds}
        return {f"{kind.name}_dim": kind.name for kind in self.kinds if kind.name not in listed}


_CLIP = r"text_encoder\.encoder\.layers\.\d+\."
_T5 = r"text_encoder_2\.encoder\.block\.\d+\.layer\."

FLUX_CLIP = TextEncoderTargets(
    name="text_encoder",
    group="text_encoder",
    kinds=(
        LayerGroup("clip_attn", _CLIP + r"self_attn\.(q_proj|k_proj|v_proj|out_proj)"),
        LayerGroup("clip_mlp", _CLIP + r"mlp\.(fc1|fc2)"),
    ),
    keys=CLIP_KEYS,
    prefixes=CLIP_PREFIXES,
)
FLUX_T5 = TextEncoderTargets(
    name="text_encoder_2",
    group="text_encoder_t5",
    kinds=(
        LayerGroup("t5_attn", _T5 + r"0\.SelfAttention\.(q|k|v|o)"),
        LayerGroup("t5_mlp", _T5 + r"1\.DenseReluDense\.(wi_0|wi_1|wo)"),
    ),
    keys=T5_KEYS,
    prefixes=T5_PREFIXES,
)

_DOUBLE = r"transformer_blocks\.\d+\."
_SINGLE = r"single_transformer_blocks\.\d+\."

FLUX_TARGETS = LoraTargets(
    family="flux",
    kinds=(
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
    block_options={
        "train_double_block_indices": r"transformer_blocks\.(\d+)\..*",
        "train_single_block_indices": r"single_transformer_blocks\.(\d+)\..*",
    },
    keys=FLUX_KEYS,
    dim_lists={"in_dims": ("img_in", "time_in", "vector_in", "guidance_in", "txt_in")},
    text_encoders=(FLUX_CLIP, FLUX_T5),
)

# Fill and Kontext have dev's layers; Fill's x_embedder is wider, which no option or key shows.
FLUX_FILL_TARGETS = replace(FLUX_TARGETS, family="flux_fill")
FLUX_KONTEXT_TARGETS = replace(FLUX_TARGETS, family="flux_kontext")

QWEN_TARGETS = LoraTargets(
    family="qwen_image",
    kinds=(
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
    kohya_module="networks.lora_qwen_image",
    kohya_base="qwen_image",
    architecture="Qwen-Image",
    implementation="https://github.com/QwenLM/Qwen-Image",
)

QWEN_EDIT_TARGETS = replace(QWEN_TARGETS, family="qwen_image_edit", architecture="Qwen-Image-Edit")
QWEN_EDIT_PLUS_TARGETS = replace(QWEN_TARGETS, family="qwen_image_edit_plus", architecture="Qwen-Image-Edit-Plus")

_Z_LAYER = r"layers\.\d+\."
_Z_REFINER = r"(noise|context)_refiner\.\d+\."
_Z_PARTS = (r"attention\.(to_q|to_k|to_v|to_out\.0)", r"feed_forward\.w[123]")

Z_IMAGE_TARGETS = LoraTargets(
    family="z_image",
    kinds=(
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
    kohya_module="networks.lora_zimage",
    kohya_base="z_image",
    architecture="Z-Image",
    implementation="https://github.com/Tongyi-MAI/Z-Image",
    plain_layouts=("comfy",),
)

_LLAMA_LAYER = r"model\.layers\.\d+\."
_GPT2_LAYER = r"transformer\.h\.\d+\."

LLAMA_TARGETS = LoraTargets(
    family="llama",
    kinds=(
        *(LayerGroup(name, rf"{_LLAMA_LAYER}self_attn\.{name}") for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(LayerGroup(name, rf"{_LLAMA_LAYER}mlp\.{name}") for name in ("gate_proj", "up_proj", "down_proj")),
    ),
    block_options={"train_block_indices": r"model\.layers\.(\d+)\..*"},
    keys=LLAMA_KEYS,
    file_prefix="language_model",
    kohya_module="peft",
    kohya_base="llama",
    architecture="llama",
    implementation="https://github.com/huggingface/transformers",
    own_names=True,
)

GPT2_TARGETS = LoraTargets(
    family="gpt2",
    kinds=(
        LayerGroup("c_attn", _GPT2_LAYER + r"attn\.c_attn"),
        LayerGroup("attn_c_proj", _GPT2_LAYER + r"attn\.c_proj"),
        LayerGroup("c_fc", _GPT2_LAYER + r"mlp\.c_fc"),
        LayerGroup("mlp_c_proj", _GPT2_LAYER + r"mlp\.c_proj"),
    ),
    block_options={"train_block_indices": r"transformer\.h\.(\d+)\..*"},
    keys=GPT2_KEYS,
    file_prefix="language_model",
    kohya_module="peft",
    kohya_base="gpt2",
    architecture="gpt2",
    implementation="https://github.com/huggingface/transformers",
    own_names=True,
)

TARGETS: Mapping[str, LoraTargets] = {
    targets.family: targets
    for targets in (
        FLUX_TARGETS,
        FLUX_FILL_TARGETS,
        FLUX_KONTEXT_TARGETS,
        QWEN_TARGETS,
        QWEN_EDIT_TARGETS,
        QWEN_EDIT_PLUS_TARGETS,
        Z_IMAGE_TARGETS,
        LLAMA_TARGETS,
        GPT2_TARGETS,
    )
}


def architectures() -> list[LoraTargets]:
    """Return one row for each naming of layers: the first family that has it."""
    rows: list[LoraTargets] = []
    for targets in TARGETS.values():
        if not any(targets.keys is row.keys for row in rows):
            rows.append(targets)
    return rows
