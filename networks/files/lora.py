"""LoRA files: from module name -> weights to each published key layout, and back.

In memory a LoRA is ``dict[module name, LoraWeights]`` in diffusers' module names. :data:`LAYOUTS` lists
what can be written:

    diffusers   transformer.transformer_blocks.0.attn.to_q.lora_A.weight         alpha in the metadata (below)
    kohya       lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight          .alpha beside every pair
    comfy       diffusion_model.double_blocks.0.img_attn.qkv.lora_down.weight    .alpha beside every pair
    peft        base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   a folder with adapter_config.json

A family may keep diffusers' names in a layout (``plain_layouts``), where not every program reads the original ones.

diffusers keeps the scale in the metadata key ``lora_adapter_metadata``: the JSON of a PEFT ``LoraConfig``
whose keys begin with ``transformer.``. Without it a file loads at alpha = rank.

Text encoders' modules go into the same file; the family's ``files.py`` lists their prefixes.

Layouts of the original checkpoint have one module where diffusers has q, k, v (and the MLP). LoRAs of rank
r on the parts are written as one of rank n*r, down-projections stacked, up-projections block-diagonal, so
that the update is exactly the same; ``networks.files.lora`` does that and undoes it.

Reading takes any mixture of the prefixes, suffixes and namings seen in published files. A key that cannot be
mapped is named in the error: a LoRA that is loaded in part is a wrong LoRA.

LoRAs of q, k, v against one LoRA of the fused qkv: the same update, exactly.

Parts with A_i [r, in], B_i [out_i, r] become A = [A_1; A_2; A_3] and B = diag(B_1, B_2, B_3), rank 3r. The
scale alpha / rank stays when alpha grows by the same factor. Parts that differ in rank, or are missing, are
filled up with zero rows in A, which reading recognises and removes again; parts that differ in scale get it
folded into B.

A fused LoRA that was trained as one (kohya's) has a dense B: every part then takes the same A and its rows
of B.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from library.errors import UserError, did_you_mean
from library.models.layer_names import KeyPlace, KeyRow, LoraTargets, TextEncoderTargets
from library.models.registry import lora_namings
from library.safetensors_io import read_safetensors_header, stream_safetensors
from networks.files.metadata import ADAPTER_METADATA_KEY, AlphaTable, adapter_metadata, hash_metadata, read_alphas
from networks.files.peft import PEFT_PREFIX, check_layout, save_peft_config, weight_file
from networks.files.weights import ADAPTER_MARKS, TITLES, LoraWeights, names_in_short, non_lora_kind

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Layout:
    """How a layout writes keys.

    Attributes:
        prefix: before the module's name. down, up: after it.
        original: names and fusing of the original checkpoint instead of diffusers'.
        underscores: dots in the module's name become underscores.
        alpha: write ``<module>.alpha``; otherwise the alphas go to diffusers' adapter metadata.
    """

    prefix: str
    down: str
    up: str
    original: bool
    underscores: bool
    alpha: bool


LAYOUTS = {
    "diffusers": Layout("transformer.", ".lora_A.weight", ".lora_B.weight", False, False, False),
    "kohya": Layout("lora_unet_", ".lora_down.weight", ".lora_up.weight", True, True, True),
    "comfy": Layout("diffusion_model.", ".lora_down.weight", ".lora_up.weight", True, False, True),
}
_PEFT = Layout(PEFT_PREFIX, ".lora_A.weight", ".lora_B.weight", False, False, False)

_ROLES = {  # suffix -> what the tensor is; PEFT may put the adapter's name before ".weight"
    ".lora_A.weight": "down",
    ".lora_A.default.weight": "down",
    ".lora_down.weight": "down",
    ".lora.down.weight": "down",
    ".lora_linear_layer.down.weight": "down",  # text encoders by diffusers before PEFT
    ".lora_B.weight": "up",
    ".lora_B.default.weight": "up",
    ".lora_up.weight": "up",
    ".lora.up.weight": "up",
    ".lora_linear_layer.up.weight": "up",
    ".alpha": "alpha",
}
_TENSOR_NAME = re.compile(
    "|".join([*(re.escape(role) + "$" for role in _ROLES), *(re.escape(mark) + ".*" for mark in ADAPTER_MARKS)])
)
_PREFIXES = (  # prefix -> the layout's name in reports; tried in this order
    (PEFT_PREFIX, "peft"),
    ("lora_unet_", "kohya"),
    ("lora_transformer_", "kohya"),
    ("lycoris_", "lycoris"),
    ("transformer.", "diffusers"),
    ("model.diffusion_model.", "comfy"),
    ("diffusion_model.", "comfy"),
    ("", "bare"),
)


@dataclass(frozen=True)
class LoraFile:
    """A LoRA read from disk.

    Attributes:
        weights: diffusers module name -> weights; a text encoder's names begin with its component.
        layout: "diffusers", "kohya", "comfy", "peft" or "bare" (module names without a prefix).
        metadata: the file's metadata strings.
    """

    weights: dict[str, LoraWeights]
    layout: str
    metadata: dict[str, str]


def save_lora(
    path: str | Path,
    weights: Mapping[str, LoraWeights],
    targets: LoraTargets,
    save_format: str = "diffusers",
    precision: str = "fp32",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a LoRA file in one step.

    Args:
        path: file to write; with ``peft`` a folder, see :func:`save_peft_config`.
        weights: diffusers module name -> weights, on any device.
        targets: the family's row.
        save_format: one of :data:`LAYOUTS`; of language models "peft".
        precision: "fp32", "fp16" or "bf16" for the weights; alphas are always fp32.
        metadata: strings to add, from :func:`networks.files.metadata.build_metadata`; hashes are added here.

    Raises:
        UserError: a tensor is not finite (or leaves fp16's range), the format is unknown, the folder is not
            writable.
    """
    check_layout(targets, save_format)
    if save_format not in (*LAYOUTS, "peft"):
        hint = did_you_mean(save_format, LAYOUTS)
        raise UserError(f"save_format: {save_format!r} is not one of {', '.join(LAYOUTS)}{hint}")
    if precision not in PRECISIONS:
        raise UserError(f"save_precision: {precision!r} is not one of {', '.join(PRECISIONS)}; choose one")
    layout = LAYOUTS.get(save_format, _PEFT)
    tensors: dict[str, Tensor] = {}
    for key, module in _by_key(weights, targets, save_format).items():
        tensors[key + layout.down] = for_file(path, key + layout.down, module.down, precision)
        tensors[key + layout.up] = for_file(path, key + layout.up, module.up, precision)
        if layout.alpha:
            tensors[key + ".alpha"] = torch.tensor(float(module.alpha))
    strings = {"format": "pt", **(metadata or {})}
    if not layout.alpha:
        components = targets.by_component(weights)
        strings[ADAPTER_METADATA_KEY] = adapter_metadata(
            {name: {key.removeprefix(f"{name}."): w for key, w in part.items()} for name, part in components.items()}
        )
    if save_format == "peft":
        path = save_peft_config(path, weights, targets, strings)
    strings |= hash_metadata(tensors, strings)
    stream_safetensors(path, {k: (t.dtype, tuple(t.shape)) for k, t in tensors.items()}, tensors.__getitem__, strings)


def load_lora(path: str | Path, targets: LoraTargets, left_out: list[str] | None = None) -> LoraFile:
    """Read a LoRA file in any known layout.

    Args:
        path: a safetensors file, or a folder written by PEFT (``adapter_model.safetensors``).
        targets: the family's row.
        left_out: receives the keys that cannot be mapped, which are refused otherwise.

    Returns:
        The weights under diffusers' module names, split where the file has fused layers, in the file's dtype
        (8-bit floats become fp32), on the CPU.

    Raises:
        UserError: no such file, no LoRA in it, or keys that cannot be mapped, are incomplete or do not fit.
    """
    path = weight_file(Path(path))
    metadata = dict(read_safetensors_header(path).get("__metadata__") or {})
    for key in read_safetensors_header(path):
        if kind := non_lora_kind([key]):
            raise UserError(f"{path}: is a {TITLES[kind]} ({key}), no LoRA; merge it into a model with merge_lora.py")
    found, layouts, unknown = _read_pairs(path, targets)
    if unknown:
        refuse_other_family(path, targets)
    if unknown and found and left_out is not None:
        left_out.extend(sorted(unknown))
    elif unknown:
        raise UserError(
            f"{path}: {len(unknown)} keys are no LoRA weights of {targets.family}'s transformer{_or_text(targets)}: "
            f"{names_in_short(sorted(unknown))}; convert the file or remove them"
        )
    if not found:
        raise UserError(f"{path}: no tensors; not a LoRA file")
    prefixes = (targets.file_prefix, *(encoder.name for encoder in targets.text_encoders))
    stated = {prefix: read_alphas(path, metadata, prefix) for prefix in prefixes}
    weights: dict[str, LoraWeights] = {}
    for key, (module, roles) in found.items():
        alphas = stated[module.encoder.name if module.encoder else targets.file_prefix]
        for name, read in _modules_of(f"{path}: {key}", module, roles, alphas).items():
            if name in weights:
                raise UserError(f"{path}: {name} is there twice, in two namings ({key}); keep one")
            weights[name] = read
    return LoraFile(weights, "+".join(sorted(layouts)), metadata)


def fitting_targets(keys: Iterable[str]) -> list[LoraTargets]:
    """Return the row of each architecture that has a layer for every key of a LoRA (or LoKr, DoRA, ...) file."""
    stems = _stems(keys)
    return [row for row in lora_namings() if stems and all(find_place(stem, row) for stem in stems)]


def refuse_other_family(path: Path, targets: LoraTargets) -> None:
    """Refuse a file whose keys are all those of another architecture than ``targets``'.

    Raises:
        UserError: with the family that it is of.
    """
    header = read_safetensors_header(path)
    fitting = fitting_targets(header)
    if fitting and not any(row.keys is targets.keys for row in fitting):
        names = " or ".join(row.family for row in fitting)
        title = TITLES[non_lora_kind(header) or "lora"]
        remedy = "give a model of its kind" if targets.own_names else f"set --model_type {names}"
        raise UserError(f"{path}: is a {title} of {names}, not of {targets.family}; {remedy}")


def best_targets(keys: Iterable[str]) -> LoraTargets:
    """Return the row of the architecture that has a layer for most of a file's keys."""
    stems = _stems(keys)
    return max(lora_namings(), key=lambda row: sum(find_place(stem, row) is not None for stem in stems))


def _stems(keys: Iterable[str]) -> set[str]:
    """Return what stands before the tensors' own names."""
    return {_TENSOR_NAME.sub("", key) for key in keys if key != "__metadata__"}


def _by_key(weights: Mapping[str, LoraWeights], targets: LoraTargets, save_format: str) -> dict[str, LoraWeights]:
    """Return what stands before a key's suffix -> weights, fused where the layout has one module for several."""
    layout = LAYOUTS.get(save_format, _PEFT)
    text = {name: encoder for name in weights if (encoder := targets.text_encoder_of(name))}
    transformer = {name: module for name, module in weights.items() if name not in text}
    if layout.original and save_format not in targets.plain_layouts:
        transformer = _to_original(transformer, targets)
    keys = {
        layout.prefix + (name.replace(".", "_") if layout.underscores else name): module
        for name, module in transformer.items()
    }
    return keys | {text_key(name, encoder, save_format): weights[name] for name, encoder in text.items()}


def text_key(name: str, encoder: TextEncoderTargets, save_format: str) -> str:
    """Return what stands before a key's suffix for a text encoder's module."""
    place = encoder.keys.find(name.removeprefix(f"{encoder.name}."))
    if place is None:
        raise UserError(f"{name} is no layer of {encoder.name} that a LoRA can be saved for; leave it out")
    prefix = encoder.prefixes[save_format][0]
    return prefix + (place.original.replace(".", "_") if prefix.endswith("_") else place.original)


def _or_text(targets: LoraTargets) -> str:
    return " or text encoders" if targets.text_encoders else ""


def _to_original(weights: Mapping[str, LoraWeights], targets: LoraTargets) -> dict[str, LoraWeights]:
    """Return original module name -> weights, fused where the original has one module for several."""
    groups: dict[str, tuple[KeyPlace, dict[int, LoraWeights]]] = {}
    for name, module in weights.items():
        place = targets.keys.find(name)
        if place is None or place.part is None:
            raise UserError(f"{name} is not in {targets.family}'s original layout; use save_format=diffusers")
        groups.setdefault(place.original, (place, {}))[1][place.part] = module
    return {name: fuse_parts(place.row, parts) for name, (place, parts) in groups.items()}


def for_file(path: str | Path, key: str, tensor: Tensor, precision: str) -> Tensor:
    """Return ``tensor`` in the file's dtype, refusing what is not finite there."""
    out = tensor.detach().to(PRECISIONS[precision])
    if not bool(torch.isfinite(out).all()):
        if bool(torch.isfinite(tensor.float()).all()):
            raise UserError(f"{path}: {key} leaves the range of {precision}; save in bf16 or fp32")
        raise UserError(f"{path}: {key} holds NaN or infinity, not saved; lower the learning rate or use bf16")
    return out


@dataclass(frozen=True)
class FoundModule:
    """The module a key means: its text encoder (None: the transformer), its place, and the layout of the prefix."""

    encoder: TextEncoderTargets | None
    place: KeyPlace
    layout: str


def _read_pairs(
    path: Path, targets: LoraTargets
) -> tuple[dict[str, tuple[FoundModule, dict[str, Tensor]]], set[str], list[str]]:
    """Return key stem -> (module, role -> tensor), the layouts seen, and the keys that could not be mapped."""
    found: dict[str, tuple[FoundModule, dict[str, Tensor]]] = {}
    unknown: list[str] = []
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                suffix = next((s for s in _ROLES if key.endswith(s)), "")
                stem = key.removesuffix(suffix)
                module = find_place(stem, targets)
                if not suffix or module is None:
                    unknown.append(key)
                    continue
                roles = found.setdefault(stem, (module, {}))[1]
                if _ROLES[suffix] in roles:
                    raise UserError(f"{path}: {stem} has two {_ROLES[suffix]} tensors; keep one of them")
                tensor = file.get_tensor(key)
                roles[_ROLES[suffix]] = tensor.float() if tensor.element_size() == 1 else tensor
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error}); download it again") from error
    modules = [module for module, _ in found.values()]
    # comfy files have kohya's keys for text encoders: the transformer's keys tell the layout where there are any
    layouts = {m.layout for m in modules if m.encoder is None} or {m.layout for m in modules}
    return found, layouts, unknown


def find_place(stem: str, targets: LoraTargets) -> FoundModule | None:
    """Return the module a key stem means."""
    for encoder in targets.text_encoders:
        for layout, prefixes in encoder.prefixes.items():
            for prefix in prefixes:
                if stem.startswith(prefix) and (place := encoder.keys.find(stem.removeprefix(prefix))):
                    return FoundModule(encoder, place, layout)
    for prefix, layout in _PREFIXES:
        if stem.startswith(prefix):
            name = stem.removeprefix(prefix)
            if layout == "peft":
                name = name.removeprefix(targets.file_prefix + ".")
            if place := targets.keys.find(name):
                return FoundModule(None, place, layout)
    return None


def _modules_of(
    where: str, module: FoundModule, roles: Mapping[str, Tensor], stated: AlphaTable | None
) -> dict[str, LoraWeights]:
    """Check one pair of tensors and return it under its diffusers names, split if it is fused."""
    if missing := [role for role in ("down", "up") if role not in roles]:
        raise UserError(f"{where} has no {missing[0]}-projection; the file is incomplete")
    down, up = roles["down"], roles["up"]
    if down.ndim != 2 or up.ndim != 2 or up.shape[1] != down.shape[0] or not down.numel() * up.numel():
        shapes = f"down {tuple(down.shape)} and up {tuple(up.shape)}"
        raise UserError(f"{where}: {shapes} are no LoRA of a linear layer; only those can be read")
    if "alpha" in roles and roles["alpha"].numel() != 1:
        raise UserError(f"{where} has {roles['alpha'].numel()} alphas; it takes one")
    if not (bool(torch.isfinite(down).all()) and bool(torch.isfinite(up).all())):
        raise UserError(f"{where} holds NaN or infinity; use an earlier save")
    rank, place = down.shape[0], module.place
    name = place.original if place.part is None or module.encoder else place.modules[place.part]
    alpha = float(rank) if stated is None else stated.alpha_of(name, rank)
    alpha = float(roles["alpha"]) if "alpha" in roles else alpha
    fused = LoraWeights(down, up, alpha or float(rank))  # alpha 0 means "no scaling" in sd-scripts
    component = f"{module.encoder.name}." if module.encoder else ""
    if place.part is not None:
        return {component + place.modules[place.part]: fused}
    try:
        parts = split_fused(place.row, fused)
    except ValueError as error:
        raise UserError(f"{where}: {error}; the file was made for another model") from None
    return {component + place.modules[part]: weights for part, weights in parts.items()}


def fuse_parts(row: KeyRow, parts: Mapping[int, LoraWeights]) -> LoraWeights:
    """Return one LoRA of the original module with the same update.

    Args:
        row: the original module's row.
        parts: part index -> weights; parts without a LoRA may be missing.
    """
    first = next(iter(parts.values()))
    if len(row.parts) == 1:
        return LoraWeights(first.down, row.swap(first.up), first.alpha)
    if len(parts) == len(row.parts) and all(_same_down(first, part) for part in parts.values()):
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


def _same_down(a: LoraWeights, b: LoraWeights) -> bool:
    return a.alpha == b.alpha and a.down.shape == b.down.shape and torch.equal(a.down, b.down)


def _only_block(up: torch.Tensor, start: int, rank: int) -> bool:
    """Whether ``up`` is zero outside the columns ``start`` to ``start + rank``."""
    return not bool(up[:, :start].any()) and not bool(up[:, start + rank :].any())
