"""Draw one run or several: learning rate, d, d*lr, loss, gradient norm; of one run the loss by noise level too.

    python tools/plot_lr.py output/run1 output/run2 --save_to lr.png

Reads each run's ``metrics.jsonl``; writes a PNG and an SVG. Works while the runs are going on.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.errors import exit_on_user_error
from tools.command import tool_parser


@exit_on_user_error
def main() -> None:
    """Read the command line, draw, print where the plots are."""
    parser = tool_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="output folders (or metrics.jsonl files)")
    parser.add_argument(
        "--save_to",
        type=Path,
        help="plot, written as .png and as .svg; default: lr.png in the first run's folder",
    )
    arguments = parser.parse_args()
    from library.training.report.plots import plot_runs

    first: Path = arguments.runs[0]
    save_to = arguments.save_to or (first if first.is_dir() else first.parent) / "lr.png"
    for path in plot_runs(arguments.runs, save_to):
        print(path)


if __name__ == "__main__":
    main()
