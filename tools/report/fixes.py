"""What removes the difference: fixes from the cheapest on, each tried on the user's own data and measured.

1. *settings*: everything but the weights as in the reference. Free.
2. *strength*: for a merge that lost part of the update, the LoRA at 1 / survival. Free; the one-minute test.
3. *retarget*: the LoRA refitted to the fp8 file, same rank, no training.
4. *correction*: the same with 32 ranks more, and a LoRA for layers that had none.
5. *rebuild*: the fp8 file made anew from bf16, of the same size, with scales, rounded with compensation, under a
   LoRA refitted to it.
6. *keep*: the same, a tenth larger: the layers that give back most per megabyte stay in bf16.
7. *teacher*: 200 steps on the fp8 file that learn the bf16 model's answers, from the refitted LoRA on.
8. *together*: the larger file, the correction for it, the steps on it.

Files that a fix makes lie in ``fixes/`` beside the report, in the LoRA's own format.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import tools.retarget_lora as retarget_lora
from library.config import load_config
from library.errors import UserError
from library.training.calibration import CalibrationOptions
from networks.files.adapters import load_lora
from networks.files.weights import LoraWeights
from tools.report.deployments import REFERENCE, Models, Variant
from tools.report.differences import Differences, compare
from tools.report.layers import LayerRow
from tools.report.measure import Asked, run_named
from tools.report.rebuilding import rebuild
from tools.report.result import Fix
from tools.report.runs import Outcome, Probe
from train_lora import train

FIXES = ("settings", "strength", "retarget", "correction", "rebuild", "keep", "teacher", "together")
CORRECTION_RANK, TEACHER_STEPS, TEACHER_RATE, KEPT_SHARE = 32, 200, "3e-4", 0.1


@dataclass(frozen=True)
class FixOptions:
    """Where files go, the LoRA, the flags that retargeting and training need, how long and how good.

    Attributes:
        folder: for files. lora: the one LoRA. base: the reference as the user named it. deploy: as the user named it.
        model_flags: of the reference's parts, as command line words.
        calibration: what fixes are fitted to and trained on.
        mixed_precision: as the user gave it.
        minutes: no further fix is begun after these.
        target: share of the deployment's error that is good enough.
        names: of the fixes to try.
    """

    folder: Path
    lora: Path
    base: str
    deploy: str
    model_flags: Sequence[str]
    calibration: CalibrationOptions
    mixed_precision: str | None
    minutes: float
    target: float
    names: tuple[str, ...] = FIXES


def try_fixes(
    models: Models,
    asked: Asked,
    probe: Probe,
    reference: Outcome,
    layers: Sequence[LayerRow],
    options: FixOptions,
    console: Console,
) -> list[Fix]:
    """Try the fixes in their order and return those that were tried.

    All are tried that the time allows, so that the table shows what more effort buys.

    Args:
        models, asked: of the deployment.
        probe, reference: what fixes are measured on, and what they are compared with.
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
        outcome = run_named(changed, variant, probe, console, name)
        figures = compare(reference, outcome, probe)
        fixes.append(Fix(name, cost, time.monotonic() - started, files, figures, outcome))

    if set(asked.variant.changes()) != {"weights"} and not models.deployed.merged:
        attempt("settings", "none: everything but the weights in high precision", lambda: (models, plain, ()))
    gains = [row.survival for row in layers if row.survival is not None]
    if gains and asked.variant.merge is not None and 0 < median(gains) < 0.95:
        stronger = replace(asked.variant, strength=asked.variant.strength / median(gains))
        attempt("strength", f"none: the LoRA at {stronger.strength:.2f}", lambda: (models, stronger, ()))
    workshop = _Workshop(models, options)
    ranks = f"{CORRECTION_RANK} ranks more in every fp8 layer"
    steps = f"{TEACHER_STEPS} training steps"
    larger = f"an fp8 file {KEPT_SHARE:.0%} larger, scaled and rounded anew"

    def with_lora(lora: Path, of: Models = models) -> tuple[Models, Variant, tuple[Path, ...]]:
        own = (of.deployed.path,) if of is not models and of.deployed.path else ()
        return _with_lora(of, lora), plain, (*own, lora)

    def fitted(of: Models, correction_rank: int = 0) -> tuple[Models, Variant, tuple[Path, ...]]:
        return with_lora(workshop.refitted(of, correction_rank), of)

    def taught(of: Models, correction_rank: int = 0) -> tuple[Models, Variant, tuple[Path, ...]]:
        return with_lora(workshop.taught(of, workshop.refitted(of, correction_rank)), of)

    attempt("retarget", "a forward pass over the calibration; the same rank", lambda: fitted(models))
    attempt("correction", ranks, lambda: fitted(models, CORRECTION_RANK))
    attempt("rebuild", "an fp8 file of the same size, scaled and rounded anew", lambda: fitted(workshop.rebuilt()))
    attempt("keep", larger, lambda: fitted(workshop.rebuilt(KEPT_SHARE)))
    attempt("teacher", f"{steps}, the same rank", lambda: taught(models))
    attempt("together", f"{larger}, {ranks}, {steps}", lambda: taught(workshop.rebuilt(KEPT_SHARE), CORRECTION_RANK))
    return fixes


def recommend(fixes: Sequence[Fix], before: Differences, target: float) -> Fix | None:
    """Return the first fix, in the order of cost, that brings the error to ``target`` of ``before``'s.

    Where none does it is the one with the smallest error; None if nothing was better than before.
    """
    good = [fix for fix in fixes if fix.figures.latents <= target * before.latents]
    best = min(fixes, key=lambda fix: fix.figures.latents, default=None)
    if good:
        return good[0]
    return best if best is not None and best.figures.latents < before.latents else None


def recommendation(best: Fix | None, before: Differences, target: float) -> str:
    """Return what to do, in words."""
    if best is None:
        return "Recommended: nothing that was tried is better than the deployment as it is."
    share = best.figures.latents / before.latents
    short = "" if share <= target else f", which is short of the target of {target:.2f}; the best that was tried"
    where = f"; use {', '.join(str(path) for path in best.files)}" if best.files else ""
    return f"Recommended: {best.name} ({best.cost}): {share:.2f} of the error{short}{where}."


def fix_table(fixes: Sequence[Fix], before: Differences) -> Table:
    """Return the deployment before and with each fix, a row each; errors in per cent of what the reference gives."""
    table = Table(box=SIMPLE_HEAD)
    for title in ("", "velocity", "latents", "picture", "of before", "ring/interior", "step", "seconds"):
        table.add_column(title, justify="right" if title else "left")

    def row(name: str, figures: Differences, seconds: str) -> None:
        ring, step = figures.ring_and_step
        share = figures.latents / before.latents if before.latents else float("nan")
        values = (f"{100 * v:.2f}" for v in (figures.velocity, figures.latents, figures.picture))
        table.add_row(name, *values, f"{share:.2f}", f"{ring:.2f}", f"{step:.2f}", seconds)

    row("as deployed", before, "")
    for fix in fixes:
        row(fix.name, fix.figures, f"{fix.seconds:.0f}")
    return table


class _Workshop:
    """Makes the files that fixes need, each once."""

    def __init__(self, models: Models, options: FixOptions) -> None:
        self.models, self.options = models, options
        self._rebuilt: dict[float, Models] = {}
        self._refitted: dict[tuple[str, int], Path] = {}

    def rebuilt(self, kept_share: float = 0.0) -> Models:
        """Return the models with the served file made anew."""
        if kept_share not in self._rebuilt:
            name = f"rebuilt_{kept_share:.0%}_larger".replace("%", "") if kept_share else "rebuilt"
            base, save_to, flags = self.options.base, self.options.folder / name, self._calibration_flags()
            self._rebuilt[kept_share] = rebuild(self.models, base, save_to, True, kept_share, flags)
        return self._rebuilt[kept_share]

    def refitted(self, models: Models, correction_rank: int) -> Path:
        """Return the LoRA refitted to the weights that ``models`` deploy."""
        key = self._name(models), correction_rank
        if key not in self._refitted:
            name = "corrected" if correction_rank else "retargeted"
            save_to = self.options.folder / (f"{name}_for_{key[0]}.safetensors" if key[0] else f"{name}.safetensors")
            words = ["--lora", str(self.options.lora), "--base", self.options.base, "--deploy", self._deploy(models)]
            words += ["--save_to", str(save_to), "--overwrite", "--correction_rank", str(correction_rank)]
            words += ["--model_type", models.family.name, *self._calibration_flags()]
            retarget_lora.retarget(retarget_lora.parser().parse_args(words), Console(quiet=True))
            self._refitted[key] = save_to
        return self._refitted[key]

    def taught(self, models: Models, lora: Path) -> Path:
        """Train ``lora`` on the weights that ``models`` deploy, the reference being the teacher; return its file.

        Raises:
            UserError: see ``train_lora.train``.
        """
        options = self.options
        output = options.folder / f"taught_{lora.stem}"
        words = ["--model_type", models.family.name, *options.model_flags, *_deployed_flags(models, options)]
        words += ["--distill_from", options.base, "--distill_lora", str(options.lora), "--network_weights", str(lora)]
        words += ["--dim_from_weights", "--output_dir", str(output), "--output_name", "taught"]
        words += [*_shared_flags(options), "--max_train_steps", str(TEACHER_STEPS), "--lr_scheduler", "cosine"]
        words += ["--learning_rate", TEACHER_RATE, "--max_data_loader_n_workers", "0"]
        train(load_config(words))
        return output / "taught.safetensors"

    def _calibration_flags(self) -> list[str]:
        calibration = self.options.calibration
        words = [*self.options.model_flags, *_shared_flags(self.options)]
        words += ["--calibration_images", str(calibration.images)]
        return [*words, "--calibration_sigmas", *(f"{sigma:g}" for sigma in calibration.sigmas)]

    def _name(self, models: Models) -> str:
        """Return the name of a rebuilt file; empty for what the user deploys."""
        path = models.deployed.path
        return "" if models is self.models or path is None else path.stem

    def _deploy(self, models: Models) -> str:
        return self.options.deploy if models is self.models else str(models.deployed.path)


def _shared_flags(options: FixOptions) -> list[str]:
    """Return the flags that retargeting and training have in common."""
    calibration = options.calibration
    words = ["--dataset_config", calibration.dataset_config, "--seed", str(calibration.seed)]
    words += ["--guidance_scale", f"{calibration.guidance_scale:g}"]
    words += ["--cache_directory", calibration.cache_directory] if calibration.cache_directory else []
    words += ["--mixed_precision", options.mixed_precision] if options.mixed_precision else []
    return [*words, *(["--masked_loss"] if calibration.masked_loss else [])]


def _deployed_flags(models: Models, options: FixOptions) -> list[str]:
    """Return the training flags of the deployed base."""
    recipe = models.deployed.recipe
    if recipe is None:
        assert models.deployed.path is not None
        config = models.deployed_config
        known = type(config).model_fields.keys() - {"model_type", "pretrained_model_name_or_path", "base_dtype"}
        given = {name: getattr(config, name) for name in sorted(known & config.model_fields_set)}
        flags = {name: [f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in given.items()}
        beside = [word for name, value in given.items() if value for word in flags[name]]
        return ["--pretrained_model_name_or_path", config.pretrained_model_name_or_path, *beside]
    words = ["--pretrained_model_name_or_path", options.base, "--fp8_format", recipe.fp8.name]
    words += ["--fp8_exclude", *recipe.exclude] if recipe.exclude else ["--fp8_exclude"]
    return [*words, *(["--fp8_base"] if recipe.granularity == "cast" else
                      ["--fp8_scaled", "--fp8_granularity", recipe.granularity])]  # fmt: skip


def _own(models: Models, path: Path) -> dict[str, LoraWeights]:
    """Return the transformer's part of a LoRA file."""
    return models.targets.by_component(load_lora(path, models.targets).weights).get(models.targets.file_prefix, {})


def _with_lora(models: Models, path: Path) -> Models:
    """Return the same models with another LoRA, at strength 1."""
    loras = {models.targets.file_prefix: _own(models, path)}
    return Models(models.config, models.deployed, loras, models.dtype, models.device)
