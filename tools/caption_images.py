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
import os
import sys
import time
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
from library.data.sources import captioned, is_image, uncaptioned
from library.files import read_bytes, write_text
from library.models.captioner import Captioner
from library.training.report.progress import duration
from library.training.signals import interruptible
from tools.check_dataset import conditioning_of

_SIDE, _LONGEST = 1024, 50  # an image is shown with at most this number squared of pixels; sides' ratio


@dataclass(frozen=True)
class Task:
    """An image, the file of its caption, and what is there now; ``settings``: of its subset."""

    image: Path
    file: Path
    old: Text
    settings: SubsetSettings


def subsets_of(dataset: Path) -> list[Subset]:
    """Return the subsets of a dataset TOML, or the one that a folder of images is."""
    if dataset.is_dir() and any(map(is_image, files := list_folder(dataset))):
        by_ending = captioned(files)
        ending = max(by_ending, key=lambda suffix: len(by_ending[suffix]))
        settings = SubsetSettings(caption_extension=ending)
        return [Subset(str(dataset), settings, str(dataset), dataset, None, None)]
    arguments = DatasetArguments(dataset_config=str(dataset))
    config = load_dataset_config(dataset, arguments, conditioning_of(dataset, arguments))
    found = [subset for each in config.datasets for subset in each.subsets]
    if not (own := [subset for subset in found if subset.metadata_file is None]):
        raise UserError(f"{dataset}: its captions stand in {found[0].metadata_file}; write them there")
    if len(own) < len(found):
        print(f"note: left out as a metadata_file has their captions: {counted(len(found) - len(own), 'subset')}")
    return own


def tasks_of(subsets: list[Subset], replace: bool) -> list[Task]:
    """Return the images to caption: those without words in their caption, or all; one of those that share a file."""
    found: dict[Path, Task] = {}
    for subset in subsets:
        for image, file in uncaptioned(subset, captioned_too=True).items():
            found.setdefault(file, Task(image, file, read(file), subset.settings))
    return [task for task in found.values() if replace or task.old.why or not task.old.shown.strip()]


def picture_of(task: Task) -> Image:
    """Return an image upright, on white, no larger than models look at it."""
    if task.old.why:
        raise UserError(f"{task.file}: {task.old.why}")
    if task.file.resolve().parent != task.file.parent.resolve():
        raise UserError(f"{task.file}: is a link to another folder; write that caption there")
    picture, _ = decode(read_bytes(task.image), str(task.image))
    if max(picture.size) > _LONGEST * min(picture.size):
        raise UserError(f"{task.image}: {picture.width} x {picture.height} is too narrow a strip to caption; crop it")
    shrink = min(1.0, _SIDE / (picture.width * picture.height) ** 0.5)
    return picture.resize((max(1, round(picture.width * shrink)), max(1, round(picture.height * shrink))))


def prompt_of(options: argparse.Namespace, settings: SubsetSettings) -> str:
    """Return what the model is asked about an image of a subset; regularisation images have no trigger word."""
    if "{trigger}" not in options.prompt:
        return str(options.prompt)
    if settings.is_reg:
        return PROMPT
    if not (word := options.trigger_word or settings.trigger_word):
        raise UserError("the prompt has {trigger} and the dataset no trigger word; name one, or remove it")
    return str(options.prompt.replace("{trigger}", word))


def caption(options: argparse.Namespace, tasks: list[Task], journal: Journal, what: str) -> None:
    """Caption images, a batch at a time: print each caption and, unless it is a preview, write it."""
    prompts = [prompt_of(options, task.settings) for task in tasks]
    computing = device_and_dtype({"fp32": "no"}.get(options.dtype, options.dtype))
    captioner, console = Captioner(options.model, *computing), tool_console()
    made, refused = list[dict[str, Any]](), list[str]()
    started, size = time.monotonic(), options.batch_size
    for at in range(0, len(tasks), size):
        batch, asked = list[Task](), list[tuple[Image, str]]()
        for task, prompt in zip(tasks[at : at + size], prompts[at : at + size], strict=True):
            with gathering(refused):
                asked.append((picture_of(task), prompt))
                batch.append(task)
        answers, done = captioner.answers(asked, options.max_new_tokens), min(at + size, len(tasks))
        for task, (text, is_cut) in zip(batch, answers, strict=True):
            with gathering(refused):
                text = keep(task, text, options.prefix, None if options.preview else journal, what)
                made.append(
                    {"image": os.path.realpath(task.image), "old": task.old.shown, "text": text, "is_cut": is_cut}
                )
                left = duration((time.monotonic() - started) / done * (len(tasks) - done))
                console.print(f"{done:,} of {len(tasks):,}, {left} left: {task.image.name}: {text}")
        if options.json:
            write_text(options.json, json.dumps({"images": made, "refused": refused}))
    what_else = "nothing was written" if options.preview else "--undo takes them back"
    print(f"{counted(len(made), 'caption')} made; {what_else}")
    if cut := [one["image"] for one in made if one["is_cut"]]:
        print(f"note: {counted(len(cut), 'caption')} cut at {options.max_new_tokens} tokens ({names_in_short(cut)})")
    if refused:
        raise UserError(f"{len(refused)} of {counted(len(tasks), 'image')} left out: {names_in_short(refused)}")


def keep(task: Task, text: str, prefix: str, journal: Journal | None, what: str) -> str:
    """Return a caption with its prefix; write it, where there is a journal that keeps the old one.

    Raises:
        UserError: there is none, or somebody has written one meanwhile.
    """
    if not text:
        raise UserError(f"{task.image}: the model says nothing about it; try another prompt")
    if (word := prefix.strip(" ,")) and not task.settings.is_reg:
        text = edited(text, "before", "", word if word[-1].isalnum() else f"{word} ")
    change = os.path.realpath(task.file), task.old.raw, task.old.changed(text), task.old.encoding
    if journal and journal.write(what, [change], more=True):
        raise UserError(f"{task.file}: was changed meanwhile; it was left as it is")
    return text


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
    tasks = tasks_of(subsets_of(dataset), options.all)
    done = journal.stacks()[0][-1:]
    mine = {path: new for one in done if one["what"] == what for path, _, new, _ in one["changes"]}
    tasks = [task for task in tasks if not (task.old.raw and mine.get(os.path.realpath(task.file)) == task.old.raw)]
    if not tasks:
        print(f"nothing to do: every image has a caption{' of this model and prompt' if options.all else ''}")
        return
    with interruptible("the captions that were written stay, and the same command goes on from there"):
        caption(options, tasks[: options.preview], journal, what)


if __name__ == "__main__":
    main()
