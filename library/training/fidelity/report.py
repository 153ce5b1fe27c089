"""From a request to all that is measured: the reference, the deployment, the layers, every cause alone and left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from rich.console import Console
from torch import Tensor, nn

from library.data.batches import Batch
from library.errors import UserError
from library.precision.parity.activations import collect_inputs
from library.precision.parity.layer_errors import measure_contributions
from library.precision.recipe import Fp8Recipe
from library.training.fidelity.calibration import Calibration, CalibrationOptions, prepare_calibration
from library.training.fidelity.causes import Attribution, Differences, Verdict, compare, judge
from library.training.fidelity.deployments import REFERENCE, EvalSet, Models, Outcome, Variant, run_variant
from library.training.fidelity.layers import ActivationSizes, LayerRow, layer_row, linear_layers, watched_sizes
from library.training.report.progress import counting

T = TypeVar("T")
FIX_COLUMNS = ("", "velocity", "latents", "image", "of before", "ring/interior", "step", "seconds", "cost")


@dataclass(frozen=True)
class Report:
    """All that was measured.

    Attributes:
        title: what was compared. settings: name -> value, for the reader and the JSON.
        full: the deployment. attributions: its causes. layers: in the model's order.
        reference, deployed: their outcomes, for the images.
    """

    title: str
    settings: Mapping[str, str]
    verdict: Verdict
    full: Differences
    attributions: Sequence[Attribution]
    layers: Sequence[LayerRow]
    reference: Outcome
    deployed: Outcome
    eval_set: EvalSet


@dataclass(frozen=True)
class Fix:
    """A fix that was tried.

    Attributes:
        name: one of the module's list. cost: in words. seconds: that finding it took. files: that it left.
        differences, outcome: of the deployment with it.
    """

    name: str
    cost: str
    seconds: float
    files: tuple[Path, ...]
    differences: Differences
    outcome: Outcome

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        files = [str(path) for path in self.files]
        return {"name": self.name, "cost": self.cost, "seconds": self.seconds, "files": files,
                "differences": self.differences.as_json()}  # fmt: skip


def fix_rows(fixes: Sequence[Fix], before: Differences) -> list[tuple[str, ...]]:
    """Return the cells of the table of fixes: the deployment before and with each fix, under ``FIX_COLUMNS``."""
    rows = []
    for name, each, cost, seconds in [
        ("as deployed", before, "", ""),
        *((fix.name, fix.differences, fix.cost, f"{fix.seconds:.0f}") for fix in fixes),
    ]:
        errors = (f"{value:.2%}" for value in (each.velocity, each.latents, each.image))
        share = f"{each.latents / before.latents:.2f}" if before.latents else ""
        seam = ("" if math.isnan(value) else f"{value:.2f}" for value in each.ring_and_step)
        rows.append((name, *errors, share, *seam, seconds, cost))
    return rows


@dataclass(frozen=True)
class ReportRequest:
    """What to measure: the deployment, on what, over how many sampling steps, and whether each layer's benefit too."""

    variant: Variant
    calibration: CalibrationOptions
    steps: int
    benefits: bool = True


def measure(models: Models, request: ReportRequest, console: Console) -> Report:
    """Return the whole report.

    Raises:
        UserError: anything wrong with models or dataset, or flags that need what the dataset does not have.
    """
    calibration = prepare_calibration(models.family, request.calibration, models.dtype, models.device, console)
    eval_set = prepare_eval_set(models, calibration, request)
    if request.variant.paste and not any(eval_set.mask(i) is not None for i in range(len(eval_set.batches))):
        raise UserError("--paste: the dataset has no masks, so there is no known region; remove --paste")
    reference = run_named(models, REFERENCE, eval_set, console, "reference")
    deployed = run_named(models, request.variant, eval_set, console, "deployment")
    full = compare(reference, deployed, eval_set)
    rows = _layers(models, request, calibration, eval_set, console)
    attributions = []
    for cause in request.variant.changes():
        outcome = run_named(models, request.variant.only(cause), eval_set, console, f"{cause} alone")
        alone = compare(reference, outcome, eval_set)
        without = None
        if len(request.variant.changes()) > 1:
            left = run_named(models, request.variant.without(cause), eval_set, console, f"without {cause}")
            without = compare(reference, left, eval_set)
        attributions.append(Attribution(cause, alone, without))
    scales = models.input_scales() if request.variant.activations == "static" else {}
    verdict = judge(request.variant, full, attributions, rows, {name: float(s) for name, s in scales.items()})
    return Report(
        title=f"{models.deployed.describe()} against {models.family.name} in high precision",
        settings=_settings(models, request),
        verdict=verdict,
        full=full,
        attributions=attributions,
        layers=rows,
        reference=reference,
        deployed=deployed,
        eval_set=eval_set,
    )


def prepare_eval_set(models: Models, calibration: Calibration, request: ReportRequest) -> EvalSet:
    """Return the evaluation set; texts in low precision are encoded where they are asked for."""
    batches = [batch.to(models.device) for batch in (*calibration.fit, *calibration.check)]
    texts: list[dict[str, Tensor]] = []
    if request.variant.text:
        encoder = models.family.load_text_encoder(models.dtype, models.device, recipe=Fp8Recipe("block64", exclude=()))
        for batch in batches:
            encoded = encoder.encode(batch.captions)[0]
            texts.append({name: tensor[None].to(models.device) for name, tensor in encoded.items()})
        encoder.release()
    options = request.calibration
    return EvalSet(batches, texts, options.sigmas, request.steps, options.guidance_scale, options.seed)


def run_named(models: Models, variant: Variant, eval_set: EvalSet, console: Console, title: str) -> Outcome:
    """Load and run one variant, its progress shown under ``title``."""
    evaluations = len(eval_set.batches) * (len(eval_set.sigmas) + eval_set.steps)
    family = models.deployed_family if variant.weights else models.family
    encoder = models.image_encoder(variant) if eval_set.steps else None
    with models.transformer(variant) as transformer, counting(console) as progress:
        advance = progress(title, evaluations)
        run = partial(run_variant, family, transformer, variant, eval_set, models.dtype, encoder)
        return run(sample=bool(eval_set.steps), advance=lambda: advance(1))


def _layers(
    models: Models, request: ReportRequest, calibration: Calibration, eval_set: EvalSet, console: Console
) -> list[LayerRow]:
    """Compare every linear layer of the deployment with the reference's."""
    variant = request.variant
    merged: Literal["no", "here", "in the file"] = "no" if variant.merge is None else "here"
    merged = "in the file" if models.deployed.merged else merged
    loras = models.transformer_lora
    with models.transformer(REFERENCE) as reference:
        sizes = _sizes(models, reference, eval_set, console)
        names = linear_layers(reference)
        deployed = models.base(deployed=True)
        served = models.merged_weights(variant) if merged == "here" else deployed
        rows: dict[str, LayerRow] = {}
        forwards = calibration.forwards(reference, eval_set.batches)
        for group in collect_inputs(reference, names, _autocast(forwards, models), seed=request.calibration.seed):
            for name, inputs in group.items():
                update = loras.get(name)
                high = _base_weight(reference.get_submodule(name))
                layers = deployed.get_submodule(name), served.get_submodule(name)
                rows[name] = layer_row(name, high, *layers, inputs, sizes[name], update, merged)
        ordered = [rows[name] for name in names if name in rows]
        return _with_benefits(models, reference, served, ordered, calibration, console) if request.benefits else ordered


def _sizes(models: Models, reference: nn.Module, eval_set: EvalSet, console: Console) -> dict[str, ActivationSizes]:
    with watched_sizes(reference, eval_set) as (begin, finish), counting(console) as progress:
        advance = progress("activations", len(eval_set.batches) * len(eval_set.sigmas))
        run_variant(
            models.family,
            reference,
            REFERENCE,
            eval_set,
            models.dtype,
            sample=False,
            advance=lambda: advance(1),
            begin=begin,
        )
        return finish()


def _with_benefits(
    models: Models,
    reference: nn.Module,
    served: nn.Module,
    rows: Sequence[LayerRow],
    calibration: Calibration,
    console: Console,
) -> list[LayerRow]:
    """Measure on one image what each fp8 layer alone, back in high precision, gives back."""
    in_fp8 = [row.name for row in rows if row.kind not in ("float32", "bfloat16", "float16")]
    if not in_fp8:
        return list(rows)
    batches: list[Batch] = [*calibration.check, *calibration.fit][:1]
    with counting(console) as progress:
        advance = progress("benefit of each layer", len(in_fp8))
        shares = measure_contributions(
            served,
            [[name] for name in in_fp8],
            lambda name: _base_weight(reference.get_submodule(name)).to(models.dtype),
            _autocast([lambda: calibration.velocities(served, batches)], models)[0],
            lambda done, total: advance(1),
        )
    found = dict(zip(in_fp8, shares, strict=True))
    return [replace(row, benefit=found.get(row.name)) for row in rows]


def _autocast(calls: Sequence[Callable[[], T]], models: Models) -> list[Callable[[], T]]:
    """Return ``calls``, each under autocast where products are made in 16 bits."""

    def wrapped(call: Callable[[], T]) -> T:
        with torch.autocast(models.device.type, models.dtype, enabled=models.dtype != torch.float32):
            return call()

    return [partial(wrapped, call) for call in calls]


def _base_weight(layer: nn.Module) -> Tensor:
    """Return a reference layer's weight, under its LoRA if there is one."""
    base: Any = getattr(layer, "base", layer)
    return base.weight.detach()


def _settings(models: Models, request: ReportRequest) -> dict[str, str]:
    """Return what was compared, in words."""
    changes = {name: str(value).removeprefix("torch.") for name, value in request.variant.changes().items()}
    options = request.calibration
    return {
        "reference": f"{models.family.name}, fingerprint {models.family.fingerprint()}",
        "deployment": models.deployed.describe(),
        "causes": ", ".join(f"{name} = {value}" for name, value in changes.items()),
        "LoRA": f"{len(models.transformer_lora)} layers of the transformer",
        "eval_set": f"{options.images} images, sigmas {', '.join(f'{s:g}' for s in options.sigmas)}, "
        f"{request.steps} sampling steps, guidance {options.guidance_scale:g}, seed {options.seed}",
        "products": str(models.dtype).removeprefix("torch."),
    }
