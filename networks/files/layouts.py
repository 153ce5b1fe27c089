"""The key layouts of published adapter files: which key means which module and tensor, and what is written.

How a program writes keys is one row of :data:`LAYOUTS`:

    diffusers   transformer.transformer_blocks.0.attn.to_q.lora_A.weight         scale in lora_B, alpha = rank
    kohya       lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight          .alpha beside every pair
    comfy       diffusion_model.double_blocks.0.img_attn.qkv.lora_down.weight    .alpha beside every pair
    peft        base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   a folder with adapter_config.json
    lycoris     lycoris_transformer_blocks_0_attn_to_q.lokr_w1                   comfy's for other kinds than LoRA
    musubi      lora_unet_transformer_blocks_0_attn_to_q.lokr_w1                 kohya's for LoKr and LoHa

A family may keep diffusers' names in a layout (``plain_layouts``), where not every program reads the original ones, and
diffusers' tensors in another program's names (``folded_layouts``), where diffusers reads those names but no alpha.
Text encoders' modules go into the same file; the family's table has their prefixes. Which program reads which keys is
in ``networks.files.readers``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from library.errors import UserError
from library.models.layer_names import KeyPlace, LoraTargets, TextEncoderTargets
from library.models.registry import lora_namings
from library.safetensors_io import read_safetensors_header
from networks.files.weights import (
    ADAPTER_MARKS,
    KINDS,
    TITLES,
    non_lora_kind,
)

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Layout:
    """How a program writes keys.

    Attributes:
        prefixes: before a module's name in the transformer; the first is written, all are read.
        names: tensor in memory -> what follows the module's name, None: not written. Others keep their names.
        original: names and fusing of the original checkpoint instead of diffusers'.
        alpha: where the scale is written: a "tensor" ``<module>.alpha``, PEFT's "config", or "folded" into B.
        text: the row of a text encoder's ``prefixes`` that it takes.
    """

    prefixes: tuple[str, ...]
    names: Mapping[str, str | None]
    original: bool = False
    alpha: Literal["tensor", "config", "folded"] = "tensor"
    text: str = ""


_PEFT = {"down": "lora_A.weight", "up": "lora_B.weight", "magnitude": "lora_magnitude_vector", "dora_scale": None}
_PEFT |= {"token_rows": "token_adapter.trainable_tokens_delta", "token_indices": None}
_KOHYA = {"down": "lora_down.weight", "up": "lora_up.weight", "magnitude": None}
_PLAIN_W1: dict[str, str | None] = {"lokr_w1_a": None, "lokr_w1_b": None}

LAYOUTS = {  # prefixes are tried in this order
    "peft": Layout(("base_model.model.",), _PEFT, alpha="config"),
    "kohya": Layout(("lora_unet_", "lora_transformer_"), _KOHYA, original=True, text="kohya"),
    "lycoris": Layout(("lycoris_",), _KOHYA, text="comfy"),
    "musubi": Layout(("lora_unet_",), _PLAIN_W1, text="kohya"),
    "diffusers": Layout(("transformer.",), _PEFT, alpha="folded", text="diffusers"),
    "comfy": Layout(("diffusion_model.", "model.diffusion_model."), _KOHYA, original=True, text="comfy"),
}

_OF_OTHER_KINDS = {"comfy": "lycoris", "kohya": "musubi"}

_ROLES = {  # suffix -> the tensor in memory; PEFT may put the adapter's name before ".weight"
    ".lora_A.default.weight": "down",
    ".lora.down.weight": "down",
    ".lora_A": "down",  # ComfyUI reads it of every model
    ".lora_B": "up",
    ".lora_linear_layer.down.weight": "down",  # text encoders by diffusers before PEFT
    ".lora_B.default.weight": "up",
    ".lora.up.weight": "up",
    ".lora_linear_layer.up.weight": "up",
    ".lora_magnitude_vector.weight": "magnitude",
    ".magnitude": "magnitude",  # ai-toolkit's DoRA
    ".down.weight": "down",  # XLabs'
    ".up.weight": "up",
    ".diff_b": "diff_b",
    **dict.fromkeys((".lora_B.bias", ".lora_B.default.bias", ".lora_up.bias"), "up_bias"),
    ".alpha": "alpha",
    **{f".{written}": name for row in LAYOUTS.values() for name, written in row.names.items() if written},
    **{f".{name}": name for kind in KINDS.values() for names in kind.complete for name in names - _KOHYA.keys()},
}

_TENSOR_NAME = re.compile(
    "|".join([*(re.escape(role) + "$" for role in _ROLES), *(re.escape(mark) + ".*" for mark in ADAPTER_MARKS)])
)


def split_key(key: str) -> tuple[str, str | None]:
    """Return what stands before the tensor's own name in a file's key, and its name in memory if it has one."""
    match = _TENSOR_NAME.search(key)
    return (key[: match.start()], _ROLES.get(match[0])) if match else (key, None)


def layout_of(kind: str, save_format: str, targets: LoraTargets | None = None) -> Layout:
    """Return the row that is written: other kinds than LoRA have keys of their own in ComfyUI and musubi-tuner.

    Of ``targets`` whose ``folded_layouts`` name it, the row has PEFT's tensors and no alpha. Other kinds cannot be
    stacked: they have a LoRA's names where no layer of the original checkpoint is several, else diffusers'.
    """
    if kind != "lora":
        layout = LAYOUTS[_OF_OTHER_KINDS.get(save_format, save_format)]
        if targets is None or save_format not in _OF_OTHER_KINDS:
            return layout
        whole = all(len(row.parts) == 1 for row in targets.keys.rows)
        prefixes = LAYOUTS[save_format].prefixes if whole or save_format in targets.plain_layouts else layout.prefixes
        return replace(layout, prefixes=prefixes, original=whole)
    folded = targets is not None and save_format in targets.folded_layouts
    return replace(LAYOUTS[save_format], names=_PEFT, alpha="folded") if folded else LAYOUTS[save_format]


def key_stem(name: str, targets: LoraTargets, layout: Layout, plain: bool) -> str:
    """Return what stands before the tensor's own name in the keys of module ``name``; ``plain``: diffusers' names.

    Raises:
        UserError: the layout has no name for it.
    """
    if encoder := targets.text_encoder_of(name):
        return _text_stem(name, encoder, layout)
    if layout.original and not plain:
        name = place_of(name, targets).original
    return stem_of(layout.prefixes[0], name)


def stem_of(prefix: str, name: str) -> str:
    """Return ``prefix`` and a module's name, whose dots become underscores after a prefix that ends in one."""
    return prefix + (name.replace(".", "_") if prefix.endswith("_") else name)


def place_of(name: str, targets: LoraTargets) -> KeyPlace:
    place = targets.keys.find(name)
    if place is None or place.part is None:
        raise UserError(f"{name} is not in {targets.family}'s original layout; use save_format=diffusers")
    return place


def _text_stem(name: str, encoder: TextEncoderTargets, layout: Layout) -> str:
    place = encoder.keys.find(name.removeprefix(f"{encoder.name}."))
    if place is None:
        raise UserError(f"{name} is no layer of {encoder.name} that a LoRA can be saved for; leave it out")
    return stem_of(encoder.prefixes[layout.text][0], place.original)


@dataclass(frozen=True)
class FoundModule:
    """The module a key means: its text encoder (None: the transformer), its place, and the layout of the prefix."""

    encoder: TextEncoderTargets | None
    place: KeyPlace
    layout: str


def find_place(stem: str, targets: LoraTargets) -> FoundModule | None:
    """Return the module a key stem means."""
    for encoder in targets.text_encoders:
        for layout, prefixes in encoder.prefixes.items():
            for prefix in prefixes:
                if stem.startswith(prefix) and (place := encoder.keys.find(stem.removeprefix(prefix))):
                    return FoundModule(encoder, place, layout)
    for layout, prefix in _PREFIXES:
        if stem.startswith(prefix):
            name = stem.removeprefix(prefix)
            if layout == "peft":
                name = name.removeprefix(targets.file_prefix + ".")
            if place := targets.keys.find_in_lora(name):
                return FoundModule(None, place, layout)
    return None


_PREFIXES = [*((name, prefix) for name, row in LAYOUTS.items() for prefix in row.prefixes), ("bare", "")]


def fitting_targets(header: Mapping[str, Any]) -> list[LoraTargets]:
    """Return the row of each architecture that has a layer for every key of a LoRA (or LoKr, DoRA, ...) file.

    Names alone do not tell FLUX.1 and 2 apart, whose fused layers have other widths: q, k, v and 4 or 6 of the MLP.
    """
    stems: dict[str, dict[str | None, Sequence[int]]] = {}
    for key, entry in header.items():
        if key != "__metadata__":
            stem, part = split_key(key)
            stems.setdefault(stem, {})[part] = entry["shape"]

    def fits(stem: str, row: LoraTargets) -> bool:
        if (found := find_place(stem, row)) is None:
            return False
        down, up = (stems[stem].get(part, ()) for part in ("down", "up"))
        if found.place.part is None and len(down) == len(up) == 2:
            with suppress(ValueError):
                return bool(found.place.row.part_rows(up[0], down[1]))
            return False
        return True

    return [row for row in lora_namings() if stems and all(fits(stem, row) for stem in stems)]


def refuse_other_family(path: Path, targets: LoraTargets) -> None:
    """Refuse a file whose keys are all those of another architecture than ``targets``'."""
    header = read_safetensors_header(path)
    fitting = fitting_targets(header)
    if fitting and not any(row.keys is targets.keys for row in fitting):
        names = " or ".join(row.family for row in fitting)
        title = TITLES[non_lora_kind(header) or "lora"]
        if targets.own_names:
            raise UserError(f"{path}: is a {title} of {names}, not of {targets.family}; give a model of its kind")
        raise of_other_family(path, title, names, targets.family)


def of_other_family(path: Path, what: str, found: str, wanted: str) -> UserError:
    """Return the error on a file of a family that is not ``wanted``, by --model_type or by the other files."""
    remedy = f"give a {what} of {wanted}, or files of {found} alone, with no other --model_type"
    return UserError(f"{path}: is a {what} of {found}, not of {wanted}; {remedy}")


def best_targets(keys: Iterable[str]) -> LoraTargets:
    """Return the row of the architecture that has a layer for most of a file's keys."""
    stems = {split_key(key)[0] for key in keys if key != "__metadata__"}
    return max(lora_namings(), key=lambda row: sum(find_place(stem, row) is not None for stem in stems))
