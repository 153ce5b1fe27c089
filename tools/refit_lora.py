"""Refit a LoRA that was trained in bf16 to the quantised model that it will be used with, without training.

    python tools/refit_lora.py --lora style.safetensors --model FLUX.1-dev --deploy flux1-dev-fp8.safetensors \\
        --dataset_config my_dataset.toml --save_to style-fp8.safetensors
    python tools/refit_lora.py ... --deploy cast               # what fp8_base makes of the base; or tensor, row, ...
    python tools/refit_lora.py ... --correction_rank 16        # and undo more of the rounding, at a larger rank

Each layer's factors are fitted so that on your images the served layer with the new LoRA computes what the bf16 layer
computed with the old one, as nearly as that rank allows (``networks.merging.refit``). Rank, alpha and keys stay, unless
--correction_rank is given: then ranks grow by it, and layers without a LoRA get one of that rank.

The cost: one forward pass of the served model for each image and noise level and for each group of layers whose
statistics fit into --statistics_gb, and one reading of both files. The result fits this file and no other: its
fingerprint goes into the metadata, and loading it beside another one is remarked on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from library.console import Console
from library.errors import exit_on_user_error
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
    from networks.merging.refit import Refit


def refit(options: argparse.Namespace, console: Console) -> dict[str, Refit]:
    """Run the tool; return the fits under their layers' names."""
    from library.fidelity.deployed import parse_deployment
    from library.fidelity.refit import refit_lora, refit_table
    from library.fidelity.serving import Models
    from networks.files.writing import SavedAs

    check_lora_output(options.save_to, options.overwrite)
    plan = calibration_plan(options, options.model)
    fits = refit_lora(
        options.lora,
        Models(plan.config, parse_deployment(options.deploy), {}, plan.dtype, plan.device),
        options.save_to,
        plan.options,
        console,
        correction_rank=options.correction_rank,
        saved_as=SavedAs(options.save_format, options.save_precision),
    )
    console.print(refit_table(fits, options.show))
    return fits


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = tool_parser(__doc__)
    top.add_argument("--lora", required=True, type=Path, help="the LoRA, of any layout")
    top.add_argument("--model", required=True, type=Path, help="bf16 model: diffusers folder or transformer file")
    top.add_argument(
        "--deploy",
        required=True,
        metavar="MODEL_OR_RECIPE",
        help="a quantised model, or a scheme to make one of --model by: " + ", ".join(SCHEME_NAMES),
    )
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
