"""A fine-tuned model minus its base, as a LoRA.

Layer by layer the difference of two weights is decomposed (``networks.merging.low_rank``) and its largest directions
become
the factors: ``up = U sqrt(s)``, ``down = sqrt(s) V^T``, alpha = rank. Two weights are in memory at a time, whatever the
models' sizes. The two may be stored in different layouts and precisions: modules are compared by diffusers' name, q, k
and v apart, fp8 weights as the numbers they stand for.

Rank: ``dim`` for every layer; or per layer the smallest one that keeps the share ``energy`` of the sum of squares of
the difference, ``dim`` being the largest allowed. Layers that are equal get no LoRA. A LoRA holds no biases and no
norms: where those differ too, a note says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from safetensors import safe_open

from library.errors import UserError
from library.models.layer_names import KeyNames, LoraTargets
from library.randomness import generator
from networks.files.base import Base, BaseFile, BaseModule, WeightReader, find_modules
from networks.files.weights import LoraWeights, names_in_short
from networks.merging.low_rank import Spectrum, decompose, decompose_to_energy


@dataclass(frozen=True)
class ExtractedLayer:
    """One layer: rank, Frobenius norm of the difference, and the share of its sum of squares that the LoRA keeps."""

    name: str
    rank: int
    norm: float
    kept: float


@dataclass(frozen=True)
class Extraction:
    """The LoRA, its layers in the models' order, the layers that are equal, and remarks worth reading."""

    weights: dict[str, LoraWeights]
    layers: list[ExtractedLayer]
    equal: int
    notes: list[str]


@dataclass(frozen=True)
class _Pair:
    """One network of both models: what stands before its modules' names in a LoRA, places and readers."""

    prefix: str
    places: tuple[dict[str, BaseModule], dict[str, BaseModule]]
    readers: tuple[WeightReader, WeightReader]
    files: tuple[Sequence[BaseFile], Sequence[BaseFile]]


def extract_lora(
    original: Base,
    tuned: Base,
    targets: LoraTargets,
    *,
    dim: int | None,
    energy: float | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Extraction:
    """Return the LoRA that turns ``original`` into ``tuned``, as nearly as the rank allows.

    Args:
        original, tuned: models of one architecture. Their text encoders are compared where both have them.
        targets: the family's row.
        dim: rank of every layer, or with ``energy`` the largest one (None: no limit).
        energy: share of the sum of squares to keep in every layer, above 0 up to 1.
        device: where to decompose.
        progress: called with (layers done, layers in all).

    Raises:
        UserError: a layer is in one model only or has another shape, or nothing differs.
    """
    pairs = [_pair(original, tuned, original.files, tuned.files, targets.keys, "", targets.family)]
    for encoder in targets.text_encoders:
        files = original.component(encoder.name), tuned.component(encoder.name)
        if files[0] and files[1]:
            name = f"{targets.family}'s {encoder.name}"
            pairs.append(_pair(original, tuned, *files, encoder.keys, f"{encoder.name}.", name))
    total, done = sum(len(pair.places[0]) for pair in pairs), 0
    weights: dict[str, LoraWeights] = {}
    layers: list[ExtractedLayer] = []
    for pair in pairs:
        for name in pair.places[0]:
            if spectrum := _layer(pair, name, dim, energy, device):
                rank = len(spectrum.values)
                lora = spectrum.lora(rank)
                full = pair.prefix + name
                weights[full] = LoraWeights(lora.down.cpu().contiguous(), lora.up.cpu().contiguous(), lora.alpha)
                layers.append(ExtractedLayer(full, rank, spectrum.energy**0.5, spectrum.kept(rank)))
            done += 1
            progress(done, total)
    if not layers:
        raise UserError(f"{tuned.path}: its linear layers are those of {original.path}; there is nothing to extract")
    notes = [note for pair in pairs for note in _other_differences(pair, tuned)]
    return Extraction(weights, layers, total - len(layers), notes)


def _pair(
    original: Base,
    tuned: Base,
    original_files: Sequence[BaseFile],
    tuned_files: Sequence[BaseFile],
    keys: KeyNames,
    prefix: str,
    model_name: str,
) -> _Pair:
    """Find the modules of both models, refusing models of different architectures."""
    before, after = (find_modules(files, keys, model_name) for files in (original_files, tuned_files))
    if alone := sorted(before.keys() ^ after.keys()):
        where = original.path if alone[0] in before else tuned.path
        raise UserError(
            f"{tuned.path}: another architecture than {original.path} ({len(alone)} layers are in one of them only: "
            f"{names_in_short(alone, 2)} in {where}); give two models of one architecture"
        )
    if other := [name for name in before if before[name].shape != after[name].shape]:
        shapes = "{}x{} against {}x{}".format(*after[other[0]].shape, *before[other[0]].shape)
        raise UserError(
            f"{tuned.path}: another architecture than {original.path} ({len(other)} layers have other shapes: "
            f"{other[0]} {shapes}); give two models of one architecture"
        )
    readers = WeightReader(original_files), WeightReader(tuned_files)
    return _Pair(prefix, (before, after), readers, (original_files, tuned_files))


def _layer(
    pair: _Pair, name: str, dim: int | None, energy: float | None, device: torch.device | str
) -> Spectrum | None:
    """Return the directions to keep of one layer's difference; None where there is none."""
    before, after = (
        reader.read(places[name], device) for reader, places in zip(pair.readers, pair.places, strict=True)
    )
    difference = after.sub_(before)
    if not bool(torch.isfinite(difference).all()):
        raise UserError(f"{pair.places[1][name].file}: {name} holds NaN or infinity; the checkpoint is damaged")
    if not bool(difference.any()):
        return None
    draws = generator(0, "extract", pair.prefix + name)
    if energy is None:
        return decompose(difference, dim, draws)
    return decompose_to_energy(difference, energy, dim, draws)


def _other_differences(pair: _Pair, tuned: Base) -> list[str]:
    """Return a remark if tensors that a LoRA cannot hold differ; only those of equal name can be compared."""
    held = {place.tensor for places in pair.places for place in places.values()}
    differing = []
    tuned_files = {name: file.path for file in pair.files[1] for name in file.tensors}
    for file in pair.files[0]:
        with safe_open(file.path, framework="pt") as before:
            for name in file.tensors:
                bookkeeping = any(reader.is_bookkeeping(name) for reader in pair.readers)
                if name in held or bookkeeping or name not in tuned_files:
                    continue
                with safe_open(tuned_files[name], framework="pt") as after:
                    one, other = before.get_tensor(name).float(), after.get_tensor(name).float()
                if not torch.equal(one, other):
                    differing.append(name)
    if not differing:
        return []
    shown = names_in_short(differing, 3)
    return [f"{tuned.path}: {len(differing)} tensors that no LoRA holds differ as well ({shown}); they are left out"]
