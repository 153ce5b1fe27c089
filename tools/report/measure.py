"""From a deployment to its report: the reference, the deployment, the layers, every cause alone and left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from library.data.batches import Batch
from library.errors import UserError
from library.precision.parity.activations import collect_inputs
from library.precision.parity.layer_errors import measure_contributions
from library.precision.recipe import Fp8Recipe
from library.training.calibration import Calibration, CalibrationOptions, prepare_calibration
from library.training.report.progress import counting
from tools.report.causes import Attribution, judge
from tools.report.deployments import REFERENCE, Models, Variant
from tools.report.differences import compare
from tools.report.layers import ActivationSizes, LayerRow, layer_row, linear_layers, watched_sizes
from tools.report.result import Report
from tools.report.runs import Outcome, Probe, run_variant


@dataclass(frozen=True)
class Asked:
    """What to measure: the deployment, on what, over how many sampling steps, and whether each layer's benefit too."""

    variant: Variant
    calibration: CalibrationOptions
    steps: int
    benefits: bool = True


def measure(models: Models, asked: Asked, console: Console) -> Report:
    """Return the whole report.

    Raises:
        UserError: anything wrong with models or dataset, or flags that need what the dataset does not have.
    """
    calibration = prepare_calibration(models.family, asked.calibration, models.dtype, models.device, console)
    probe = prepare_probe(models, calibration, asked)
    if asked.variant.paste and not any(probe.mask(i) is not None for i in range(len(probe.batches))):
        raise UserError("--paste: the dataset has no masks, so there is no known region; remove --paste")
    reference = run_named(models, REFERENCE, probe, console, "reference")
    deployed = run_named(models, asked.variant, probe, console, "deployment")
    full = compare(reference, deployed, probe)
    rows = _layers(models, asked, calibration, probe, console)
    attributions = []
    for cause in asked.variant.changes():
        outcome = run_named(models, asked.variant.only(cause), probe, console, f"{cause} alone")
        alone = compare(reference, outcome, probe)
        without = None
        if len(asked.variant.changes()) > 1:
            left = run_named(models, asked.variant.without(cause), probe, console, f"without {cause}")
            without = compare(reference, left, probe)
        attributions.append(Attribution(cause, alone, without))
    scales = models.input_scales() if asked.variant.activations == "static" else {}
    verdict = judge(asked.variant, full, attributions, rows, {name: float(s) for name, s in scales.items()})
    return Report(
        title=f"{models.deployed.describe()} against {models.family.name} in high precision",
        settings=_settings(models, asked),
        verdict=verdict,
        full=full,
        attributions=attributions,
        layers=rows,
        reference=reference,
        deployed=deployed,
        probe=probe,
    )


def prepare_probe(models: Models, calibration: Calibration, asked: Asked) -> Probe:
    """Return the probe; texts in low precision are encoded where they are asked for."""
    batches = [batch.to(models.device) for batch in (*calibration.fit, *calibration.check)]
    texts: list[dict[str, Tensor]] = []
    if asked.variant.text:
        encoder = models.family.load_text_encoder(models.dtype, models.device, recipe=Fp8Recipe("block64", exclude=()))
        for batch in batches:
            encoded = encoder.encode(batch.captions)[0]
            texts.append({name: tensor[None].to(models.device) for name, tensor in encoded.items()})
        encoder.release()
    options = asked.calibration
    return Probe(batches, texts, options.sigmas, asked.steps, options.guidance_scale, options.seed)


def run_named(models: Models, variant: Variant, probe: Probe, console: Console, title: str) -> Outcome:
    """Load and run one variant, its progress shown under ``title``."""
    evaluations = len(probe.batches) * (len(probe.sigmas) + probe.steps)
    family = models.deployed_family if variant.weights else models.family
    encoder = models.image_encoder(variant) if probe.steps else None
    with models.transformer(variant) as transformer, counting(console) as progress:
        advance = progress(title, evaluations)
        run = partial(run_variant, family, transformer, variant, probe, models.dtype, encoder)
        return run(sample=bool(probe.steps), advance=lambda: advance(1))


def _layers(models: Models, asked: Asked, calibration: Calibration, probe: Probe, console: Console) -> list[LayerRow]:
    """Compare every linear layer of the deployment with the reference's."""
    variant = asked.variant
    merged: Literal["no", "here", "in the file"] = "no" if variant.merge is None else "here"
    merged = "in the file" if models.deployed.merged else merged
    loras = models.transformer_lora
    with models.transformer(REFERENCE) as reference:
        sizes = _sizes(models, reference, probe, console)
        names = linear_layers(reference)
        deployed = models.base(deployed=True)
        served = models.merged_weights(variant) if merged == "here" else deployed
        rows: dict[str, LayerRow] = {}
        forwards = calibration.forwards(reference, probe.batches)
        for group in collect_inputs(reference, names, _autocast(forwards, models), seed=asked.calibration.seed):
            for name, inputs in group.items():
                update = loras.get(name)
                high = _base_weight(reference.get_submodule(name))
                layers = deployed.get_submodule(name), served.get_submodule(name)
                rows[name] = layer_row(name, high, *layers, inputs, sizes[name], update, merged)
        ordered = [rows[name] for name in names if name in rows]
        return _with_benefits(models, reference, served, ordered, calibration, console) if asked.benefits else ordered


def _sizes(models: Models, reference: nn.Module, probe: Probe, console: Console) -> dict[str, ActivationSizes]:
    with watched_sizes(reference, probe) as (begin, finish), counting(console) as progress:
        advance = progress("activations", len(probe.batches) * len(probe.sigmas))
        run_variant(
            models.family,
            reference,
            REFERENCE,
            probe,
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


def _autocast(calls, models: Models):  # type: ignore[no-untyped-def]
    """Return ``calls``, each under autocast where products are made in 16 bits."""

    def wrapped(call):  # type: ignore[no-untyped-def]
        with torch.autocast(models.device.type, models.dtype, enabled=models.dtype != torch.float32):
            return call()

    return [partial(wrapped, call) for call in calls]


def _base_weight(layer: nn.Module) -> Tensor:
    """Return a reference layer's weight, under its LoRA if there is one."""
    base: Any = getattr(layer, "base", layer)
    return base.weight.detach()


def _settings(models: Models, asked: Asked) -> dict[str, str]:
    """Return what was compared, in words."""
    changes = {name: str(value).removeprefix("torch.") for name, value in asked.variant.changes().items()}
    options = asked.calibration
    return {
        "reference": f"{models.family.name}, fingerprint {models.family.fingerprint()}",
        "deployment": models.deployed.describe(),
        "causes": ", ".join(f"{name} = {value}" for name, value in changes.items()),
        "LoRA": f"{len(models.transformer_lora)} layers of the transformer",
        "probe": f"{options.images} images, sigmas {', '.join(f'{s:g}' for s in options.sigmas)}, "
        f"{asked.steps} sampling steps, guidance {options.guidance_scale:g}, seed {options.seed}",
        "products": str(models.dtype).removeprefix("torch."),
    }
