"""A configuration of ai-toolkit, OneTrainer or SimpleTuner in Tandem's keys.

Each program is a TOML file beside this one: what each of its keys means, and what an unset one means where training
depends on that (``default``; ``like``: the value of another key). A key is written as its path, ``network.linear``,
with ``*`` for an item of a list and ``key@value`` where ``value`` is that of the key that ``by`` names. A row has

    to       the key here; of a list, such as dataset_args, the value becomes an item
    text     how the value is written there, "resolutions={}"
    values   value there -> value here, or a table of several keys here; others are not taken
    but      value there -> what is different with it
    add      added to a number
    option   what is written after the sample prompts, "--w {}"
    when     another key, and its values with which this one has an effect
    off      values that ask for nothing, or for what always happens here
    why      why it is not taken, or what to do instead

and ``without`` are groups of keys that have no counterpart. What no row translates gets a line: nothing is dropped.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml

from library.config.kohya.translation import Note, Outcome
from library.config.markers import is_nothing
from library.errors import UserError
from library.files import read_text, read_toml

_MOST = 20_000  # keys of a file; the longest published have a few hundred
_LISTS = ("dataset_args", "optimizer_args", "network_args")


@dataclass(frozen=True)
class Translated:
    """A configuration in Tandem's keys: of training, None for a file of datasets alone, and of each dataset."""

    training: dict[str, Any] | None
    notes: list[Note]
    datasets: list[dict[str, Any]]
    dataset_notes: list[Note]


def translate_foreign(program: str, text: str, path: Path) -> Translated:
    """Return what ``text``, a file of ``program``, means; the file of datasets that it names is read if it is there.

    Raises:
        UserError: one of them cannot be read.
    """
    tables = read_toml(Path(__file__).with_name(f"{program.lower()}.toml"))[0] | {"program": program}
    listed, file, data = tables["datasets"], tables.get("dataset_file", ""), _parsed(text, path)
    given = _leaves(data, path, listed if isinstance(data, list) else "", tables.get("root", ""))
    found = Translated(None if isinstance(data, list) else {}, [], [], [])
    named = str(given.get(file) or "")
    for place in (Path(named), path.parent / named, path.parent / PureWindowsPath(named).name):
        if file in given and place.is_file():
            given |= _leaves(_parsed(read_text(place), place), place, listed)
            found.notes.append(Note(file, "accepted", f"{place} is translated too"))
            del given[file]
    for tag, key in tables.get("tags", {}).items():
        meant = json.dumps(str(given.get(key) or tag))[1:-1]
        given = json.loads(json.dumps(given, default=str).replace(tag, meant))
    items: dict[str, dict[str, Any]] = defaultdict(dict)
    for key in [key for key in given if re.match(rf"{listed}\.\d+(\.|$)", key)]:
        number, _, inner = key.removeprefix(f"{listed}.").partition(".")
        items[number][inner] = given.pop(key)
    if found.training is not None:
        found.training.update(_translate_keys(tables, "training", given, found.notes))
    for number, item in items.items():
        where = f"{listed}.{number}."
        off = [
            f"{key} = {_word(item[key])}"
            for key, on in tables.get("images", {}).items()
            if item.get(key, on[0]) not in on
        ]
        if off:
            found.dataset_notes.extend(Note(where + key, "refused", f"not taken: {off[0]}") for key in item)
        else:
            found.datasets.append(_translate_keys(tables, "dataset", item, found.dataset_notes, where))
    return found


def _parsed(text: str, path: Path) -> Any:
    try:
        if text.lstrip()[:1] in ("{", "["):
            return json.loads(text)
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise UserError(f"{path}: refers to parts of itself (*name); write them out")
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); correct it") from None


def _leaves(data: Any, path: Path, below: str = "", root: str = "") -> dict[str, Any]:
    """Return path -> value of each key, without ``root``; a list without tables is a value."""

    def walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
        tables = isinstance(value, list) and any(isinstance(item, Mapping) for item in value)
        pairs: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if tables else ()
        if not pairs:
            yield key, value
        for inner, item in pairs:
            yield from walk(item, f"{key}.{inner}".removeprefix(".").removeprefix("--"))

    found = list(islice(walk(data, below), _MOST + 1))
    if len(found) > _MOST:
        raise UserError(f"{path}: has more than {_MOST} keys; give a program's configuration")
    return {key.removeprefix(root): value for key, value in found}


def _translate_keys(
    tables: Mapping[str, Any], part: str, given: Mapping[str, Any], notes: list[Note], where: str = ""
) -> dict[str, Any]:
    """Return ``given`` in Tandem's keys; add a note on each key, which messages call ``where`` and its path."""
    rows: dict[str, Any] = dict(tables[part])
    for group in rows.pop("without", ()):
        rows |= dict.fromkeys(group["keys"].split(), group)
    values: dict[str, Any] = {}
    prompts: dict[str, str] = {}
    options: dict[str, list[str]] = defaultdict(list)  # of a prompt's number; "": of all
    sources: dict[str, str] = {}
    by, order = tables.get("by", {}), list(rows)  # of two keys with one meaning the later row counts
    both = {key: row["default"] for key, row in rows.items() if "default" in row} | dict(given)
    both |= {key: both[row["like"]] for key, row in rows.items() if "like" in row and key not in given}
    for key in sorted(both, key=lambda key: (key in given, order.index(key) if key in rows else len(order))):
        general, number = re.sub(r"\.\d+(?=\.|$)", ".*", key), "".join(re.findall(r"\.(\d+)(?=\.|$)", key)[:1])
        row = rows.get(f"{general}@{_word(both.get(by.get(key)))}") or rows.get(general) or {}
        outcome, text, meant = _meaning(row, both[key], both)
        if outcome == "refused" and key in by.values():
            outcome, text = "accepted", f"says how {next(one for one in by if by[one] == key)} is meant"
        if "option" in row and outcome == "renamed":
            options[number].append(_formatted(row["option"], both[key]))
        for to, one in meant.items():
            several = one if isinstance(one, list) else [one]
            if to == "sample_prompts":
                prompts |= {number or str(i): str(prompt) for i, prompt in enumerate(several)}
                continue
            values[to] = [*values.get(to, []), *several] if to in _LISTS else one
            replaced = sources.get(to) if "to" in row and to not in _LISTS and key in given else None
            notes[:] = [
                note for note in notes if note.key != replaced and (note.key, note.outcome) != (where + to, "default")
            ]
            if replaced:
                notes.append(Note(replaced, "left out", f"{where}{key} is set too and counts"))
            if "to" in row and key in given:
                sources[to] = where + key
        if key in given:
            notes.append(Note(where + key, outcome, text, to="" if where else next(iter(meant), "")))
        else:
            source = f"{key} is unset, so {_word(both[key])}, the default of {tables['program']}"
            notes.extend(Note(where + to, "default", source) for to in meant)
    if prompts:
        values["sample_prompts"] = [" ".join([prompt, *options[""], *options[n]]) for n, prompt in prompts.items()]
    return values


def _meaning(row: Mapping[str, Any], value: Any, given: Mapping[str, Any]) -> tuple[Outcome, str, dict[str, Any]]:
    """Return what becomes of a value, what to say of it, and the keys and values that it means here."""
    values: Any = row.get("values")
    word, to = _word(value), row.get("to", "")
    for key, wanted in row.get("when", {}).items():
        if _word(given.get(key)) not in map(_word, wanted):
            return "left out", f"has no effect there without {key} = {' or '.join(map(_word, wanted))}", {}
    if word in map(_word, row.get("off", ())):
        return "accepted", "asks for what happens here", {}
    if values is None and (value in (None, "", []) or (is_nothing(value) and not to)):
        return "left out", "asks for nothing", {}
    if "option" in row:
        return "renamed", "stands after the sample prompts", {}
    if values is not None and word not in values:
        return "refused", f"not taken: {word} is not in this version, but {', '.join(values)}", {}
    if values is None and not to:
        return "refused", f"not taken: {row.get('why', 'it has no counterpart here')}", {}
    value = values[word] if values else value
    if "add" in row:
        try:
            value = float(value) + row["add"]
        except (TypeError, ValueError):
            return "refused", f"not taken: {value!r} is no number", {}
    value = _formatted(row["text"], value) if "text" in row else value
    meant: dict[str, Any] = value if isinstance(value, dict) else {to: value}
    text = f"becomes {', '.join(f'{key} = {one}' for key, one in meant.items())}" if meant else "is what happens here"
    return "renamed" if meant else "accepted", text + row.get("but", {}).get(word, ""), meant


def _formatted(text: str, value: Any) -> str:
    sides = str(value).lower().split("x") if "{1}" in text else []  # 1024x768, or 1024 for both
    return text.format(*sides, *sides, ",".join(map(str, value)) if isinstance(value, list) else value)


def _word(value: Any) -> str:
    return str(value).lower()
