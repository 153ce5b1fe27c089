"""Adding LoRAs to a base model's weights, for good.

    W' = round(W + sum_k ratio_k * alpha_k / rank_k * B_k @ A_k)          in fp32, rounded once

Other kinds (DoRA, LoKr, LoHa) change a weight by their own formula, ``networks.files.weights``; those that
depend on the weight see it as the files before them left it.

The base is a diffusers folder (a pipeline or its transformer alone, in one file or in shards) or a single
file in the original layout, with or without ComfyUI's ``model.diffusion_model.`` in front, or in diffusers'
names. The result has the base's layout. A fused original module (qkv) takes each part's update in that
part's rows. A LoRA's text encoder layers go into the ``text_encoder`` folders of a pipeline, which keep their dtype;
a base that has none is refused, unless they are left out on request.

*As it is loaded* (:class:`BaseWeights`, kohya's ``base_weights``), before another LoRA is trained on it, a base is
merged into the same way: rounded once to what the file holds W in, and only then cast or quantised as the run asks. A
weight that the file has in fp8 is dequantised, changed, and quantised again with fresh scales of its kind.

Tensors are read, merged and written one at a time: memory stays at a few times the largest tensor, whatever
the model's size. Everything is checked before the first byte is written: that every LoRA module has its
place in the base, that shapes fit, that the disk has room. Nothing appears under the final name until it is
complete.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from library.checksums import fingerprint, weights_fingerprint
from library.errors import UserError, names_in_short
from library.files import broken_link
from library.llm.conversion import write_transformers
from library.models.layer_names import KeyNames, LoraTargets
from library.models.llm.files import TransformersFiles
from library.precision.checkpoint import WeightFiles
from library.safetensors_io import read_tensor, stream_safetensors
from networks.files.adapters import AdapterFile, load_adapter
from networks.files.base import Base, BaseModule, check_target, find_modules, folder_copy, open_base, saved_specs
from networks.files.layouts import PRECISIONS
from networks.files.metadata import base_mismatch, weight_file
from networks.files.weights import ADDED_INPUTS, AdapterWeights, check_strength, fitted

Updates = Mapping[str, AdapterWeights]  # by module name
_STALE_METADATA = ("modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")


@dataclass(frozen=True)
class LoraSource:
    """One LoRA file and the strength it is merged at.

    Raises:
        UserError: a strength that is not finite, or that no LoRA is of use at.
    """

    path: Path
    ratio: float

    def __post_init__(self) -> None:
        check_strength(f"--lora {self.path}", self.ratio)


@dataclass(frozen=True)
class Update:
    """One module's update, its strength, and where the module lies in the base."""

    weights: AdapterWeights
    ratio: float
    place: BaseModule

    def apply(self, tensor: Tensor) -> None:
        """Change the module's rows of ``tensor``, the base's tensor in fp32."""
        oriented = tensor.t() if self.place.transposed else tensor
        rows = self.place.rows
        oriented[rows] = self.place.swap(self.weights.apply(self.place.swap(oriented[rows]), self.ratio))


@dataclass(frozen=True)
class MergeReport:
    """What was merged: base tensors changed, tensors written, and remarks worth reading."""

    changed: int
    written: int
    notes: tuple[str, ...]


def merge_loras(
    model: Path,
    sources: Sequence[LoraSource],
    save_to: Path,
    targets: LoraTargets,
    precision: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    transformer_only: bool = False,
) -> MergeReport:
    """Merge LoRAs into ``model`` and write the result to ``save_to``.

    Args:
        model: diffusers folder or safetensors file.
        sources: LoRA files with their strengths; updates to the same layer add up.
        save_to: a new folder for a folder, a ``.safetensors`` file for a file.
        targets: the family's row.
        precision: "fp32", "fp16" or "bf16" for the transformer's floating tensors; None keeps each tensor's dtype.
        progress: called with (tensors done, tensors in all).
        transformer_only: leave out the LoRAs' layers of text encoders; a note says so.

    Raises:
        UserError: a file is missing, a LoRA does not fit, a value leaves fp16's range, the disk is full.
    """
    dtype = PRECISIONS[precision] if precision else None
    base = open_base(model)
    read = read_sources(sources, targets)
    loras = [(source, file.weights) for source, file in read]
    components = _components(base, loras, targets, transformer_only)
    check_target(base, save_to, dtype)
    total = sum(len(component.weights.entries) for component in components)
    done = itertools.count(1)

    def write(component: _Component, folder: Path) -> None:
        target_dtype = dtype if component.name == targets.file_prefix else None
        metadata = _merged_metadata(component.weights, sources)
        for file in component.files:
            path = folder / file.name if base.folder else save_to
            _write_file(component, file, path, target_dtype, metadata, lambda: progress(next(done), total))

    if base.folder is None:
        write(components[0], save_to.parent)
    else:
        rewritten = {file for component in components[1:] for file in component.files}
        with folder_copy(base, save_to, dtype, rewritten) as folder:
            write(components[0], folder)
            for component in components[1:]:
                write(component, folder.parent / component.name)
    left_out = _left_out_notes(loras, targets) if transformer_only else ()
    given = {id(one) for _, weights in loras for one in weights.values()}
    wider = [n for n, updates in components[0].updates.items() if any(id(one.weights) not in given for one in updates)]
    notes = [*base_notes(base.weights_path, read), *left_out, *(f"{name}: {ADDED_INPUTS}" for name in wider)]
    return MergeReport(sum(len(component.updates) for component in components), total, tuple(notes))


def merge_language_model(
    model: Path,
    sources: Sequence[LoraSource],
    save_to: Path,
    targets: LoraTargets,
    precision: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MergeReport:
    """Merge LoRAs into a language model in any layout, GGUF among them, and write a transformers folder.

    Arguments as for :func:`merge_loras`; without ``precision`` a quantised model becomes bf16.
    """
    files = TransformersFiles(model)
    read = read_sources(sources, targets)
    updates = plan_updates(files, [(s, file.weights) for s, file in read], targets.keys, targets.family)

    def merged(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return merge_tensor(f"{save_to}: {name}", tensor, updates.get(name, ()), dtype)

    metadata, dtype = _merged_metadata(files, sources), PRECISIONS[precision] if precision else None
    remark = write_transformers(files, save_to, dtype, change=merged, progress=progress, metadata=metadata)
    notes = [*base_notes(model, read), *([remark] if remark else [])]
    return MergeReport(len(updates), len(files.entries), tuple(notes))


def read_sources(sources: Sequence[LoraSource], targets: LoraTargets) -> list[tuple[LoraSource, AdapterFile]]:
    """Return what LoRA files hold."""
    return [(source, load_adapter(source.path, targets)) for source in sources]


@dataclass(frozen=True)
class _Component:
    """One network of the base: its weights, and base tensor -> updates."""

    name: str
    weights: WeightFiles
    updates: dict[str, list[Update]]

    @property
    def files(self) -> list[Path]:
        """Its weight files."""
        return list(dict.fromkeys(entry.file for entry in self.weights.entries.values()))


def _components(
    base: Base,
    loras: Sequence[tuple[LoraSource, Updates]],
    targets: LoraTargets,
    transformer_only: bool,
) -> list[_Component]:
    """Return the transformer, and the text encoders that the LoRAs change, with their updates."""
    split = [(source, targets.by_component(weights)) for source, weights in loras]
    name = targets.file_prefix
    of_transformer = [(source, parts.get(name, {})) for source, parts in split]
    updates = plan_updates(base.weights, of_transformer, targets.keys, targets.family)
    components = [_Component(name, base.weights, updates)]
    for encoder in () if transformer_only else targets.text_encoders:
        concerned = [(source, parts[encoder.name]) for source, parts in split if encoder.name in parts]
        if not concerned:
            continue
        inside = base.component(encoder.name)
        if inside is None:
            raise UserError(
                f"{concerned[0][0].path}: {len(concerned[0][1])} modules are {encoder.name}'s, which {base.path} does "
                "not have; give a diffusers pipeline folder, or --transformer_only to leave them out"
            )
        prefix = f"{encoder.name}."
        stripped = [(source, {k.removeprefix(prefix): w for k, w in weights.items()}) for source, weights in concerned]
        updates = plan_updates(inside, stripped, encoder.keys, f"{targets.family}'s {encoder.name}")
        components.append(_Component(encoder.name, inside, updates))
    return components


def plan_updates(
    base: WeightFiles,
    loras: Sequence[tuple[LoraSource, Updates]],
    keys: KeyNames,
    model_name: str,
) -> dict[str, list[Update]]:
    """Return base tensor -> its updates.

    Raises:
        UserError: a LoRA module has no place in the base or another shape; its name is in the message.
    """
    places = find_modules(base, keys, model_name)
    places |= {f"{name}.bias": bias for name, place in places.items() if (bias := place.bias(base))}
    updates: dict[str, list[Update]] = {}
    for source, modules in loras:
        if absent := sorted(modules.keys() - places.keys()):
            names = names_in_short(absent)
            raise UserError(f"{source.path}: {len(absent)} modules are not in the base ({names}); wrong model?")
        problems = []
        for name, weights in modules.items():
            place = places[name]
            weights = fitted(name, weights, keys, place.columns)
            if made_for := weights.made_for_other(place.shape):
                problems.append(f"{name} is for {made_for}, the base has {place.shape[0]}x{place.shape[1]}")
                continue
            updates.setdefault(place.tensor, []).append(Update(weights, source.ratio, place))
        if problems:
            raise UserError(f"{source.path}: {names_in_short(problems)}; it was trained on another model")
    return updates


def merge_tensor(where: str, tensor: Tensor, updates: Sequence[Update], dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` with its updates, one after the other, in fp32 and rounded once to ``dtype``.

    Args:
        where: file and tensor, for messages.
        tensor, updates, dtype: of the base; what is to be added; of the result.

    Raises:
        UserError: NaN or infinity would be written: it is in the base, comes of the updates, or ``dtype`` is too small.
            Infinity in a tensor without updates is kept: masks hold it.
    """
    total = tensor.float() if updates else tensor
    total = total.clone() if total is tensor and updates else total
    for update in updates:
        update.apply(total)
    merged = total.to(dtype)
    if merged.is_floating_point() and not bool(torch.isfinite(merged).all()):
        if not bool(torch.isfinite(total.float()).all()):
            if updates and bool(torch.isfinite(tensor.float()).all()):
                raise UserError(f"{where} is not finite with the LoRAs in it; lower their strengths, or leave one out")
            if updates or bool(tensor.float().isnan().any()):
                raise UserError(f"{where} holds NaN or infinity in the base already; download or make the base again")
        else:
            kind = next(name for name, known in PRECISIONS.items() if known is dtype)
            raise UserError(f"{where} leaves the range of {kind}; use --save_precision bf16")
    return merged


def _write_file(
    component: _Component,
    file: Path,
    path: Path,
    dtype: torch.dtype | None,
    metadata: Mapping[str, str],
    count: Callable[[], None],
) -> None:
    """Merge one weight file into ``path``, tensor by tensor."""
    entries = component.weights.entries
    specs = {name: s for name, s in saved_specs(component.weights, dtype).items() if entries[name].file == file}

    def produce(name: str) -> Tensor:
        tensor = read_tensor(entries, name)
        merged = merge_tensor(f"{path}: {name}", tensor, component.updates.get(name, ()), specs[name][0])
        count()
        return merged

    stream_safetensors(path, specs, produce, metadata)


def _merged_metadata(base: WeightFiles, sources: Sequence[LoraSource]) -> dict[str, str]:
    """Return the base's metadata without the hashes that no longer hold, plus what was merged."""
    kept = {key: value for key, value in base.metadata.items() if key not in _STALE_METADATA}
    merged = [{"lora": source.path.name, "ratio": source.ratio} for source in sources]
    return {"format": "pt", **kept, "tandem.merged_loras": json.dumps(merged)}


def _left_out_notes(loras: Sequence[tuple[LoraSource, Updates]], targets: LoraTargets) -> Iterator[str]:
    """Yield a remark for every LoRA whose text encoder layers were left out."""
    for source, weights in loras:
        text = sorted(name for name in weights if targets.text_encoder_of(name))
        if text:
            yield f"{source.path}: {len(text)} text encoder modules left out ({names_in_short(text)})"


def base_notes(weights: Path, loras: Sequence[tuple[LoraSource, AdapterFile]]) -> Iterator[str]:
    """Yield a remark for every LoRA that says it was trained on other weights, or leaves open what it means."""
    for _, lora in loras:
        yield from lora.notes
    if any("tandem.base_fingerprint" in lora.metadata for _, lora in loras):
        base_fingerprint = weights_fingerprint(weights)
        for source, lora in loras:
            if remark := base_mismatch(lora.metadata, base_fingerprint):
                yield f"{source.path}: {remark}"


@dataclass(frozen=True)
class BaseWeights:
    """LoRA files and their strengths, read.

    Attributes:
        sources: file and strength of each.
        updates: module of the transformer -> its updates with their strengths, in the files' order.
        left_out: a line for each file with layers of text encoders, which are not merged, and each note on reading.
    """

    sources: tuple[tuple[Path, float], ...]
    updates: Mapping[str, Sequence[tuple[AdapterWeights, float]]]
    left_out: tuple[str, ...]

    def changes(self, targets: LoraTargets) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return parameter of the transformer -> what makes the merged weight [out, in] fp32 of it."""
        merged = {name: partial(self._merged, name, targets.keys) for name in self.updates}
        return {name if name.endswith(".bias") else f"{name}.weight": change for name, change in merged.items()}

    def _merged(self, name: str, keys: KeyNames, weight: Tensor) -> Tensor:
        shape = (*weight.shape, 1)[:2]  # of a bias too
        for update, strength in self.updates[name]:
            update = fitted(name, update, keys, shape[1])
            if made_for := update.made_for_other(shape):
                shapes = f"{made_for}, the model's has {shape[0]}x{shape[1]}"
                raise UserError(f"base_weights: {name} is for a layer of {shapes}; it was trained on another model")
            weight = update.apply(weight, strength)
        if not torch.isfinite(weight).all():
            raise UserError(f"base_weights: {name} is not finite when merged; lower base_weights_multiplier")
        return weight

    def fingerprint(self) -> str:
        """Return what a state remembers them by: contents and strengths, wherever the files lie; "" of none."""
        return ", ".join(f"{fingerprint(weight_file(path))} x {strength:g}" for path, strength in self.sources)

    def described(self) -> str:
        """Return names and strengths as JSON, as a LoRA's metadata have them; "" of none."""
        named = [{"lora": path.name, "ratio": strength} for path, strength in self.sources]
        return json.dumps(named) if named else ""


def read_base_weights(
    paths: Sequence[str], strengths: Sequence[float], targets: LoraTargets, base_fingerprint: str = ""
) -> BaseWeights:
    """Read LoRAs to merge; strengths that are not given are 1, and ``base_fingerprint`` is of what they change.

    Raises:
        UserError: a file is missing, damaged, or no LoRA of this family, or has nothing for the transformer.
    """
    sources = tuple(
        (Path(path).expanduser(), strengths[i] if i < len(strengths) else 1.0) for i, path in enumerate(paths)
    )
    updates: dict[str, list[tuple[AdapterWeights, float]]] = {}
    left_out: list[str] = []
    for path, strength in sources:
        if not path.exists():
            raise UserError(f"base_weights: {path} does not exist{broken_link(path)}; check the path")
        file = load_adapter(path, targets)
        parts = targets.by_component(file.weights)
        left_out += file.notes
        if base_fingerprint and (remark := base_mismatch(file.metadata, base_fingerprint)):
            left_out.append(f"{path}: {remark}")
        of_transformer = parts.pop(targets.file_prefix, {})
        if not of_transformer:
            raise UserError(f"base_weights: {path} has nothing for the transformer; give a LoRA that has")
        if parts:
            left_out.append(f"{path}: its layers of {' and '.join(sorted(parts))} are not merged")
        for name, weights in of_transformer.items():
            updates.setdefault(name, []).append((weights, strength))
    return BaseWeights(sources, updates, tuple(left_out))
