"""What removes the difference: fixes from the cheapest on, each tried on the user's own data and measured.

1. *settings*: everything but the weights as in the reference. Free.
2. *strength*: for a merge that lost part of the update, the LoRA at 1 / update retention. Free; the one-minute test.
3. *refit*: the LoRA refitted to the fp8 file, same rank, no training.
4. *correction*: the same with 32 ranks more, and a LoRA for layers that had none.
5. *rebuild*: a new fp8 file from bf16, of the same size, with scales, rounded with compensation, under a
   LoRA refitted to it.
6. *keep*: the same, a tenth larger: the layers that give back most per megabyte stay in bf16.
7. *teacher*: 200 steps on the fp8 file that learn the bf16 model's outputs, from the refitted LoRA on.
8. *together*: the larger file, the correction for it, the steps on it.

Three things that plain casts and most published files leave out are worth a new file: scales, four bytes a layer, that
lift small weights out of the subnormals; rounding that makes up for its own errors on real activations; and a tenth of
the size more, spent on the layers that contribute most to the error (``quantize``). A file without scales gets
ComfyUI's, which programs that read a plain cast and no scales (diffusers' layerwise casting) do not take; any other
keeps its layout. Files that a fix makes lie in ``fixes/`` beside the report, in the LoRA's own format.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from library.config.load import validated
from library.config.schema import TrainConfig
from library.errors import UserError
from library.precision.checkpoint_layouts import LayoutKind
from library.precision.fp8_linear import Fp8Linear
from library.precision.quantize import E4M3FN, Granularity, format_of
from library.precision.recipe import Fp8Recipe
from library.training.fidelity.calibration import CalibrationOptions, CalibrationPlan
from library.training.fidelity.causes import Differences, compare
from library.training.fidelity.deployments import REFERENCE, DeployedWeights, EvalSet, Models, Outcome, Variant
from library.training.fidelity.layers import LayerRow
from library.training.fidelity.quantize import Calibrated, quantize_checkpoint
from library.training.fidelity.refit import refit_lora
from library.training.fidelity.report import FIX_COLUMNS, Fix, ReportRequest, fix_rows, run_named
from library.training.report.progress import plain_table
from networks.files.adapters import load_lora
from networks.files.weights import LoraWeights

FIXES = ("settings", "strength", "refit", "correction", "rebuild", "keep", "teacher", "together")
CORRECTION_RANK, TEACHER_STEPS, TEACHER_RATE, KEPT_SHARE = 32, 200, 3e-4, 0.1


@dataclass(frozen=True)
class FixOptions:
    """What fixes are made of, how long they may take and how good they must be.

    Attributes:
        folder: for files. lora: the one LoRA, at strength 1.
        calibration: what fixes are fitted to and trained on.
        train: trains a LoRA as a configuration says.
        mixed_precision: of training, where the user chose it.
        minutes: no further fix is begun after these.
        target: share of the deployment's error that is good enough.
        names: of the fixes to try.
    """

    folder: Path
    lora: Path
    calibration: CalibrationOptions
    train: Callable[[TrainConfig], object]
    mixed_precision: str | None = None
    minutes: float = 30.0
    target: float = 0.3
    names: tuple[str, ...] = FIXES


def try_fixes(
    models: Models,
    request: ReportRequest,
    eval_set: EvalSet,
    reference: Outcome,
    layers: Sequence[LayerRow],
    options: FixOptions,
    console: Console,
) -> list[Fix]:
    """Try the fixes in their order and return those that were tried.

    All are tried that the time allows, so that the table shows what more effort buys.

    Args:
        models, request: of the deployment.
        eval_set, reference: what fixes are measured on, and what they are compared with.
        layers: of the deployment, for the survival of its LoRA; may be empty.
        options: files, flags, limits.
    """
    begun = time.monotonic()
    plain = replace(REFERENCE, weights=True)
    fixes: list[Fix] = []

    def attempt(name: str, cost: str, make: Callable[[], tuple[Models, Variant, tuple[Path, ...]]]) -> None:
        if name not in options.names:
            return
        if time.monotonic() - begun > 60 * options.minutes:
            console.print(f"note: {name} not tried, the {options.minutes:g} minutes are over; raise --fix_minutes")
            return
        started = time.monotonic()
        try:
            changed, variant, files = make()
        except UserError as error:
            console.print(f"note: {name} not tried: {error}")
            return
        outcome = run_named(changed, variant, eval_set, console, name)
        differences = compare(reference, outcome, eval_set)
        fixes.append(Fix(name, cost, time.monotonic() - started, files, differences, outcome))

    if set(request.variant.changes()) != {"weights"} and not models.deployed.merged:
        attempt("settings", "none: everything but the weights in high precision", lambda: (models, plain, ()))
    gains = [row.survival for row in layers if row.survival is not None]
    if gains and request.variant.merge is not None and 0 < median(gains) < 0.95:
        stronger = replace(request.variant, strength=request.variant.strength / median(gains))
        attempt("strength", f"none: the LoRA at {stronger.strength:.2f}", lambda: (models, stronger, ()))
    builder = FixBuilder(models, options)
    ranks = f"{CORRECTION_RANK} ranks more in every fp8 layer"
    steps = f"{TEACHER_STEPS} training steps"
    larger = f"an fp8 file {KEPT_SHARE:.0%} larger, scaled and rounded anew"

    def with_lora(lora: Path, of: Models = models) -> tuple[Models, Variant, tuple[Path, ...]]:
        own = (of.deployed.path,) if of is not models and of.deployed.path else ()
        return _with_lora(of, lora), plain, (*own, lora)

    def fitted(of: Models, correction_rank: int = 0) -> tuple[Models, Variant, tuple[Path, ...]]:
        return with_lora(builder.refitted(of, correction_rank), of)

    def taught(of: Models, correction_rank: int = 0) -> tuple[Models, Variant, tuple[Path, ...]]:
        return with_lora(builder.taught(of, builder.refitted(of, correction_rank)), of)

    attempt("refit", "a forward pass over the calibration; the same rank", lambda: fitted(models))
    attempt("correction", ranks, lambda: fitted(models, CORRECTION_RANK))
    attempt("rebuild", "an fp8 file of the same size, scaled and rounded anew", lambda: fitted(builder.rebuilt()))
    attempt("keep", larger, lambda: fitted(builder.rebuilt(KEPT_SHARE)))
    attempt("teacher", f"{steps}, the same rank", lambda: taught(models))
    attempt("together", f"{larger}, {ranks}, {steps}", lambda: taught(builder.rebuilt(KEPT_SHARE), CORRECTION_RANK))
    return fixes


def recommend(fixes: Sequence[Fix], before: Differences, target: float) -> Fix | None:
    """Return the first fix, in the order of cost, that brings the error to ``target`` of ``before``'s.

    Where none does it is the one with the smallest error; None if nothing was better than before.
    """
    good = [fix for fix in fixes if fix.differences.latents <= target * before.latents]
    best = min(fixes, key=lambda fix: fix.differences.latents, default=None)
    if good:
        return good[0]
    return best if best is not None and best.differences.latents < before.latents else None


def recommendation(best: Fix | None, before: Differences, target: float) -> str:
    """Return what to do, in words."""
    if best is None:
        return "Recommended: nothing that was tried is better than the deployment as it is."
    share = best.differences.latents / before.latents
    short = "" if share <= target else f", which is short of the target of {target:.2f}; the best that was tried"
    where = f"; use {', '.join(str(path) for path in best.files)}" if best.files else ""
    return f"Recommended: {best.name} ({best.cost}): {share:.2f} of the error{short}{where}."


def fix_table(fixes: Sequence[Fix], before: Differences) -> Table:
    """Return the deployment before and with each fix for the terminal, without what they cost."""
    table = plain_table(*FIX_COLUMNS[:-1])
    for row in fix_rows(fixes, before):
        table.add_row(*row[:-1])
    return table


class FixBuilder:
    """Makes the files that fixes need, each once."""

    def __init__(self, models: Models, options: FixOptions) -> None:
        self.models, self.options = models, options
        self._rebuilt: dict[float, Models] = {}
        self._refitted: dict[tuple[str, int], Path] = {}

    def rebuilt(self, kept_share: float = 0.0) -> Models:
        """Return the models with a new file deployed, ``kept_share`` of its size spent on layers in bf16."""
        if kept_share not in self._rebuilt:
            name = f"rebuilt_{kept_share:.0%}_larger".replace("%", "") if kept_share else "rebuilt"
            self._rebuilt[kept_share] = rebuild(self.models, self.options.folder / name, kept_share, self._plan())
        return self._rebuilt[kept_share]

    def refitted(self, models: Models, correction_rank: int) -> Path:
        """Return the LoRA refitted to the weights that ``models`` deploy."""
        path = models.deployed.path
        new = "" if models is self.models or path is None else path.stem  # a rebuilt file
        if (new, correction_rank) not in self._refitted:
            name = "corrected" if correction_rank else "refitted"
            save_to = self.options.folder / (f"{name}_for_{new}.safetensors" if new else f"{name}.safetensors")
            quiet = Console(quiet=True)
            refit_lora(
                self.options.lora, models.deployed, save_to, self._plan(), quiet, correction_rank=correction_rank
            )
            self._refitted[new, correction_rank] = save_to
        return self._refitted[new, correction_rank]

    def taught(self, models: Models, lora: Path) -> Path:
        """Train ``lora`` on the weights that ``models`` deploy, the reference being the teacher; return its file."""
        options, calibration = self.options, self.options.calibration
        output = options.folder / f"taught_{lora.stem}"
        values = _deployed_base(models) | {
            "distill_from": models.config.pretrained_model_name_or_path,
            "distill_lora": str(options.lora),
            "network_weights": str(lora),
            "dim_from_weights": True,
            "output_dir": str(output),
            "output_name": "taught",
            "dataset_config": calibration.dataset_config,
            "cache_directory": calibration.cache_directory,
            "masked_loss": calibration.masked_loss,
            "guidance_scale": calibration.guidance_scale,
            "seed": calibration.seed,
            "max_train_steps": TEACHER_STEPS,
            "lr_scheduler": "cosine",
            "learning_rate": TEACHER_RATE,
            "max_data_loader_n_workers": 0,
        }
        if options.mixed_precision:
            values["mixed_precision"] = options.mixed_precision
        options.train(validated(values, {key: f"--fix teacher: {key}" for key in values}))
        return output / "taught.safetensors"

    def _plan(self) -> CalibrationPlan:
        return CalibrationPlan(self.models.config, self.options.calibration, self.models.dtype, self.models.device)


def _deployed_base(models: Models) -> dict[str, Any]:
    """Return the training options of the deployed base."""
    recipe, config = models.deployed.recipe, models.deployed_config
    values = {key: getattr(config, key) for key in config.model_fields_set if key != "base_dtype"}
    values["model_type"] = models.family.name
    if recipe is None:
        return values
    values |= {"fp8_format": recipe.fp8.name, "fp8_exclude": list(recipe.exclude)}
    if recipe.granularity == "cast":
        return values | {"fp8_base": True}
    return values | {"fp8_scaled": True, "fp8_granularity": recipe.granularity}


_LAYOUT_OF_SCALES: dict[Granularity, LayoutKind] = {
    "tensor": "comfy_scaled",
    "row": "musubi",
    "block64": "musubi",
    "block128": "musubi",
}


def rebuild(models: Models, save_to: Path, kept_share: float, plan: CalibrationPlan) -> Models:
    """Write the deployed model anew and return the models with it deployed.

    Args:
        models: what is deployed now, a file or a recipe.
        save_to: where the result goes; a suffix is put on where the reference is a file.
        kept_share: of the fp8 file's size to spend on layers in bf16; 0 for none.
        plan: the reference, and what it runs on.
    """
    deployed = models.base(deployed=True)
    fp8 = {name: layer for name, layer in deployed.named_modules() if isinstance(layer, Fp8Linear)}
    high = [name for name, m in deployed.named_modules() if isinstance(m, nn.Linear) and name not in fp8]
    size = sum(layer.weight.numel() for layer in fp8.values())
    granularity = Counter(map(_granularity, fp8.values())).most_common(1)[0][0]
    number_format = format_of(next(iter(fp8.values())).weight.dtype)
    assert number_format is not None
    layout = models.deployed_family.fp8_layout() if models.deployed.path else None
    kind = layout.kind if layout and layout.kind != "plain" else _LAYOUT_OF_SCALES[granularity]
    # ComfyUI reads its scaled layout as e4m3fn; with scales nothing needs the range of e5m2
    number_format = E4M3FN if kind == "comfy_scaled" else number_format
    patterns = (f"^({'|'.join(map(re.escape, high))})$",) if high else ()
    recipe = Fp8Recipe(granularity, number_format, (), patterns, seed=plan.options.seed)
    base = Path(models.config.pretrained_model_name_or_path)
    target = save_to if base.expanduser().is_dir() else save_to.with_name(f"{save_to.name}.safetensors")
    del deployed, fp8
    calibrated = Calibrated(plan, compensated=True, budget_mb=kept_share * size / 2**20 if kept_share else None)
    quantize_checkpoint(base, target, kind, recipe, Console(quiet=True), calibrated)
    new = DeployedWeights(target.name, target, None)
    return Models(models.config, new, models.loras, models.dtype, models.device)


def _granularity(layer: Fp8Linear) -> Granularity:
    """Return the kind of a layer's scales; that of the scales which a layer without any is to get."""
    if layer.scale is None:
        return "tensor"
    rows, blocks = layer.scale.shape
    if blocks == 1:
        return "row" if rows > 1 else "tensor"
    found: Granularity = "block64" if layer.in_features // blocks == 64 else "block128"
    return found


def _own(models: Models, path: Path) -> dict[str, LoraWeights]:
    """Return the transformer's part of a LoRA file."""
    return models.targets.by_component(load_lora(path, models.targets).weights).get(models.targets.file_prefix, {})


def _with_lora(models: Models, path: Path) -> Models:
    """Return the same models with another LoRA, at strength 1."""
    loras = {models.targets.file_prefix: _own(models, path)}
    return Models(models.config, models.deployed, loras, models.dtype, models.device)
