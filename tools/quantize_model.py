"""Turn a bf16 checkpoint into an fp8 one that ComfyUI, diffusers, musubi-tuner and Tandem can load.

    python tools/quantize_model.py --model flux1-dev.safetensors --save_to flux1-dev-fp8.safetensors
    python tools/quantize_model.py --model FLUX.1-dev --save_to FLUX.1-dev-fp8 --layout plain     # a diffusers folder
    python tools/quantize_model.py --model qwen.safetensors --save_to q.safetensors --layout musubi
    --granularity row

With --dataset_config and --compensated weights are rounded so that outputs on your images change least; with
--budget_mb those that contribute most to the error of the model stay in bf16.

Layouts: comfy_scaled (ComfyUI, any version), comfy_quant (ComfyUI since late 2025), musubi, plain (no
scales: anything that loads fp8). See docs/precision.md for what each costs in accuracy.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.progress import Progress

from library.errors import UserError, exit_on_user_error
from library.files import atomic_path
from library.precision.checkpoint_layouts import LayoutKind, WeightFiles
from library.precision.checkpoint_writing import WrittenFp8, default_granularity, write_fp8_checkpoint
from library.precision.quantize import FORMATS, GRANULARITIES, format_named
from library.precision.recipe import KINDS, Fp8Recipe
from library.safetensors_io import weight_files
from tools.calibrated_quantising import add_calibrated_arguments, calibrated

_FILE_IN_FOLDER = {"diffusers": "diffusion_pytorch_model.safetensors", "transformers": "model.safetensors"}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--model", required=True, type=Path, help="a .safetensors file, a model folder or a pipeline folder"
    )
    parser.add_argument(
        "--save_to", required=True, type=Path, help="a .safetensors file, or a folder if --model is one"
    )
    parser.add_argument("--layout", choices=get_args(LayoutKind), default="comfy_scaled")
    parser.add_argument("--granularity", choices=GRANULARITIES, help="scales; default: the layout's usual ones")
    parser.add_argument("--format", choices=[fp8.name for fp8 in FORMATS], default="e4m3fn")
    parser.add_argument(
        "--keep", default="embedders,final", help=f"kinds kept high, of {', '.join(KINDS)}; '' for none"
    )
    parser.add_argument("--keep_pattern", action="append", default=[], metavar="REGEX", help="further layers kept high")
    parser.add_argument("--rounding", choices=("nearest", "stochastic"), default="nearest")
    parser.add_argument("--seed", type=int, default=0, help="of stochastic rounding and calibration")
    parser.add_argument(
        "--fp8_matmul",
        action="store_true",
        help="let ComfyUI multiply in fp8 (rounds activations; not what training saw)",
    )
    add_calibrated_arguments(parser)
    return parser.parse_args(arguments)


def quantize(options: argparse.Namespace, console: Console) -> WrittenFp8:
    """Write the fp8 model that ``options`` ask for.

    Raises:
        UserError: see ``write_fp8_checkpoint``; or ``--save_to`` does not suit ``--model``.
    """
    model: Path = options.model.expanduser()
    if (model / "model_index.json").is_file():
        if not (model / "transformer").is_dir():
            raise UserError(
                f"{model}: a pipeline without a transformer folder; give the folder of the model to quantise"
            )
        model = model / "transformer"
    target: Path = options.save_to.expanduser()
    folder = target.suffix != ".safetensors"
    if folder:
        target = _file_in_folder(model, target)
    if target.resolve() in {file.resolve() for file in weight_files(model)}:
        raise UserError(f"--save_to {target}: is the model itself; choose another place")
    recipe = Fp8Recipe(
        granularity=options.granularity or default_granularity(options.layout),
        fp8=format_named(options.format),
        exclude=tuple(kind.strip() for kind in options.keep.split(",") if kind.strip()),
        exclude_patterns=tuple(options.keep_pattern),
        stochastic=options.rounding == "stochastic",
        seed=options.seed,
    )
    with (
        calibrated(options, options.layout, recipe, console) as (rounded, recipe),
        Progress(transient=True) as progress,
    ):
        task = progress.add_task("quantising", total=None)
        written = write_fp8_checkpoint(
            WeightFiles(options.model, weight_files(model)),
            target,
            options.layout,
            recipe,
            fp8_matmul=options.fp8_matmul,
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
    diffusers = '"_class_name"' in (model / "config.json").read_text(encoding="utf-8")
    return folder / _FILE_IN_FOLDER["diffusers" if diffusers else "transformers"]


@exit_on_user_error
def main() -> None:
    """Read the command line, quantise, say what was written."""
    options = parse(sys.argv[1:])
    print(quantize(options, Console(highlight=False, markup=False)).describe())


if __name__ == "__main__":
    main()
