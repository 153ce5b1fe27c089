"""From a TOML file and command line flags to a validated configuration.

The flags are made from the schema: ``--network_dim 32`` sets the key ``network_dim``, a boolean takes
``--flag`` or ``--no-flag``, a list takes its items one after another; values stay text, which the schema converts. A
flag wins over the TOML file. Table headings in the TOML file are for the reader: a key is known by its name, under
whichever heading it stands.

Keys and flags of kohya's trainers are taken too, in the file and on the command line, and translated into the
schema's by ``library.config.kohya.translate``; ``--help`` does not list them, ``docs/kohya_flags.md`` does.

All problems are reported at once, a line each: unknown keys, values that do not fit, keys of kohya's that are not
taken, and options that contradict each other among those that could be read.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from library.config.kinds import Ask, model_type_of
from library.config.kohya.flags import FLAGS
from library.config.kohya.translate import find_tool, summary, translate
from library.config.kohya.translation import Note
from library.config.markers import asks_for_nothing, is_nothing, words_of
from library.config.model_layouts import pipeline_of, snapshot_of
from library.config.model_types import IMAGE_MODELS, LANGUAGE_MODELS, MODEL_FILE_KEYS, MODEL_TYPES, PATHS
from library.config.published_models import FILE_ENDINGS, MODEL
from library.config.rules import find_conflicts
from library.config.schema import TrainConfig
from library.config.scripts import LORA, REMOVED_KEYS, Schema, Script, fields, meant_by, section_fields, sections
from library.errors import UserError, did_you_mean, nearest_of
from library.files import MOST_TOML_BYTES, parse_toml, read_text, written_path

_SAME_WORD = 0.8  # similarity above which an unknown key of a kohya's configuration is taken for a misspelt one
_MOST_HINTS = 200  # unknown keys of a file for which one that may be meant is looked for
_OF_DATASETS = ("general", "datasets")
_NAME = re.compile(r"\"[^\"]*\"|'[^']*'|[\w-]+")  # a TOML key's part, and a line's beginning that sets one or a table
_NAMES = re.compile(rf"[ \t]*\[*[ \t]*((?:{_NAME.pattern})(?:[ \t]*\.[ \t]*(?:{_NAME.pattern}))*)[ \t]*[=\]]")
_INSTEAD = {
    "max_train_steps": "max_train_epochs",
    "max_train_epochs": "max_train_steps",
}  # two ways of saying one thing
# values that configurations of earlier versions may hold
_FORMER_VALUES = {("on_nan", "rollback"): "skip", ("quantised_compute", "fused"): "dequant"}


@dataclass
class RawConfig:
    """What a person wrote.

    Attributes:
        values, origins: known keys, and where each one stands, "run.toml:3: network_dim" or "--network_dim".
        problems: a line for everything that is no key.
        meant: keys that were probably meant by it; their absence is no problem.
        notes: what a person should see, though it runs.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    meant: set[str] = field(default_factory=set)
    notes: list[Note] = field(default_factory=list)


def load_config(argv: Sequence[str], notes: list[Note] | None = None) -> TrainConfig:
    """Return the configuration of a LoRA on images, as :func:`load_for` does."""
    return load_for(LORA, argv, notes)


def names_language_model(argv: Sequence[str]) -> bool:
    """Return whether ``model_type``, a flag or a key of the TOML file, is one of a language model."""
    with suppress(UserError):  # said when the configuration is loaded
        words = [word for word in argv if word not in ("-h", "--help")]
        return read_arguments(words).values.get("model_type") in LANGUAGE_MODELS
    return False


def load_for(script: Script[Schema], argv: Sequence[str], notes: list[Note] | None = None) -> Schema:
    """Read ``--config_file`` and the other flags in ``argv`` into the validated configuration of a script.

    Args:
        script: whose.
        argv: the command line.
        notes: receives what became of kohya's keys, what they leave unset, and what a flag leaves without effect, to be
            shown to the person.

    Raises:
        UserError: a file that cannot be read, an unknown key, a wrong type, or options that exclude each other;
            every problem found is a line of its own, with file, line and key.
    """
    return checked(read_arguments(argv, script), script, notes)


def load_and_tell(script: Script[Schema], argv: Sequence[str], ask: Ask | None = None) -> Schema:
    """Return what :func:`load_for` does; its notes are printed, by one process of several.

    ``ask`` tells of models that are not here (``library.config.kinds``).
    """
    notes = list[Note]()
    config = checked(read_arguments(argv, script), script, notes, ask)
    if notes and os.environ.get("RANK", "0") == "0":
        print(*summary(notes), sep="\n")
    return config


def checked(
    given: RawConfig, script: Script[Schema], notes: list[Note] | None = None, ask: Ask | None = None
) -> Schema:
    """Return the validated configuration that ``given`` keys make; arguments and errors as of :func:`load_for`."""
    values, origins, uncertain = given.values, given.origins, given.meant
    became, problems = list(given.notes), list(given.problems)
    if script.takes_kohya:
        translation = translate(values, origins, fields(script))
        translation.keep_dataset_keys()
        values, origins = translation.values, translation.origins
        uncertain |= {note.key for note in translation.notes if note.outcome == "refused"}
        uncertain |= {"dataset_config"} if translation.dataset else set()
        became, problems = [*became, *translation.notes], [*problems, *translation.problems()]
        wrong, told = _set_kind(values, origins, ask)
        uncertain |= {"model_type"} if wrong else set()
        became, problems = [*became, *told], [*problems, *wrong]
    config, unfit, overridden = _validate(values, origins, uncertain, script)
    if config is None or problems or unfit:
        raise UserError(*problems, *unfit, *(f"note: {note.line()}" for note in given.notes))
    if notes is not None:
        notes.extend([*became, *overridden])
    return config


def _set_kind(
    values: dict[str, Any], origins: Mapping[str, str], ask: Ask | None = None
) -> tuple[list[str], list[Note]]:
    """Set ``model_type`` as the model has it; return a line if it is not known, and notes on the model."""
    if not values.get(MODEL) or values.get("model_type") not in (None, *IMAGE_MODELS):  # what is wrong, the schema says
        return [], []
    try:
        found, lines = model_type_of(values, ask)
    except UserError as error:
        return [f"{origins.get(MODEL, MODEL)}: {str(error).removeprefix(f'{MODEL} ').removeprefix(f'{MODEL}: ')}"], []
    values |= {"model_type": found} if found else {}
    return [], [Note(MODEL, "note", line, origins.get(MODEL, MODEL)) for line in lines]


def read_arguments(argv: Sequence[str], script: Script[Any] = LORA) -> RawConfig:
    """Return the keys of the TOML file and the flags together, flags winning.

    Raises:
        UserError: a file that cannot be read, a flag without its value.
    """
    parsed, unknown = _parser(script).parse_known_args(argv)
    arguments = vars(parsed)
    config_file = arguments.pop("config_file")
    given = _read_file(config_file, script) if config_file else RawConfig()
    for problem, meant in _unknown_flags(unknown, script):
        given.problems.append(problem)
        given.meant |= {meant} if meant else set()
    for key, value in arguments.items():
        given.values[key], given.origins[key] = value, f"--{key}"
        if (other := _INSTEAD.get(key)) and other not in arguments and not is_nothing(value):
            given.values.pop(other, None)  # a flag wins over the file, in whichever terms that has it
            given.origins.pop(other, None)
    _leave_out_parts(given, arguments)
    return given


def _leave_out_parts(given: RawConfig, arguments: Mapping[str, Any]) -> None:
    """Leave out the parts of a single file that a configuration names, where a flag names a whole pipeline; say so."""
    model = str(arguments.get(MODEL, ""))
    path = Path(model).expanduser()
    is_pipeline = pipeline_of(snapshot_of(path)) is not None if path.exists() else not model.endswith(FILE_ENDINGS)
    if not model or not is_pipeline:
        return
    if left_out := [key for key in MODEL_FILE_KEYS if key in given.values and key not in arguments]:
        for key in left_out:
            del given.values[key], given.origins[key]
        text = f"{model} has its own; the configuration's {', '.join(left_out)} are left out"
        given.notes.append(Note(MODEL, "note", text))


def _read_file(path: str, script: Script[Any]) -> RawConfig:
    """Return the keys of a training TOML; its suffix may be left out, as with kohya's."""
    path = toml_path(path)
    if Path(path).is_dir():
        inside = ", such as config.toml in it" if (Path(path) / "config.toml").is_file() else ""
        raise UserError(f"{path}: is a folder; give --config_file the path of a training TOML{inside}")
    return read_keys(read_text(path, "give --config_file the path of a training TOML", MOST_TOML_BYTES), path, script)


def read_keys(text: str, path: str, script: Script[Any] = LORA) -> RawConfig:
    """Return the keys of a training TOML's text, table headings dissolved; messages call it ``path``."""
    tables, known, given = parse_toml(text, path), fields(script), RawConfig()
    pairs, lines = _flattened(tables, set(known)), _lines_of(text)
    of_kohyas = script.takes_kohya and find_tool(dict(pairs)) is not None
    for key, value in pairs:
        if key in REMOVED_KEYS and value == REMOVED_KEYS[key][0]:
            continue
        where = f"{path}:{lines.get(key, 1)}: {key}"
        if key not in known and not (script.takes_kohya and key in FLAGS):
            if len(given.problems) + len(given.notes) >= _MOST_HINTS:
                given.problems.append(f"{where}: unknown key")
                continue
            foreign = key in script.foreign_keys or isinstance(value, dict | list)
            if of_kohyas and not foreign and not nearest_of(key, [*known, *FLAGS], _SAME_WORD):
                remark = f"is no key of kohya's or Tandem's; passed over, as there{did_you_mean(key, [*known, *FLAGS])}"
                given.notes.append(Note(key, "note", remark, where))
                continue
            given.problems.append(f"{where}: {_unknown(key, value, script)}")
            given.meant |= set() if key in script.foreign_keys else {meant_by(key, known) or ""}
            continue
        if key in given.values:
            given.problems.append(f"{where}: stands in this file twice; keep one")
        if isinstance(value, str) and (now := _FORMER_VALUES.get((key, value))):
            given.notes.append(Note(key, "note", f'"{value}" is no longer there; read as "{now}"', where))
            value = now
        given.values[key], given.origins[key] = value, where
    return given


def toml_path(path: str) -> str:
    """Return the file that ``path`` names, whose suffix may be left out."""
    return path if Path(path).exists() or not Path(f"{path}.toml").exists() else f"{path}.toml"


def _unknown(key: str, value: Any, script: Script[Any]) -> str:
    """Return what to say of a key that is none."""
    if key in script.foreign_keys:
        return script.foreign_keys[key]
    if key in _OF_DATASETS and script is LORA:
        return "describes images; put it into the file that dataset_config names"
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return f"is a list of tables; write [{key}] in single brackets"
    meant = meant_by(key, fields(script))
    return f"unknown key; {f'did you mean {meant!r}?' if meant else f'see {script.name} --help'}"


def _flattened(table: dict[str, Any], known: set[str]) -> list[tuple[str, Any]]:
    """Return the key-value pairs of nested tables, in the order in which they stand."""
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, dict) and key not in known and key not in _OF_DATASETS:
            pairs.extend(_flattened(value, known))
        else:
            pairs.append((key, value))
    return pairs


def _lines_of(text: str) -> dict[str, int]:
    """Return the first line of ``text`` that sets a key, or has it as a table's last name."""
    keys: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if match := _NAMES.match(line):
            keys.setdefault(_NAME.findall(match[1])[-1].strip("\"'"), number)
    return keys


def validated(values: dict[str, Any], origins: dict[str, str], notes: list[Note] | None = None) -> TrainConfig:
    """Sort ``values`` into sections and validate them.

    With ``notes`` options that exclude each other are not refused but added there, with what has no effect.

    Raises:
        UserError: a line for every value that does not fit, and for options that exclude each other.
    """
    _set_kind(values, origins)
    config, problems, others = _validate(values, origins, (), LORA)
    if config is None or (problems and notes is None):
        raise UserError(*problems)
    if notes is not None:
        stops = [line.partition(": ") for line in problems]
        notes += [*others, *(Note(key, "note", f"a run would stop: {text}") for key, _, text in stops)]
    return config


def _validate(
    values: dict[str, Any], origins: dict[str, str], uncertain: Collection[str], script: Script[Schema]
) -> tuple[Schema | None, list[str], list[Note]]:
    """Return the configuration, None where values do not fit, a line for everything that is wrong, and notes.

    Options are compared with each other even if some values do not fit: without those, and without what would be said
    about them.

    Args:
        values, origins: keys of the schema.
        uncertain: keys that were set under wrong names, or to what is not taken.
    """
    known = fields(script)
    given = {key: value for key, value in values.items() if not asks_for_nothing(value, known[key][1])}
    values = {key: _at_home(value) if key in PATHS else value for key, value in given.items()}
    forbidden = [line for key in values if key in PATHS for line in _forbidden(origins.get(key, key), values[key])]
    try:
        config = script.schema.model_validate(_sorted(values, script))
    except ValidationError as error:
        items = [item for item in error.errors() if item["type"] != "missing" or item["loc"][1] not in uncertain]
        # of a value that fits none of several types pydantic has an item each; one is enough
        problems = list({(item["loc"][1], repr(item["input"])): _problem(item, origins) for item in items}.values())
        unfit = {str(item["loc"][1]) for item in error.errors()}
        rest = {key: value for key, value in values.items() if key not in unfit}
        missing = {key: field for key, (_, field) in known.items() if field.is_required() and key not in rest}
        required = {key: _anything(field.annotation) for key, field in missing.items()}
        fitting = script.schema.model_validate(_sorted(rest | required, script))
        refused, notes = _conflicts(fitting, unfit | set(uncertain), origins)
        return None, [*problems, *forbidden, *refused], notes
    refused, notes = _conflicts(config, uncertain, origins)
    if notes:  # what they are about has its default, so that it has no effect whoever reads it
        without = {note.key for note in notes}
        config = script.schema.model_validate(_sorted({k: v for k, v in values.items() if k not in without}, script))
    return config, [*forbidden, *refused], notes


def _forbidden(where: str, value: Any) -> Iterator[str]:
    """Yield a line for each path of an option that lies in a folder which this user may not look into."""
    for path in value if isinstance(value, list) else [value]:
        with suppress(OSError, ValueError):  # what else is wrong with it, who reads it says
            try:
                Path(str(path)).stat()
            except PermissionError as error:
                yield f"{where}: {path}: cannot be used ({error.strerror}); choose another, or change its permissions"


def _at_home(value: Any) -> Any:
    """Return a path, or a list of them, with ``~`` resolved, which no shell does in a TOML file."""
    if isinstance(value, list):
        return [_at_home(each) for each in value]
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith(("~/", "~\\")) else value


def misfits(values: dict[str, Any]) -> list[str]:
    """Return a line for each value that does not fit its key of the schema for images, whatever else is set."""
    return _validate(values, {}, fields(), LORA)[1]


def _conflicts(config: Any, uncertain: Collection[str], origins: Mapping[str, str]) -> tuple[list[str], list[Note]]:
    """Return a line for every conflict that is not about ``uncertain`` keys, and notes of those that are none.

    A key of the file that has no effect beside a flag was not meant for this run; an option that another one overrides
    asks for nothing.
    """
    refused: list[str] = []
    notes: list[Note] = []
    for conflict in find_conflicts(config):
        key, *others = conflict.keys
        by_flag = [origins.get(other, "").startswith("--") for other in others]
        if set(conflict.keys) & set(uncertain):
            continue
        text = conflict.message.removeprefix(f"{key}: ").rpartition("; ")[0]
        if conflict.overridden:
            notes.append(Note(key, "note", text, origins.get(key, key)))
        elif conflict.harmless and any(by_flag) and not origins.get(key, "").startswith("--"):
            notes.append(Note(key, "note", f"{text}, as the command line has it", origins.get(key, key)))
        else:
            refused.append(conflict.message)
    return refused, notes


def _sorted(values: dict[str, Any], script: Script[Any]) -> dict[str, dict[str, Any]]:
    """Return ``values`` by section."""
    known = fields(script)
    tree: dict[str, dict[str, Any]] = {name: {} for name in sections(script)}
    for key, value in values.items():
        tree[known[key][0]][key] = value
    return tree


def _anything(annotation: Any) -> Any:
    """Return a value that fits a required key: a word, a list of one, or the first that is allowed."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)[0]
    return ["?"] if get_origin(annotation) is list else "?"


def _problem(item: Any, origins: dict[str, str]) -> str:
    """Return one line for one of pydantic's error items."""
    key = str(item["loc"][1])
    if item["type"] == "missing":
        return f"{key}: is required; set it in the TOML file or with --{key}"
    if item["type"] == "value_error":  # of a validator of ours, which says what to do
        return f"{origins.get(key, key)}: {item['input']!r} does not fit: {item['ctx']['error']}"
    message = str(item["msg"]).removeprefix("Input should be ")
    nearest = ""
    expected = item.get("ctx", {}).get("expected")
    if expected:
        words = re.findall(r"'([^']*)'", expected)
        if key == "model_type":  # which schema a configuration has hangs on it, so it has been read as that of images
            words = list(MODEL_TYPES)
            message += f", or of a language model {' or '.join(map(repr, LANGUAGE_MODELS))}"
        nearest = did_you_mean(str(item["input"]), words)
    if message == "'auto'":  # of a switch
        message = "'auto', true or false"
    return f"{origins.get(key, key)}: {item['input']!r} does not fit: should be {message}{nearest}"


def _unknown_flags(words: Sequence[str], script: Script[Any] = LORA) -> Iterator[tuple[str, str | None]]:
    """Yield, of words that belong to no flag, a line for each mistake and the key that was probably meant."""
    flag = False  # whether a word may be the value of an unknown flag before it
    for word in words:
        if word.startswith("--"):
            flag, name = True, word.split("=")[0]
            if remark := script.foreign_keys.get(name.lstrip("-")):
                yield f"command line: {name}: {remark}", None
                continue
            meant = meant_by(name.lstrip("-"), fields(script))
            remedy = f"did you mean {meant!r}?" if meant else "see --help"
            yield f"command line: {name}: unknown flag; {remedy}", meant
        elif not flag:
            yield f"command line: {word!r} belongs to no flag; a switch takes no value: --flag or --no-flag", None


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are ``UserError``s, and whose flags of type ``Path`` take what can be one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", Path, _path)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; ``--key=--``, of which it makes an empty list, is refused."""
        for word in sys.argv[1:] if args is None else args:
            if word.startswith("-") and word.endswith("=--"):
                self.error(f"argument {word[:-3]}: expected a value, not '--'")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see --help")


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; write one, or leave the flag out")
    try:
        return written_path(text, "")
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).strip()) from None


def _parser(script: Script[Any]) -> Parser:
    """Build the command line from the schema: a group a section, a flag a key."""
    parser = Parser(
        prog=script.name,
        usage=f"{script.name} --config_file TOML [--key value ...]",
        description=f"{script.purpose} Every flag is also a key of the TOML file; flags win.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.HelpFormatter,
    )
    parser.add_argument("--config_file", metavar="TOML", default=None, help="training TOML with any of the keys below")
    for name, section in sections(script).items():
        group = parser.add_argument_group(name, (section.__doc__ or "").strip().split("\n")[0])
        for key, option in section_fields(script, section).items():
            _add_flag(group, key, option)
    for name in FLAGS.keys() - fields(script).keys() if script.takes_kohya else ():
        takes: dict[str, Any] = {
            "switch": {"action": argparse.BooleanOptionalAction},
            "list": {"nargs": "*"},
            "value": {},
        }
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, **takes[FLAGS[name].takes])
    return parser


def _add_flag(group: Any, key: str, field: FieldInfo) -> None:
    """Add the flag of one key; values stay text, the schema converts them."""
    choices = words_of(field.annotation)
    if choices and bool in get_args(field.annotation):
        choices = (*choices, "true", "false")
    text = f"{field.description}" + (f"; one of {', '.join(choices)}" if choices else "")
    default = "" if field.is_required() else field.get_default()
    words = " ".join(map(str, default)) if isinstance(default, list) else "" if default is None else str(default)
    text += " (required)" if field.is_required() else f" (default: {words})" if words else ""  # unset: nothing to say
    text = text.replace("%", "%%")
    if bool in get_args(field.annotation) and choices:
        group.add_argument(f"--{key}", nargs="?", const="true", metavar="X", help=text)
        group.add_argument(f"--no-{key}", dest=key, action="store_const", const="false", help=argparse.SUPPRESS)
    elif field.annotation in (bool, bool | None):
        group.add_argument(f"--{key}", action=argparse.BooleanOptionalAction, help=text)
    elif get_origin(field.annotation) is list:
        group.add_argument(f"--{key}", nargs="*", metavar="X", help=text)
    else:
        group.add_argument(f"--{key}", metavar="X", help=text)
