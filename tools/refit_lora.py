"""Refit a LoRA to the quantised or distilled model that it will be used with, without training.

    python tools/refit_lora.py --lora style.safetensors --model FLUX.1-dev --deploy flux1-dev-fp8.safetensors \\
        --dataset_config my_dataset.toml --save_to style-fp8.safetensors
    python tools/refit_lora.py ... --deploy cast               # what fp8_base makes of the base; or tensor, row, ...
    python tools/refit_lora.py ... --correction_rank 16        # and undo more of the rounding, at a larger rank
    python tools/refit_lora.py --lora style.safetensors --model Z-Image --distilled Z-Image-Turbo \\
        --dataset_config my_dataset.toml --save_to style-turbo.safetensors

Each layer's factors are fitted so that on your images the served layer with the new LoRA computes what the bf16 layer
computed with the old one, as nearly as that rank allows (``networks.merging.refit``). Rank, alpha and keys stay, unless
--correction_rank is given: then ranks grow by it, and layers without a LoRA get one of that rank.

The cost: one forward pass of the served model for each image and noise level and for each group of layers whose
statistics fit into --statistics_gb, and one reading of both files. The result fits this file and no other: its
fingerprint goes into the metadata, and loading it beside another one is remarked on.

With --distilled each kind of layer gets the strength with which the LoRA does on the distilled model what it does on
its base, as nearly as strengths can (docs/distilled.md). That takes two runs of the distilled model on your images for
each kind of layer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from library.console import Console
from library.errors import UserError, exit_on_user_error
from library.models.hub import find_model
from library.precision.names import SCHEME_NAMES
from tools.command import (
    add_calibration,
    add_lora_output,
    calibration_plan,
    check_lora_output,
    tool_console,
    tool_parser,
    whole,
)

if TYPE_CHECKING:
    from library.fidelity.calibration import CalibrationPlan
    from networks.files.writing import SavedAs
    from networks.merging.refit import Refit


def refit(options: argparse.Namespace, console: Console) -> dict[str, Refit]:
    """Run the tool; return the fits under their layers' names."""
    from library.fidelity.deployed import parse_deployment
    from library.fidelity.refit import refit_lora, refit_table
    from library.fidelity.serving import Models
    from networks.files.writing import SavedAs

    check_lora_output(options.save_to, options.overwrite)
    plan, saved_as = calibration_plan(options, options.model), SavedAs(options.save_format, options.save_precision)
    if options.distilled is not None:
        fit_to_distilled(options, plan, saved_as, console)
        return {}
    fits = refit_lora(
        options.lora,
        Models(plan.config, parse_deployment(options.deploy), {}, plan.dtype, plan.device),
        options.save_to,
        plan.options,
        console,
        correction_rank=options.correction_rank,
        saved_as=saved_as,
    )
    console.print(refit_table(fits, options.show))
    return fits


def fit_to_distilled(options: argparse.Namespace, plan: CalibrationPlan, saved_as: SavedAs, console: Console) -> None:
    """Write the LoRA with the strengths that fit it to --distilled; print them."""
    from library.fidelity.deployed import DeployedWeights
    from library.fidelity.runs import prepare_eval_set
    from library.fidelity.serving import REFERENCE, Models
    from library.fidelity.strengths import fit_strengths, kind_of_layer
    from networks.files.adapters import load_lora
    from networks.files.weights import LoraWeights
    from networks.files.writing import save_derived_lora

    if options.correction_rank:
        raise UserError("--correction_rank: undoes rounding, and a distilled model is not rounded; remove it")
    name, path = options.distilled.name, find_model(options.distilled, "--distilled")
    if path.resolve() == options.model.resolve():
        raise UserError(f"--distilled: {path} is --model itself; give the distilled model of it")
    models = Models(plan.config, DeployedWeights(name, path, None), {}, plan.dtype, plan.device)
    source = load_lora(options.lora, models.targets)
    models.loras = models.targets.by_component(source.weights)
    strengths = fit_strengths(models, prepare_eval_set(models, plan.prepare(console), REFERENCE, 0), console)
    fitted = {
        layer: LoraWeights(each.down, each.up * strengths[kind_of_layer(layer)], each.alpha)
        for layer, each in models.transformer_lora.items()
    }
    made = source.weights | fitted, models.targets, source.metadata, f"strengths fitted to {name}", [source], saved_as
    save_derived_lora(options.save_to, *made)
    console.print(*(f"{kind}: {strength:.2f}" for kind, strength in strengths.items()), str(options.save_to), sep="\n")


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = tool_parser(__doc__)
    top.add_argument("--lora", required=True, type=Path, help="the LoRA, of any layout")
    top.add_argument("--model", required=True, type=Path, help="bf16 model: diffusers folder or transformer file")
    served = top.add_mutually_exclusive_group(required=True)
    served.add_argument(
        "--deploy",
        metavar="MODEL_OR_RECIPE",
        help="a quantised model, or a scheme to make one of --model by: " + ", ".join(SCHEME_NAMES),
    )
    served.add_argument("--distilled", type=Path, metavar="MODEL", help="a distilled model of --model: its turbo")
    top.add_argument(
        "--correction_rank", type=whole(least=0), default=0, metavar="R", help="rank to add to every quantised layer"
    )
    top.add_argument(
        "--show", type=whole(least=0), default=20, metavar="N", help="layers in the table (default: %(default)s)"
    )
    add_lora_output(top)
    add_calibration(top, required=True, model_type=False)
    return top


@exit_on_user_error
def main() -> None:
    """Parse the command line and refit."""
    refit(parser().parse_args(), tool_console())


if __name__ == "__main__":
    main()
