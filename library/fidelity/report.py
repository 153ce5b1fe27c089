"""From a request to all that is measured: the reference, the deployment, the layers, every cause alone and left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from library.console import Console
from library.errors import UserError, counted
from library.fidelity.calibration import Calibration, CalibrationOptions
from library.fidelity.differences import Differences, compare
from library.fidelity.layers import LayerRow, layer_row, sizes_by_region
from library.fidelity.runs import EvalSet, Outcome, run_variant
from library.fidelity.serving import REFERENCE, Models, Variant, base_layer, numbers
from library.fidelity.verdict import Attribution, Verdict, judge
from library.precision.parity.layer_errors import measure_contributions
from library.precision.recipe import Fp8Recipe
from library.training.report.progress import counting


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


def measure(
    models: Models,
    variant: Variant,
    options: CalibrationOptions,
    console: Console,
    *,
    steps: int,
    benefits: bool = True,
) -> Report:
    """Return the report.

    Args:
        models, variant: the deployment.
        options: what it is measured on.
        console: for progress.
        steps: of the sampling runs; 0 for none.
        benefits: measure what each layer alone in high precision gives back, too.

    Raises:
        UserError: anything wrong with models or dataset, or flags that need what the dataset does not have.
    """
    calibration = models.plan(options).prepare(console)
    eval_set = prepare_eval_set(models, calibration, variant, steps)
    if variant.paste and not any(eval_set.mask(i) is not None for i in range(len(eval_set.batches))):
        raise UserError("--paste: the dataset has no masks, so there is no known region; remove --paste")
    reference = run_variant(models, REFERENCE, eval_set, console, "reference")
    decode = models.image_encoder(REFERENCE).decode

    def run(changed: Variant, title: str) -> tuple[Outcome, Differences]:
        outcome = run_variant(models, changed, eval_set, console, title)
        return outcome, compare(reference, outcome, eval_set, decode)

    deployed, full = run(variant, "deployment")
    rows = _layers(models, variant, calibration, eval_set, console, benefits)
    causes, attributions = variant.changes(), []
    for cause in causes:
        _, alone = run(variant.only(cause), f"{cause} alone")
        without = run(variant.without(cause), f"without {cause}")[1] if len(causes) > 1 else None
        attributions.append(Attribution(cause, alone, without))
    scales = models.input_scales() if variant.activations == "static" else {}
    verdict = judge(variant, full, attributions, rows, {name: float(s) for name, s in scales.items()})
    return Report(
        title=f"{models.deployed.describe()} against {models.family.name} in high precision",
        settings=_settings(models, causes, options, steps),
        verdict=verdict,
        full=full,
        attributions=attributions,
        layers=rows,
        reference=reference,
        deployed=deployed,
        eval_set=eval_set,
    )


def prepare_eval_set(models: Models, calibration: Calibration, variant: Variant, steps: int) -> EvalSet:
    """Return the evaluation set; texts in low precision are encoded where they are asked for."""
    batches = [batch.to(models.device) for batch in (*calibration.fit, *calibration.check)]
    texts: list[dict[str, Tensor]] = []
    if variant.text:
        encoder = models.family.load_text_encoder(models.dtype, models.device, recipe=Fp8Recipe("block64", exclude=()))
        for batch in batches:
            encoded = encoder.encode(batch.captions)[0]
            texts.append({name: tensor[None].to(models.device) for name, tensor in encoded.items()})
        encoder.release()
    options = calibration.plan.options
    return EvalSet(batches, texts, options.sigmas, steps, options.guidance_scale, options.seed)


def _layers(
    models: Models, variant: Variant, calibration: Calibration, eval_set: EvalSet, console: Console, benefits: bool
) -> list[LayerRow]:
    """Compare every linear layer of the deployment with the reference's."""
    merged: Literal["no", "here", "in the file"] = "no" if variant.merge is None else "here"
    merged = "in the file" if models.deployed.merged else merged
    loras = models.transformer_lora
    with models.transformer(REFERENCE) as reference:
        with counting(console) as progress:
            by_region = sizes_by_region(reference, calibration, eval_set, progress)
        names = list(by_region)
        deployed = models.base(deployed=True)
        served = models.merged_weights(variant) if merged == "here" else deployed
        rows: dict[str, LayerRow] = {}
        for group in calibration.layer_inputs(reference, names):
            for name, inputs in group.items():
                update = loras.get(name)
                high = numbers(base_layer(reference, name))
                layers = deployed.get_submodule(name), served.get_submodule(name)
                rows[name] = layer_row(name, high, *layers, inputs, by_region[name], update, merged)
        ordered = [rows[name] for name in names if name in rows]
        return _with_benefits(models, reference, served, ordered, calibration, console) if benefits else ordered


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
    batches = [*calibration.check, *calibration.fit][:1]
    shares = measure_contributions(
        served,
        [[name] for name in in_fp8],
        lambda name: numbers(base_layer(reference, name)).to(models.dtype),
        lambda: calibration.velocities(served, batches),
    )
    found = {}
    with counting(console) as progress:
        advance = progress("benefit of each layer", len(in_fp8))
        for name, share in zip(in_fp8, shares, strict=True):
            found[name] = share
            advance(1)
    return [replace(row, benefit=found.get(row.name)) for row in rows]


def _settings(models: Models, causes: Mapping[str, Any], options: CalibrationOptions, steps: int) -> dict[str, str]:
    """Return what was compared, in words."""
    changes = {name: str(value).removeprefix("torch.") for name, value in causes.items()}
    return {
        "reference": f"{models.family.name}, fingerprint {models.family.fingerprint()}",
        "deployment": models.deployed.describe(),
        "causes": ", ".join(f"{name} = {value}" for name, value in changes.items()),
        "LoRA": f"{counted(len(models.transformer_lora), 'layer')} of the transformer",
        "eval_set": f"{counted(options.images, 'image')}, sigmas {', '.join(f'{s:g}' for s in options.sigmas)}, "
        f"{counted(steps, 'sampling step')}, guidance {options.guidance_scale:g}, seed {options.seed}",
        "products": str(models.dtype).removeprefix("torch."),
    }
