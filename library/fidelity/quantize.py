"""bf16 checkpoint -> quantised file, rounded by the activations of a calibration where that is wanted.

A recipe says which layers stay in high precision and how the others are rounded. With a calibration every weight's
neighbour is chosen so that outputs change least (GPTQ, ``library.precision.parity.compensated``).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from rich.progress import Progress

from library.config.model_layouts import pipeline_index
from library.console import Console
from library.errors import UserError
from library.fidelity.calibration import CalibrationPlan
from library.fidelity.merge import compensate
from library.files import atomic_path, read_json
from library.models.family_by_name import family_class
from library.precision.checkpoint import WeightFiles
from library.precision.names import LayoutKind
from library.precision.recipe import Recipe
from library.precision.writing import Written, write_quantized
from library.safetensors_io import weight_files
from networks.files.base import open_base
from networks.merging.quantized import QuantizedMerge


def quantize_checkpoint(
    model: Path,
    save_to: Path,
    kind: LayoutKind,
    recipe: Recipe,
    console: Console,
    calibration: CalibrationPlan | None = None,
    low_precision_products: bool | None = None,
) -> Written:
    """Write ``model`` quantised.

    Args:
        model: a .safetensors file, a model's folder or a pipeline's.
        save_to: a .safetensors file, or a folder where ``model`` is one.
        kind, recipe: the layout, and how weights are rounded.
        console: for what the calibration says.
        calibration: rounding makes outputs change least on it; None: as the recipe says.
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
    rounding: AbstractContextManager[QuantizedMerge | None] = nullcontext()
    if calibration:
        rounding = _compensated(given, save_to, kind, recipe, calibration, console)
    with rounding as rounded, Progress(transient=True) as progress:
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
def _compensated(
    model: Path, save_to: Path, kind: LayoutKind, recipe: Recipe, plan: CalibrationPlan, console: Console
) -> Iterator[QuantizedMerge]:
    """Yield the weights, rounded so that outputs change least."""
    base, targets = open_base(model, quantized=True), family_class(plan.config.model_type).targets
    save_to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=save_to.parent, prefix=f".{save_to.name}.") as spool:
        merge = QuantizedMerge(base, {}, kind, recipe, targets, Path(spool))
        compensate(merge, plan, console)
        yield merge
