"""Write a first configuration for a LoRA: asked for what, it looks at the images and the card.

    python tools/suggest_config.py
    python tools/suggest_config.py --kind subject --model models/flux1-dev.safetensors --ae models/ae.safetensors
        --clip_l models/clip_l.safetensors --t5xxl models/t5xxl_fp16.safetensors --images my_images
        --trigger_word zorbo --class_word creature --gpu_memory 16 --save_to my_lora

What is not said by a flag is asked for, in a terminal. Written are config.toml, dataset.toml (of a folder of images; a
dataset TOML is kept), commented: every value cites what another trainer publishes for such a model, or the memory that
is counted for it. Nothing is downloaded, no weight is read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.config.schema import ModelConfig
from library.errors import UserError, counted, exit_on_user_error
from library.files import broken_link, write_text
from library.models.hub import takes_parts
from tools.command import answer_early, number, tool_parser

KINDS = ("subject", "style", "edit")
_OF_KINDS = {"trigger_word": KINDS[:2], "class_word": KINDS[:1], "control_directory": KINDS[2:]}  # flags of some kinds
FILES = tuple(dict.fromkeys(key for name in IMAGE_MODELS for key in MODEL_TYPES[name].files))


def memory(text: str) -> float:
    """Read GiB, or 0 for ``cpu``."""
    return 0.0 if text == "cpu" else number(above=0)(text)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = tool_parser(__doc__)
    parser.add_argument("--kind", choices=KINDS, help="what is learnt: a person or thing, a look, an edit")
    parser.add_argument("--model", help="file or diffusers folder of the base model, or its name on the hub")
    parser.add_argument("--model_type", choices=list(IMAGE_MODELS), help="default: as the model says")
    for key in FILES:
        parser.add_argument(f"--{key}", metavar="PATH", help=ModelConfig.model_fields[key].description)
    parser.add_argument("--images", type=Path, help="folder of images with captions beside them, or a dataset TOML")
    parser.add_argument("--control_directory", type=Path, metavar="DIR", help="edit: the images before, of a folder")
    parser.add_argument("--trigger_word", help="subject, style: the word that will call it up")
    parser.add_argument("--class_word", help="subject: the word for what it is (person, dog)")
    parser.add_argument("--network_type", choices=["lora", "lokr"], default="lora", help="kind of adapter")
    parser.add_argument("--gpu_memory", type=memory, help="GiB of the card, or cpu; default: this machine's card")
    parser.add_argument("--save_to", type=Path, metavar="DIR", help="folder to write into")
    parser.add_argument("--overwrite", action="store_true", help="replace what was written there before")
    return parser


answer_early(__name__, lambda: parser().parse_args())

import torch

from library.data.captions import has_word
from library.training import suggestion
from library.training.memory.budget import GIB


def answer(
    options: argparse.Namespace, flag: str, question: str, read: Callable[[str], Any] = str, among: Sequence[str] = ()
) -> Any:
    """Return what a flag says, or what is said when asked, which is kept in ``options``.

    Raises:
        UserError: there is nobody to ask.
    """
    if (given := getattr(options, flag)) is not None:
        return given
    choices = f" ({', '.join(among)})" if among else ""
    while sys.stdin.isatty():
        try:
            text = input(f"{question}{choices}: ").strip()
            if text and (not among or text in among):
                setattr(options, flag, given := read(text))
                return given
        except argparse.ArgumentTypeError as error:
            print(error)
        except EOFError:
            break
    raise UserError(f"--{flag} is missing ({question}); nothing was written")


def answers(options: argparse.Namespace) -> tuple[suggestion.Answers, Mapping[str, Any]]:
    """Ask for what the flags do not say; return it, and the arguments of the transformer."""
    kind = answer(options, "kind", "What is learnt", among=KINDS)
    for flag, kinds in _OF_KINDS.items():
        if getattr(options, flag) is not None and kind not in kinds:
            raise UserError(f"--{flag}: has no meaning for --kind {kind}; remove it, or choose {' or '.join(kinds)}")
    model = answer(options, "model", "Base model: file, diffusers folder, or name on the hub")
    path = Path(model).expanduser()
    model_type, arguments = suggestion.find_model_type(model, kind, options.model_type)
    wanted = MODEL_TYPES[model_type].files if takes_parts(path) else ()
    parts = {key: answer(options, key, ModelConfig.model_fields[key].description or key) for key in wanted}
    if unused := [key for key in FILES if getattr(options, key) is not None and key not in wanted]:
        raise UserError(f"--{unused[0]}: {model} takes none; remove it")
    images = answer(options, "images", "Images: a folder, or a dataset TOML", Path)
    if images.is_file() and images.suffix.lower() != ".toml":
        raise UserError(f"--images {images}: is neither a folder nor a dataset TOML; name the folder it lies in")
    if images.is_file() and options.control_directory is not None:
        raise UserError(f"--control_directory: {images} says itself where they are; remove it")
    if kind == "edit" and not images.is_file():
        answer(options, "control_directory", "Folder of the images before", Path)
    for flag in ("images", "control_directory"):
        if (given := getattr(options, flag)) is not None and not given.exists():
            raise UserError(f"--{flag} {given}: does not exist{broken_link(given)}; give a folder that does")
    if kind == "subject":
        answer(options, "trigger_word", "Word that will call the subject up")
        answer(options, "class_word", "Word for what it is (person, dog)")
        if not (trigger := options.trigger_word.strip()) or has_word(options.class_word, trigger):
            raise UserError(f"--class_word {options.class_word}: holds the trigger word {trigger!r}; change one")
    if options.gpu_memory is None and torch.cuda.is_available():
        options.gpu_memory = torch.cuda.get_device_properties(0).total_memory / GIB
    gpu_memory = round(answer(options, "gpu_memory", "GiB of the card, or cpu", memory) * GIB) or None
    save_to = answer(options, "save_to", "Folder to write into", Path)
    old = [save_to / name for name in ("config.toml", "dataset.toml") if (save_to / name).exists()]
    if old and not options.overwrite:
        raise UserError(f"{old[0]}: exists; choose another --save_to or give --overwrite")
    others = (options.control_directory, options.trigger_word, options.class_word, gpu_memory, save_to)
    return suggestion.Answers(kind, model, model_type, parts, images, *others, options.network_type), arguments


@exit_on_user_error
def main() -> None:
    """Ask, look, write, and say what was found and decided."""
    answered, arguments = answers(parser().parse_args())
    remarks = suggestion.remarks(answered)
    given = (answered.model_type, answered.model, arguments, answered.gpu_memory, answered.network_type)
    chosen = suggestion.choose_memory(*given)
    found, values = suggestion.summarise_dataset(answered), answered.presets
    for name, text in suggestion.suggest(answered, found, chosen).items():  # config.toml names the other: the last
        write_text(answered.save_to / name, text)
    settings = [f"{key} = {value}" for key, value in chosen.settings.items()] or ["nothing quantised or swapped"]
    size = "network_dim" if answered.network_type == "lora" else "network_args"
    training = (f"{key} = {values[key][0]}" for key in (size, "learning_rate", "max_train_steps"))
    print(f"model     {answered.model}: {answered.model_type}")
    print(*(f"          {line}" for line in remarks), sep="\n", end="\n" * bool(remarks))
    width, height = found.resolution
    trained = f"trained at up to {width} x {height} pixels"
    print(f"images    {counted(len(found.samples), 'image')} of about {found.side} x {found.side}, {trained}")
    card = f"{answered.gpu_memory / GIB:.1f} GiB; " if answered.gpu_memory else ""
    less = f"; {width} x {height} takes less" if card and width * height < 1024**2 else ""
    print(f"card      {card}{chosen.describe()}{less}")
    print(f"memory    {', '.join(settings)}")
    print(f"training  {', '.join(training)}")
    if painted := suggestion.painted_first(answered, found):
        print(f"first     {painted}")
    print(*(f"note: {line}" for line in found.notes), sep="\n", end="\n" * bool(found.notes))
    if missing := found.without_caption:
        print(f"note: {missing} without a caption; write them, or run: {suggestion.captioner(answered.images)}")
    print(f"start: .venv/bin/python train_lora.py --config_file {answered.save_to / 'config.toml'}")


if __name__ == "__main__":
    main()
