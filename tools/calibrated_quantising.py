"""``quantize_model.py`` with a look at activations: which layers stay in bf16 under a budget, and how the others round.

With a budget the model runs in fp8 on the calibration, and once more with each weight alone back in bf16; what the
output changes by is what that weight contributes (``library.precision.parity.layer_errors``). With --compensated
every weight is then rounded so that outputs change least (``library.precision.parity.compensated``).
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import tools.calibration_flags as flags
from library.errors import UserError
from library.models.family import model_family
from library.precision.checkpoint_layouts import LayoutKind
from library.precision.parity.activations import collect_inputs
from library.precision.parity.layer_errors import Candidate, choose_kept, measure_contributions
from library.precision.recipe import Fp8Loader, Fp8Recipe
from library.training.calibration import IMAGES, prepare_calibration
from networks.files.base import open_base
from networks.merging.merge_fp8 import Fp8Merge

_RANKED_ON = IMAGES  # of the calibration; ranking layers runs the model once more for each of them


def add_calibrated_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of calibrated quantisation; without --seed, which the parser has, for rounding and images alike."""
    group = parser.add_argument_group("by activations")
    group.add_argument("--compensated", action="store_true", help="round so that outputs change least (GPTQ)")
    group.add_argument("--budget_mb", type=float, metavar="MB", help="keep in bf16 what helps most for so many MiB")
    flags.add_calibration_arguments(parser, required=False, seed=False)


@contextmanager
def calibrated(
    options: argparse.Namespace, kind: LayoutKind, recipe: Fp8Recipe, console: Console
) -> Iterator[tuple[Fp8Merge | None, Fp8Recipe]]:
    """Yield weights that are rounded already, if any, and the recipe with the layers that are worth keeping.

    Raises:
        UserError: flags that do not go together, or see ``prepare_calibration``.
    """
    asked = options.compensated or options.budget_mb is not None
    if asked != bool(options.dataset_config):
        raise UserError(
            "--dataset_config goes with --compensated or --budget_mb, and they with it; give both or neither"
        )
    if not asked:
        yield None, recipe
        return
    if options.compensated and recipe.stochastic:
        raise UserError("--compensated and --rounding stochastic are two ways of rounding; choose one")
    if options.budget_mb is not None and options.budget_mb <= 0:
        raise UserError(f"--budget_mb {options.budget_mb:g}: must be more than 0")
    device, dtype = flags.device_and_dtype(options)
    family = model_family(flags.model_config(options, options.model))
    targets = family.targets
    calibration = prepare_calibration(family, flags.calibration_options(options), dtype, device, console)
    transformer = family.load_transformer(dtype, device, fp8=Fp8Loader(recipe, compute="dequant"))
    batches = [*calibration.fit, *calibration.check]
    base = open_base(options.model, fp8=True)
    options.save_to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.save_to.parent, prefix=f".{options.save_to.name}.") as spool:
        merge = Fp8Merge(base, {}, kind, recipe, targets, Path(spool))
        modules = merge.modules()
        if options.budget_mb is not None:
            places = merge.places()
            shares = measure_contributions(
                transformer,
                list(modules.values()),
                lambda name: places[name].read(base.weights, device).to(dtype),
                lambda: calibration.velocities(transformer, batches[:_RANKED_ON]),
            )
            sizes = [sum(places[m].shape[0] * places[m].shape[1] for m in names) for names in modules.values()]
            measured = zip(modules, shares, sizes, strict=True)
            candidates = [Candidate(name.removesuffix(".weight"), share, size) for name, share, size in measured]
            kept = choose_kept(candidates, int(options.budget_mb * 2**20))
            console.print(_table(candidates, {one.name for one in kept}))
            console.print(f"kept: {len(kept)} of {len(candidates)} weights within {options.budget_mb:g} MiB")
            recipe = replace(
                recipe, exclude_patterns=(*recipe.exclude_patterns, *(f"^{re.escape(one.name)}$" for one in kept))
            )
            modules = {
                name: of for name, of in modules.items() if recipe.excluded_as(name.removesuffix(".weight")) is None
            }
        if options.compensated:
            first = {names[0]: tensor for tensor, names in modules.items()}
            forwards, memory = calibration.forwards(transformer, batches), int(options.statistics_gb * 2**30)
            for group in collect_inputs(transformer, list(first), forwards, memory_bytes=memory, seed=options.seed):
                for name, inputs in group.items():
                    merge.compensate(first[name], inputs)
        yield (merge if options.compensated else None), recipe


def _table(candidates: list[Candidate], kept: set[str], shown: int = 20) -> Table:
    """Return weights by falling benefit: error of the output by each alone, what keeping it costs and brings."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", border_style="dim")
    for heading in ("weight", "alone %", "MiB", "per MiB", "kept"):
        table.add_column(heading, justify="left" if heading in ("weight", "kept") else "right", no_wrap=True)
    for one in sorted(candidates, key=lambda c: -c.benefit_per_megabyte)[:shown]:
        size = f"{one.extra_bytes / 2**20:.2f}"
        mark = "bf16" if one.name in kept else ""
        table.add_row(one.name, f"{100 * one.benefit**0.5:.3g}", size, f"{one.benefit_per_megabyte:.2g}", mark)
    whole, saved = (
        sum(c.benefit for c in candidates if c.name in names) for names in ({c.name for c in candidates}, kept)
    )
    table.add_section()
    used = sum(c.extra_bytes for c in candidates if c.name in kept) / 2**20
    left = f"{100 * whole**0.5:.3g} -> {100 * max(0.0, whole - saved) ** 0.5:.3g}"
    table.add_row("all together", left, f"{used:.2f}", "", "")
    return table
