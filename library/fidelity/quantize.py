"""bf16 checkpoint -> quantised file, with a look at activations where that is asked for.

Without a calibration a recipe says which layers stay in high precision and how the others are rounded. With one, two
more things can be had. *Compensated* rounding chooses every weight's neighbour so that outputs change least (GPTQ,
``library.precision.parity.compensated``). A *budget* is spent on weights that stay in bf16: the quantised model runs
on the calibration once for each weight, that one alone back in bf16, and what the output changes by is what the weight
contributes to the error (``library.precision.parity.layer_errors``).
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import Progress
from rich.table import Table

from library.console import Console
from library.errors import UserError, counted
from library.fidelity.calibration import IMAGES, CalibrationPlan
from library.files import atomic_path, read_json
from library.models.hub import pipeline_index
from library.precision.checkpoint import WeightFiles
from library.precision.names import LayoutKind
from library.precision.parity.layer_errors import Candidate, choose_kept, measure_contributions
from library.precision.recipe import Recipe
from library.precision.writing import Written, write_quantized
from library.safetensors_io import weight_files
from library.training.report.progress import plain_table
from networks.files.base import open_base
from networks.merging.quantized import QuantizedMerge

_RANKED_ON = IMAGES  # of the calibration; ranking layers runs the model once more for each of them


@dataclass(frozen=True)
class ByActivations:
    """What is decided by running the model.

    Attributes:
        plan: what is run.
        compensated: round so that outputs change least.
        budget_mb: MiB for weights that stay in bf16; None for none.
    """

    plan: CalibrationPlan
    compensated: bool = False
    budget_mb: float | None = None


def quantize_checkpoint(
    model: Path,
    save_to: Path,
    kind: LayoutKind,
    recipe: Recipe,
    console: Console,
    by_activations: ByActivations | None = None,
    low_precision_products: bool | None = None,
) -> Written:
    """Write ``model`` quantised.

    Args:
        model: a .safetensors file, a model's folder or a pipeline's.
        save_to: a .safetensors file, or a folder where ``model`` is one.
        kind, recipe: the layout, and how weights are rounded.
        console: for what the calibration says.
        by_activations: what is decided by running the model; None: nothing, the recipe says all.
        low_precision_products: let ComfyUI multiply in the format; None: as is usual for it.
    """
    given, model = model, model.expanduser()
    if pipeline_index(model) is not None:
        if not (model / "transformer").is_dir():
            raise UserError(
                f"{model}: a pipeline without a transformer folder; give the folder of the model to quantise"
            )
        model = model / "transformer"
    target = save_to.expanduser()
    folder = target.suffix != ".safetensors"
    if folder:
        target = _file_in_folder(model, target)
    if target.resolve() in {file.resolve() for file in weight_files(model)}:
        raise UserError(f"--save_to {target}: is the model itself; choose another place")
    rounding: AbstractContextManager[tuple[QuantizedMerge | None, Recipe]] = nullcontext((None, recipe))
    if by_activations:
        rounding = _calibrated(given, save_to, kind, recipe, by_activations, console)
    with rounding as (rounded, recipe), Progress(transient=True) as progress:
        task = progress.add_task("quantising", total=None)
        written = write_quantized(
            WeightFiles(given, weight_files(model)),
            target,
            kind,
            recipe,
            low_precision_products=low_precision_products,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
            merge=rounded,
        )
    if folder:
        with atomic_path(target.parent / "config.json") as temporary:
            shutil.copyfile(model / "config.json", temporary)
    return written


def _file_in_folder(model: Path, folder: Path) -> Path:
    """Return where the weights lie in ``folder``, named as the library that reads the model wants them."""
    if not (model / "config.json").is_file():
        raise UserError(
            f"--save_to {folder}: {model} is a file, so the result is one; give a name that ends in .safetensors"
        )
    diffusers = "_class_name" in read_json(model / "config.json")
    return folder / ("diffusion_pytorch_model.safetensors" if diffusers else "model.safetensors")


@contextmanager
def _calibrated(
    model: Path,
    save_to: Path,
    kind: LayoutKind,
    recipe: Recipe,
    how: ByActivations,
    console: Console,
) -> Iterator[tuple[QuantizedMerge | None, Recipe]]:
    """Yield weights that are rounded already, if any, and the recipe with the layers that are worth keeping."""
    calibration = how.plan.prepare(console)
    transformer = calibration.load_fp8(recipe)
    base = open_base(model, quantized=True)
    save_to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=save_to.parent, prefix=f".{save_to.name}.") as spool:
        merge = QuantizedMerge(base, {}, kind, recipe, calibration.family.targets, Path(spool))
        modules = merge.modules()
        if how.budget_mb is not None:
            batches = [*calibration.fit, *calibration.check][:_RANKED_ON]
            places = merge.places
            shares = measure_contributions(
                transformer,
                list(modules.values()),
                lambda name: places[name].read(base.weights, how.plan.device).to(how.plan.dtype),
                lambda: calibration.velocities(transformer, batches),
            )
            sizes = [merge.bytes_saved(name) for name in modules]
            measured = zip(modules, shares, sizes, strict=True)
            candidates = [Candidate(name.removesuffix(".weight"), share, size) for name, share, size in measured]
            kept = choose_kept(candidates, int(how.budget_mb * 2**20))
            console.print(_budget_table(candidates, {one.name for one in kept}))
            console.print(f"kept: {len(kept)} of {counted(len(candidates), 'weight')} within {how.budget_mb:g} MiB")
            kept_patterns = (f"^{re.escape(one.name)}$" for one in kept)
            recipe = replace(recipe, exclude_patterns=(*recipe.exclude_patterns, *kept_patterns))
            modules = {
                name: of for name, of in modules.items() if recipe.excluded_as(name.removesuffix(".weight")) is None
            }
        if how.compensated:
            first = {names[0]: tensor for tensor, names in modules.items()}
            for group in calibration.layer_inputs(transformer, list(first)):
                for name, inputs in group.items():
                    merge.compensate(first[name], inputs)
        yield (merge if how.compensated else None), recipe


def _budget_table(candidates: list[Candidate], kept: set[str], shown: int = 20) -> Table:
    """Return weights by falling benefit: error of the output by each alone, what keeping it costs and brings."""
    table = plain_table("weight", "alone %", "MiB", "per MiB", "kept", left=["kept"])
    for one in sorted(candidates, key=lambda c: -c.benefit_per_megabyte)[:shown]:
        size = f"{one.extra_bytes / 2**20:.2f}"
        mark = "bf16" if one.name in kept else ""
        table.add_row(one.name, f"{100 * one.benefit**0.5:.3g}", size, f"{one.benefit_per_megabyte:.2g}", mark)
    total = sum(c.benefit for c in candidates)
    saved = sum(c.benefit for c in candidates if c.name in kept)
    table.add_section()
    used = sum(c.extra_bytes for c in candidates if c.name in kept) / 2**20
    left = f"{100 * total**0.5:.3g} -> {100 * max(0.0, total - saved) ** 0.5:.3g}"
    table.add_row("all together", left, f"{used:.2f}", "", "")
    return table
