"""From a request to all that is measured: the reference, the deployment, the layers, every cause alone and left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from library.console import Console
from library.errors import counted
from library.fidelity.calibration import CalibrationOptions
from library.fidelity.comparison import Comparison, compare_models
from library.fidelity.differences import Differences, compare
from library.fidelity.runs import EvalSet, Outcome, prepare_eval_set, run_variant
from library.fidelity.serving import REFERENCE, Models, Variant
from library.fidelity.verdict import Attribution, Verdict, is_worse, judge


@dataclass(frozen=True)
class Report:
    """All that was measured.

    Attributes:
        title: what was compared. settings: name -> value, for the reader and the JSON.
        full: the deployment. attributions: its causes. comparison: of all tensors.
        reference, deployed: their outcomes, for the images.
    """

    title: str
    settings: Mapping[str, str]
    verdict: Verdict
    full: Differences
    attributions: Sequence[Attribution]
    comparison: Comparison
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
    explain: bool = False,
) -> Report:
    """Return the report.

    Args:
        models, variant: the deployment.
        options: what it is measured on.
        console: for progress.
        steps: of the sampling runs; 0 for none.
        explain: measure what each kind of tensors, each block and each layer explains, and what servers do to masks.

    Raises:
        UserError: anything wrong with models or dataset, or flags that need what the dataset does not have.
    """
    calibration = models.plan(options).prepare(console)
    eval_set = prepare_eval_set(models, calibration, variant, steps)
    reference = run_variant(models, REFERENCE, eval_set, console, "reference")
    decode = models.image_encoder(REFERENCE).decode

    def run(changed: Variant, title: str) -> tuple[Outcome, Differences]:
        outcome = run_variant(models, changed, eval_set, console, title)
        return outcome, compare(reference, outcome, eval_set, decode)

    deployed, full = run(variant, "deployment")
    comparison = compare_models(models, variant, calibration, eval_set, console, explain=explain)
    causes = variant.changes()
    alone = {cause: full if variant.only(cause) == variant else run(variant.only(cause), cause)[1] for cause in causes}
    puzzling = is_worse(full) and not any(map(is_worse, alone.values()))
    several = len(causes) > 1 and (explain or puzzling)
    without = {cause: run(variant.without(cause), f"without {cause}")[1] for cause in causes} if several else {}
    attributions = [Attribution(cause, alone[cause], without.get(cause)) for cause in causes]
    scales = models.input_scales() if variant.activations == "static" else {}
    verdict = judge(variant, full, attributions, comparison, {name: float(s) for name, s in scales.items()})
    return Report(
        title=f"{models.deployed.describe()} against {models.family.name} in high precision",
        settings=_settings(models, causes, options, steps),
        verdict=verdict,
        full=full,
        attributions=attributions,
        comparison=comparison,
        reference=reference,
        deployed=deployed,
        eval_set=eval_set,
    )


def _settings(models: Models, causes: Mapping[str, Any], options: CalibrationOptions, steps: int) -> dict[str, str]:
    """Return what was compared, in words."""
    changes = [models.words(name, value) for name, value in causes.items()]
    return {
        "reference": f"{models.family.name}, fingerprint {models.family.fingerprint()}",
        "deployment": models.deployed.describe(),
        "causes": ", ".join(changes),
        "LoRA": f"{counted(len(models.transformer_lora), 'layer')} of the transformer",
        "eval_set": f"{counted(options.images, 'image')}, sigmas {', '.join(f'{s:g}' for s in options.sigmas)}, "
        f"{counted(steps, 'sampling step')}, guidance {options.guidance_scale:g}, seed {options.seed}",
        "products": str(models.dtype).removeprefix("torch."),
    }
