"""What removes the difference: fixes from the cheapest on, each tried on the user's own data and measured.

1. *bypass*: the LoRA beside the weights instead of rounded into them. Free.
2. *refit*: the LoRA refitted to the deployed file, same rank, no training.
3. *correction*: the same with 32 ranks more, and a LoRA for layers that had none.

A fix is measured as the server of the deployment will run it: the LoRA merged and products made as there. Where that
merge rounds, it is measured beside the weights too, which says what the bypass adds to the fix.

Files that a fix makes lie in ``fixes/`` beside the report, in the LoRA's own format.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.table import Table

from library.console import Console, plain_table
from library.errors import UserError, counted
from library.fidelity import FIXES
from library.fidelity.calibration import CalibrationOptions
from library.fidelity.differences import Differences, compare, taken_off
from library.fidelity.intervals import images_to_tell, side
from library.fidelity.refit import refit_lora
from library.fidelity.runs import EvalSet, Outcome, run_variant
from library.fidelity.serving import REFERENCE, Models, Variant
from networks.files.adapters import load_lora

FIX_COLUMNS = (
    *("", "velocity", "latents", "image", "of before", "bypass, of before", "border, times noise"),
    *("helps", "seconds", "cost"),
)
GOOD_ENOUGH = 0.3  # share of the deployment's error
CORRECTION_RANK = 32

Made = tuple[Models, Variant, tuple[Path, ...]]  # models and variant to run with a fix, and its files


@dataclass(frozen=True)
class FixOptions:
    """What fixes are made of.

    Attributes:
        folder: for files. lora: the one LoRA, at strength 1.
        calibration: what fixes are fitted to.
        names: of the fixes to try.
    """

    folder: Path
    lora: Path
    calibration: CalibrationOptions
    names: tuple[str, ...] = FIXES


@dataclass(frozen=True)
class Fix:
    """A fix that was tried.

    Attributes:
        name: one of the module's list. cost: in words. seconds: that finding it took. files: that it left.
        differences, outcome: of the deployment with it, as its server runs it.
        beside, outcome_beside: the same with the LoRA beside the weights; None where the server leaves it there, or the
            fix is no file.
    """

    name: str
    cost: str
    seconds: float
    files: tuple[Path, ...]
    differences: Differences
    outcome: Outcome
    beside: Differences | None = None
    outcome_beside: Outcome | None = None

    @property
    def left(self) -> float:
        """What is left in the latents, the better way of loading it."""
        return self.better.latents

    @property
    def better(self) -> Differences:
        """With it loaded the better way."""
        return min((each for each in (self.differences, self.beside) if each), key=lambda each: each.latents)

    def helps(self, before: Differences) -> str:
        """Return whether it helps: yes, no, or that so few images cannot tell and how many would."""
        share, images = taken_off(before, self.better), len(before.by_image)
        found = side(share.low, share.high, 0.0)
        if found != "open":
            return "yes" if found == "above" else "no"
        wanted = images_to_tell(images, share.value, share.low, share.high, 0.0)
        return f"{counted(images, 'image')} cannot tell, {wanted} would"


def fix_rows(fixes: Sequence[Fix], before: Differences) -> list[tuple[str, ...]]:
    """Return the cells of the table of fixes: the deployment before and with each fix, under ``FIX_COLUMNS``."""
    rows = []
    for name, each, beside, helps, seconds, cost in [
        ("as deployed", before, None, "", "", ""),
        *((fix.name, fix.differences, fix.beside, fix.helps(before), f"{fix.seconds:.0f}", fix.cost) for fix in fixes),
    ]:
        errors = (f"{value:.2%}" for value in (each.velocity, each.latents, each.image))
        shares = (f"{one.latents / before.latents:.2f}" if one and before.latents else "" for one in (each, beside))
        worst = each.border.worst if each.border else None
        seam = f"{worst.name} {worst.times:.2f}" if worst else ""
        rows.append((name, *errors, *shares, seam, helps, seconds, cost))
    return rows


def try_fixes(
    models: Models,
    deployment: Variant,
    eval_set: EvalSet,
    reference: Outcome,
    options: FixOptions,
    console: Console,
) -> list[Fix]:
    """Try the fixes in their order and return those that were tried.

    All are tried, so that the table shows what more effort buys.

    Args:
        models, deployment: what is mended.
        eval_set, reference: what fixes are measured on, and what they are compared with.
        options: files, flags, limits.
    """
    fixes: list[Fix] = []
    decode = models.image_encoder(REFERENCE).decode

    def run(changed: Models, variant: Variant, title: str) -> tuple[Outcome, Differences]:
        outcome = run_variant(changed, variant, eval_set, console, title)
        return outcome, compare(reference, outcome, eval_set, decode)

    def attempt(name: str, cost: str, make: Callable[[], Made]) -> None:
        if name not in options.names:
            return
        started = time.monotonic()
        try:
            changed, variant, files = make()
        except UserError as error:
            console.print(f"note: {name} not tried: {error}")
            return
        outcome, differences = run(changed, variant, name)
        seconds, beside, apart = time.monotonic() - started, None, None
        if files and changed.rounded_in(variant):
            apart, beside = run(changed, replace(variant, merge=None), f"{name}, bypass")
        fixes.append(Fix(name, cost, seconds, files, differences, outcome, beside, apart))

    served = replace(REFERENCE, weights=True, merge=deployment.merge, activations=deployment.activations)
    if models.rounded_in(deployment) and not models.deployed.merged:
        apart = replace(deployment, merge=None)
        attempt("bypass", "none: ComfyUI's Load LoRA (Bypass), or a GGUF", lambda: (models, apart, ()))
    for name, cost, ranks in (
        ("refit", "a forward pass over the calibration; the same rank", 0),
        ("correction", f"{CORRECTION_RANK} ranks more in every quantised layer", CORRECTION_RANK),
    ):
        attempt(name, cost, partial(_fitted, models, options, ranks, served))
    return fixes


def recommend(fixes: Sequence[Fix], before: Differences) -> Fix | None:
    """Return the first fix, in the order of cost, that brings the error to ``GOOD_ENOUGH`` of ``before``'s.

    The bypass costs nothing, so that it counts where it helps. Where none does it is the one with the smallest error;
    None if nothing was better than before.
    """
    good = [fix for fix in fixes if fix.left <= GOOD_ENOUGH * before.latents]
    best = min(fixes, key=lambda fix: fix.left, default=None)
    if good:
        return good[0]
    return best if best is not None and best.left < before.latents else None


def recommendation(best: Fix | None, before: Differences) -> str:
    """Return what to do, in words."""
    if best is None:
        return "nothing that was tried is better than the deployment as it is"
    if not before.latents:
        return "nothing: the finished latents are right; what differs is made of them (VAE, pasting)"
    share = best.left / before.latents
    short = (
        "" if share <= GOOD_ENOUGH else f", which is short of the target of {GOOD_ENOUGH:.2f}; the best that was tried"
    )
    where = f"; use {', '.join(str(path) for path in best.files)}" if best.files else ""
    if best.left < best.differences.latents:
        merged = best.differences.latents / before.latents
        where += f" beside the weights (ComfyUI: Load LoRA (Bypass)); merged by the server it leaves {merged:.2f}"
    helps = best.helps(before)
    doubt = "" if helps == "yes" else f"; whether it helps: {helps}"
    return f"“{best.name}” ({best.cost}): {share:.2f} of the error is left{short}{where}{doubt}"


def fix_table(fixes: Sequence[Fix], before: Differences) -> Table:
    """Return the deployment before and with each fix for the terminal, without what they cost."""
    table = plain_table(*FIX_COLUMNS[:-1])
    for row in fix_rows(fixes, before):
        table.add_row(*row[:-1])
    return table


def _fitted(models: Models, options: FixOptions, correction_rank: int, served: Variant) -> Made:
    """Return ``models`` with the LoRA refitted to the weights they deploy, run as ``served``."""
    targets, quiet = models.targets, Console(quiet=True)
    lora = options.folder / f"{'corrected' if correction_rank else 'refitted'}.safetensors"
    refit_lora(options.lora, models, lora, options.calibration, quiet, correction_rank=correction_rank)
    weights = targets.by_component(load_lora(lora, targets).weights)
    ours = {**models.loras, targets.file_prefix: weights.get(targets.file_prefix, {})}
    return replace(models, loras=ours), served, (lora,)
