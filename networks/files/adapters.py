"""Adapter files: from module name -> weights to each published key layout, and back, for every kind of adapter.

In memory an adapter is ``dict[module name, AdapterWeights]`` in diffusers' module names. How a program writes keys is
one row of :data:`LAYOUTS`:

    diffusers   transformer.transformer_blocks.0.attn.to_q.lora_A.weight         scale in lora_B, alpha = rank
    kohya       lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight          .alpha beside every pair
    comfy       diffusion_model.double_blocks.0.img_attn.qkv.lora_down.weight    .alpha beside every pair
    peft        base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   a folder with adapter_config.json
    lycoris     lycoris_transformer_blocks_0_attn_to_q.lokr_w1                   comfy's for other kinds than LoRA
    musubi      lora_unet_transformer_blocks_0_attn_to_q.lokr_w1                 kohya's for LoKr and LoHa

A diffusers file has no place for alpha but its header, which diffusers alone reads; every other program takes alpha to
be the rank. So alpha / rank is multiplied into B (:func:`networks.files.weights.fold_scale`) and alpha is the rank,
wherever one looks for it. The alpha of the training is noted in the header for those who train on
(``networks.files.metadata``). Which program reads which keys is in ``networks.files.readers``.

A family may keep diffusers' names in a layout (``plain_layouts``), where not every program reads the original ones, and
diffusers' tensors in another program's names (``folded_layouts``), where diffusers reads those names but no alpha.
Text encoders' modules go into the same file; the family's table has their prefixes.

Layouts of the original checkpoint have one module where diffusers has q, k, v (and the MLP). LoRAs A_i [r, in],
B_i [out_i, r] of n parts become A = [A_1; ...; A_n] and B = diag(B_1, ..., B_n) of rank n r: exactly the same update.
The scale alpha / rank stays when alpha grows by the same factor. Parts that differ in rank, or are missing, are filled
up with zero rows in A, which reading recognises and removes again; parts that differ in scale get it folded into B. A
fused LoRA that was trained as one (kohya's) has a dense B: every part then takes the same A and its rows of B.
Products and rotations of other kinds cannot be joined, so those keep diffusers' names; ComfyUI applies each to its rows
of the original qkv, diffusers loads DoRA, as peft's, and none of the others. Of those that were trained on a joined
layer (LyCORIS in sd-scripts), each part takes its rows (``of_rows``).

Reading takes any mixture of the prefixes, suffixes and namings seen in published files. A key that cannot be mapped is
named in the error: an adapter that is loaded in part is a wrong adapter. Whoever asks for a part all the same
(``allow_partial``) gets the names of what was left out (:class:`PartialFit`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from library.errors import UserError, names_in_short
from library.models.layer_names import KeyPlace, KeyRow, LoraTargets, TextEncoderTargets
from library.models.registry import lora_namings
from library.safetensors_io import TensorEntry, read_entries, read_safetensors_header, read_tensor, write_safetensors
from networks.files.metadata import (
    ADAPTER_METADATA_KEY,
    TRAINED_ALPHA_KEY,
    AlphaTable,
    adapter_metadata,
    alpha_metadata,
    hash_metadata,
    read_alphas,
    save_peft_config,
    weight_file,
)
from networks.files.weights import (
    ADAPTER_MARKS,
    KINDS,
    NORMS,
    TITLES,
    AdapterWeights,
    LokrWeights,
    LoraWeights,
    OftWeights,
    RowsDependError,
    fold_scale,
    non_lora_kind,
    rank_of,
    same_down,
)

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Layout:
    """How a program writes keys.

    Attributes:
        prefixes: before a module's name in the transformer; the first is written, all are read.
        kinds: of adapter that programs load from it.
        names: tensor in memory -> what follows the module's name, None: not written. Others keep their names.
        original: names and fusing of the original checkpoint instead of diffusers'.
        alpha: where the scale is written: a "tensor" ``<module>.alpha``, PEFT's "config", or "folded" into B.
        text: the row of a text encoder's ``prefixes`` that it takes.
    """

    prefixes: tuple[str, ...]
    kinds: tuple[str, ...]
    names: Mapping[str, str | None]
    original: bool = False
    alpha: Literal["tensor", "config", "folded"] = "tensor"
    text: str = ""


_PEFT = {"down": "lora_A.weight", "up": "lora_B.weight", "magnitude": "lora_magnitude_vector", "dora_scale": None}
_KOHYA = {"down": "lora_down.weight", "up": "lora_up.weight", "magnitude": None}
_PLAIN_W1: dict[str, str | None] = {"lokr_w1_a": None, "lokr_w1_b": None}
_OTHER_KINDS = tuple(kind for kind in KINDS if kind != "lora")

LAYOUTS = {  # prefixes are tried in this order
    "peft": Layout(("base_model.model.",), ("lora", "dora"), _PEFT, alpha="config"),
    "kohya": Layout(("lora_unet_", "lora_transformer_"), ("lora",), _KOHYA, original=True, text="kohya"),
    "lycoris": Layout(("lycoris_",), _OTHER_KINDS, _KOHYA, text="comfy"),
    "musubi": Layout(("lora_unet_",), ("lokr", "loha"), _PLAIN_W1, text="kohya"),
    "diffusers": Layout(("transformer.",), ("lora", "dora"), _PEFT, alpha="folded", text="diffusers"),
    "comfy": Layout(("diffusion_model.", "model.diffusion_model."), ("lora",), _KOHYA, original=True, text="comfy"),
}
_OF_OTHER_KINDS = {"comfy": "lycoris", "kohya": "musubi"}
SAVE_FORMATS = ("diffusers", "kohya", "comfy")  # of image models; language models' are PEFT's

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


@dataclass(frozen=True)
class AdapterFile:
    """An adapter read from disk.

    Attributes:
        weights: diffusers module name -> weights; a text encoder's names begin with its component.
        layout: rows of :data:`LAYOUTS`, or "bare" (module names without a prefix); several joined by "+".
        metadata: the file's metadata strings.
        notes: what had to be taken for granted.
    """

    weights: dict[str, AdapterWeights]
    layout: str
    metadata: dict[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoraFile(AdapterFile):
    """A file of LoRAs alone."""

    weights: dict[str, LoraWeights]  # type: ignore[assignment]


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
        save_format: one of :data:`SAVE_FORMATS`; of language models "peft".
        precision: "fp32", "fp16" or "bf16" for the weights; alphas and a DoRA's norms are always fp32.
        metadata: strings to add, from :func:`networks.files.metadata.build_metadata`; hashes are added here.

    Raises:
        UserError: a tensor is not finite (or leaves fp16's range), no program would load the kind from the format, the
            folder is not writable.
    """
    if targets.own_names and save_format != "peft":
        raise UserError(f"save_format: LoRAs of {targets.family} are kept in PEFT's layout alone; leave it out")
    kind = next((module.kind for module in weights.values()), "lora")
    check_save_format(kind, save_format)
    layout = layout_of(kind, save_format, targets)
    tensors: dict[str, Tensor] = {}
    for stem, module in _by_stem(weights, targets, layout, plain=save_format in targets.plain_layouts).items():
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


def save_derived_lora(
    save_to: Path,
    weights: Mapping[str, LoraWeights],
    targets: LoraTargets,
    metadata: Mapping[str, str],
    comment: str,
    sources: Sequence[LoraFile] = (),
    save_format: str | None = None,
    precision: str | None = None,
) -> None:
    """Save a LoRA that was made from others or from models, its metadata brought up to date.

    Args:
        save_to, weights, targets: as of :func:`save_adapter`.
        metadata: of a source, or made for this file.
        comment: put before the training comment, as sd-scripts' tools do.
        sources: the LoRAs it was made from.
        save_format: None: the first source's, where it is one of ``SAVE_FORMATS``; else diffusers, of a language model
            peft.
        precision: None: the one that holds every tensor of the sources.
    """
    strings = {key: value for key, value in metadata.items() if key != ADAPTER_METADATA_KEY}
    ranks = Counter(module.rank for module in weights.values())
    alphas = Counter(module.alpha for module in weights.values())
    strings["ss_network_dim"] = str(next(iter(ranks))) if len(ranks) == 1 else "Dynamic"
    strings["ss_network_alpha"] = f"{next(iter(alphas)):g}" if len(alphas) == 1 else "Dynamic"
    before = strings.get("ss_training_comment", "None")
    strings["ss_training_comment"] = comment if before in ("", "None") else f"{comment}; {before}"
    layout = save_format or next((file.layout for file in sources[:1]), "")
    if layout not in SAVE_FORMATS:
        layout = "peft" if targets.own_names else "diffusers"
    precision = precision or widest_precision(*(file.weights for file in sources))
    save_adapter(save_to, weights, targets, layout, precision, strings)


def widest_precision(*loras: Mapping[str, LoraWeights]) -> str:
    """Return the precision that holds every tensor: their common 16-bit dtype, else fp32."""
    dtypes = {tensor.dtype for lora in loras for module in lora.values() for tensor in module.tensors.values()}
    names = {dtype: name for name, dtype in PRECISIONS.items()}
    return names.get(dtypes.pop(), "fp32") if len(dtypes) == 1 else "fp32"


def check_save_format(kind: str, save_format: str) -> None:
    """Refuse a layout that no program would load the kind of adapter from."""
    if kind not in layout_of(kind, save_format).kinds:
        allowed = [name for name in SAVE_FORMATS if kind in layout_of(kind, name).kinds]
        raise UserError(
            f"save_format: no program loads network_type {kind} from the layout {save_format}; "
            f"set save_format = {' or '.join(allowed)}"
        )


def layout_of(kind: str, save_format: str, targets: LoraTargets | None = None) -> Layout:
    """Return the row that is written: other kinds than LoRA have keys of their own in ComfyUI and musubi-tuner.

    Of ``targets`` whose ``folded_layouts`` name it, the row has PEFT's tensors and no alpha.
    """
    if kind != "lora":
        return LAYOUTS[_OF_OTHER_KINDS.get(save_format, save_format)]
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
        name = _place(name, targets).original
    return stem_of(layout.prefixes[0], name)


def stem_of(prefix: str, name: str) -> str:
    """Return ``prefix`` and a module's name, whose dots become underscores after a prefix that ends in one."""
    return prefix + (name.replace(".", "_") if prefix.endswith("_") else name)


def _place(name: str, targets: LoraTargets) -> KeyPlace:
    place = targets.keys.find(name)
    if place is None or place.part is None:
        raise UserError(f"{name} is not in {targets.family}'s original layout; use save_format=diffusers")
    return place


def _by_stem(
    weights: Mapping[str, AdapterWeights], targets: LoraTargets, layout: Layout, plain: bool
) -> dict[str, AdapterWeights]:
    """Return key without the tensor's name -> weights, fused where the layout has one module for several."""
    groups: dict[str, list[str]] = {}
    for name in weights:
        groups.setdefault(key_stem(name, targets, layout, plain), []).append(name)
    joins = layout.original and not plain
    return {
        stem: _as_one({name: weights[name] for name in names}, targets)
        if joins and not targets.text_encoder_of(names[0])
        else weights[names[0]]
        for stem, names in groups.items()
    }


def _as_one(parts: Mapping[str, AdapterWeights], targets: LoraTargets) -> LoraWeights:
    """Return the LoRA of the original module that ``parts`` are stacked in."""
    by_part: dict[int, LoraWeights] = {}
    for name, module in parts.items():
        assert isinstance(module, LoraWeights)
        place = _place(name, targets)
        assert place.part is not None
        by_part[place.part] = module
    return fuse_parts(place.row, by_part)


def _text_stem(name: str, encoder: TextEncoderTargets, layout: Layout) -> str:
    place = encoder.keys.find(name.removeprefix(f"{encoder.name}."))
    if place is None:
        raise UserError(f"{name} is no layer of {encoder.name} that a LoRA can be saved for; leave it out")
    return stem_of(encoder.prefixes[layout.text][0], place.original)


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


def load_adapter(
    path: str | Path, targets: LoraTargets, left_out: list[str] | None = None, dora_norm: str = "auto"
) -> AdapterFile:
    """Read an adapter file of any kind, in any known layout.

    Args:
        path: a safetensors file, or a folder written by PEFT (``adapter_model.safetensors``).
        targets: the family's row.
        left_out: receives the keys that cannot be mapped, which are refused otherwise.
        dora_norm: one of :data:`networks.files.weights.DORA_NORMS`.

    Returns:
        The weights under diffusers' module names, split where the file has fused layers, in the file's dtype
        (8-bit floats become fp32), on the CPU.

    Raises:
        UserError: no such file, no adapter in it, or keys that cannot be mapped, are incomplete or do not fit.
    """
    path = weight_file(Path(path))
    entries, metadata = read_entries([path])
    found, unknown = _by_module(path, entries, targets)
    title = TITLES[non_lora_kind(entries) or "lora"]
    if unknown:
        refuse_other_family(path, targets)
    if unknown and found and left_out is not None:
        left_out.extend(sorted(unknown))
    elif unknown:
        or_text = " or text encoders" if targets.text_encoders else ""
        raise UserError(
            f"{path}: {len(unknown)} keys are no {title} weights of {targets.family}'s transformer{or_text}: "
            f"{names_in_short(sorted(unknown))}; convert the file or remove them"
        )
    if not found:
        raise UserError(f"{path}: no tensors; not a LoRA file")
    prefixes = (targets.file_prefix, *(encoder.name for encoder in targets.text_encoders))
    stated = {prefix: read_alphas(path, metadata, prefix, dora=title == "DoRA") for prefix in prefixes}
    weights: dict[str, AdapterWeights] = {}
    for stem, (module, tensors) in found.items():
        alphas = stated[module.encoder.name if module.encoder else targets.file_prefix]
        for name, read in _modules_of(f"{path}: {stem}", module, tensors, alphas).items():
            if name in weights:
                raise UserError(f"{path}: {name} is there twice, in two namings ({stem}); keep one")
            weights[name] = read
    notes = _settle_norms(path, weights, metadata, dora_norm)
    if limited := [name for name, module in weights.items() if isinstance(module, OftWeights) and module.alpha > 0]:
        what = f"{len(limited)} rotations are limited to alpha times the outputs, as LyCORIS and sd-scripts train them"
        notes += (f"{path}: {what}; ComfyUI limits them to alpha and shows a smaller change",)
    modules = [module for module, _ in found.values()]
    # comfy files have kohya's keys for text encoders: the transformer's keys tell the layout where there are any
    layouts = {m.layout for m in modules if m.encoder is None} or {m.layout for m in modules}
    return AdapterFile(weights, "+".join(sorted(layouts)), metadata, notes)


DORA_NORM = "tandem.dora_norm"  # in a file's metadata


def _settle_norms(
    path: Path, weights: dict[str, AdapterWeights], metadata: Mapping[str, str], dora_norm: str
) -> tuple[str, ...]:
    """Rename ``dora_scale`` with a row for each output where it stands for rows of V; return a note if that is a guess.

    Trainers (LyCORIS, OneTrainer) mean V = W + BA, ComfyUI divides by W: so mean files that were written here for it.
    """
    by_rows = {n: w for n, w in weights.items() if "dora_scale" in w.tensors and w.tensors["dora_scale"].shape[1] == 1}
    stated = metadata.get(DORA_NORM) or ("base" if any(key.startswith("tandem.") for key in metadata) else "")
    norm = dora_norm if dora_norm != "auto" else stated or "merged"
    if norm == "base":
        return ()
    for name, module in by_rows.items():
        tensors = {"magnitude" if n == "dora_scale" else n: t for n, t in module.tensors.items()}
        weights[name] = module.of({**tensors, "magnitude": tensors["magnitude"].flatten()}, module.alpha)
    known = dora_norm != "auto" or stated or any(key.startswith("ot_") for key in metadata)
    if not by_rows or known or "lycoris" in metadata.get("ss_network_module", ""):
        return ()
    return (
        f"{path}: {len(by_rows)} dora_scale are taken for row norms of W + BA, as LyCORIS and OneTrainer train them; "
        "ComfyUI divides by those of W: dora_norm=base does so too",
    )


def load_lora(path: str | Path, targets: LoraTargets) -> LoraFile:
    """Read a file of LoRAs, and refuse other kinds; see :func:`load_adapter`."""
    path = weight_file(Path(path))
    for key in sorted(read_safetensors_header(path)):
        if kind := non_lora_kind([key]):
            raise UserError(f"{path}: is a {TITLES[kind]} ({key}), no LoRA; merge it into a model with merge_lora.py")
    file = load_adapter(path, targets)
    return LoraFile({n: w for n, w in file.weights.items() if isinstance(w, LoraWeights)}, file.layout, file.metadata)


@dataclass(frozen=True)
class FoundModule:
    """The module a key means: its text encoder (None: the transformer), its place, and the layout of the prefix."""

    encoder: TextEncoderTargets | None
    place: KeyPlace
    layout: str

    @property
    def is_fused(self) -> bool:
        """Whether it stands for several of diffusers' modules."""
        return self.place.part is None and len(self.place.modules) > 1


_Found = dict[str, tuple[FoundModule, dict[str, Tensor]]]


def _by_module(path: Path, entries: Mapping[str, TensorEntry], targets: LoraTargets) -> tuple[_Found, list[str]]:
    """Return key stem -> (module, name in memory -> tensor), and the keys that could not be mapped."""
    found: _Found = {}
    unknown: list[str] = []
    for key in entries:
        stem, name = split_key(key)
        module = find_place(stem, targets)
        if name is None or module is None:
            unknown.append(key)
            continue
        tensors = found.setdefault(stem, (module, {}))[1]
        if name in tensors:
            raise UserError(f"{path}: {stem} has two {name} tensors; keep one of them")
        tensor = read_tensor(entries, key)
        tensors[name] = tensor.float() if tensor.element_size() == 1 else tensor
    return found, unknown


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
            if place := targets.keys.find(name):
                return FoundModule(None, place, layout)
    return None


_PREFIXES = [*((name, prefix) for name, row in LAYOUTS.items() for prefix in row.prefixes), ("bare", "")]


def _kind_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the kind of adapter that one module's tensors are of: the one they make complete, else what they show."""
    complete = (kind for kind, each in KINDS.items() if set(tensors) in each.complete)
    shown = sorted(f".{name}" for name in tensors if name not in NORMS) + [f".{name}" for name in tensors]
    kind = next(complete, None) or non_lora_kind(shown) or "lora"
    return "boft" if kind == "oft" and tensors["oft_blocks"].ndim == 4 else kind


def _modules_of(
    where: str, module: FoundModule, tensors: dict[str, Tensor], stated: AlphaTable | None
) -> dict[str, AdapterWeights]:
    """Check one module's tensors and return them under its diffusers names, split if it is fused."""
    alpha = tensors.pop("alpha", None)
    if {"lokr_w1", "lokr_w2"} <= tensors.keys():
        alpha = None  # scales nothing; ai-toolkit's of full rank, 9999999999, is infinite in fp16
    kind = KINDS[_kind_of(tensors)]
    _check_tensors(where, kind, tensors, alpha)
    place, rank = module.place, rank_of(tensors)
    if kind.kind == "lokr" and not rank and stated is not None:
        why = "which PEFT scales by its config's alpha / r"
        raise UserError(f"{where}: is a LoKr without low rank, {why}; merge it with peft (merge_and_unload)")
    name = place.original if place.part is None or module.encoder else place.modules[place.part]
    value = float(rank) if stated is None or not rank else stated.alpha_of(name, rank)
    value = float(alpha) if alpha is not None else value
    component = f"{module.encoder.name}." if module.encoder else ""
    if "down" in tensors:
        value = value or float(rank)  # alpha 0 means "no scaling" in sd-scripts
    read = kind.of(tensors, value)
    if isinstance(read, OftWeights) and read.alpha > 0:
        read = kind.of(tensors, read.alpha * read.shape[0])  # trainers limit |Q| by alpha times the outputs
    try:
        _check_norms(read)
        if not module.is_fused and place.part is not None:
            return {component + place.modules[place.part]: read}
        parts: Mapping[int, AdapterWeights]
        parts = split_fused(place.row, read) if isinstance(read, LoraWeights) else split_rows(place.row, read)
    except RowsDependError as error:
        why = "which have weights of their own here; use it in the program that trained it"
        raise UserError(f"{where}: {error} ({', '.join(place.modules)}), {why}") from None
    except ValueError as error:
        raise UserError(f"{where}: {error}; the file was made for another model") from None
    return {component + place.modules[part]: weights for part, weights in parts.items()}


def _check_tensors(where: str, kind: type[AdapterWeights], tensors: Mapping[str, Tensor], alpha: Tensor | None) -> None:
    """Refuse tensors that are no complete adapter of their kind."""
    names = set(tensors)
    if kind is LoraWeights and (missing := [role for role in ("down", "up") if role not in names]):
        raise UserError(f"{where} has no {missing[0]}-projection; the file is incomplete")
    if names not in kind.complete:
        has = ", ".join(sorted(names))
        raise UserError(f"{where} has {has}, which is no complete {kind.title}; the file cannot be read")
    if not _multiply(tensors):
        shapes = " and ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise UserError(f"{where}: {shapes} are no {kind.title} of a linear layer; only those can be read")
    if alpha is not None and alpha.numel() != 1:
        raise UserError(f"{where} has {alpha.numel()} alphas; it takes one")
    numbers = tensors if alpha is None else {**tensors, "alpha": alpha}
    if broken := [name for name, tensor in numbers.items() if not bool(torch.isfinite(tensor.float()).all())]:
        raise UserError(f"{where} holds NaN or infinity ({broken[0]}); use an earlier save")


def _multiply(tensors: Mapping[str, Tensor]) -> bool:
    """Whether an adapter's tensors have shapes that can be multiplied as its kind does."""
    pairs = [("up", "down"), *((f"{n}_a", f"{n}_b") for n in ("lokr_w1", "lokr_w2", "hada_w1", "hada_w2"))]
    products = [(tensors[a].shape, tensors[b].shape) for a, b in pairs if a in tensors]
    blocks = tensors.get("oft_blocks")
    return (
        all(tensor.numel() for tensor in tensors.values())
        and all(len(a) == len(b) == 2 and a[1] == b[0] for a, b in products)
        and ("hada_w1_a" not in tensors or len({(a[0], b[1]) for a, b in products}) == 1)
        and all(tensor.ndim == 2 for name, tensor in tensors.items() if name in ("lokr_w1", "lokr_w2"))
        and (blocks is None or (blocks.ndim in (3, 4) and blocks.shape[-1] == blocks.shape[-2]))
    )


def _check_norms(read: AdapterWeights) -> None:
    """Refuse norms that are neither of the layer's rows nor of its columns, which would be stretched over it."""
    out, columns = read.shape
    allowed: dict[str, list[tuple[int | None, ...]]] = {"magnitude": [(out,)], "dora_scale": [(out, 1), (1, columns)]}
    for name in NORMS:
        if name in read.tensors and tuple(read.tensors[name].shape) not in allowed[name]:
            shape = tuple(read.tensors[name].shape)
            raise ValueError(f"{name} {shape} is not one norm a row or column of {out}x{columns}")


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
        fused = sum(found.place.row.rows) if found.place.part is None else 0
        return not fused or len(down) != 2 or len(up) != 2 or up[0] == fused * down[1]

    return [row for row in lora_namings() if stems and all(fits(stem, row) for stem in stems)]


def refuse_other_family(path: Path, targets: LoraTargets) -> None:
    """Refuse a file whose keys are all those of another architecture than ``targets``'."""
    header = read_safetensors_header(path)
    fitting = fitting_targets(header)
    if fitting and not any(row.keys is targets.keys for row in fitting):
        names = " or ".join(row.family for row in fitting)
        title = TITLES[non_lora_kind(header) or "lora"]
        remedy = "give a model of its kind" if targets.own_names else f"set --model_type {names}"
        raise UserError(f"{path}: is a {title} of {names}, not of {targets.family}; {remedy}")


def best_targets(keys: Iterable[str]) -> LoraTargets:
    """Return the row of the architecture that has a layer for most of a file's keys."""
    stems = {split_key(key)[0] for key in keys if key != "__metadata__"}
    return max(lora_namings(), key=lambda row: sum(find_place(stem, row) is not None for stem in stems))


def fuse_parts(row: KeyRow, parts: Mapping[int, LoraWeights]) -> LoraWeights:
    """Return one LoRA of the original module with the same update.

    Args:
        row: the original module's row.
        parts: part index -> weights; parts without a LoRA may be missing.
    """
    first = next(iter(parts.values()))
    if len(row.parts) == 1:
        return LoraWeights(first.down, row.swap(first.up), first.alpha)
    if len(parts) == len(row.parts) and all(same_down(first, part) for part in parts.values()):
        return LoraWeights(first.down, torch.cat([parts[i].up for i in range(len(parts))]), first.alpha)
    in_features = first.down.shape[1]
    rows = [multiple * in_features for multiple in row.rows]
    rank = max(part.rank for part in parts.values())
    count = len(row.parts)
    one_scale = len({part.scale for part in parts.values()}) == 1
    down = first.down.new_zeros(count * rank, in_features)
    up = first.up.new_zeros(sum(rows), count * rank)
    for i, part in parts.items():
        top, left = sum(rows[:i]), i * rank
        down[left : left + part.rank] = part.down
        up[top : top + rows[i], left : left + part.rank] = part.up if one_scale else part.up.float() * part.scale
    if one_scale and all(part.rank == rank for part in parts.values()):
        return LoraWeights(down, up, first.alpha * count)  # alpha / rank keeps its bits
    return LoraWeights(down, up, (first.scale if one_scale else 1.0) * count * rank)


def split_fused(row: KeyRow, fused: LoraWeights) -> dict[int, LoraWeights]:
    """Return part index -> weights with the same update as ``fused``.

    Parts of a block-diagonal LoRA whose down-projection is all zero were never there and are left out.

    Raises:
        ValueError: the shapes are not those of this module.
    """
    if len(row.parts) == 1:
        return {0: LoraWeights(fused.down, row.swap(fused.up), fused.alpha)}
    rows = row.part_rows(fused.up.shape[0], fused.down.shape[1])
    ups = fused.up.split(rows)
    count = len(rows)
    rank = fused.rank // count
    if fused.rank % count or not all(_only_block(up, i * rank, rank) for i, up in enumerate(ups)):
        return {i: LoraWeights(fused.down, up.contiguous(), fused.alpha) for i, up in enumerate(ups)}
    parts: dict[int, LoraWeights] = {}
    for i, up in enumerate(ups):
        block = slice(i * rank, (i + 1) * rank)
        filled = fused.down[block].any(dim=1)
        if bool(filled.all()):
            parts[i] = LoraWeights(fused.down[block], up[:, block].contiguous(), fused.alpha / count)
        elif bool(filled.any()):
            kept = int(filled.sum())
            alpha = fused.scale * kept
            parts[i] = LoraWeights(fused.down[block][filled], up[:, block][:, filled].contiguous(), alpha)
    return parts


def split_rows(row: KeyRow, joined: AdapterWeights) -> dict[int, AdapterWeights]:
    """Return part index -> its rows of an adapter of another kind that was trained on the original module.

    Raises:
        ValueError: the shapes are not those of this module, or the rows' changes depend on one another.
    """
    out, columns = joined.shape
    if len(row.parts) == 1:
        order = row.swap(torch.arange(out))
        return {0: joined.of_rows(order) if row.halves_swapped else joined}
    ends = row.part_rows(out, out // sum(row.rows) if columns is None else columns)
    return {i: joined.of_rows(rows) for i, rows in enumerate(torch.arange(out).split(ends))}


def _only_block(up: torch.Tensor, start: int, rank: int) -> bool:
    """Whether ``up`` is zero outside the columns ``start`` to ``start + rank``."""
    return not bool(up[:, :start].any()) and not bool(up[:, start + rank :].any())


_SHOWN = 20  # names of each sort; a FLUX LoRA has 500


@dataclass
class PartialFit:
    """A tally of one file's modules.

    Attributes:
        source: the file. unknown: its keys that mean no module of the family.
        unmatched: modules that have no place here. misfits: those of another shape, described. matched: the rest.
    """

    source: str
    unknown: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    matched: set[str] = field(default_factory=set)

    def line(self, wanted: Collection[str] | None = None) -> str:
        """Return what was taken and what was not, by name, in one line; ``wanted`` are the modules there are."""
        missing = sorted(set(wanted) - self.matched) if wanted is not None else []
        groups = {
            "not known": self.unknown,
            "without a place here": self.unmatched,
            "of another shape": self.misfits,
            "newly initialised": missing,
        }
        left = [f"{len(names)} {what} ({names_in_short(names, _SHOWN)})" for what, names in groups.items() if names]
        if not self.matched:
            raise UserError(f"{self.source}: nothing of it fits: {', '.join(left[:3])}; give a LoRA of this model")
        return f"{self.source}: " + "; ".join([f"{len(self.matched)} modules matched", *left])

    @property
    def complete(self) -> bool:
        """Whether all of the file was taken."""
        return not (self.unknown or self.unmatched or self.misfits)
