"""Turn a bf16 checkpoint into a quantised one that ComfyUI, diffusers, musubi-tuner and Tandem can load.

    python tools/quantize_model.py --model flux1-dev.safetensors --save_to flux1-dev-fp8.safetensors
    python tools/quantize_model.py --model flux1-dev.safetensors --save_to int8.safetensors --scheme int8_convrot
    python tools/quantize_model.py --model FLUX.1-dev --save_to FLUX.1-dev-fp8 --layout plain     # a diffusers folder
    python tools/quantize_model.py --model qwen.safetensors --save_to q.safetensors --layout musubi --scheme row
    python tools/quantize_model.py --model flux1-dev-fp8.safetensors --save_to high.safetensors --products high

With --dataset_config and --compensated weights are rounded so that outputs on your images change least. The last line
above changes nothing of a downloaded file but what it asks ComfyUI for: products in high precision, whose activations
are not rounded.

--scheme is the format: fp8 (cast: without scales; tensor, row, block64, block128: what shares a scale), int8 (a scale
a tensor), int8_row, int8_convrot (rotated; the best of these), nvfp4. Layouts of fp8: comfy_scaled (ComfyUI, any
version), comfy_quant (ComfyUI since late 2025), musubi, plain (no scales: anything that loads fp8), rows (scales a row
without a marker); int8 and nvfp4 are written as comfy_quant. mxfp8, GGUF and nf4 are read and not written.
docs/serving.md says which to choose.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from library.config.schema import PrecisionConfig
from library.console import Console
from library.errors import UserError, exit_on_user_error
from library.models.hub import find_model
from library.precision.names import FORMAT_NAMES, GRANULARITIES, SCHEME_NAMES, USUAL_LAYOUTS, WRITTEN_LAYOUTS
from tools.command import (
    add_calibration,
    answer_early,
    calibration_plan,
    choices,
    seed_number,
    tool_console,
    tool_parser,
)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--model",
        required=True,
        type=Path,
        help="a .safetensors file, a model or pipeline folder, a name on the hub",
    )
    parser.add_argument(
        "--save_to", required=True, type=Path, help="a .safetensors file, or a folder if --model is one"
    )
    parser.add_argument("--layout", choices=list(WRITTEN_LAYOUTS), help="default: comfy_scaled, or the scheme's usual")
    names = ", ".join(SCHEME_NAMES)
    parser.add_argument("--scheme", metavar="NAME", help=f"one of {names}; default: the layout's usual one")
    parser.add_argument("--format", choices=FORMAT_NAMES, help="of fp8 (default: e4m3fn)")
    parser.add_argument(
        "--exclude",
        default="embedders,final",
        help=f"kinds that stay in high precision, of {', '.join(choices(PrecisionConfig, 'fp8_exclude'))}; '' for none",
    )
    parser.add_argument(
        "--exclude_pattern", action="append", default=[], metavar="REGEX", help="further layers that stay so"
    )
    parser.add_argument("--rounding", choices=("nearest", "stochastic"), default="nearest")
    parser.add_argument("--seed", type=seed_number, default=0, help="of stochastic rounding and calibration")
    parser.add_argument(
        "--products",
        choices=("high", "low"),
        help="what a file of scaled fp8 or nvfp4 asks of ComfyUI: products in high precision, as training sees them, "
        "or in the format, which rounds activations (default: high for fp8, low for nvfp4); of a --model that is "
        "quantised already nothing else is changed",
    )
    group = parser.add_argument_group("by activations")
    group.add_argument("--compensated", action="store_true", help="round so that outputs change least (GPTQ)")
    add_calibration(parser, required=False, model_type=True, seed=False)
    return parser


answer_early(__name__, lambda: parser().parse_args())

from library.precision.fp8_numbers import format_named
from library.precision.recipe import Recipe, scheme_named
from library.precision.writing import Written
from networks.files.base import open_base


def quantize(options: argparse.Namespace, console: Console) -> Written:
    """Write the quantised model that ``options`` ask for."""
    from library.fidelity.quantize import quantize_checkpoint

    if options.compensated != bool(options.dataset_config):
        raise UserError("--dataset_config goes with --compensated, and that with it; give both or neither")
    if options.compensated and options.rounding == "stochastic":
        raise UserError("--compensated and --rounding stochastic are two ways of rounding; choose one")
    name = options.scheme or WRITTEN_LAYOUTS[options.layout or "comfy_scaled"][0]
    scheme = scheme_named(name, format_named(options.format or "e4m3fn"))
    layout = options.layout or USUAL_LAYOUTS[name]
    if options.format and name not in GRANULARITIES:
        raise UserError(f"--format {options.format}: is of fp8, and the scheme is {name}; remove it")
    model = find_model(options.model, "--model")
    if options.products:
        _check_products(options, model, layout, name)
    recipe = Recipe(
        scheme,
        exclude=tuple(kind.strip() for kind in options.exclude.split(",") if kind.strip()),
        exclude_patterns=tuple(options.exclude_pattern),
        stochastic=options.rounding == "stochastic",
        seed=options.seed,
    )
    plan = calibration_plan(options, model) if options.compensated else None
    low = None if options.products is None else options.products == "low"
    return quantize_checkpoint(model, options.save_to, layout, recipe, console, plan, low)


def _check_products(options: argparse.Namespace, model: Path, layout: str, scheme: str) -> None:
    """Refuse ``--products`` where no server would heed it, or beside what cannot be changed with it."""
    if model.exists() and open_base(model, quantized=True).weights.quantized is not None:
        alone, top = {"model", "save_to", "products"}, parser()
        others = [name for name, value in vars(options).items() if name not in alone and value != top.get_default(name)]
        if others:
            raise UserError(
                f"--{others[0]}: {model} is quantised already, and --products changes nothing else of it; "
                f"remove --{others[0]}, or give the bf16 file"
            )
    elif not layout.startswith("comfy"):
        raise UserError(f"--products {options.products}: files of layout {layout} cannot say so; remove it")
    elif scheme.startswith("int8"):
        raise UserError(f"--products {options.products}: ComfyUI multiplies int8 files in int8 always; remove it")


@exit_on_user_error
def main() -> None:
    """Quantise from the command line; say what was written."""
    print(quantize(parser().parse_args(), tool_console()).describe())


if __name__ == "__main__":
    main()
