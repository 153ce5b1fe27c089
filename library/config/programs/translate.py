"""A configuration of ai-toolkit, OneTrainer or SimpleTuner in Tandem's keys.

Each program is a TOML file beside this one: what each of its keys means, and what an unset one means where training
depends on that (``default``; ``like``: the value of another key). A key is written as its path, ``network.linear``,
with ``*`` for an item of a list and ``key@value`` where ``value`` is that of the key that ``by`` names; a value of that
key with no such row, and no row of its own, is not taken; ``network.*`` is the row of all keys below that have none. A
row has

    to       the key here, or several; of a list, such as dataset_args, the value becomes an item
    text     how the value is written there, "resolutions={}"
    values   value there -> value here, or a table of several keys here; others are not taken
    but      value there, "*" in it for any text -> what is different with it
    as       value there -> value here; others stay as they are
    each     what the items of the value, a list here, are separated by
    add      added to a number
    times    a key by whose value it is multiplied then
    per      a key that says how many steps there are one here
    area     a number of megapixels becomes the side of their square, in multiples of this
    option   what is written after the sample prompts, "--w {}"
    when     another key, and its values with which this one has an effect; not taken if that key is not
    unless   another key, and its values with which this one has no effect
    off      values that ask for nothing, or for what always happens here; without it 0 and false ask for nothing
    idle     why it has no effect there
    why      why it is not taken, or what to do instead

and ``without`` are groups of keys that have no counterpart. What no row translates gets a line: nothing is dropped.
Beside the rows, ``entry`` are keys that decide what the table they stand in is: with a refused value all of it is left
out. ``dataset_file`` is the key of a file of datasets, ``files`` are those of others: their keys stand below the given
one. ``inherits`` are keys that hold for datasets that lack them, ``always`` is what holds for each dataset, ``flags``
what options within prompts are called here, ``env`` what variables of a file of settings are called in other files.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice, product
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml

from library.config.kohya.translation import Note, Outcome
from library.config.load import misfits
from library.config.markers import is_nothing
from library.config.model_types import MODEL_TYPES
from library.errors import UserError
from library.files import keys_once, parse_json, read_text, read_toml

_MOST = 20_000  # keys of a file; the longest published have a few hundred
_LISTS = ("dataset_args", "optimizer_args", "network_args", "sample_prompts")


@dataclass(frozen=True)
class Translated:
    """A configuration in Tandem's keys: training, None for a file of datasets alone, and datasets by their paths."""

    training: dict[str, Any] | None
    notes: list[Note]
    datasets: dict[str, dict[str, Any]]
    dataset_notes: list[Note]


def translate_foreign(program: str, text: str, path: Path) -> Translated:
    """Return what ``text``, a file of ``program``, means; the file of datasets that it names is read if it is there.

    Raises:
        UserError: one of them cannot be read.
    """
    tables = read_toml(Path(__file__).with_name(f"{program.lower()}.toml"))[0] | {"program": program}
    listed, names = tables["datasets"], tables.get("env", {})
    data = _parsed(text, path, names)
    called = {names.get(key, key.lower()): key for key in re.findall(r"\b[A-Z_0-9]+(?=\s*\+?=)", text) if names}
    given = _leaves(data, path, listed if isinstance(data, list) else "", tables.get("root", ""))
    found = Translated(None if isinstance(data, list) else {}, [], {}, [])
    for file, below in _files(tables).items():
        named = str(given.get(file) or "")
        for place in (Path(named), path.parent / named, path.parent / PureWindowsPath(named).name):
            if file in given and place.is_file() and not any(key.startswith(f"{below}.") for key in given):
                given |= _leaves(_parsed(read_text(place), place), place, below)
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
    tables["outer"] = {key: given[key] for key in tables.get("inherits", ()) if key in given}
    for number, item in items.items():
        where, always = f"{listed}.{number}.", tables.get("always", {})
        if values := _translate_keys(tables, "dataset", item, found.dataset_notes, where):
            found.dataset_notes.extend(Note(where + key, "default", f"as always in {program}") for key in always)
            found.datasets[where] = always | values
    found.notes[:] = [
        note if note.outcome == "default" else replace(note, key=called.get(note.key, note.key)) for note in found.notes
    ]
    return found


def files_read(program: str, text: str, path: Path) -> list[str]:
    """Return the files that ``text`` names, of datasets or settings, which :func:`translate_foreign` reads too."""
    tables = read_toml(Path(__file__).with_name(f"{program.lower()}.toml"))[0]
    given = _leaves(_parsed(text, path, tables.get("env", {})), path, "", tables.get("root", ""))
    return [str(given[file]) for file in _files(tables) if given.get(file)]


def _files(tables: Mapping[str, Any]) -> dict[str, str]:
    """Return the key of each file that is read too -> the key below which its own stand."""
    return {tables["dataset_file"]: tables["datasets"]} | tables.get("files", {}) if "dataset_file" in tables else {}


def _parsed(text: str, path: Path, names: Mapping[str, str] | None = None) -> Any:
    """Return what a file holds: JSON, else YAML or, with ``names`` of variables, what sets those."""
    if text.lstrip()[:1] in ("{", "["):
        return parse_json(text, str(path))
    try:
        if names:
            return _settings(text, names)
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ValueError("refers to parts of itself by *name; write them out")
        return yaml.load(text, _OnceEach)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); correct it") from None


def _settings(text: str, names: Mapping[str, str]) -> dict[str, Any]:
    """Return what SimpleTuner's config.toml or config.env sets, by its options; other lines as "line 3"."""
    found: dict[str, Any] = {}
    with suppress(tomllib.TOMLDecodeError):
        found, text = tomllib.loads(text), ""
    for number, line in enumerate(text.splitlines(), 1):
        words = " ".join(shlex.split(line, comments=True)).removeprefix("export ")
        name, more, value = re.findall(r"^(?:(\w+)(\+?)=)?(.*)", words)[0]
        if name in found and not more:
            raise ValueError(f"{name!r} is set twice; keep one")
        if words:
            value = re.sub(r"\$\{?(\w+)\}?", lambda variable: found.get(variable[1], variable[0]), value)
            found[name or f"line {number}"] = f"{found.get(name, '')} {value}".strip()
    extra = re.findall(r"--(\w+)[ =]*((?:(?!--)\S+ *)*)", found.pop("TRAINER_EXTRA_ARGS", ""))
    pairs = [(names.get(name, name.lower()), value) for name, value in found.items()]
    return keys_once([*pairs, *((name, value.strip() or "true") for name, value in extra)])


class _OnceEach(yaml.SafeLoader):
    """Reads YAML, and refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping."""
        keys_once([(str(key.value), None) for key, _ in node.value])
        return super().construct_mapping(node, deep)


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
    try:
        return keys_once([(key.removeprefix(root), value) for key, value in found])
    except ValueError as error:  # --rank and rank, a.b and b within a
        raise UserError(f"{path}: {error}") from None


def _left_out(entry: Sequence[str], rows: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return key -> why of what stands in tables in which a key that decides what they are is refused."""
    found: dict[str, str] = {}
    for key in [key for key in given if _general(where + key) in entry]:
        outcome, text, _ = _meaning(rows[_general(key)], given[key], given)
        if outcome == "refused":
            inside = [other for other in given if other.startswith(key[: key.rfind(".") + 1])]
            found |= dict.fromkeys(inside, f"not taken: {key} = {_word(given[key])}") | {key: text}
    return found


class _Found:
    """What the keys of one table mean, as far as they are translated; ``where`` stands before them in notes."""

    def __init__(self, where: str, given: Mapping[str, Any], notes: list[Note]) -> None:
        self.where, self.given, self.notes = where, given, notes
        self.values: dict[str, Any] = {}  # in Tandem's keys
        self._sources: dict[str, str] = {}  # key here -> the given one that it is from
        self._prompts: dict[str, str] = {}  # number -> prompt
        self._options = defaultdict[str, list[list[str]]](list)  # of a prompt's number, "": of all; what each may be

    def put(self, key: str, row: Mapping[str, Any], meant: Mapping[str, Any]) -> None:
        """Take what ``key`` means; of two given keys for one here the later counts, and of two items with one name."""
        for to, one in meant.items():
            items = one if isinstance(one, list) else [one]
            if to == "sample_prompts":
                self._prompts |= {_number(key) or str(i): str(prompt) for i, prompt in enumerate(items)}
            elif to in _LISTS:
                named = {str(item).split("=")[0]: item for item in [*self.values.get(to, ()), *items]}
                self.values[to] = list(named.values())
            else:
                self.values[to] = one
                self._replace(self._sources.get(to) if "to" in row and key in self.given else None, to, key)
            if "to" in row and key in self.given:
                self._sources[to] = self.where + key

    def _replace(self, former: str | None, to: str, key: str) -> None:
        """Let ``key`` count for ``to`` in the notes, and neither ``former`` nor the default."""
        default = (self.where + to, "default")
        kept = [note for note in self.notes if note.key != former and (note.key, note.outcome) != default]
        said = [Note(former, "left out", f"{self.where}{key} is set too and counts")] if former else []
        self.notes[:] = kept + said

    def put_option(self, key: str, option: str, value: Any) -> None:
        """Take what stands after the prompt that ``key`` is of, or after all; of several sides each is painted."""
        choices = str(value).split(",") if "{1}" in option else [value]
        self._options[_number(key)].append([_formatted(option, one) for one in choices])

    def tell(self, key: str, outcome: Outcome, text: str, meant: Mapping[str, Any], unset: str) -> None:
        """Add the note on ``key``; ``unset``: what holds where it is not given."""
        if key in self.given:
            self.notes.append(Note(self.where + key, outcome, text, to=self.where + next(iter(meant), "")))
            return
        differs = "".join(text.partition("; ")[1:])
        self.notes.extend(Note(self.where + to, "default", f"{key} is unset, so {unset}{differs}") for to in meant)
        if outcome == "refused":
            self.notes.append(Note(self.where + key, outcome, f"{text} ({key} is unset, so {unset})"))

    def write_prompts(self, flags: Mapping[str, str]) -> None:
        """Put the prompts with their options among the values; ``flags``: what options within them are called here."""
        kind = MODEL_TYPES.get(str(self.values.get("model_type")))
        guidance, options = "--g " if kind is None or kind.takes_guidance else "--l ", self._options
        lines = [_prompt_lines(one, options[""] + options[n], flags, guidance) for n, one in self._prompts.items()]
        if lines:
            self.values["sample_prompts"] = [line for several in lines for line in several]


def _translate_keys(
    tables: Mapping[str, Any], part: str, given: Mapping[str, Any], notes: list[Note], where: str = ""
) -> dict[str, Any]:
    """Return ``given`` in Tandem's keys, none of a dataset that is left out; add a note on each key.

    Messages call a key ``where`` and its path. ``tables`` has in ``outer`` what holds where ``given`` lacks it.
    """
    rows: dict[str, Any] = dict(tables[part])
    for group in rows.pop("without", ()):
        rows |= dict.fromkeys(group["keys"].split(), group)
    gone, outer = _left_out(tables["entry"], rows, given, where), tables.get("outer", {})
    notes.extend(Note(where + key, "refused", why) for key, why in gone.items())
    given = {key: value for key, value in given.items() if key not in gone}
    if where and not given:
        return {}
    found, untaken = _Found(where, given, notes), set[str]()
    by, order = tables.get("by", {}), list(rows)  # of two keys with one meaning the later row counts
    both = {key: row["default"] for key, row in rows.items() if "default" in row} | outer | given
    both |= {key: both[row["like"]] for key, row in rows.items() if row.get("like") in both and key not in given}
    for key in sorted(both, key=lambda key: (key in given, order.index(key) if key in rows else len(order))):
        general, value = _general(key), both[key]
        named = (f"{general}@{_word(both.get(by.get(key)))}", general, f"{general.partition('.')[0]}.*")
        row: Mapping[str, Any] = next((rows[one] for one in named if one in rows), {})
        outcome, text, meant = _meaning(row, value, both)
        lost = [other for other in (by.get(key), *row.get("when", ())) if other in untaken]
        fitting = {to: one for to, one in meant.items() if to not in _LISTS} if part == "training" else {}
        if lost and value not in (None, False):
            outcome, text, meant = "refused", f"not taken: {lost[0]}, which says what it means, is not", {}
        elif unfit := fitting and misfits(fitting):
            outcome, text, meant = "refused", f"not taken: {'; '.join(unfit)}", {}
        chosen = [one for one in by if by[one] == key and f"{one}@{_word(value)}" in rows]
        if outcome == "refused" and "values" in row:
            untaken.add(key)
        elif outcome == "refused" and chosen:
            outcome, text = "accepted", f"says how {chosen[0]} is meant"
        if "option" in row and outcome == "renamed":
            found.put_option(key, row["option"], value)
        found.put(key, row, meant)
        whose = "as outside the dataset" if key in outer else f"the default of {tables['program']}"
        found.tell(key, outcome, text, meant, f"{_word(value)}, {whose}")
    found.write_prompts(tables.get("flags", {}))
    return found.values


def _prompt_lines(prompt: str, options: list[list[str]], flags: Mapping[str, str], guidance: str) -> list[str]:
    """Return a prompt with its options, a line for each choice of them; the prompt's own count before the others."""
    text, *own = re.split(r"\s--(\w+)\s+", f"{prompt} ") if flags else [prompt]
    written = [f"--{flags.get(name, name)} {value.strip()}" for name, value in zip(own[::2], own[1::2], strict=True)]
    lines = []
    for chosen in product(*options):
        each = {one if one.startswith("--ci ") else one.split()[0]: one for one in [*chosen, *written]}
        lines.append(" ".join([text.strip(), *(re.sub("^--g ", guidance, one) for one in each.values())]))
    return lines


def _meaning(row: Mapping[str, Any], value: Any, given: Mapping[str, Any]) -> tuple[Outcome, str, dict[str, Any]]:
    """Return what becomes of a value, what to say of it, and the keys and values that it means here."""
    values: Any = row.get("values")
    word, to = _word(value), row.get("to", "")
    but = next((text for pattern, text in row.get("but", {}).items() if fnmatchcase(word, pattern)), "")
    for condition, has in (("when", True), ("unless", False)):
        for key, wanted in row.get(condition, {}).items():
            if (_word(given.get(key)) in map(_word, wanted)) != has:
                which = f"with{'out' if has else ''} {key} = {' or '.join(map(_word, wanted))}"
                return "left out", f"has no effect there {which}", {}
    if "idle" in row:
        return "left out", f"has no effect there: {row['idle']}", {}
    if word in map(_word, row.get("off", ())):
        return "accepted", "asks for what happens here", {}
    if values is None and (value in (None, "", []) or (is_nothing(value) and not to and "off" not in row)):
        return "left out", "asks for nothing", {}
    if "option" in row:
        return "renamed", f"stands after the sample prompts{but}", {}
    if values is not None and word not in values:
        follows = f"; {row['why']}" if "why" in row else ""
        return "refused", f"not taken: {word} is not in this version, but {', '.join(values)}{follows}", {}
    if values is None and not to:
        return "refused", f"not taken: {row.get('why', 'it has no counterpart here')}", {}
    value = (values or row.get("as", {})).get(word, value)
    try:
        value = float(value) + row["add"] if "add" in row else value
        value = int(value * float(given[row["times"]])) if "times" in row else value
        there = _word(given.get(row.get("per", "")))
        if there.isdigit() and int(there) > 1 and float(value) >= 1:
            value, but = max(1, int(value) // int(there)), f"; {there} steps there are one here"
        value = round(math.sqrt(float(value) * 1e6) / row["area"]) * row["area"] if "area" in row else value
    except (TypeError, ValueError, OverflowError):
        return "refused", f"not taken: {value!r} is no number", {}
    value = _formatted(row["text"], value) if "text" in row else value
    value = str(value).split(row["each"]) if "each" in row else value
    meant: dict[str, Any] = value if isinstance(value, dict) else dict.fromkeys(to.split(), value)
    text = f"becomes {', '.join(f'{key} = {one}' for key, one in meant.items())}" if meant else "is what happens here"
    return "renamed" if meant else "accepted", text + but, meant


def _formatted(text: str, value: Any) -> str:
    sides = str(value).lower().split("x") if "{1}" in text else []  # 1024x768, or 1024 for both
    return text.format(*sides, *sides, ",".join(map(str, value)) if isinstance(value, list) else value)


def _word(value: Any) -> str:
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).lower()


def _general(key: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", key)


def _number(key: str) -> str:
    """Return the first number on a key's path, empty without one."""
    return "".join(re.findall(r"\.(\d+)(?=\.|$)", key)[:1])
