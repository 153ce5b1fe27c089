"""Other words for options: those that people look for, and the names that other trainers have for them.

The first stand in ``synonyms.toml``, the others in the tables by which their configurations are translated
(``kohya/flags.toml``, ``programs/*.toml``). The search of the New run form and the remedy for an unknown key read them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

from library.config.kohya.flags import FLAGS
from library.errors import nearest_of
from library.files import read_toml


@cache
def synonyms() -> Mapping[str, list[str]]:
    """Return each other word with the options it may mean, the nearest first."""
    here, found = Path(__file__).parent, dict[str, dict[str, None]]()
    rows = [(word, keys.split()) for word, keys in read_toml(here / "synonyms.toml")[0].items()]
    rows += [(flag.name, [*flag.to]) for flag in FLAGS.values() if flag.fate == "renamed"]
    for program in sorted((here / "programs").glob("*.toml")):
        for key, row in read_toml(program)[0]["training"].items():
            if isinstance(row, dict):  # else a list of keys that have no counterpart
                tables = [value for value in row.get("values", {}).values() if isinstance(value, dict)]
                keys = [*row.get("to", "").split(), *(option for table in tables for option in table)]
                rows.append((key.partition("@")[0].rpartition(".")[2].lower(), keys))
    for word, keys in rows:
        found.setdefault(word, {}).update(dict.fromkeys(keys))
    return {word: others for word, keys in found.items() if (others := [key for key in keys if key != word])}


def meant_by(word: str, known: Collection[str]) -> str | None:
    """Return which of the options ``known`` a wrong name means: one that it is another word for, or the nearest."""
    return next((key for key in synonyms().get(word.lower(), ()) if key in known), None) or nearest_of(word, known)
