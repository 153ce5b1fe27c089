"""Every tensor of the deployed model beside the reference's, and what was done to those that are not just rounded.

Every tensor is measured by itself: its error, what rounding to nearest in its format costs, which share of the LoRA's
update is in it, and whether it is an honest rounding on its own grid (``ServedMatrix.fits``). What is none is diagnosed
against candidates made from the reference. All rows together say only two things: which format most weights have, so
that a much coarser one is named, and whether the file is a dequantised copy, whose small layers show their grid badly.

What a LoRA left in a weight is ``<S - W, D> / <D, D>`` for the served weight S, the reference's W as rounded without
it, and the update D. Rounding's noise, of rms s a number, moves it by ``s / |D|``: small layers are known badly, and
only what is beyond five times that is believed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

from library.errors import names_in_short
from library.fidelity.grids import (
    EITHER_NEIGHBOUR,
    SURE,
    distinct,
    errs_like,
    on_own_grid,
    relative,
    seen_grid,
)
from library.fidelity.rounding_laws import TWO_ROUNDINGS, ServedMatrix, same_in_bf16
from library.fidelity.serving import round_like, rounded, rounds
from library.fidelity.transformations import diagnose
from library.fidelity.updates import moved_update, share_in, with_merge
from library.models.family import Family
from library.precision.checkpoint import WeightFiles
from library.precision.files.base import QuantizedWeight, Scheme
from library.precision.files.fp8 import Fp8Weight
from library.precision.fp8_numbers import FORMATS
from library.precision.linear import QuantizedLinear
from library.precision.parity.layer_errors import update_retention
from library.randomness import generator
from networks.files.weights import AddedWeights

Role = Literal["weight", "bias", "norm", "scale", "input_scale", "buffer"]

_GRID = 0.97  # distinct numbers in 32 neighbours, over the reference's; bf16 of another model has 1.0, 8 bits 0.93
_SEARCHED = 2.0  # times the plain rule's rounding; scales that ggml searched with an importance matrix have 1.35
_CANNOT_TELL = 0.01  # error from which it is said that a grid is too fine to tell
_COARSER = 1.5  # times what the main format costs; e5m2 has 2, another granularity at most 1.2
_SHARE = 0.05  # of the update, from which it is worth a word
_IN_BF16 = 0.004  # relative error of bf16's rounding, with a margin


@dataclass(frozen=True)
class TensorRow:
    """One tensor of the deployment against the reference's.

    Attributes:
        name: diffusers' name of the parameter. role: what it is. size: numbers in it.
        kind: how its numbers are stored, in words: "e4m3fn row", "BF16", "F32, on the grid of e4m3fn cast".
        error: |deployed - reference| / |reference|, the LoRA's update counted in where it came merged.
        expected: the same of rounding to nearest in the format that most of the deployment's weights have.
        own_expected: the same in its own format.
        lora_share: of the LoRA's update that is in it; None without a LoRA for it. lora_doubt: its standard error.
        lora_kept: what rounding to nearest would leave of the update in a merge into the weight's own numbers.
        lora_dithered: the same of stochastic rounding: nvfp4 clips a little of it at the largest number of a block.
        lora_at_share: it is the reference with that share of the update, rounded once; and not with all of it.
        fault: the cause it shows, a key of ``CAUSES``; empty where nothing is wrong.
        diagnosis: what was done to it, in words.
    """

    name: str
    role: Role
    kind: str
    size: int
    error: float
    expected: float = 0.0
    own_expected: float = 0.0
    lora_share: float | None = None
    lora_doubt: float | None = None
    lora_kept: float | None = None
    lora_dithered: float | None = None
    lora_at_share: bool = False
    fault: str = ""
    diagnosis: str = ""

    @property
    def layer(self) -> str:
        """The module it belongs to."""
        return self.name.rpartition(".")[0]

    @property
    def doubt(self) -> float:
        """The standard error of a share that is known."""
        assert self.lora_doubt is not None
        return self.lora_doubt


def compare_tensors(
    reference: nn.Module,
    deployed: nn.Module,
    updates: Mapping[str, AddedWeights],
    merged: bool,
    *,
    stored: Mapping[str, str] | None = None,
    input_scales: Mapping[str, Tensor] | None = None,
) -> list[TensorRow]:
    """Return a row for every tensor of ``reference``, in its order; scales follow their weights.

    Args:
        reference: the high-precision transformer, with or without its LoRA beside it.
        deployed: as the file has it, nothing merged here.
        updates: module -> the LoRA's weights at full strength.
        merged: the LoRA is in the file already.
        stored: name -> dtype in the file, see :func:`stored_dtypes`.
        input_scales: layer -> scale of its activations, of the file.
    """
    places, served = _places(reference), _places(deployed)
    stored, input_scales = stored or {}, input_scales or {}
    rows: list[TensorRow] = []
    pairs: dict[str, _Pair] = {}
    schemes: dict[str, Scheme] = {}
    compared: dict[str, partial[tuple[TensorRow, Scheme | None]]] = {}
    for name, place in places.items():
        if name not in served or served[name].shape != place.shape:
            row = TensorRow(name, place.role, "absent", place.size, 1.0, fault="wrong_base", diagnosis="of other shape")
            rows.append(row)
            continue
        update = updates.get(place.layer) if name.endswith(".weight") else None
        pairs[name] = _Pair(place, served[name], update, merged)
        beside = {layer: update for layer, update in updates.items() if layer != place.layer}
        compared[name] = partial(
            _compared, pairs[name], stored.get(name, ""), partial(_same_shape, places, place), beside
        )
        row, scheme = compared[name]()
        rows.append(row)
        if scheme is not None and row.own_expected:
            schemes[row.kind] = scheme
        rows += _scale_rows(pairs[name], input_scales.get(place.layer))
    errors: dict[str, list[float]] = {}
    for row in rows:
        if row.own_expected and not row.fault:
            errors.setdefault(row.kind, []).append(row.error)
    for number, row in enumerate(rows):
        small = row.role == "weight" and row.fault and not row.own_expected and row.kind in errors
        if small and row.error <= _COARSER * median(errors[row.kind]):
            rows[number], _ = compared[row.name](on_grid=True)
    main = _main_kind([row for row in rows if row.kind in schemes])
    rows = [_beside_most(row, pairs[row.name], schemes, main) if row.own_expected else row for row in rows]
    added = [place for name, place in served.items() if name not in places]
    return [*rows, *(TensorRow(place.name, place.role, "only here", place.size, 1.0) for place in added)]


def without_compensated(rows: Sequence[TensorRow], layers: Collection[str]) -> list[TensorRow]:
    """Return ``rows`` without the faults of ``layers`` whose outputs err less than rounding to nearest would make them.

    Rounding that makes up for errors by activations (GPTQ) changes weights by more than a step; damage never helps.
    """
    diagnosis = "changed by more than rounding, and its outputs err less for it"
    of_weights = {f"{layer}.weight" for layer in layers}
    return [
        replace(row, fault="", diagnosis=diagnosis) if row.name in of_weights and row.fault else row for row in rows
    ]


def stored_dtypes(family: Family) -> dict[str, str]:
    """Return parameter -> dtype that it has in the transformer's file, in safetensors' words."""
    weights = WeightFiles(family.files.transformer)
    key_map = family.layout.key_map(weights, family.files.prefix)
    return {name: weights.entries[ranges[0].source].dtype for name, ranges in key_map.items() if ranges}


@dataclass(frozen=True)
class _Place:
    """A parameter or buffer of a model: where it is, and its numbers on request."""

    name: str
    module: Any
    leaf: str
    role: Role

    @property
    def tensor(self) -> Tensor:
        """As it is kept."""
        kept = self.module._parameters.get(self.leaf)
        return (self.module._buffers[self.leaf] if kept is None else kept).detach()

    @property
    def shape(self) -> tuple[int, ...]:
        """Its own shape, whatever holds its numbers."""
        return tuple(self.tensor.shape if self.quantized_weight is None else self.quantized_weight.shape)

    @property
    def layer(self) -> str:
        """The module it belongs to."""
        return self.name.rpartition(".")[0]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def quantized_weight(self) -> QuantizedWeight | None:
        """The weight of a quantised layer, where it is."""
        return self.module.quantized() if isinstance(self.module, QuantizedLinear) and self.leaf == "weight" else None

    @property
    def numbers(self) -> Tensor:
        """Its numbers, those of a quantised weight in fp32."""
        return self.tensor if self.quantized_weight is None else self.quantized_weight.dequantize(torch.float32)

    @property
    def stored(self) -> QuantizedWeight | None:
        """The weight of a quantised layer on the CPU, as :meth:`matrix` is."""
        return None if self.quantized_weight is None else self.quantized_weight.to("cpu")

    def matrix(self) -> Tensor:
        """Return the numbers in fp32 on the CPU, [out, rest]; a vector is one row."""
        numbers = self.numbers.float()
        return numbers.cpu().reshape(1 if numbers.ndim < 2 else numbers.shape[0], -1)


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer as numbers; a LoRA beside a layer is left out, what is quantised turned back."""
    for place in _walk(model, ""):
        yield place.name, place.numbers


def _places(model: nn.Module) -> dict[str, _Place]:
    return {place.name: place for place in _walk(model, "")}


def _walk(module: Any, prefix: str) -> Iterator[_Place]:
    """Yield parameters and buffers; a LoRA, or a rounding of inputs, around a layer is left out."""
    while isinstance(getattr(module, "base", None), nn.Module):
        module = module.base
    quantized_weight = module.outline.tensors() if isinstance(module, QuantizedLinear) else {}
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None or name in quantized_weight:
            continue
        role: Role = "weight"
        if name in module._buffers:
            role = "buffer"
        elif tensor.ndim < 2 and not (quantized_weight and name == "weight"):
            role = "bias" if name.endswith("bias") else "norm"
        yield _Place(f"{prefix}{name}", module, name, role)
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.")


def _same_shape(places: Mapping[str, _Place], like: _Place) -> dict[str, Tensor]:
    found = {name: place for name, place in places.items() if place.shape == like.shape and place.role == like.role}
    return {
        name: place.tensor.reshape(1 if like.tensor.ndim < 2 else like.shape[0], -1) for name, place in found.items()
    }


@dataclass(frozen=True)
class _Pair:
    """A tensor of the reference, and the one of its name and shape that is deployed.

    ``update``: the LoRA's of it, if there is one. ``merged``: the LoRA is in the deployed file.
    """

    reference: _Place
    deployed: _Place
    update: AddedWeights | None
    merged: bool

    def matrices(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return the reference, what is deployed, the update if there is one, and what should be deployed."""
        high, delta = self.reference.matrix(), None if self.update is None else self.update.delta().cpu().float()
        return high, self.deployed.matrix(), delta, high + delta if delta is not None and self.merged else high

    @property
    def holds_update(self) -> bool:
        """Whether the update should be in the deployed tensor."""
        return self.merged and self.update is not None


def _compared(
    pair: _Pair,
    dtype: str,
    others: Callable[[], Mapping[str, Tensor]],
    updates: Mapping[str, AddedWeights],
    on_grid: bool = False,
) -> tuple[TensorRow, Scheme | None]:
    """Measure one tensor, and say what was done to it if that is not just rounding.

    Args:
        pair: the tensor twice.
        dtype: its numbers' in the file, empty where that is as it is kept.
        others: gives the reference's tensors of its shape. updates: the LoRA's of other layers.
        on_grid: others of the file are dequantised, and err as much: a small one shows its grid badly.

    Returns:
        The row, and the scheme of its format, where something rounds to it.
    """
    place, (high, numbers, delta, wanted) = pair.reference, pair.matrices()
    dtype = dtype or str(pair.deployed.tensor.dtype).removeprefix("torch.")
    row = TensorRow(place.name, place.role, dtype, high.numel(), relative(numbers, wanted))
    if delta is None and same_in_bf16(numbers, wanted):
        return row, None
    if not bool(torch.isfinite(numbers).all()):
        return _diagnosed(replace(row, error=1.0), ServedMatrix(numbers), wanted, others), None
    served, fresh = _served(pair, numbers, high, wanted, on_grid)
    row = replace(row, kind=_kind(pair, dtype, served), own_expected=served.expected)
    if delta is not None and bool(delta.any()):
        row = _with_share(row, served, high, delta, pair.merged)
    scheme = served.stored.scheme if served.stored is not None and rounds(served.stored) else None
    if served.fits(wanted, high if pair.holds_update else None):
        row = _judged_by_format(row, served, wanted, fresh)
        if row.fault != "mixed_formats":
            return row, scheme
    if delta is not None and row.lora_share is not None and abs(row.lora_share - pair.merged) > SURE * row.doubt:
        served = replace(served, merged=scheme is not None)
        named, as_found = _by_its_update(row, served, high, delta, pair.merged, updates)
        if named is not None:
            return named, scheme
        wanted = wanted if pair.merged else as_found
        served = replace(served, merged=pair.holds_update or (not pair.merged and scheme is not None))
    return _diagnosed(row, served, wanted, others), scheme


def _served(pair: _Pair, numbers: Tensor, high: Tensor, wanted: Tensor, on_grid: bool) -> tuple[ServedMatrix, Tensor]:
    """Return the deployed matrix with the grid that it lies on, and what should be there as its format rounds it."""
    stored, seen = pair.deployed.stored or _on_a_casts_grid(numbers), None
    if stored is None and pair.reference.role == "weight" and not same_in_bf16(numbers, wanted):
        shown = distinct(numbers, 32) < _GRID * distinct(high.bfloat16(), 32)
        seen = seen_grid(numbers) if on_grid or shown else None
    fresh = rounded(stored, wanted) if seen is None else seen.on_grid(wanted)
    return ServedMatrix(numbers, stored, seen, relative(fresh, wanted), pair.holds_update), fresh


def _kind(pair: _Pair, dtype: str, served: ServedMatrix) -> str:
    if served.stored is None:
        return dtype
    if served.fp8 is None:
        return served.stored.scheme.describe()
    kind = f"{served.fp8.fp8.name} {served.fp8.granularity}"
    return kind if pair.deployed.stored is not None else f"{dtype}, on the grid of {kind}"


def _with_share(row: TensorRow, served: ServedMatrix, high: Tensor, delta: Tensor, merged: bool) -> TensorRow:
    """Add what is in the weight of its LoRA's update ``delta``."""
    numbers, stored = served.numbers, served.stored
    base = high if stored is None else on_own_grid(stored, high)
    found = share_in(numbers, high, base, delta, row.own_expected)
    dithered = None
    if merged:
        found = with_merge(found, numbers, high, base, delta, partial(on_own_grid, stored) if stored else _in_bf16)
        dithered = _dithered(stored, base, delta) if stored is not None and rounds(stored) else None
    return replace(
        row,
        lora_share=found.share,
        lora_doubt=found.doubt,
        lora_kept=found.kept,
        lora_at_share=found.once,
        lora_dithered=dithered,
    )


def _judged_by_format(row: TensorRow, served: ServedMatrix, wanted: Tensor, fresh: Tensor) -> TensorRow:
    """Name what is wrong with an honest rounding on its own grid: the format, or scales that make it too coarse."""
    vector = row.role != "weight" or len(wanted) == 1
    if vector and served.fp8 is not None:
        return replace(row, fault="small_in_fp8", diagnosis=f"rounded to {served.fp8.fp8.name}")
    most = TWO_ROUNDINGS if served.merged else EITHER_NEIGHBOUR if rounds(served.stored) else _SEARCHED
    if served.stored is not None and not errs_like(served.numbers, fresh, wanted, most):
        times = row.error / row.own_expected if row.own_expected else math.inf
        text = f"rounded {times:.1f} times as coarsely as {row.kind} has to"
        return replace(row, fault="mixed_formats", diagnosis=text)
    if served.seen is not None and served.seen.too_fine and row.error > _CANNOT_TELL:
        return replace(row, diagnosis=f"on a fine grid that is not known: {row.error:.1%} cannot be told from rounding")
    return row


def _diagnosed(
    row: TensorRow, served: ServedMatrix, wanted: Tensor, others: Callable[[], Mapping[str, Tensor]]
) -> TensorRow:
    """Say what was done to it; where that is not known, what was said already."""
    fault, text = diagnose(served, wanted, others, row.name)
    return row if row.fault and fault == "ruined_layer" else replace(row, fault=fault, diagnosis=text)


def _dithered(stored: QuantizedWeight, base: Tensor, delta: Tensor) -> float:
    """Return what stochastic rounding in the format of ``stored`` leaves of ``delta`` in a merge into ``base``."""
    made = round_like(stored, base + delta, "stochastic", generator("dithered", delta.numel()))
    return update_retention(made.dequantize(torch.float32), base, delta).gain


def _in_bf16(numbers: Tensor) -> Tensor:
    return numbers.bfloat16().float()


def _on_a_casts_grid(numbers: Tensor) -> Fp8Weight | None:
    """Return the numbers as fp8 if that changes none of them: a plain cast's, kept in a wider dtype."""
    for fp8 in FORMATS:
        values = numbers.to(fp8.dtype)
        if float(numbers.abs().amax()) <= fp8.max and torch.equal(values.float(), numbers):
            return Fp8Weight(values, None)
    return None


def _main_kind(rows: Sequence[TensorRow]) -> str:
    """Return the kind that most quantised weights have, the finer of two that are as common; empty without any."""
    counts = Counter(row.kind for row in rows if row.role == "weight")
    return max(counts, key=lambda kind: (counts[kind], "e4m3fn" in kind), default="")


def _beside_most(row: TensorRow, pair: _Pair, schemes: Mapping[str, Scheme], main: str) -> TensorRow:
    """Add what the format of most weights, ``main``, would cost, and name one that is much coarser."""
    expected, wanted = row.own_expected, pair.matrices()[3] if row.kind in schemes and row.kind != main else None
    if wanted is not None and row.role == "weight" and len(wanted) > 1:
        fitting = schemes[main].fitting(wanted.shape)
        expected = relative(fitting.quantize(wanted).dequantize(torch.float32), wanted) if fitting else 0.0
    row = replace(row, expected=expected)
    if row.fault or row.own_expected <= _COARSER * expected + 1e-3:
        return row
    times = row.own_expected / expected if expected else math.inf
    text = f"in {row.kind}, which errs {times:.1f} times what {main} would"
    return replace(row, fault="mixed_formats", diagnosis=text)


def _by_its_update(
    row: TensorRow,
    served: ServedMatrix,
    high: Tensor,
    delta: Tensor,
    merged: bool,
    updates: Mapping[str, AddedWeights],
) -> tuple[TensorRow | None, Tensor]:
    """Return the row if what is wrong with it is which update it holds, or how much of it; and that sum."""
    numbers = served.numbers
    if merged and (moved := moved_update(numbers - high, delta, updates)):
        cause, words, held = moved
        if served.fits(high + held) or relative(numbers, high + held) < _IN_BF16:
            return replace(row, fault=cause, diagnosis=words), high + held
    found = share_in(numbers, high, high, delta, row.own_expected)
    as_found = high + found.share * delta
    gained = found.gain * as_found
    if relative(numbers, gained) > _IN_BF16 and not served.fits(gained):
        return None, as_found
    if found.gain == 1:
        return row, as_found
    words = f"times {found.gain:.3g}"
    if abs(found.share - merged) > _SHARE:
        words = f"{words}, and holds {found.share:.2f} of the update"
    return replace(row, fault="wrong_scale", diagnosis=words), as_found


def _scale_rows(pair: _Pair, input_scale: Tensor | None) -> list[TensorRow]:
    """Return rows of a layer's scales; one that is not the reference's own is no fault while the numbers are right."""
    rows, place = [], pair.reference
    quantized = pair.deployed.quantized_weight
    if isinstance(quantized, Fp8Weight) and quantized.scale is not None:
        scale = quantized.factors.cpu()
        fresh = quantized.scheme.steps(quantized.scheme.magnitudes(place.matrix()))
        error = relative(scale, fresh) if fresh is not None else 0.0
        short = bool(torch.equal(scale.bfloat16().float(), scale))
        kind = f"{'bfloat16' if short else 'float32'}, {quantized.granularity}"
        rows.append(_scale_row(place.layer, "scale", kind, scale, error, "wrong_scale"))
    if input_scale is not None and place.name.endswith(".weight"):
        kind = f"{float(input_scale.float().mean()):.3g}"
        rows.append(_scale_row(place.layer, "input_scale", kind, input_scale, 0.0, "activation_scale"))
    return rows


def _scale_row(layer: str, role: Role, kind: str, scale: Tensor, error: float, fault: str) -> TensorRow:
    row = TensorRow(f"{layer}.{role}", role, kind, scale.numel(), error)
    if bool((torch.isfinite(scale) & (scale > 0)).all()):
        return row
    return replace(row, fault=fault, diagnosis="zero, negative or not finite")


def module_difference(reference: nn.Module, deployed: nn.Module) -> str:
    """Say how ``deployed`` differs from ``reference``, two modules of one class; nothing where they are the same."""
    expected, found = _places(reference), _places(deployed)
    strange = [
        name
        for name in {**expected, **found}
        if name not in expected or name not in found or expected[name].shape != found[name].shape
    ]
    if strange:
        return f"another architecture ({names_in_short(strange)}: absent in one of the two, or of another shape)"
    casts: Counter[str] = Counter()
    ranks: list[str] = []
    others: list[tuple[float, str, str]] = []
    for name, place in expected.items():
        high, numbers = place.matrix(), found[name].matrix()
        if torch.equal(numbers, high):
            continue
        served = ServedMatrix(numbers, found[name].stored or _on_a_casts_grid(numbers))
        if served.fits(high):
            casts[_cast_of(served)] += 1
            continue
        fault, text = diagnose(served, high)
        others.append((relative(numbers, high), name, text))
        ranks += [name] if fault == "other_lora" else []
    tensors = len(expected)
    rounded_to = f"rounded to {casts.most_common(1)[0][0]}" if casts else ""
    if not others:
        return f"{casts.total()} of {tensors} tensors {rounded_to}" if casts else ""
    worst, name, text = max(others)
    what = f"{len(others)} of {tensors} tensors are not the reference's ({name}: {text})"
    if len(ranks) > 0.5 * len(others):
        what = f"{len(ranks)} of {tensors} tensors differ by a LoRA's few directions, {worst:.1%} at most ({name})"
    elif len(others) > 0.5 * tensors:
        middle = median(one for one, _, _ in others)
        what = f"another file: {len(others)} of {tensors} tensors differ, in the median by {middle:.1%}"
    return f"{what}; {casts.total()} more are {rounded_to}" if casts else what


def _cast_of(served: ServedMatrix) -> str:
    if served.stored is not None:
        return served.fp8.fp8.name if served.fp8 is not None else served.stored.scheme.describe()
    in_bf16 = torch.equal(served.numbers, _in_bf16(served.numbers))
    return "bfloat16" if in_bf16 else "float16"
