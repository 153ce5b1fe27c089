"""Adapters read: a file of any kind, in any published key layout, as module name -> weights.

In memory an adapter is ``dict[module name, AdapterWeights]`` in diffusers' module names. Reading takes any mixture of
the prefixes, suffixes and namings seen in published files (``networks.files.layouts``). A key that cannot be mapped is
named in the error: an adapter that is loaded in part is a wrong adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from library.errors import UserError, names_in_short
from library.models.layer_names import LoraTargets
from library.safetensors_io import TensorEntry, read_entries, read_safetensors_header, read_tensor
from networks.files.joined import placed
from networks.files.layouts import FoundModule, find_place, refuse_other_family, split_key
from networks.files.metadata import TOKENS, AlphaTable, read_alphas, weight_file
from networks.files.weights import (
    BIASES,
    KINDS,
    NORMS,
    TITLES,
    AdapterWeights,
    FullWeights,
    LoraWeights,
    RowsDependError,
    non_lora_kind,
    rank_of,
    unscaled_alpha,
)


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


def load_adapter(path: str | Path, targets: LoraTargets) -> AdapterFile:
    """Read an adapter file of any kind, in any known layout.

    Args:
        path: a safetensors file, or a folder written by PEFT (``adapter_model.safetensors``).
        targets: the family's row.

    Returns:
        The weights under diffusers' module names, split where the file has fused layers, in the file's dtype
        (8-bit floats become fp32), on the CPU.

    Raises:
        UserError: no such file, no adapter in it, or keys that cannot be mapped, are incomplete or do not fit.
    """
    path = weight_file(Path(path))
    entries, metadata = read_entries([path])
    found, unknown = _by_module(path, entries, targets)
    title = TITLES[non_lora_kind(key for key in entries if ".token_adapter." not in key) or "lora"]
    if unknown:
        if any(key.endswith((".oft_blocks", ".oft_R.weight")) for key in unknown):
            raise UserError(f"{path}: is an OFT, which is not read; use a LoRA, DoRA, LoHa or LoKr")
        refuse_other_family(path, targets)
        if not found and not any("lora" in key or non_lora_kind([key]) for key in entries):
            raise UserError(
                f"{path}: holds a model or something else, no LoRA ({sorted(unknown)[0]}); give a LoRA's file"
            )
        or_text = " or text encoders" if targets.text_encoders else ""
        raise UserError(
            f"{path}: {len(unknown)} keys are no {title} weights of {targets.family}'s transformer{or_text}: "
            f"{names_in_short(sorted(unknown))}; take them out of the file, or use it in the program that wrote it"
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
    notes = (*_settle_norms(path, weights, metadata), *_drop_zeros(path, weights))
    modules = [module for module, _ in found.values()]
    # comfy files have kohya's keys for text encoders: the transformer's keys tell the layout where there are any
    layouts = {m.layout for m in modules if m.encoder is None} or {m.layout for m in modules}
    return AdapterFile(weights, "+".join(sorted(layouts)), metadata, notes)


DORA_NORM = "tandem.dora_norm"  # in a file's metadata


def _settle_norms(path: Path, weights: dict[str, AdapterWeights], metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Rename ``dora_scale`` with a row for each output where it stands for rows of V; return a note if that is a guess.

    Trainers (LyCORIS, OneTrainer) mean V = W + BA, ComfyUI divides by W: so mean files that were written here for it.
    """
    by_rows = {n: w for n, w in weights.items() if "dora_scale" in w.tensors and w.tensors["dora_scale"].shape[1] == 1}
    stated = metadata.get(DORA_NORM) or ("base" if any(key.startswith("tandem.") for key in metadata) else "")
    if stated == "base":
        return ()
    for name, module in by_rows.items():
        tensors = {"magnitude" if n == "dora_scale" else n: t for n, t in module.tensors.items()}
        weights[name] = module.of({**tensors, "magnitude": tensors["magnitude"].flatten()}, module.alpha)
    known = stated or any(key.startswith("ot_") for key in metadata)
    if not by_rows or known or "lycoris" in metadata.get("ss_network_module", ""):
        return ()
    return (
        f"{path}: {len(by_rows)} dora_scale are taken for row norms of W + BA, as LyCORIS and OneTrainer train them; "
        'ComfyUI divides by those of W; if the file was made for it, add the metadata "tandem.dora_norm": "base"',
    )


def _drop_zeros(path: Path, weights: dict[str, AdapterWeights]) -> Iterator[str]:
    """Take out differences that are zero, of which extractions of whole models have many; yield a note."""
    names = [n for n, w in weights.items() if isinstance(w, FullWeights) and not bool(w.tensors["diff"].any())]
    for name in names if len(names) < len(weights) else ():
        del weights[name]
    if names:
        yield f"{path}: {len(names)} differences of biases or weights are zero and left out ({names_in_short(names)})"


def load_lora(path: str | Path, targets: LoraTargets) -> LoraFile:
    """Read a file of LoRAs, and refuse other kinds; see :func:`load_adapter`."""
    path = weight_file(Path(path))
    for key in sorted(read_safetensors_header(path)):
        if kind := non_lora_kind([key]):
            remedy = "merge it into a model with merge_lora.py"
            remedy += "" if "dora" in kind else ", or make a LoRA of it with resize_lora.py --network_type lora"
            raise UserError(f"{path}: is a {TITLES[kind]} ({key}), no LoRA; {remedy}")
    file = load_trainable(path, targets)
    loras = {name: module for name, module in file.weights.items() if isinstance(module, LoraWeights)}
    return LoraFile(loras, file.layout, file.metadata, file.notes)


def load_trainable(path: str | Path, targets: LoraTargets) -> AdapterFile:
    """Read a file of which every part is of a kind that is trained here, and refuse biases and full differences."""
    file = load_adapter(path, targets)
    if others := sorted(name for name, module in file.weights.items() if isinstance(module, FullWeights)):
        raise UserError(
            f"{path}: changes {names_in_short(others)} beside or instead of LoRAs; merge it into a model "
            "(merge_lora.py --model), or train on it as base_weights"
        )
    return file


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


def _kind_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the kind of adapter that one module's tensors are of: the one they make complete, else what they show."""
    complete = (kind for kind, each in KINDS.items() if set(tensors) in each.complete)
    shown = sorted(f".{name}" for name in tensors if name not in NORMS) + [f".{name}" for name in tensors]
    return next(complete, None) or non_lora_kind(shown) or "lora"


def _modules_of(
    where: str, module: FoundModule, tensors: dict[str, Tensor], stated: AlphaTable | None
) -> dict[str, AdapterWeights]:
    """Check one module's tensors and return them under its diffusers names, split if it is fused; biases with them."""
    biases = {name: tensors.pop(name) for name in BIASES if name in tensors}
    _check_finite(where, biases)
    is_bias_alone = not tensors.keys() - {"alpha"} and biases.keys() == {"diff_b"}
    read = None if is_bias_alone else _adapter_of(where, module, tensors, stated)
    try:
        if read is not None:
            _check_norms(read)
        found = placed(module.place, read, biases)
    except RowsDependError as error:
        why = "which have weights of their own here; use it in the program that trained it"
        raise UserError(f"{where}: {error} ({', '.join(module.place.modules)}), {why}") from None
    except ValueError as error:
        raise UserError(f"{where}: {error}; the file was made for another model") from None
    component = f"{module.encoder.name}." if module.encoder else ""
    return {component + name: weights for name, weights in found.items()}


def _adapter_of(
    where: str, module: FoundModule, tensors: dict[str, Tensor], stated: AlphaTable | None
) -> AdapterWeights:
    """Return the adapter that one module's tensors are, checked."""
    alpha = tensors.pop("alpha", None)
    is_whole = {"lokr_w1", "lokr_w2"} <= tensors.keys()
    if is_whole:
        alpha = None  # scales nothing; ai-toolkit's of full rank, 9999999999, is infinite in fp16
    if "token_rows" in tensors:
        tokens = stated.tokens_of(module.place.modules[0]) if stated else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) and token >= 0 for token in tokens):
            raise UserError(f"{where}: no {TOKENS} of it in adapter_config.json; get the whole folder")
        numbers = torch.tensor(tokens, dtype=torch.int64)
        if len(set(tokens)) != len(tensors["token_rows"]) or not tokens:
            count = len(tensors["token_rows"])
            raise UserError(f"{where}: {count} rows of {len(tokens)} {TOKENS}; save the LoRA again")
        order = numbers.argsort()
        tensors = {"token_indices": numbers[order], "token_rows": tensors["token_rows"][order]}
    kind = KINDS[_kind_of(tensors)]
    _check_tensors(where, kind, tensors, alpha)
    place, rank = module.place, rank_of(tensors)
    name = place.original if place.part is None or module.encoder else place.modules[place.part]
    if kind.kind == "lokr" and not rank and stated is not None:  # which PEFT alone scales, by alpha / r
        if not (stated_rank := stated.rank_of(name)):
            raise UserError(f"{where}: no r of it in PEFT's config; merge it with peft (merge_and_unload)")
        return kind.of(tensors, 1.0).scaled(stated.alpha_of(name, stated_rank) / stated_rank)
    value = unscaled_alpha(tensors) if is_whole else float(rank)
    value = value if stated is None or not rank else stated.alpha_of(name, rank)
    value = float(alpha) if alpha is not None else value
    if "down" in tensors:
        value = value or float(rank)  # alpha 0 means "no scaling" in sd-scripts
    return kind.of(tensors, value)


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
    _check_finite(where, tensors if alpha is None else {**tensors, "alpha": alpha})


def _check_finite(where: str, numbers: Mapping[str, Tensor]) -> None:
    if broken := [name for name, tensor in numbers.items() if not bool(torch.isfinite(tensor.float()).all())]:
        raise UserError(f"{where} holds NaN or infinity ({broken[0]}); use an earlier save")


def _multiply(tensors: Mapping[str, Tensor]) -> bool:
    """Whether an adapter's tensors have shapes that can be multiplied as its kind does."""
    pairs = [("up", "down"), *((f"{n}_a", f"{n}_b") for n in ("lokr_w1", "lokr_w2", "hada_w1", "hada_w2"))]
    products = [(tensors[a].shape, tensors[b].shape) for a, b in pairs if a in tensors]
    return (
        all(tensor.numel() for tensor in tensors.values())
        and all(len(a) == len(b) == 2 and a[1] == b[0] for a, b in products)
        and ("hada_w1_a" not in tensors or len({(a[0], b[1]) for a, b in products}) == 1)
        and all(tensor.ndim == 2 for name, tensor in tensors.items() if name in ("lokr_w1", "lokr_w2", "diff"))
    )


def _check_norms(read: AdapterWeights) -> None:
    """Refuse norms that are neither of the layer's rows nor of its columns, which would be stretched over it."""
    out, columns = read.shape
    allowed: dict[str, list[tuple[int | None, ...]]] = {"magnitude": [(out,)], "dora_scale": [(out, 1), (1, columns)]}
    for name in NORMS:
        if name in read.tensors and tuple(read.tensors[name].shape) not in allowed[name]:
            shape = tuple(read.tensors[name].shape)
            raise ValueError(f"{name} {shape} is not one norm a row or column of {out}x{columns}")
