"""Write captions for a dataset's images with a vision language model.

    python tools/caption_images.py my_dataset.toml --model Qwen/Qwen3-VL-2B-Instruct --preview 4
    python tools/caption_images.py my_dataset.toml --model Qwen/Qwen3-VL-2B-Instruct

Captions of images that have none are written beside them, each as soon as it is made; with --all those of the others
are replaced. The same command goes on where one was stopped. --undo takes back what the last one wrote. An image that
cannot be read or gets no caption is named and left out; the exit code then is 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.errors import UserError, counted, exit_on_user_error, gathering, names_in_short
from library.models.captioner import CAPTIONERS, PROMPT
from tools.command import answer_early, count, device_and_dtype, tool_console, tool_parser


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser, usual = tool_parser(__doc__), ", ".join(f"{name} ({size} GB)" for name, size in CAPTIONERS.items())
    parser.add_argument("dataset", type=Path, help="dataset TOML, or a folder of images")
    parser.add_argument("--model", help=f"folder, or name on the hub, with the memory that it takes: {usual}")
    parser.add_argument("--prompt", default=PROMPT, help="{trigger} in it is the trigger word; default: %(default)s")
    parser.add_argument("--prefix", default="", help="put before each caption that lacks it, such as a trigger word")
    parser.add_argument("--trigger_word", help="default: the dataset's")
    parser.add_argument("--all", action="store_true", help="replace captions that are there, too")
    parser.add_argument("--preview", type=count, metavar="N", help="caption N images and write nothing")
    parser.add_argument("--max_new_tokens", type=count, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--dtype", choices=["fp32", "fp16", "bf16"], help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--batch_size", type=count, default=1, metavar="N", help="images at once; default: %(default)s")
    parser.add_argument("--undo", action="store_true", help="take back what the last command wrote, and end")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keeps what --undo needs; default: in the dataset")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the captions for programs, too")
    return parser


answer_early(__name__, lambda: parser().parse_args())

from PIL.Image import Image

from library.config.schema import DatasetArguments
from library.data.caption_edit import Journal, Text, edited, read
from library.data.config import Subset, SubsetSettings, load_dataset_config
from library.data.file_index import list_folder
from library.data.images import decode
from library.data.sources import is_image, uncaptioned, usual_extension
from library.files import read_bytes, write_text
from library.models.captioner import Captioner
from library.training.report.progress import duration
from library.training.signals import interruptible
from tools.check_dataset import conditioning_of

_SIDE, _LONGEST = 1280, 50  # pixels of the longer side that a model is shown; the most times it may be the shorter one


@dataclass(frozen=True)
class Task:
    """An image, the file of its caption with its links resolved, what is there now, and its subset's settings."""

    image: Path
    file: Path
    old: Text
    settings: SubsetSettings


def subsets_of(dataset: Path) -> list[Subset]:
    """Return the subsets of a dataset TOML whose captions are files, or the one that a folder of images is."""
    if is_image(dataset.name) and dataset.is_file():
        raise UserError(f"{dataset}: is an image; give the folder that it is in, or a dataset TOML")
    if dataset.is_dir() and any(map(is_image, list_folder(dataset))):
        settings = SubsetSettings(caption_extension=usual_extension(dataset)[0])
        return [Subset(str(dataset), settings, str(dataset), dataset, None, None)]
    arguments = DatasetArguments(dataset_config=str(dataset))
    config = load_dataset_config(dataset, arguments, conditioning_of(dataset, arguments))
    found = [subset for each in config.datasets for subset in each.subsets]
    for subset in found:
        if subset.metadata_file:
            print(f"note: {subset.where}: its captions stand in {subset.metadata_file.name}, where none are written")
    with_files = [subset for subset in found if not subset.metadata_file]
    if not with_files:
        raise UserError(f"{dataset}: no subset has captions in text files; set image_dir in place of metadata_file")
    return with_files


def tasks_of(dataset: Path, replace: bool, written: Mapping[str, str]) -> list[Task]:
    """Return the images whose caption has no words, or all; of those that share a file, one.

    ``written``: path -> caption, of which those that are still there are not written again.
    """
    found: dict[Path, Task] = {}
    for subset in subsets_of(dataset):
        for image, file in uncaptioned(subset, captioned_too=True).items():
            found.setdefault(file.resolve(), Task(image, file.resolve(), read(file), subset.settings))
    usual, others = usual_extension(dataset) if dataset.is_dir() and not replace else ("", set[str]())
    if others:
        why = f"note: left out, as most captions are {usual} files and theirs are not"
        print(f"{why}: {names_in_short(sorted(others))}; rename those captions, or caption all images with --all")
    left = [task for task in found.values() if task.image.name not in others]
    tasks = [task for task in left if replace or task.old.why or not task.old.shown.strip()]
    return [task for task in tasks if task.old.raw is None or written.get(str(task.file)) != task.old.raw]


def picture_of(task: Task) -> Image:
    """Return an image upright, on white, as small as a model looks at it."""
    if task.old.why or task.file.parent != task.image.parent.resolve():
        why = task.old.why or f"leads to {task.file}; write it there"
        raise UserError(f"{task.image}: its caption {why}")
    picture, _ = decode(read_bytes(task.image), str(task.image))
    picture.thumbnail((_SIDE, _SIDE))
    if max(picture.size) > _LONGEST * min(picture.size):
        raise UserError(f"{task.image}: is too narrow a strip to caption; crop it")
    return picture


def prompt_of(options: argparse.Namespace, settings: SubsetSettings) -> str:
    """Return what the model is asked about an image of a subset; regularisation images have no trigger word."""
    if settings.is_reg and "{trigger}" in options.prompt:
        return PROMPT
    if (word := options.trigger_word or settings.trigger_word) is None and "{trigger}" in options.prompt:
        raise UserError("the prompt has {trigger} and the dataset no trigger word; name one, or remove it")
    return str(options.prompt.replace("{trigger}", word or ""))


def keep(task: Task, text: str, prefix: str, journal: Journal | None, what: str) -> str:
    """Return a caption with its prefix; write it, where there is a journal that keeps the old one."""
    if not text:
        raise UserError(f"{task.image}: the model says nothing about it; try another prompt")
    if (word := prefix.strip(" ,")) and not task.settings.is_reg:
        text = edited(text, "before", "", word if word[-1].isalnum() else f"{word} ")
    change = str(task.file), task.old.raw, task.old.changed(text), task.old.encoding
    if journal and journal.write(what, [change], more=True):
        raise UserError(f"{task.file}: was changed meanwhile, and is left as it is")
    return text


def caption(options: argparse.Namespace, tasks: list[Task], journal: Journal | None, what: str) -> None:
    """Caption images, a batch at a time: print each caption and, with a journal, write it."""
    prompts, refused = [prompt_of(options, task.settings) for task in tasks], list[str]()
    computing = device_and_dtype({"fp32": "no"}.get(options.dtype, options.dtype))
    captioner, console = Captioner(options.model, *computing), tool_console()
    made, started, size = list[dict[str, Any]](), time.monotonic(), options.batch_size
    for at in range(0, len(tasks), size):
        batch = list[tuple[Task, Image, str]]()
        for task, prompt in zip(tasks[at : at + size], prompts[at : at + size], strict=True):
            with gathering(refused):
                batch.append((task, picture_of(task), prompt))
        asked = [(picture, prompt) for _, picture, prompt in batch]
        answers = captioner.answers(asked, options.max_new_tokens) if asked else []
        done = min(at + size, len(tasks))
        left = duration((time.monotonic() - started) / done * (len(tasks) - done))
        for (task, _, _), (text, is_cut) in zip(batch, answers, strict=True):
            with gathering(refused):
                text = keep(task, text, options.prefix, journal, what)
                console.print(f"{done:,} of {len(tasks):,}, {left} left: {task.image.name}: {text}")
                made.append({"image": str(task.image.resolve()), "old": task.old.shown, "text": text, "is_cut": is_cut})
        if options.json:
            write_text(options.json, json.dumps({"images": made}))
    print(f"{counted(len(made), 'caption')} made; {'--undo takes them back' if journal else 'nothing was written'}")
    if cut := [one["image"] for one in made if one["is_cut"]]:
        print(f"note: {counted(len(cut), 'caption')} cut at {options.max_new_tokens} tokens ({names_in_short(cut)})")
    if refused:
        raise UserError(f"{len(refused)} of {counted(len(tasks), 'image')} left out: {names_in_short(refused)}")


@exit_on_user_error
def main() -> None:
    """Caption a dataset from the command line."""
    options = parser().parse_args()
    dataset = options.dataset.expanduser()
    folder = dataset if dataset.is_dir() else dataset.parent
    journal = Journal(options.journal or folder / ".captions_undo.json", Path)
    if options.undo:
        what, left = journal.step(back=True)
        print(f"undone: {what}" + (f"; left alone, as changed meanwhile: {names_in_short(left)}" if left else ""))
        return
    if not options.model:
        raise UserError(f"--model: is missing; name one, as {next(iter(CAPTIONERS))}")
    what = f"captions by {options.model} ({', '.join(filter(None, (options.prefix, options.prompt)))})"
    mine = [one["changes"] for one in journal.stacks()[0][-1:] if one["what"] == what]
    tasks = tasks_of(dataset, options.all, {path: new for changes in mine for path, _, new, _ in changes})
    if not tasks:
        print(f"nothing to do: every image has a caption{' of this model and prompt' if options.all else ''}")
        return
    with interruptible("the captions that were written stay, and the same command goes on from there"):
        caption(options, tasks[: options.preview], None if options.preview else journal, what)


if __name__ == "__main__":
    main()
