"""A fine-tuned model minus its base, as a LoRA or a LoKr.

Layer by layer the difference of two weights is decomposed (``networks.merging.low_rank``) and its largest directions
become the factors: ``up = U sqrt(s)``, ``down = sqrt(s) V^T``, alpha = rank; or it becomes the Kronecker product that
is closest to it. Two weights are in memory at a time, whatever the models' sizes. The two may be stored in different
layouts and precisions: modules are compared by diffusers' name, q, k and v apart, fp8 weights as the numbers they stand
for.

Layers that are equal get no LoRA. A LoRA holds no biases and no norms: where those differ too, a note says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from library.errors import UserError, counted, names_in_short
from library.models.layer_names import KeyNames, LoraTargets
from library.precision.checkpoint import WeightFiles
from library.randomness import generator
from library.safetensors_io import read_tensor
from networks.adapters.lycoris import factorization, other_factors, refuse_large_factor
from networks.files.base import Base, BaseModule, find_modules
from networks.files.weights import AdapterWeights, LokrWeights
from networks.merging.low_rank import decompose, nearest_kronecker, smaller_lokr


@dataclass(frozen=True)
class Extraction:
    """What was extracted.

    Attributes:
        weights: the LoRA, its layers in the models' order.
        kept: layer -> the share of its difference's sum of squares that the adapter has.
        beside: of a LoKr, the same of a LoRA of as many parameters.
        equal: how many layers are.
        notes: what a LoRA cannot hold.
    """

    weights: dict[str, AdapterWeights]
    kept: dict[str, float]
    beside: dict[str, float]
    equal: int
    notes: list[str]


@dataclass(frozen=True)
class _Pair:
    """One network of both models: its modules' prefix in a LoRA, their places and weights."""

    prefix: str
    places: tuple[dict[str, BaseModule], dict[str, BaseModule]]
    weights: tuple[WeightFiles, WeightFiles]


def extract_lora(
    original: Base,
    tuned: Base,
    targets: LoraTargets,
    *,
    dim: int,
    factor: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Extraction:
    """Return the LoRA, or LoKr, that turns ``original`` into ``tuned``, as nearly as the rank allows.

    Args:
        original, tuned: models of one architecture. Their text encoders are compared where both have them.
        targets: the family's row.
        dim: rank of every layer; of a LoKr's w2, which is whole from half of its larger side on.
        factor: the smaller factor of a LoKr's sides; 0: a LoRA.
        device: where to decompose.
        progress: called with (layers done, layers in all).

    Raises:
        UserError: a layer is in one model only or has another shape, or nothing differs.
    """
    pairs = [_pair((original.weights, tuned.weights), targets.keys, "", targets.family)]
    for encoder in targets.text_encoders:
        before, after = original.component(encoder.name), tuned.component(encoder.name)
        if before is not None and after is not None:
            name = f"{targets.family}'s {encoder.name}"
            pairs.append(_pair((before, after), encoder.keys, f"{encoder.name}.", name))
    shapes = [place.shape for pair in pairs for place in pair.places[0].values()]
    refuse_large_factor("--factor", factor, shapes)
    total, done = sum(len(pair.places[0]) for pair in pairs), 0
    weights: dict[str, AdapterWeights] = {}
    kept: dict[str, float] = {}
    beside: dict[str, float] = {}
    for pair in pairs:
        for name in pair.places[0]:
            difference, full = _difference(pair, name, device), pair.prefix + name
            if difference is not None:
                random = generator(0, "extract", full)
                made, kept[full] = (
                    _lora(difference, dim, random) if not factor else _lokr(difference, dim, factor, random)
                )
                weights[full] = made.to(torch.device("cpu"))
                if factor:
                    size = sum(tensor.numel() for tensor in made.tensors.values())
                    beside[full] = _lora(difference, max(1, size // sum(difference.shape)), random)[1]
            done += 1
            progress(done, total)
    if not weights:
        raise UserError(f"{tuned.path}: its linear layers are those of {original.path}; there is nothing to extract")
    notes = [note for pair in pairs for note in _other_differences(pair)]
    lokrs = [made.w1().shape for made in weights.values() if isinstance(made, LokrWeights)]
    if words := other_factors(factor, lokrs):
        notes.append(words)
    return Extraction(weights, kept, beside, total - len(weights), notes)


def _pair(weights: tuple[WeightFiles, WeightFiles], keys: KeyNames, prefix: str, model_name: str) -> _Pair:
    """Find the modules of both models, refusing models of different architectures."""
    before, after = (find_modules(files, keys, model_name) for files in weights)
    original, tuned = (files.path for files in weights)
    if alone := sorted(before.keys() ^ after.keys()):
        where = original if alone[0] in before else tuned
        raise UserError(
            f"{tuned}: another architecture than {original} ({len(alone)} layers are in one of them only: "
            f"{names_in_short(alone, 2)} in {where}); give two models of one architecture"
        )
    if other := [name for name in before if before[name].shape != after[name].shape]:
        shapes = "{}x{} against {}x{}".format(*after[other[0]].shape, *before[other[0]].shape)
        raise UserError(
            f"{tuned}: another architecture than {original} ({len(other)} layers have other shapes: "
            f"{other[0]} {shapes}); give two models of one architecture"
        )
    return _Pair(prefix, (before, after), weights)


def _difference(pair: _Pair, name: str, device: torch.device | str) -> Tensor | None:
    """Return one layer's difference [out, in] fp32; None where there is none."""
    before, after = (
        places[name].read(weights, device) for weights, places in zip(pair.weights, pair.places, strict=True)
    )
    difference = after.sub_(before)
    if not bool(torch.isfinite(difference).all()):
        raise UserError(f"{pair.weights[1].path}: {name} holds NaN or infinity; the checkpoint is damaged")
    return difference if bool(difference.any()) else None


def _lora(difference: Tensor, dim: int, random: torch.Generator) -> tuple[AdapterWeights, float]:
    """Return the closest LoRA, and the share of the difference that it keeps."""
    spectrum = decompose(difference, dim, random)
    rank = len(spectrum.values)
    return spectrum.lora(rank), spectrum.kept(rank)


def _lokr(difference: Tensor, dim: int, factor: int, random: torch.Generator) -> tuple[AdapterWeights, float]:
    """Return the closest LoKr, and the share of the difference that it keeps.

    What the product of w1 and the best w2 leaves is orthogonal to w1 (x) anything: shares multiply.
    """
    rows, columns = (min(factorization(size, factor)) for size in difference.shape)
    w1, w2 = nearest_kronecker(difference, rows, columns, random)
    whole = LokrWeights({"lokr_w1": w1, "lokr_w2": w2}, 1.0)
    kept = float((w1.double().norm() * w2.double().norm() / difference.double().norm()) ** 2)
    low, layer = smaller_lokr(whole, lambda values: min(dim, len(values)))
    return low, kept * layer.kept


def _other_differences(pair: _Pair) -> list[str]:
    """Return a remark if tensors that a LoRA cannot hold differ; only those of equal name can be compared."""
    layers = {place.tensor for places in pair.places for place in places.values()}
    before, after = (weights.entries for weights in pair.weights)
    differing = [
        name
        for name in before
        if name not in layers
        and name in after
        and not torch.equal(read_tensor(before, name).float(), read_tensor(after, name).float())
    ]
    if not differing:
        return []
    where, shown = pair.weights[1].path, names_in_short(differing, 3)
    return [f"{where}: also different, but not in the LoRA: {counted(len(differing), 'tensor')} ({shown})"]
