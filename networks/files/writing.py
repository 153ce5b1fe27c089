"""Adapters written: module name -> weights, of one kind, as a file in any published key layout.

A diffusers file has no place for alpha but its header, which diffusers alone reads; every other program takes alpha to
be the rank. So alpha / rank is multiplied into B (:func:`networks.files.weights.fold_scale`) and alpha is the rank,
wherever one looks for it. The alpha of the training is noted in the header for those who train on
(``networks.files.metadata``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from library.config.run_schema import KINDS_OF_LAYOUT, SAVE_FORMATS
from library.errors import UserError
from library.models.layer_names import LoraTargets
from library.safetensors_io import write_safetensors
from networks.files.adapters import DORA_NORM, AdapterFile
from networks.files.joined import fuse_parts
from networks.files.layouts import (
    LAYOUTS,
    PRECISIONS,
    Layout,
    key_stem,
    layout_of,
    place_of,
)
from networks.files.metadata import (
    ADAPTER_METADATA_KEY,
    TRAINED_ALPHA_KEY,
    adapter_metadata,
    alpha_metadata,
    hash_metadata,
    save_peft_config,
)
from networks.files.readers import check_save_format
from networks.files.weights import (
    NORMS,
    AdapterWeights,
    LokrWeights,
    LoraWeights,
    TokenRowWeights,
    fold_scale,
)


def save_adapter(
    path: str | Path,
    weights: Mapping[str, AdapterWeights],
    targets: LoraTargets,
    save_format: str = "diffusers",
    precision: str = "fp32",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write an adapter file in one step.

    Args:
        path: file to write; with ``peft`` a folder, see :func:`networks.files.metadata.save_peft_config`.
        weights: diffusers module name -> weights of one kind, on any device.
        targets: the family's row.
        save_format: one of ``SAVE_FORMATS``; of language models "peft".
        precision: "fp32", "fp16" or "bf16" for the weights; alphas and a DoRA's norms are always fp32.
        metadata: strings to add, from :func:`networks.files.metadata.build_metadata`; hashes are added here.

    Raises:
        UserError: a tensor is not finite (or leaves fp16's range), no program would load the kind from the format, the
            folder is not writable.
    """
    if targets.own_names and save_format != "peft":
        raise UserError(f"save_format: LoRAs of {targets.family} are kept in PEFT's layout alone; leave it out")
    kind = next((module.kind for module in weights.values() if not isinstance(module, TokenRowWeights)), "lora")
    check_save_format(kind, save_format, weights, targets)
    layout = layout_of(kind, save_format, targets)
    tensors: dict[str, Tensor] = {}
    for stem, module in _by_stem(weights, targets, layout, save_format).items():
        if layout.alpha == "folded":
            module = fold_scale(module, evenly=precision == "fp16")
        elif isinstance(module, LokrWeights) and layout.names.get("lokr_w1_a", "lokr_w1_a") is None:
            module = module.with_plain_w1()
        for name, tensor in module.tensors.items():
            if (written := layout.names.get(name, name)) is not None:
                dtype = "fp32" if name in NORMS else precision  # 2^-9 of a weight is much of its change
                tensors[f"{stem}.{written}"] = _for_file(path, f"{stem}.{written}", tensor, dtype)
        if layout.alpha == "tensor":
            tensors[f"{stem}.alpha"] = torch.tensor(float(module.alpha))
    strings = {"format": "pt", **(metadata or {})}
    for key in (ADAPTER_METADATA_KEY, TRAINED_ALPHA_KEY):  # of the file that the metadata were taken from
        strings.pop(key, None)
    strings |= _alpha_strings(weights, targets, layout)
    if any(key.endswith(".dora_scale") for key in tensors):
        strings[DORA_NORM] = "base"
    if save_format == "peft":
        path = save_peft_config(path, weights, targets, strings)
    # A base's or dataset's file name may have bytes that are not UTF-8, which a header has to be.
    strings = {key: value.encode(errors="backslashreplace").decode() for key, value in strings.items()}
    write_safetensors(path, tensors, strings | hash_metadata(tensors, strings))


def _alpha_strings(weights: Mapping[str, AdapterWeights], targets: LoraTargets, layout: Layout) -> dict[str, str]:
    """Return what the header says of ranks and alphas, where the layout has no tensors for them."""
    if layout.alpha == "tensor":
        return {}
    parts = {
        component: {name.removeprefix(f"{component}."): module for name, module in modules.items()}
        for component, modules in targets.by_component(weights).items()
    }
    if layout.alpha == "config":
        return {ADAPTER_METADATA_KEY: adapter_metadata(parts)}
    folded = any(module.alpha != module.rank for module in weights.values())
    trained = {TRAINED_ALPHA_KEY: alpha_metadata(parts)} if folded else {}
    if layout.original:  # diffusers would take the ranks of its modules for those of the fused ones
        return trained
    return {ADAPTER_METADATA_KEY: adapter_metadata(parts, folded=True), **trained}


class SavedAs(NamedTuple):
    """How a LoRA that was made from others is saved.

    Attributes:
        save_format: None: the first source's, where it is one of ``SAVE_FORMATS``; else diffusers, of a language model
            peft.
        precision: None: the one that holds every tensor of the sources.
    """

    save_format: str | None = None
    precision: str | None = None


AS_THE_SOURCES = SavedAs()


def save_derived_lora(
    save_to: Path,
    weights: Mapping[str, AdapterWeights],
    targets: LoraTargets,
    metadata: Mapping[str, str],
    comment: str,
    sources: Sequence[AdapterFile] = (),
    saved_as: SavedAs = AS_THE_SOURCES,
) -> None:
    """Save a LoRA that was made from others or from models, its metadata brought up to date.

    Args:
        save_to, weights, targets: as of :func:`save_adapter`.
        metadata: of a source, or made for this file.
        comment: put before the training comment, as sd-scripts' tools do.
        sources: the LoRAs it was made from.
    """
    strings = {key: value for key, value in metadata.items() if key != ADAPTER_METADATA_KEY}
    for key, found in (
        ("dim", {each.rank for each in weights.values()}),
        ("alpha", {w.alpha for w in weights.values()}),
    ):
        strings[f"ss_network_{key}"] = f"{found.pop():g}" if len(found) == 1 and 0 not in found else "Dynamic"
    before = strings.get("ss_training_comment", "None")
    strings["ss_training_comment"] = comment if before in ("", "None") else f"{comment}; {before}"
    kind = next(module.kind for module in weights.values())
    if arguments := strings.get("ss_network_args"):
        is_whole = any(each.rank == 0 for each in weights.values())
        strings["ss_network_args"] = _still_true(arguments, kind, is_whole)
    layout = saved_as.save_format or next((file.layout for file in sources[:1]), "")
    if layout not in SAVE_FORMATS or (not saved_as.save_format and kind not in KINDS_OF_LAYOUT[layout]):
        layout = "peft" if targets.own_names else "diffusers" if kind == "lora" else "comfy"
    precision = saved_as.precision or widest_precision(*(file.weights for file in sources))
    save_adapter(save_to, weights, targets, layout, precision, strings)


def _still_true(arguments: str, kind: str, is_whole: bool) -> str:
    """Return ``ss_network_args``, a JSON object, without what the layers of a LoKr no longer are."""
    stale = "full_matrix" if kind == "lokr" else "full_matrix|decompose_both|algo|(.*_)?factor"
    try:
        given = json.loads(arguments)
        kept = {key: value for key, value in given.items() if is_whole or not re.fullmatch(stale, key)}
    except (ValueError, AttributeError):  # another program's
        return arguments
    return arguments if kept == given else json.dumps(kept)


def widest_precision(*loras: Mapping[str, AdapterWeights]) -> str:
    """Return the precision that holds every tensor: their common 16-bit dtype, else fp32."""
    tensors = (tensor for lora in loras for module in lora.values() for tensor in module.tensors.values())
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    names = {dtype: name for name, dtype in PRECISIONS.items()}
    return names.get(dtypes.pop(), "fp32") if len(dtypes) == 1 else "fp32"


def _by_stem(
    weights: Mapping[str, AdapterWeights], targets: LoraTargets, layout: Layout, save_format: str
) -> dict[str, AdapterWeights]:
    """Return key without the tensor's name -> weights, fused where the layout has one module for several.

    Rows of a LoKr are written as the module that it was trained on, in the original checkpoint's names.
    """
    groups: dict[str, list[str]] = {}
    plain = save_format in targets.plain_layouts
    for name, module in weights.items():
        whole = (LAYOUTS[save_format], False) if "rows" in module.tensors else (layout, plain)
        groups.setdefault(key_stem(name, targets, *whole), []).append(name)
    joins = layout.original and not plain
    return {
        stem: _as_one({name: weights[name] for name in names}, targets)
        if (joins or "rows" in weights[names[0]].tensors) and not targets.text_encoder_of(names[0])
        else weights[names[0]]
        for stem, names in groups.items()
    }


def _as_one(parts: Mapping[str, AdapterWeights], targets: LoraTargets) -> AdapterWeights:
    """Return the adapter of the original module that ``parts`` are stacked in."""
    places = {name: place_of(name, targets) for name in parts}
    row, first = next(iter(places.values())).row, next(iter(parts.values()))
    loras = {places[name].part or 0: module for name, module in parts.items() if isinstance(module, LoraWeights)}
    if loras:
        return fuse_parts(row, loras)
    if len(parts) < len(row.parts):
        raise UserError(f"{next(iter(parts))}: is a part of a {first.title} of a joined layer; keep its other parts")
    return first.of({name: tensor for name, tensor in first.tensors.items() if name != "rows"}, first.alpha)


def _for_file(path: str | Path, key: str, tensor: Tensor, precision: str) -> Tensor:
    """Return ``tensor`` in the file's dtype, refusing what is not finite there.

    A copy: q, k and v of one fused layer have the same ``down``, and safetensors writes no memory twice.
    """
    out = tensor.detach().to(PRECISIONS[precision], copy=True)
    if not bool(torch.isfinite(out).all()):
        if bool(torch.isfinite(tensor.float()).all()):
            raise UserError(f"{path}: {key} leaves the range of {precision}; save in bf16 or fp32")
        raise UserError(f"{path}: {key} holds NaN or infinity, not saved; lower the learning rate or use bf16")
    return out
