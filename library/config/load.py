"""From a TOML file and command line flags to a validated ``TrainConfig``.

The flags are made from the schema: ``--network_dim 32`` sets the key ``network_dim``, a boolean takes
``--flag`` or ``--no-flag``, a list takes its items one after another. A flag wins over the TOML file. Table
headings in the TOML file are for the reader: a key is known by its name, under whichever heading it stands.

Keys and flags of kohya's trainers are taken too, in the file and on the command line, and translated into the
schema's by ``library.config.kohya``; ``--help`` does not list them, ``docs/kohya_flags.md`` does.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import toml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from library.config.conflicts import find_conflict
from library.config.kohya import Note, is_known, translate
from library.config.kohya_flags import FLAGS
from library.config.schema import TrainConfig
from library.errors import UserError, did_you_mean

Fields = dict[str, tuple[str, FieldInfo]]


def sections() -> dict[str, type[BaseModel]]:
    """Return the schema's sections by name."""
    found = {name: field.annotation for name, field in TrainConfig.model_fields.items()}
    return {name: cls for name, cls in found.items() if isinstance(cls, type) and issubclass(cls, BaseModel)}


def fields() -> Fields:
    """Return every key of the schema with its section and field."""
    return {key: (name, field) for name, cls in sections().items() for key, field in cls.model_fields.items()}


def load_config(argv: Sequence[str], notes: list[Note] | None = None) -> TrainConfig:
    """Read ``--config_file`` and the other flags in ``argv`` into a validated configuration.

    Args:
        argv: the command line.
        notes: receives what became of kohya's keys and of what they leave unset, to be shown to the person.

    Raises:
        UserError: a file that cannot be read, an unknown key, a wrong type, or options that exclude each other;
            every problem found is a line of its own, with file, line and key.
    """
    values, origins = read_arguments(argv)
    translation = translate(values, origins, fields())
    if problems := translation.problems():
        raise UserError("\n".join(problems))
    if notes is not None:
        notes.extend(translation.notes)
    return validated(translation.values, translation.origins)


def read_arguments(argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys of the TOML file and the flags together, flags winning, and where each one stands.

    Raises:
        UserError: a file that cannot be read, an unknown key or flag.
    """
    arguments = vars(_parser().parse_args(argv))
    config_file = arguments.pop("config_file")
    values, origins = read_toml(config_file) if config_file else ({}, {})
    for key, value in arguments.items():
        values[key], origins[key] = value, f"--{key}"
    return values, origins


def read_toml(path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys of a training TOML, table headings dissolved, and where each one stands ("file:line: key").

    The suffix may be left out, as with kohya's trainers.

    Raises:
        UserError: the file does not exist or is no TOML, a key is unknown, or one stands there twice.
    """
    if not Path(path).exists() and Path(f"{path}.toml").exists():
        path = f"{path}.toml"
    try:
        text = Path(path).read_text(encoding="utf-8")
        tables = toml.loads(text)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give --config_file the path of a training TOML") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); check the path and the file's rights") from None
    except (toml.TomlDecodeError, IndexError) as error:  # toml 0.10 raises IndexError on some broken lines
        raise UserError(f"{path}: not valid TOML: {error}") from None

    known = fields()
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    for key, value in _flattened(tables, set(known)):
        where = f"{path}:{_line_of(key, text)}: {key}"
        if key not in known and not is_known(key):
            problems.append(f"{where}: unknown key{did_you_mean(key, known) or '; see train_lora.py --help'}")
        elif key in values:
            problems.append(f"{where}: stands in this file twice; keep one")
        values[key], origins[key] = value, where
    if problems:
        raise UserError("\n".join(problems))
    return values, origins


def _flattened(table: dict[str, Any], known: set[str]) -> list[tuple[str, Any]]:
    """Return the key-value pairs of nested tables, in the order in which they stand."""
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, dict) and key not in known:
            pairs.extend(_flattened(value, known))
        else:
            pairs.append((key, value))
    return pairs


def _line_of(key: str, text: str) -> int:
    """Return the first line of ``text`` that sets ``key``, or 1."""
    match = re.search(rf"^\s*[\"']?{re.escape(key)}[\"']?\s*=", text, re.MULTILINE)
    return text.count("\n", 0, match.end()) + 1 if match else 1


def validated(values: dict[str, Any], origins: dict[str, str]) -> TrainConfig:
    """Sort ``values`` into sections and validate them; turn pydantic's report into lines a person can use.

    Raises:
        UserError: a line for every value that does not fit; or options that exclude each other.
    """
    known = fields()
    tree: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    for key, value in values.items():
        tree[known[key][0]][key] = value
    try:
        config = TrainConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError("\n".join(_problem(item, origins) for item in error.errors())) from None
    if conflict := find_conflict(config):
        raise UserError(conflict)
    return config


def _problem(item: Any, origins: dict[str, str]) -> str:
    """Return one line for one of pydantic's error items."""
    key = str(item["loc"][1])
    if item["type"] == "missing":
        return f"{key}: is required; set it in the TOML file or with --{key}"
    message = str(item["msg"]).removeprefix("Input should be ")
    nearest = ""
    expected = item.get("ctx", {}).get("expected")
    if expected:
        nearest = did_you_mean(str(item["input"]), re.findall(r"'([^']*)'", expected))
    return f"{origins.get(key, key)}: {item['input']!r} does not fit: should be {message}{nearest}"


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are ``UserError``s with the nearest valid flag."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see --help")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].split("=")[0]
            if not flag.startswith("-"):
                raise UserError(
                    f"command line: {flag!r} belongs to no flag; a switch takes no value: --flag or --no-flag"
                )
            nearest = did_you_mean(flag.lstrip("-"), fields())
            raise UserError(f"command line: {flag}: unknown flag{nearest or '; see --help'}")
        return parsed


def _parser() -> _Parser:
    """Build the command line from the schema: a group a section, a flag a key."""
    parser = _Parser(
        prog="train_lora.py",
        usage="train_lora.py --config_file TOML [--key value ...]",
        description="Train a LoRA. Every flag is also a key of the TOML file; flags win.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.HelpFormatter,
    )
    parser.add_argument("--config_file", metavar="TOML", default=None, help="training TOML with any of the keys below")
    for name, section in sections().items():
        group = parser.add_argument_group(name, (section.__doc__ or "").strip().split("\n")[0])
        for key, field in section.model_fields.items():
            _add_flag(group, key, field)
    for name in FLAGS.keys() - fields().keys():
        _add_kohya_flag(parser, name, FLAGS[name].takes)
    return parser


def _add_kohya_flag(parser: argparse.ArgumentParser, name: str, takes: str) -> None:
    """Add a flag of kohya's that is no key of the schema, without a line in ``--help``."""
    if takes == "switch":
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    else:
        parser.add_argument(f"--{name}", nargs="*" if takes == "list" else None, help=argparse.SUPPRESS)


def _add_flag(group: Any, key: str, field: FieldInfo) -> None:
    """Add the flag of one key; values stay text, the schema converts them."""
    choices = _choices(field.annotation)
    default = "required" if field.is_required() else f"default: {field.get_default()}"
    text = f"{field.description}" + (f"; one of {', '.join(choices)}" if choices else "") + f" ({default})"
    text = text.replace("%", "%%")
    if field.annotation is bool:
        group.add_argument(f"--{key}", action=argparse.BooleanOptionalAction, help=text)
    elif get_origin(field.annotation) is list:
        group.add_argument(f"--{key}", nargs="*", metavar="X", help=text)
    else:
        group.add_argument(f"--{key}", metavar="X", help=text)


def _choices(annotation: Any) -> list[str]:
    """Return the words a ``Literal`` (possibly optional) allows, or nothing."""
    if get_args(annotation) and all(isinstance(a, str) for a in get_args(annotation)):
        return list(get_args(annotation))
    return [word for part in get_args(annotation) for word in _choices(part)]
