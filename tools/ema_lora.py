"""Average the LoRAs that one run saved: an EMA made after training.

    python tools/ema_lora.py --lora out/style-step*.safetensors --save_to out/style-ema.safetensors --beta 0.9
    python tools/ema_lora.py --lora out/style-step*.safetensors --save_to out/style-ema.safetensors --sigma_rel 0.2

Files are put in the order of training by the step in their metadata (``ss_steps``) or name. ``--beta`` is the weight of
the past at each file, to ``--beta2`` at the last one if given; ``--sigma_rel`` takes the power function instead, its
width being that share of the run. A is averaged with A and B with B, so all files must be of one run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.errors import UserError, counted, exit_on_user_error
from tools.command import add_lora_output, check_lora_output, finite, tool_parser


def average(options: argparse.Namespace) -> list[tuple[Path, float]]:
    """Write the average that the command line asks for; return each file with its share in it, in order."""
    from networks.files.adapters import save_derived_lora
    from networks.files.detection import load_loras
    from networks.merging.average import average_loras, linear_betas, power_betas, training_order

    if len(options.lora) < 2:
        raise UserError("give at least two LoRAs of one run")
    if options.sigma_rel is not None and (options.beta is not None or options.beta2 is not None):
        raise UserError("--sigma_rel: is another rule than --beta and --beta2; give one of them")
    for name in ("beta", "beta2"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < 1:
            raise UserError(f"--{name} {value:g}: must be at least 0 and below 1; 0.95 is usual")
    check_lora_output(options.save_to, options.overwrite)
    targets, files = load_loras(options.lora, options.model_type)
    steps = list(range(1, len(files) + 1))
    if not options.no_sort:
        steps = training_order(options.lora, [file.metadata for file in files])
    order = sorted(range(len(files)), key=steps.__getitem__)
    paths, files = [options.lora[i] for i in order], [files[i] for i in order]
    first = 0.95 if options.beta is None else options.beta
    if options.sigma_rel is not None:
        betas = power_betas(sorted(steps), options.sigma_rel)
    else:
        betas = linear_betas(len(files), first, first if options.beta2 is None else options.beta2)
    weights, comment, last = average_loras(paths, files, betas), f"average of {len(files)} saves", files[-1]
    format_and_precision = options.save_format, options.save_precision
    save_derived_lora(options.save_to, weights, targets, last.metadata, comment, [last], *format_and_precision)
    return list(zip(paths, shares(betas), strict=True))


def shares(betas: list[float]) -> list[float]:
    """Return the weight of each file in the average; they sum to 1."""
    weights = [1.0]
    for beta in betas:
        weights = [weight * beta for weight in weights] + [1 - beta]
    return weights


@exit_on_user_error
def main() -> None:
    """Parse the command line, average, report."""
    parser = tool_parser(__doc__)
    parser.add_argument("--lora", required=True, nargs="+", type=Path, metavar="FILE", help="LoRAs that one run saved")
    parser.add_argument("--beta", type=finite, metavar="X", help="weight of the past (default: 0.95)")
    parser.add_argument("--beta2", type=finite, metavar="X", help="weight of the past at the last file")
    parser.add_argument("--sigma_rel", type=finite, metavar="X", help="width of the power function, a share of the run")
    parser.add_argument("--no_sort", action="store_true", help="the files are in order; with --sigma_rel evenly spaced")
    add_lora_output(parser)
    options = parser.parse_args()
    for path, share in average(options):
        print(f"{share:7.2%}  {path}")
    print(f"{options.save_to}: average of {counted(len(options.lora), 'LoRA')}")


if __name__ == "__main__":
    main()
