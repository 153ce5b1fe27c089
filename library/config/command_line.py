"""The command line, made from the schema: a group a section, a flag a key; and kohya's flags beside them.

Values stay text, the schema converts them. Flags nobody knows are collected, so that they are told together with
what else is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from library.config.keys import LORA, Script, fields, section_fields, sections
from library.config.kohya_flags import FLAGS
from library.errors import UserError, nearest_of


def parse_flags(argv: Sequence[str], script: Script = LORA) -> tuple[dict[str, Any], list[str]]:
    """Return the flags in ``argv`` with their values, and the words that are none.

    Raises:
        UserError: a flag lacks its value.
    """
    parsed, unknown = _parser(script).parse_known_args(argv)
    return vars(parsed), unknown


def unknown_flags(words: Sequence[str], script: Script = LORA) -> Iterator[tuple[str, str | None]]:
    """Yield, of words that belong to no flag, a line for each mistake and the key that was probably meant."""
    flag = False  # whether a word may be the value of an unknown flag before it
    for word in words:
        if word.startswith("--"):
            flag, name = True, word.split("=")[0]
            if remark := script.elsewhere.get(name.lstrip("-")):
                yield f"command line: {name}: {remark}", None
                continue
            meant = nearest_of(name.lstrip("-"), fields(script))
            remedy = f"did you mean {meant!r}?" if meant else "see --help"
            yield f"command line: {name}: unknown flag; {remedy}", meant
        elif not flag:
            yield f"command line: {word!r} belongs to no flag; a switch takes no value: --flag or --no-flag", None


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are ``UserError``s."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see --help")


def _parser(script: Script) -> _Parser:
    """Build the command line from the schema: a group a section, a flag a key."""
    parser = _Parser(
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
        for key, field in section_fields(script, section).items():
            _add_flag(group, key, field)
    for name in FLAGS.keys() - fields(script).keys() if script.takes_kohya else ():
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
    if field.annotation in (bool, bool | None):
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
