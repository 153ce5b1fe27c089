"""Look a dataset over before training on it: broken files, duplicates, captions, sizes, masks, borders.

    python tools/check_dataset.py dataset.toml
    python tools/check_dataset.py dataset.toml --strict

Every file is decoded once; what was found is cached, so the next look takes a second. ``--strict`` leaves with exit
code 2 if anything was found. With ``--config_file`` captions are counted in the tokens of its model's text encoder,
whose weights are not loaded. ``--json`` writes for programs the findings and the images as training sees them, then
small pictures of the images into the folder of ``--thumbnails``, and those of masks and control images into
``previews`` beside it; the Data screen of the browser's page (``ui.py``) shows them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.config import load_config
from library.config.markers import is_nothing, split_pairs
from library.config.model_types import MODEL_TYPES, ConditionKind, ModelType
from library.config.schema import DatasetArguments
from library.console import Console
from library.errors import UserError, counted, exit_on_user_error
from library.files import read_toml, write_text
from library.training.report.progress import counting, print_progress
from tools.command import answer_early, seed_number, tool_console, tool_parser


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = tool_parser(__doc__)
    parser.add_argument("dataset", type=Path, help="dataset TOML")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write findings, buckets and images for programs")
    parser.add_argument("--thumbnails", type=Path, metavar="DIR", help="with --json: keep small pictures of the images")
    parser.add_argument("--seed", type=seed_number, default=0, help="the training's: masks and held-out images follow")
    parser.add_argument("--strict", action="store_true", help="exit code 2 if anything is found")
    parser.add_argument("--trigger_word", help="as in training: for subsets that name none")
    parser.add_argument("--cache_directory", help="as in training; default .tandem_cache beside the images")
    parser.add_argument(
        "--dataset_args", nargs="*", metavar="KEY=VALUE", help="as in training: what the TOML leaves open"
    )
    parser.add_argument("--config_file", help="the training's: captions are counted in its model's tokens")
    return parser


answer_early(__name__, lambda: parser().parse_args())

from concurrent.futures import ThreadPoolExecutor

from library.data.config import INPAINT_KEYS, OTHER_NAMES, REFERENCE_KEYS, DatasetConfig, load_dataset_config
from library.data.gallery import described, hashed_previews, small_jpeg, thumbnail_name, write_thumbnails
from library.data.lint import Advance, Report, check, title
from library.data.samples import Sample
from library.data.sources import names_controls
from library.training.run_inputs import idle_options

_SHOWN = 5  # findings of a kind in the terminal


def conditioning_of(dataset: Path, arguments: DatasetArguments) -> ConditionKind:
    """Return which kind of model a dataset's keys are for, and those of its metadata files."""
    tables = {} if dataset.expanduser().is_dir() else read_toml(dataset, "check dataset_config")[0]
    asked = _asked([tables, split_pairs(arguments.dataset_args, "dataset_args")])
    if asked & {*INPAINT_KEYS}:
        return "fill"
    if asked & {*REFERENCE_KEYS}:
        return "references"
    subsets = (subset for each in load_dataset_config(dataset, arguments).datasets for subset in each.subsets)
    names_some = any(subset.metadata_file and names_controls(subset.metadata_file) for subset in subsets)
    return "references" if names_some else "none"


def _asked(value: Any) -> set[str]:
    """Return the keys, in Tandem's names, of all tables in ``value`` but those that ask for nothing."""
    keys = set[str]()
    if isinstance(value, dict):
        keys = {OTHER_NAMES.get(key, key) for key, one in value.items() if not is_nothing(one)}
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return keys.union(*map(_asked, inside))


def show(report: Report, console: Console) -> None:
    """Print the findings, a heading a kind."""
    for line in (*report.sizes, *(f"note: {note}" for note in report.notes)):
        console.print(line)
    if not report.findings:
        console.print(f"{counted(report.images, 'image')}, nothing found")
    for found in report.by_kind().values():
        console.print(title(found), style="bold red" if found[0].is_error else "bold")
        lines = [finding.text for finding in found[:_SHOWN]]
        lines += [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        console.print(*(f"  {line}" for line in lines), sep="\n")


def write_json(
    options: argparse.Namespace,
    config: DatasetConfig,
    report: Report,
    start: Callable[[str, int], Advance],
    pixel_multiple: int,
) -> None:
    """Write what is known of a dataset; then small pictures of its images, and of what models are given besides.

    "thumbnail" of an image is a name in the folder of --thumbnails.
    """
    path, thumbnails, seed = options.json, options.thumbnails, options.seed
    content = described(config, report, report.samples, report.refused)
    for image in content["images"]:
        image["thumbnail"] = thumbnail_name(image["path"]) if thumbnails and image["size"] else None
    write_text(path, json.dumps(content))
    if thumbnails is not None:
        names = {image["path"]: image["thumbnail"] for image in content["images"] if image["thumbnail"]}
        write_thumbnails(names, thumbnails, start("making small pictures", len(names)))
    order = sorted(report.samples, key=lambda sample: (sample.group.dataset, sample.fit.bucket))  # as described
    waiting = [(number, sample) for number, sample in enumerate(order) if content["images"][number]["besides"]]
    advance = start("pictures of masks and control images", len(waiting))

    def draw(numbered: tuple[int, Sample]) -> None:
        try:
            for n, (_, image) in enumerate(hashed_previews(numbered[1], seed)):
                (path.parent / "previews" / f"{numbered[0]}_{n}.jpg").write_bytes(small_jpeg(image))
        except UserError as error:
            print(error)

    if waiting:
        (path.parent / "previews").mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(draw, waiting):
            advance(1)


@exit_on_user_error
def main() -> None:
    """Check one dataset from the command line."""
    options = parser().parse_args()
    if options.thumbnails is not None and options.json is None:
        raise UserError("--thumbnails: has no effect without --json, which names them; give it, or remove --thumbnails")
    given = {key: getattr(options, key) for key in ("cache_directory", "trigger_word", "dataset_args")}
    given = {"dataset_config": str(options.dataset)} | {key: value for key, value in given.items() if value is not None}
    arguments = DatasetArguments(**given)
    pixel_multiple = ModelType.pixel_multiple  # where no --config_file says
    too_long, share, training, idle = None, None, None, list[str]()
    if options.config_file is not None:
        import torch

        from library.models.family_by_name import model_family

        words = ((f"--{key}", *([value] if isinstance(value, str) else value)) for key, value in given.items())
        training = load_config(["--config_file", options.config_file, *chain(*words)])
        arguments, family = training.dataset, model_family(training.model)
        kind, pixel_multiple = family.conditioning, MODEL_TYPES[training.model.model_type].pixel_multiple
        too_long = family.load_text_encoder(torch.float32).too_long
    else:
        kind = conditioning_of(options.dataset, arguments)
    console, config = tool_console(), load_dataset_config(options.dataset, arguments, kind)
    if training is not None:
        from library.data.dataset import preserving

        share, _ = preserving(training.preservation, config, training.training.prior_loss_weight)
        idle = idle_options(training, config)
    printed = nullcontext(partial(print_progress, console, None, seconds=0.5))
    with printed if options.json is not None else counting(console) as start:
        report = check(config, pixel_multiple, start, too_long, options.seed, share or 0)
        report = replace(report, notes=(*idle, *report.notes))
        if options.json is not None:
            write_json(options, config, report, start, pixel_multiple)
    show(report, console)
    if options.strict and report.findings:
        raise UserError(
            f"{options.dataset}: {counted(len(report.findings), 'finding')}; fix them, or check without --strict"
        )


if __name__ == "__main__":
    main()
