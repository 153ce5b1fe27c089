"""A LoRA that was trained in bf16, refitted to the fp8 model it will be used with: no training, the same file format.

Each layer's factors are fitted so that on the calibration the fp8 layer with the new LoRA computes what the bf16 layer
computed with the old one, as nearly as that rank allows (``networks.merging.refit``). Layers that share A in a fused
file (sd-scripts' qkv) are fitted as one and keep sharing it. What it costs: one forward pass of the fp8 model for each
image and noise level and for each group of layers whose statistics fit into memory, and one reading of both files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from library.errors import UserError
from library.models.family import Family, model_family, with_transformer
from library.models.layer_names import LoraTargets
from library.precision.checkpoint_layouts import Fp8Layout, WeightFiles
from library.precision.parity.activations import LayerInputs
from library.precision.recipe import Fp8Loader, Fp8Recipe
from library.training.fidelity.calibration import CalibrationPlan
from library.training.fidelity.deployments import DeployedWeights
from library.training.report.progress import plain_table
from library.training.tasks.lora_plan import describe_base
from networks.files.adapters import PRECISIONS, LoraFile, load_lora, save_derived_lora, widest_precision
from networks.files.base import BaseModule, find_modules, open_base
from networks.files.metadata import base_mismatch
from networks.files.weights import LoraWeights, names_in_short
from networks.injection import attach_lora
from networks.merging.refit import Refit, refit_layer


@dataclass(frozen=True)
class _Weights:
    """The linear weights of a model on disk, read one at a time."""

    places: Mapping[str, BaseModule]
    weights: WeightFiles

    @classmethod
    def of(cls, path: Path, option: str, targets: LoraTargets) -> _Weights:
        weights = open_base(path, option, fp8=True).weights
        return cls(find_modules(weights, targets.keys, targets.family), weights)

    def read(self, names: Sequence[str], device: torch.device) -> Tensor:
        """Return the weights of ``names``, one below the other, fp32."""
        return torch.cat([self.places[name].read(self.weights, device) for name in names])


@dataclass(frozen=True)
class _Served:
    """The model that is served: an fp8 file, or a recipe for the base's weights."""

    family: Family
    layout: Fp8Layout | None
    recipe: Fp8Recipe | None
    base: _Weights
    file: _Weights | None

    def weights(self, names: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the weights of ``names`` in high precision and as served, one below the other."""
        high = self.base.read(names, device)
        if self.file is not None:
            return high, self.file.read(names, device)
        assert self.recipe is not None
        parts = high.split([self.base.places[name].shape[0] for name in names])
        rounded = [self.recipe.quantize(name, part) for name, part in zip(names, parts, strict=True)]
        return high, torch.cat([quantized.dequantize(torch.float32) for quantized in rounded])

    def in_fp8(self, name: str) -> bool:
        """Return whether the layer ``name`` is served in fp8."""
        if self.file is not None:
            return self.layout is not None and self.file.places[name].tensor in self.layout.dtypes
        return self.recipe is not None and self.recipe.excluded_as(name) is None


def refit_lora(
    lora: Path,
    deployed: DeployedWeights,
    save_to: Path,
    plan: CalibrationPlan,
    console: Console,
    *,
    correction_rank: int = 0,
    layout: str | None = None,
    precision: str | None = None,
    shown: int = 20,
) -> dict[str, Refit]:
    """Refit ``lora``, which was trained on the model of ``plan``, to ``deployed``; return the layers' fits by name.

    Args:
        lora: of any layout.
        deployed: the fp8 file that is served, or a recipe.
        save_to: the file to write.
        plan: the bf16 model, and what both run on.
        console: for tables and notes.
        correction_rank: is added to the rank of every fp8 layer; layers without a LoRA get one of that rank.
        layout, precision: of the file; the source's by default.
        shown: layers in the table.
    """
    if correction_rank < 0:
        raise UserError(f"--correction_rank {correction_rank}: is negative; give 0 or more")
    base = model_family(plan.config)
    targets = base.targets
    served = _open_served(base, plan, deployed, targets)
    source = load_lora(lora, targets)
    parts = targets.by_component(source.weights)
    trained = parts.pop(targets.file_prefix, {})
    text = {name: weights for part in parts.values() for name, weights in part.items()}  # stays as it is
    base_path = plan.config.pretrained_model_name_or_path
    if absent := sorted(trained.keys() - served.base.places.keys()):
        raise UserError(f"{lora}: {names_in_short(absent)} are not in {base_path}; wrong model?")
    if remark := base_mismatch(source.metadata, base.fingerprint()):
        console.print(f"note: {lora}: {remark}")
    in_fp8 = [name for name in served.base.places if served.in_fp8(name)]
    rounded = set(in_fp8)
    fitted_loras = {name: weights for name, weights in trained.items() if name in rounded}
    units = _units(fitted_loras, in_fp8 if correction_rank else [], targets)
    if not units:
        raise UserError(f"{lora}: none of its layers is in fp8 in {deployed.name}; it fits as it is")

    calibration = plan.prepare(base, console)
    fp8 = Fp8Loader(served.recipe, compute="dequant")
    transformer = served.family.load_transformer(plan.dtype, plan.device, fp8=fp8)
    base_precision = describe_base(served.layout, fp8, plan.dtype)
    console.print(f"deployed: {deployed.name}: {base_precision}")
    if trained:
        attach_lora(transformer, trained, targets, str(lora))
    precision = precision or widest_precision(source.weights)
    fits: dict[str, Refit] = {}
    fitted: dict[str, LoraWeights] = {}
    for group in calibration.layer_inputs(transformer, [name for unit in units for name in unit], held_out=True):
        for unit in (unit for unit in units if unit[0] in group):
            done, weights = _fit_unit(unit, trained, served, group[unit[0]], correction_rank, PRECISIONS[precision])
            fits[" + ".join(unit)] = done
            fitted |= weights
        console.print(f"{len(fits)} of {len(units)} layers fitted")
    console.print(refit_table(fits, shown))
    metadata = source.metadata | {
        "tandem.base_fingerprint": served.family.fingerprint(),
        "tandem.base_precision": base_precision,
        "tandem.base_name": deployed.name,
        "tandem.retargeted": json.dumps(_record(lora, source, correction_rank, plan, fits)),
    }
    comment = f"refitted to {deployed.name}"
    save_derived_lora(save_to, trained | fitted | text, targets, metadata, comment, [source], layout, precision)
    console.print(f"{save_to}: {len(fitted)} layers fitted to {deployed.name}")
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


def _open_served(base: Family, plan: CalibrationPlan, deployed: DeployedWeights, targets: LoraTargets) -> _Served:
    base_path = plan.config.pretrained_model_name_or_path
    high = _Weights.of(Path(base_path).expanduser(), "--base", targets)
    if base.fp8_layout() is not None:
        raise UserError(f"--base {base_path}: is in fp8; give the bf16 model that the LoRA was trained on")
    if deployed.path is None:
        return _Served(base, None, deployed.recipe, high, None)
    family = model_family(with_transformer(plan.config, deployed.path))
    layout = family.fp8_layout()
    if layout is None:
        raise UserError(f"--deploy {deployed.path}: holds no fp8 weights; give the fp8 file that is served")
    return _Served(family, layout, None, high, _Weights.of(deployed.path, "--deploy", targets))


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


def _fit_unit(
    names: Sequence[str],
    lora: Mapping[str, LoraWeights],
    served: _Served,
    inputs: LayerInputs,
    correction_rank: int,
    dtype: torch.dtype,
) -> tuple[Refit, dict[str, LoraWeights]]:
    """Refit layers that share A; return the fit of all and the weights of each."""
    high, low = served.weights(names, inputs.moment.device)  # [out of all, in]
    joined = None
    if names[0] in lora:
        ups = torch.cat([lora[name].up for name in names])
        joined = LoraWeights(lora[names[0]].down.to(high.device), ups.to(high.device), lora[names[0]].alpha)
    done = refit_layer(joined, high, low, inputs, correction_rank=correction_rank, dtype=dtype)
    if done.weights is None:
        return done, {}
    rows = [served.base.places[name].shape[0] for name in names]
    down, ups_of = done.weights.down.cpu(), done.weights.up.cpu().split(rows)
    alpha = done.weights.alpha
    return done, {n: LoraWeights(down, up.contiguous(), alpha) for n, up in zip(names, ups_of, strict=True)}


def _record(
    lora: Path, source: LoraFile, correction_rank: int, plan: CalibrationPlan, fits: Mapping[str, Refit]
) -> dict[str, object]:
    """Return what the file says about how it was made."""
    return {
        "lora": lora.name,
        "base_fingerprint": source.metadata.get("tandem.base_fingerprint"),
        "correction_rank": correction_rank,
        "calibration_images": plan.options.images,
        "calibration_sigmas": list(plan.options.sigmas),
        "seed": plan.options.seed,
        "mean_error_before": sum(fit.before for fit in fits.values()) / len(fits),
        "mean_error_after": sum(fit.after for fit in fits.values()) / len(fits),
    }
