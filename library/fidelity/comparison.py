"""The deployed transformer beside the reference's: every layer, every tensor, and what putting tensors back explains.

The reference runs with its LoRA, the deployment's weights with the LoRA beside them (or inside, where the file has it),
on the calibration's images and noise levels. A set of tensors *explains* the share of the squared velocity error that
is gone once they are the reference's. With all of them put back nothing of the error may be left: what is left is not
in the weights, and nothing here knows what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from library.console import Console
from library.fidelity.calibration import Calibration
from library.fidelity.findings import Finding, costly_kinds, tensor_findings, with_lora_faults
from library.fidelity.layers import LayerRow, layer_row, linear_layers
from library.fidelity.serving import REFERENCE, Models, Variant, base_layer, numbers
from library.fidelity.tensors import TensorRow, compare_tensors, model_tensors, stored_dtypes, without_compensated
from library.precision.parity.layer_errors import replaced
from library.training.report.progress import Advance, counting
from networks.files.weights import AddedWeights
from networks.network import attach_lora

_IMAGES = 2  # that shares are measured on: tokens of one image differ more than images do
_COSTLY = 0.1  # share from which a kind that most keep in high precision is worth naming
_SENSITIVE, _ONE_LAYER = 4.0, 0.5  # times the median layer's output error, and the share of the whole that is its


@dataclass(frozen=True)
class Comparison:
    """The deployed transformer beside the reference's.

    Attributes:
        layers, tensors: in the model's order.
        findings: what is wrong with tensors; shares are of the weights' squared velocity error.
        explained: the share that every compared tensor together explains.
        input_scales: layer -> the static scale of its activations that the file has.
        used_scales: layer -> the scale that its activations are rounded to fp8 with, where it does not follow them.
        int8: rms of the layers' output errors as int8_convrot, over that as deployed; None where it is int8 already, or
            in high precision.
    """

    layers: Sequence[LayerRow]
    tensors: Sequence[TensorRow]
    findings: Sequence[Finding]
    explained: float
    input_scales: Mapping[str, float]
    used_scales: Mapping[str, float] = field(default_factory=dict)
    int8: float | None = None


def compare_models(models: Models, variant: Variant, calibration: Calibration, console: Console) -> Comparison:
    """Compare every tensor of the deployment with the reference's."""
    merged: Literal["no", "here", "in the file"] = "no" if variant.merge is None else "here"
    merged = "in the file" if models.deployed.merged else merged
    inside, updates = merged == "in the file", models.transformer_lora
    with models.transformer(REFERENCE) as reference:
        linears = linear_layers(reference)
        deployed = models.base(deployed=True)
        stored = stored_dtypes(models.deployed_family) if models.deployed.path else {}
        scales = {name: each.scale for name, each in models.served_inputs.items() if each.scale is not None}
        tensors = compare_tensors(reference, deployed, updates, inside, stored=stored, input_scales=scales)
        tensors = with_lora_faults(tensors, inside)
        weights = {row.layer: row for row in tensors if row.name.endswith(".weight")}
        served = models.merged_weights(variant) if merged == "here" else deployed
        expected = models.merged_updates(variant) if merged == "here" else updates
        rows: dict[str, LayerRow] = {}
        for group in calibration.layer_inputs(reference, linears):
            for name, inputs in group.items():
                high = numbers(base_layer(reference, name))
                layers = deployed.get_submodule(name), served.get_submodule(name)
                update = expected.get(name)
                rows[name] = layer_row(weights[name], high, *layers, inputs, update, merged)
        layers_in_order = [rows[name] for name in linears if name in rows]
        tensors = without_compensated(tensors, [row.name for row in layers_in_order if row.compensated])
        batches = [*calibration.check, *calibration.fit][:_IMAGES]
        del served
        if updates and not inside:
            attach_lora(deployed, updates, models.targets, "the LoRAs")
        high_tensors = dict(model_tensors(reference))
        target = _targets(high_tensors, updates if inside else {}, models.dtype)

        def left(names: Iterable[str]) -> float:
            with replaced(deployed, {name: target(name) for name in names}):
                found = calibration.velocities(deployed, batches)
            return float((found - wanted).double().square().sum())

        wanted = calibration.velocities(reference, batches)
        whole = left(())
        names = [row.name for row in tensors if row.name in high_tensors]
        faults = tensor_findings(tensors)
        choices = [*costly_kinds(tensors), *_sensitive(layers_in_order, faults)]
        sets = [_tensors_of(finding.layers, names) for finding in (*faults, *choices)]
        with counting(console) as progress:
            advance = progress("putting tensors back", 1 + len(sets))
            explained, *shares = [_share(left, each, whole, advance) for each in (names, *sets)]
    named = [replace(finding, share=share) for finding, share in zip((*faults, *choices), shares, strict=True)]
    kept = named[: len(faults)] + [
        choice
        for choice in named[len(faults) :]
        if choice.share >= (_ONE_LAYER if choice.cause == "sensitive_layer" else _COSTLY)
    ]
    static = {name: float(scale.max()) for name, scale in scales.items()}
    how = models.roundings(variant).items()
    used = {
        name: 1.0 if each.scale is None else float(each.scale) for name, each in how if each.how in ("unit", "static")
    }
    return Comparison(layers_in_order, tensors, kept, explained, static, used, _as_int8(layers_in_order))


def _as_int8(rows: Sequence[LayerRow]) -> float | None:
    """Return how large the quantised layers' output errors would be as int8_convrot, over those there are."""
    pairs = [(row.as_int8, row.output_error) for row in rows if row.as_int8 is not None]
    whole = sum(output_error**2 for _, output_error in pairs)
    return math.sqrt(sum((share * output_error) ** 2 for share, output_error in pairs) / whole) if whole else None


def _sensitive(rows: Sequence[LayerRow], faults: Sequence[Finding]) -> list[Finding]:
    """Return a finding for the layer that errs far more than the others, though nothing is wrong with its numbers."""
    faulty = {name.removesuffix(".weight") for finding in faults for name in finding.layers}
    rounded = [row for row in rows if row.output_error > 0 and row.name not in faulty]
    if not rounded:
        return []
    worst, usual = max(rounded, key=lambda row: row.output_error), median(row.output_error for row in rounded)
    if worst.output_error < _SENSITIVE * usual:
        return []
    text = f"{worst.name} errs by {worst.output_error:.1%} of its output, the median layer by {usual:.1%}"
    return [Finding("sensitive_layer", math.nan, (worst.name,), text)]


def _targets(
    high: Mapping[str, Tensor], inside: Mapping[str, AddedWeights], dtype: torch.dtype
) -> Callable[[str], Tensor]:
    """Return what gives a tensor as it should be served, in the dtype of the products."""

    def target(name: str) -> Tensor:
        tensor, update = high[name], inside.get(name.removesuffix(".weight"))
        if update is not None and name.endswith(".weight"):
            tensor = tensor.float() + update.delta().to(tensor.device)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return target


def _share(left: Callable[[Iterable[str]], float], names: Sequence[str], whole: float, advance: Advance) -> float:
    share = 1 - left(names) / whole if whole else 1.0
    advance(1)
    return share


def _tensors_of(layers: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the tensors called ``layers``, or inside of modules that are."""
    wanted = set(layers)
    return [name for name in names if name in wanted or any(name.startswith(f"{each}.") for each in wanted)]
