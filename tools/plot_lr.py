"""Draw one run or several: learning rate, d, d*lr, loss, gradient norm; or one run's loss by noise level.

    python tools/plot_lr.py output/run1 output/run2 --save_to lr.png
    python tools/plot_lr.py output/run1 --noise_levels

Reads each run's ``metrics.jsonl``; writes a PNG and an SVG. Works while the runs are going on.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.errors import UserError, exit_on_user_error
from tools.command import tool_parser


@exit_on_user_error
def main() -> None:
    """Read the command line, draw, print where the plots are."""
    parser = tool_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="output folders (or metrics.jsonl files)")
    parser.add_argument(
        "--save_to",
        type=Path,
        help="plot, written as .png and as .svg; default: lr.png, or noise_levels.png, in the first run's folder",
    )
    parser.add_argument(
        "--noise_levels", action="store_true", help="draw one run's loss and gradient norm by noise level instead"
    )
    arguments = parser.parse_args()
    from library.training.report.plots import plot_noise_levels, plot_runs

    first: Path = arguments.runs[0]
    name = "noise_levels.png" if arguments.noise_levels else "lr.png"
    save_to = arguments.save_to or (first if first.is_dir() else first.parent) / name
    if not arguments.noise_levels:
        written = plot_runs(arguments.runs, save_to)
    elif len(arguments.runs) > 1:
        raise UserError("noise_levels: draws one run; name one run")
    elif not (written := plot_noise_levels(first, save_to)):
        raise UserError(f"{first}: its metrics have no noise levels (runs on images of this version do); train again")
    for path in written:
        print(path)


if __name__ == "__main__":
    main()
