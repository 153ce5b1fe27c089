"""A LoRA that was trained in bf16, refitted to the quantised model that it will be used with, without training.

Each layer's factors are fitted so that on the calibration the served layer with the new LoRA computes what the bf16
layer computed with the old one, as nearly as that rank allows (``networks.merging.refit``). Layers that share A in a
fused file (sd-scripts' qkv) are fitted as one and keep sharing it. What it costs: one forward of the served model for
each image and noise level and for each group of layers whose statistics fit into memory, and one reading of both files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import nn

from library.console import Console, plain_table
from library.errors import UserError, counted, names_in_short
from library.fidelity.calibration import CalibrationOptions
from library.fidelity.serving import Models, base_layer, numbers, rounded
from library.models.layer_names import LoraTargets
from library.precision.checkpoint import WeightFiles
from networks.files.adapters import LoraFile, load_lora
from networks.files.base import BaseModule, find_modules, open_base
from networks.files.layouts import PRECISIONS
from networks.files.metadata import base_mismatch
from networks.files.weights import LoraWeights
from networks.files.writing import AS_THE_SOURCES, SavedAs, save_derived_lora, widest_precision
from networks.merging.refit import Refit, refit_layer
from networks.network import attach_lora

_LOOKED_AT, _ANOTHER_MODEL = 8, 3.0  # layers; times what rounding to nearest costs


def refit_lora(
    lora: Path,
    models: Models,
    save_to: Path,
    options: CalibrationOptions,
    console: Console,
    *,
    correction_rank: int = 0,
    saved_as: SavedAs = AS_THE_SOURCES,
) -> dict[str, Refit]:
    """Refit ``lora``, which was trained on the reference, to the deployed model; return the layers' fits by name.

    Args:
        lora: of any layout.
        models: the bf16 model, and the file that is served, or a recipe.
        save_to: the file to write.
        options: what both run on.
        console: for notes.
        correction_rank: is added to the rank of every quantised layer; layers without a LoRA get one of that rank.
        saved_as: layout and precision of the file.
    """
    if correction_rank < 0:
        raise UserError(f"--correction_rank {correction_rank}: is negative; give 0 or more")
    targets, deployed = models.targets, models.deployed
    source = load_lora(lora, targets)
    base, places = _reference(models)
    trained = targets.by_component(source.weights).get(targets.file_prefix, {})  # text encoders stay as they are
    if absent := sorted(trained.keys() - places.keys()):
        raise UserError(
            f"{lora}: {names_in_short(absent)} are not in {models.config.pretrained_model_name_or_path}; wrong model?"
        )
    if remark := base_mismatch(source.metadata, models.family.fingerprint()):
        console.print(f"note: {lora}: {remark}")
    quantised = _quantised_layers(models, places)
    fitted_loras = {name: weights for name, weights in trained.items() if name in quantised}
    units = _units(fitted_loras, quantised if correction_rank else [], targets)
    if not units:
        raise UserError(f"{lora}: none of its layers is quantised in {deployed.name}; it fits as it is")

    calibration = models.plan(options).prepare(console, textures=True)
    transformer = models.base(deployed=True)
    console.print(f"deployed: {deployed.name}: {models.base_precision}")
    _refuse_another_model(models, transformer, base, {unit[0]: places[unit[0]] for unit in units})
    if trained:
        attach_lora(transformer, trained, targets, str(lora))
    precision = saved_as.precision or widest_precision(source.weights)
    fits: dict[str, Refit] = {}
    fitted: dict[str, LoraWeights] = {}
    for group in calibration.layer_inputs(transformer, [name for unit in units for name in unit], held_out=True):
        for unit in (unit for unit in units if unit[0] in group):
            device = group[unit[0]].moment.device
            high = torch.cat([places[name].read(base, device) for name in unit])  # [out of all, in]
            low = torch.cat([numbers(base_layer(transformer, name)).to(device) for name in unit])
            joined = _joined([trained[name] for name in unit], device) if unit[0] in trained else None
            done = refit_layer(
                joined, high, low, group[unit[0]], correction_rank=correction_rank, dtype=PRECISIONS[precision]
            )
            fits[" + ".join(unit)] = done
            if done.weights is not None:
                fitted |= _split(done.weights, {name: places[name].shape[0] for name in unit})
        console.print(f"{len(fits)} of {counted(len(units), 'layer')} fitted")
    metadata, comment = _metadata(lora, source, models, correction_rank, options, fits), f"refitted to {deployed.name}"
    save_derived_lora(
        save_to, source.weights | fitted, targets, metadata, comment, [source], SavedAs(saved_as.save_format, precision)
    )
    console.print(f"{save_to}: {counted(len(fitted), 'layer')} fitted to {deployed.name}")
    return fits


def refit_table(fits: Mapping[str, Refit], shown: int) -> Table:
    """Return layers by falling error before.

    In per cent of the layer's output, on held-out images: the LoRA's own effect, the error before and after.
    """
    table = plain_table("layer", "rank", "effect %", "before %", "after %", "less %", "fitted", left=["fitted"])

    def shares(before: float, after: float) -> tuple[str, str, str]:
        less = f"{100 * (1 - after / before):.0f}" if before else "-"
        return f"{100 * before:.3g}", f"{100 * after:.3g}", less

    order = sorted(fits, key=lambda name: -fits[name].before)
    for name in order[:shown]:
        fit = fits[name]
        rank = str(fit.weights.rank) if fit.weights else "-"
        table.add_row(name, rank, f"{100 * fit.effect:.3g}", *shares(fit.before, fit.after), fit.method)
    if len(order) > shown:
        table.add_row(f"and {len(order) - shown} more", *[""] * 6)
    before, after = (sum(getattr(fit, key) for fit in fits.values()) / len(fits) for key in ("before", "after"))
    kept = sum(fit.method == "kept" for fit in fits.values())
    table.add_section()
    table.add_row("mean of all layers", "", "", *shares(before, after), f"{len(fits) - kept} of {len(fits)}")
    return table


def _reference(models: Models) -> tuple[WeightFiles, dict[str, BaseModule]]:
    """Return the bf16 model's file, and where in it the layers lie.

    Raises:
        UserError: it is quantised.
    """
    path = models.config.pretrained_model_name_or_path
    if models.family.quantized_file() is not None:
        raise UserError(f"--model {path}: is quantised; give the bf16 model that the LoRA was trained on")
    base = open_base(Path(path).expanduser(), "--model").weights
    return base, find_modules(base, models.targets.keys, models.targets.family)


def _refuse_another_model(
    models: Models, transformer: nn.Module, base: WeightFiles, places: Mapping[str, BaseModule]
) -> None:
    """Refuse to fit to what is not the reference rounded: the LoRA would learn to undo a distillation, layer by layer.

    A few layers are looked at; rounding that makes up for its own errors is at most half as far off again as rounding
    to nearest.

    Raises:
        UserError: the deployed weights are another model's.
    """
    names = [*places][:: max(1, len(places) // _LOOKED_AT)]
    times, off = [], []
    for name in names:
        layer: Any = transformer.get_submodule(name)
        low = numbers(layer)
        high = places[name].read(base, low.device).float()
        rounding = float((rounded(layer.quantized(), high) - high).norm())
        off.append(float((low - high).norm() / high.norm()))
        times.append(off[-1] * float(high.norm()) / rounding if rounding else 1.0)
    if median(times) > _ANOTHER_MODEL:
        path = models.config.pretrained_model_name_or_path
        raise UserError(
            f"--deploy {models.deployed.name}: its weights are {median(off):.0%} off from {path}, {median(times):.0f} "
            "times what rounding costs: another model, distilled perhaps; give its own bf16 weights as --model, and "
            "see docs/distilled.md"
        )


def _quantised_layers(models: Models, high: Mapping[str, BaseModule]) -> list[str]:
    """Return those of the linear layers ``high`` that the deployed model has quantised; nothing is loaded."""
    deployed, targets = models.deployed, models.targets
    if deployed.path is None:
        recipe = deployed.recipe
        return [name for name, place in high.items() if recipe and recipe.scheme_of(name, place.shape)]
    weights = open_base(deployed.path, "--deploy", quantized=True).weights
    places = find_modules(weights, targets.keys, targets.family)
    return [name for name in high if weights.quantized is not None and places[name].tensor in weights.quantized.weights]


def _units(lora: Mapping[str, LoraWeights], extra: Sequence[str], targets: LoraTargets) -> list[list[str]]:
    """Return the layers that are fitted as one, by name: those that share A in a fused file, others are alone."""
    found: list[list[str]] = []
    for name, weights in lora.items():
        place = targets.keys.find(name)
        for unit in found:
            first, other = lora[unit[0]], targets.keys.find(unit[0])
            fused = place is not None and other is not None and place.original == other.original
            if fused and first.alpha == weights.alpha and torch.equal(first.down, weights.down):
                unit.append(name)
                break
        else:
            found.append([name])
    return [*found, *([name] for name in extra if name not in lora)]


def _joined(loras: Sequence[LoraWeights], device: torch.device) -> LoraWeights:
    """Return the update of layers that share A, one below the other."""
    first = loras[0]
    return LoraWeights(first.down.to(device), torch.cat([lora.up for lora in loras]).to(device), first.alpha)


def _split(weights: LoraWeights, rows: Mapping[str, int]) -> dict[str, LoraWeights]:
    """Return layer -> its part of an update of ``rows`` of each, with the same A."""
    down, ups = weights.down.cpu(), weights.up.cpu().split(list(rows.values()))
    return {name: LoraWeights(down, up.contiguous(), weights.alpha) for name, up in zip(rows, ups, strict=True)}


def _metadata(
    lora: Path,
    source: LoraFile,
    models: Models,
    correction_rank: int,
    options: CalibrationOptions,
    fits: Mapping[str, Refit],
) -> dict[str, str]:
    """Return the source's metadata with what the file is for now, and how it was made."""
    made = {
        "lora": lora.name,
        "base_fingerprint": source.metadata.get("tandem.base_fingerprint"),
        "correction_rank": correction_rank,
        "calibration_images": options.images,
        "calibration_sigmas": list(options.sigmas),
        "seed": options.seed,
        "mean_error_before": sum(fit.before for fit in fits.values()) / len(fits),
        "mean_error_after": sum(fit.after for fit in fits.values()) / len(fits),
    }
    return source.metadata | {
        "tandem.base_fingerprint": models.deployed_family.fingerprint(),
        "tandem.base_precision": models.base_precision,
        "tandem.base_name": models.deployed.name,
        "tandem.refitted": json.dumps(made),
    }
