"""Turn a configuration of sd-scripts, musubi-tuner, ai-toolkit, OneTrainer or SimpleTuner into one of Tandem's.

    python tools/migrate_config.py --save_to my.toml kohya.toml          # a training TOML
    python tools/migrate_config.py --save_to my.toml train.sh            # a script: .sh, .bat, .ps1
    python tools/migrate_config.py --save_to my.toml train.yaml          # ai-toolkit; OneTrainer: .json
    python tools/migrate_config.py --save_to my.toml config.env          # SimpleTuner; .json and .toml too
    python tools/migrate_config.py --save_to my.toml -- accelerate launch flux_train_network.py --network_dim 16 ...

Prints what becomes of every key, and writes the TOML with the settings they mean; what is not taken stands in
it as comments. Keys that describe images become ``dataset_args``, beside the dataset TOML or the folder of
``train_data_dir`` that they are about. Datasets of ai-toolkit, OneTrainer and SimpleTuner become my_dataset.toml; of a
file that has nothing else, such as multidatabackend.json, my.toml is the dataset TOML.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.config.kohya.command import SCRIPT_SUFFIXES, Command, read_command, read_command_file
from library.config.kohya.translate import drop_inert, find_tool, translate
from library.config.kohya.translation import Note, Translation
from library.config.load import fields, read_arguments, sections, validated
from library.config.model_types import MODEL_TYPES
from library.config.programs.translate import Translated, translate_foreign
from library.config.rules import layout_conflicts, reason_alone
from library.config.schema import TrainConfig
from library.errors import UserError, counted, exit_on_user_error
from library.files import find_program, read_text, toml_string, toml_text, write_text
from tools.command import answer_early, tool_parser


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the words of the command after ``--``."""
    parser = tool_parser(__doc__)
    parser.add_argument("source", nargs="?", help="training TOML, or a script with the command in it")
    parser.add_argument("--save_to", required=True, type=Path, help="the TOML to write")
    parser.add_argument("--overwrite", action="store_true", help="replace it if it exists")
    parser.epilog = "after -- : the command line itself"
    own, words = sys.argv[1:], []
    if "--" in own:
        own, words = own[: own.index("--")], own[own.index("--") + 1 :]
    return parser.parse_args(own), words


answer_early(__name__, arguments)

import toml

from library.data.config import DATASET_KEYS, FIELDS, check_value, dataset_value
from library.models.registry import lora_targets
from library.training.optim.factory import check_optimizer
from library.training.sampling.prompts import SamplePrompt, check_steering, read_prompts
from networks.options import parse_network_args


def migrate(command: Command, save_to: Path, source: str, overwrite: bool = False) -> list[Note]:
    """Write the configuration that ``command`` means to ``save_to``; return what became of every key.

    Raises:
        UserError: a file that cannot be read, a key of neither project, a model family that is not there, a value
            that does not fit; without ``overwrite`` a file that is there already.
    """
    given = read_arguments(command.arguments)
    if given.problems:
        raise UserError(*given.problems)
    values, origins = given.values, given.origins
    tool = command.tool or find_tool(values) or "sd-scripts"
    if tool == "musubi-tuner" and command.launcher.get("mixed_precision"):
        values.setdefault("mixed_precision", command.launcher["mixed_precision"])
    translation = translate(values, origins, fields(), tool)
    translation.notes += given.notes
    translation.keep_dataset_keys()
    _save_training(translation, save_to, f"{source}, a configuration of {tool}", overwrite)
    if int(command.launcher.get("num_processes") or 1) > 1:
        count = command.launcher["num_processes"]
        translation.note("num_processes", "note", f"start with accelerate launch --num_processes {count} train_lora.py")
    untouched = [key for key in translation.values if key not in {note.key for note in translation.notes}]
    return [Note(key, "same", "") for key in untouched] + translation.notes


def migrate_foreign(program: str, text: str, path: Path, save_to: Path, overwrite: bool = False) -> list[Note]:
    """Write what ``text``, a configuration of ``program``, means to ``save_to`` and, of its datasets, beside it.

    Returns and raises as :func:`migrate`.
    """
    found = translate_foreign(program, text, path)
    training, dataset_toml = found.training, save_to.with_name(f"{save_to.stem}_dataset.toml")
    if training is None:
        _save_datasets(found, save_to, path, overwrite)
        return found.dataset_notes
    for key, what in {"model_type": "model family of this version", "pretrained_model_name_or_path": "model"}.items():
        if key not in training:
            refused = [note for note in found.notes if note.outcome == "refused"]
            kinds = ("job", "type", "model_type", "training_method")
            other = [note for note in refused if note.key in kinds and "this version" in note.text]
            named = [note.line() for note in other[:1] or [note for note in refused if "model" in note.key]]
            lacks = f"is of {program}, but trains nothing here" if other else f"names no {what}"
            raise UserError("; ".join([f"{path}: {lacks}", *named]))
    translation = Translation(training, {}, notes=found.notes)
    training["dataset_config"] = str(dataset_toml)
    if found.datasets:
        _check_new(dataset_toml, overwrite)
    else:
        translation.note("dataset_config", "note", f"no images are named; describe them in {dataset_toml}")
    described, edits = {key for each in found.datasets.values() for key in each}, f"{training['model_type']}_edit"
    if "control_directory" in described and edits in MODEL_TYPES:
        translation.default("model_type", edits, "", "the dataset has control images")
    if described & {"conditioning_data_dir", "alpha_mask"}:
        translation.default("masked_loss", True, "", "the dataset has masks")
    for conflict in layout_conflicts(training.get("network_type", "lora"), training.get("save_format", "diffusers")):
        training.pop("save_format", None)
        translation.default("save_format", "comfy", "", reason_alone(conflict.message, "save_format"))
    drop_inert(translation, fields(), list(training))
    _save_training(translation, save_to, f"{path.name}, a configuration of {program}", overwrite)
    if found.datasets:
        _save_datasets(found, dataset_toml, path, overwrite)
    return translation.notes + found.dataset_notes


def _save_datasets(found: Translated, save_to: Path, path: Path, overwrite: bool) -> None:
    """Write the dataset TOML; what does not fit a key is not taken, with a note."""
    _check_new(save_to, overwrite)
    tables = []
    for where, values in found.datasets.items():
        taken: dict[str, Any] = {}
        for key, value in values.items():
            try:
                taken[key] = dataset_value(key, str(value) if key in ("resolution", "resolutions") else value)
                check_value("", key, taken[key])
            except UserError:
                taken.pop(key, None)
                usual = FIELDS[key].get_default()
                follows = "" if usual is None else f"; it is {usual!r}"
                given = next((note.key for note in found.dataset_notes if note.to == where + key), where + key)
                notes = [note for note in found.dataset_notes if where + key not in (note.to, note.key)]
                text = f"not taken: {key} = {value!r} does not fit{follows}"
                found.dataset_notes[:] = [*notes, Note(given, "refused", text)]
        table: dict[str, Any] = {key: taken.pop(key) for key in list(taken) if key in DATASET_KEYS}
        tables.append(table | {"subsets": [taken]})
    head = [f"# Made by tools/migrate_config.py from {path.name}.", *_comments(found.dataset_notes)]
    write_text(save_to, "\n".join([*head, "", toml_text({"datasets": tables})]))


def _save_training(translation: Translation, save_to: Path, source: str, overwrite: bool) -> None:
    if save_to.suffix != ".toml":
        raise UserError(f"--save_to {save_to}: the configuration is TOML; give it a name that ends in .toml")
    notes: list[Note] = []
    config = _without_refused_args(translation, validated(translation.values, translation.origins, notes))
    translation.notes += notes
    guided, listed = MODEL_TYPES[config.model.model_type].takes_guidance, config.sampling.sample_prompts
    prompts = listed if isinstance(listed, list) else None  # a file is not looked into
    for check in (
        lambda: check_optimizer(config.optimizer),
        lambda: check_steering(read_prompts(prompts, 0, 1), guided, SamplePrompt("").guidance),
    ):
        try:
            check()
        except UserError as error:
            key, _, text = str(error).partition(": ")
            translation.note(key, "note", f"a run would stop: {text}")
    _check_new(save_to, overwrite)
    write_text(save_to, training_toml(translation, config, source))


def _check_new(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise UserError(f"{path}: exists; choose another --save_to or give --overwrite")


def training_toml(translation: Translation, config: TrainConfig, source: str) -> str:
    """Return the training TOML: sections as in the schema, a comment on every key that did not pass as it was."""
    comments: dict[str, str] = {}
    for note in translation.notes:
        if note.outcome in ("changed", "default"):
            comments[note.key] = "; ".join(filter(None, (comments.get(note.key), note.text)))
    taken = [note for note in translation.notes if note.to]
    comments |= {to: "from " + ", ".join(note.key for note in taken if note.to == to) for to in {n.to for n in taken}}
    lines = [f"# Made by tools/migrate_config.py from {source}.", ""]
    for name in sections():
        section = getattr(config, name)
        keys = [key for key in type(section).model_fields if key in section.model_fields_set]
        if keys:
            lines.append(f"[{name}]")
            for key in keys:
                comment = f"  # {comments[key]}" if key in comments else ""
                lines.append(f"{key} = {_toml_value(getattr(section, key))}{comment}")
            lines.append("")
    return "\n".join([*lines, *_comments(translation.notes)]).rstrip() + "\n"


def _comments(notes: Sequence[Note]) -> list[str]:
    """Return what is not taken, and what is different here, a comment each."""
    lines = []
    for outcome, title in (("refused", "# Not taken over:"), ("note", "# Different here:")):
        of_it = [note for note in notes if note.outcome == outcome]
        found = [f"#   {note.key}: {note.text.removeprefix('not taken: ')}" for note in of_it]
        lines += [title, *found] if found else []
    return lines


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    return toml_string(value) if isinstance(value, str) else str(toml.TomlEncoder().dump_value(value))


def _without_refused_args(translation: Translation, config: TrainConfig) -> TrainConfig:
    """Take out the network arguments that the LoRA refuses: a run would stop there."""
    taken: list[str] = []
    targets = lora_targets()[config.model.model_type]
    for pair in config.network.network_args:
        try:
            parse_network_args(config.network.model_copy(update={"network_args": [pair]}), targets)
            taken.append(pair)
        except UserError as error:
            translation.note("network_args", "refused", str(error).removeprefix("network_args: "))
    if taken == config.network.network_args:
        return config
    translation.values["network_args"] = taken
    return validated(translation.values, translation.origins, [])


def table(notes: Sequence[Note]) -> str:
    """Return the notes as text in columns: key, what became of it, more."""
    width = max((len(note.key) for note in notes), default=0)
    return "\n".join(f"{note.key:<{width}}  {note.outcome:<8}  {note.text}".rstrip() for note in notes)


def _command(source: str | None, words: Sequence[str]) -> tuple[Command, str]:
    """Return the command to read and what to call it."""
    if bool(source) == bool(words):
        raise UserError("migrate_config: give a TOML file, a script, or -- and a command; one of them")
    if not source:
        return read_command(words), "a command line"
    if Path(source).suffix.lower() in SCRIPT_SUFFIXES:
        return read_command_file(source), Path(source).name
    return Command(None, ("--config_file", source)), Path(source).name


@exit_on_user_error
def main() -> None:
    """Parse the command line, migrate, print the table."""
    args, words = arguments()
    path = Path(args.source or "")
    text = read_text(path) if args.source and not words else ""
    if program := find_program(text):
        notes = migrate_foreign(program, text, path, args.save_to, args.overwrite)
    else:
        command, called = _command(args.source, words)
        notes = migrate(command, args.save_to, called, args.overwrite)
    print(table(notes))
    refused = sum(note.outcome == "refused" for note in notes)
    left = f"; not taken over: {counted(refused, 'setting')}, see above" if refused else ""
    print(f"\n{args.save_to}: written{left}")


if __name__ == "__main__":
    main()
