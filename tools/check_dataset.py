"""Look a dataset over before training on it: broken files, duplicates, captions, sizes, masks, borders.

    python tools/check_dataset.py dataset.toml
    python tools/check_dataset.py dataset.toml --report report.html --strict

Every file is decoded once; what was learnt is kept in the cache folder, so the next look takes a second. ``--strict``
leaves with exit code 2 if anything was found, as ``strict_dataset`` does in training.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table
from rich.text import Text

from library.conditions import ConditionKind
from library.config.schema import DatasetArguments
from library.data.config import INPAINT_KEYS, REFERENCE_KEYS, load_dataset_config, read_toml
from library.data.lint import TITLES, Report, check
from library.errors import UserError, exit_on_user_error
from library.files import write_text
from library.training.report.progress import counting
from tools.dataset_page import page

_SHOWN = 5  # findings of a kind in the terminal


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Look a dataset over before training on it.")
    parser.add_argument("dataset", type=Path, help="dataset TOML")
    parser.add_argument("--report", type=Path, help="HTML page to write, with thumbnails")
    parser.add_argument("--strict", action="store_true", help="exit code 2 if anything is found")
    parser.add_argument("--cache_directory", help="as in training; default .tandem_cache beside the images")
    parser.add_argument(
        "--pixel_multiple", type=int, default=16, help="sides are multiples of it; 16 for every model so far"
    )
    parser.add_argument(
        "--conditioning", choices=get_args(ConditionKind), help="what the model is given; default: as the TOML's keys"
    )
    return parser.parse_args(argv)


def conditioning_of(dataset: Path) -> ConditionKind:
    """Return which kind of model a TOML's keys are for."""
    text = str(read_toml(dataset).tables)
    if any(f"'{key}'" in text for key in INPAINT_KEYS):
        return "fill"
    return "references" if any(f"'{key}'" in text for key in REFERENCE_KEYS) else "none"


def show(report: Report, console: Console) -> None:
    """Print the findings as a table."""
    if not report.findings:
        console.print(f"{report.images} images, nothing found")
        return
    table = Table("", "found", "", show_edge=False)
    for kind, count in report.counts().items():
        found = [finding for finding in report.findings if finding.kind == kind]
        lines = [finding.text for finding in found[:_SHOWN]]
        lines += [f"and {count - _SHOWN} more"] if count > _SHOWN else []
        style = "bold red" if found[0].is_error else "bold"
        table.add_row(Text(TITLES[kind], style), str(count), Text("\n".join(lines)))
    console.print(table)


@exit_on_user_error
def main() -> None:
    """Check one dataset from the command line."""
    options = parse_arguments(sys.argv[1:])
    arguments = DatasetArguments(dataset_config=str(options.dataset), cache_directory=options.cache_directory)
    conditioning = options.conditioning or conditioning_of(options.dataset)
    config = load_dataset_config(options.dataset, arguments, conditioning)
    console = Console(markup=False, highlight=False)
    with counting(console) as start:
        report = check(config, options.pixel_multiple, conditioning, start)
    show(report, console)
    if options.report is not None:
        write_text(options.report, page(report, options.dataset))
        console.print(f"written: {options.report}")
    if options.strict and report.findings:
        raise UserError(
            f"{options.dataset}: {len(report.findings)} findings; put them right, or check without --strict"
        )


if __name__ == "__main__":
    main()
