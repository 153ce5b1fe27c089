"""Directions between prompts, which a slider is trained along: ``slider_prompts``.

A direction has a target, which images are seen with, and a positive and a negative prompt. As lines, in the
configuration or a text file, ``a person --p an old person --n a young person``; in a JSON file a list of objects, in a
TOML file ``[[prompts]]``, with the keys target, positive and negative (as Concept Sliders' and LECO's files have them,
where the last is called unconditional).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from library.errors import UserError, error_prefix
from library.files import parse_json, read_text, read_toml

_OPTION = re.compile(r"(?:^|\s)--([pn])\s")
_REMEDY = 'write "a person --p an old person --n a young person"'


class Direction(NamedTuple):
    """What the LoRA learns at strength 1: to make of the target what the positive prompt has more than the negative."""

    target: str
    positive: str
    negative: str


def read_directions(given: str | list[str] | None) -> tuple[Direction, ...]:
    """Return the directions of ``slider_prompts``: lines, or a file of them.

    Raises:
        UserError: the file cannot be read, or an entry has no two different prompts.
    """
    with error_prefix("slider_prompts"):
        if given is None or isinstance(given, list) or _OPTION.search(given):
            lines = [given] if isinstance(given, str) else given or []
            return tuple(_of_line(line, f"prompt {i}, {line!r}") for i, line in enumerate(lines, 1))
        path, entry = Path(given).expanduser(), "entry"
        if not path.is_file():
            raise UserError(f"{given} is not a file; name one, or {_REMEDY}")
        entries: Any = None
        if path.suffix.lower() == ".toml":
            entries = read_toml(path)[0].get("prompts")
        elif path.suffix.lower() == ".json":
            entries = parse_json(read_text(path), str(path))
        else:
            entry, entries = "line", read_text(path).split("\n")
        if not isinstance(entries, list) or all(_is_empty(one) for one in entries):
            raise UserError(f"{given} holds no list of directions; {_REMEDY}")
        numbered = [(number, one) for number, one in enumerate(entries, 1) if not _is_empty(one)]
        return tuple(_of_entry(one, f"{given}, {entry} {number}") for number, one in numbered)


def _is_empty(entry: Any) -> bool:
    """Whether an entry is an empty line, or a comment."""
    return isinstance(entry, str) and (not entry.strip() or entry.startswith("#"))


def _of_entry(entry: Any, where: str) -> Direction:
    if isinstance(entry, str):
        return _of_line(entry, where)
    keys = ("target", "positive", "negative" if isinstance(entry, Mapping) and "negative" in entry else "unconditional")
    if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key), str) for key in keys):
        raise UserError(f"{where}: has no texts target, positive and negative; write all three")
    if others := sorted(entry.keys() - {*keys}):
        raise UserError(f"{where}: {others[0]!r} is not taken; remove it (slider_guidance is the scale of all)")
    return _checked(Direction(*(entry[key].strip() for key in keys)), where)


def _of_line(line: str, where: str) -> Direction:
    target, *found = (part.strip() for part in _OPTION.split(line))
    if other := re.search(r"(?:^|\s)(--\w+)(?:\s|$)", " ".join([target, *found[1::2]])):
        raise UserError(f"{where}: {other[1]} is no part of a direction; remove it")
    prompts = dict(zip(found[::2], found[1::2], strict=True))
    if prompts.keys() != {"p", "n"} or len(found) != 4:
        raise UserError(f"{where}: has not one --p and one --n; {_REMEDY}")
    return _checked(Direction(target, prompts["p"], prompts["n"]), where)


def _checked(direction: Direction, where: str) -> Direction:
    if direction.positive == direction.negative:
        raise UserError(f"{where}: positive and negative are the same prompt, which is no direction; change one")
    return direction
