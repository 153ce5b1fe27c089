"""Every flag of kohya's image LoRA trainers, and what becomes of it here: read from flags.toml.

They are those of sd-scripts' ``flux_train_network.py`` (sd-scripts 48d368f, February 2026) and of
musubi-tuner's trainers of FLUX.1 Kontext, FLUX.2, Krea 2, Qwen-Image and Z-Image (musubi-tuner 30c658c, June 2026; of
Qwen-Image-2.1 a later one), read from their argument parsers, and keys that kohya_ss (the GUI, 45088f0) writes into its
TOML files. Each has one of six fates:

    same      a key of the schema, with the same meaning
    renamed   set under another name, the first of ``to`` that the schema has; refused if it has none
    accepted  describes what is always so here, or nothing that training depends on; ``only`` lists the values
              for which that is true, any other value is refused
    noted     has no effect here, and none that training depends on: a line says why; ``off`` as for refused
    dataset   belongs in the dataset TOML, under the same name
    refused   not taken, with the reason and what to do instead; ``off`` lists values that ask for nothing

A flag that is a key of the schema is ``same`` whatever stands there, so a row need not change on the day on
which a feature arrives. Behind the flags the file has what unset keys and single values mean there where that is not
what they mean here. ``library.config.kohya.translate`` applies the tables; ``docs/kohya_flags.md`` is made from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from library.config.model_types import MODEL_TYPES, Tool
from library.files import read_toml

Fate = Literal["same", "renamed", "accepted", "noted", "dataset", "refused"]


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        name: without dashes.
        fate: see the module's docstring.
        tools: the trainers that have it.
        takes: what follows it on the command line.
        why: what it means here, or why it is refused.
        instead: what to do where it is refused.
        to: the names it may have here.
        only: the accepted values; empty for any. Of ``network_module`` they are those of the families.
        off: the values, beside false, zero and nothing, that ask for nothing.
    """

    name: str
    fate: Fate
    tools: tuple[Tool, ...]
    takes: Literal["switch", "value", "list"] = "value"
    why: str = ""
    instead: str = "remove it"
    to: Sequence[str] = ()
    only: Sequence[str] = ()
    off: Sequence[Any] = ()


def _rows(tables: dict[str, Any]) -> Iterator[Flag]:
    modules = tuple(dict.fromkeys(row.kohya_module for row in MODEL_TYPES.values() if row.kohya_module))
    for fate in get_args(Fate):
        for row in tables[fate]:
            names, trainer = row.pop("flags").split(), row.pop("trainer", None)
            tools = (trainer,) if trainer else get_args(Tool)
            row |= {"only": modules} if names == ["network_module"] and fate == "accepted" else {}
            yield from (Flag(name, fate, tools, **row) for name in names)


_TABLES = read_toml(Path(__file__).with_name("flags.toml"))[0]
FLAGS: Mapping[str, Flag] = {flag.name: flag for flag in _rows(_TABLES)}
DEFAULTS: Mapping[Tool, Mapping[str, Any]] = {
    tool: _TABLES["defaults"]["both"] | _TABLES["defaults"][tool] for tool in get_args(Tool)
}
SAME_AS: Mapping[str, Mapping[str, str]] = _TABLES["same_as"]
REFUSED_VALUES: Mapping[str, Mapping[str, str]] = _TABLES["refused_values"]

# Kohya's trainers stop at these where they would have no effect: refused, not left out.
NEVER_LEFT_OUT = frozenset({"dim_from_weights", "lr_warmup_steps"})
