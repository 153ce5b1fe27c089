"""The scripts that have a configuration, and their keys by name: which section each belongs to, and its field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from library.config.conflicts import find_conflicts
from library.config.schema import TrainConfig

Fields = dict[str, tuple[str, FieldInfo]]


@dataclass(frozen=True)
class Script:
    """A script and its schema.

    Attributes:
        name, purpose: for ``--help``.
        schema: all sections.
        conflicts: yields a line for options that exclude each other.
        takes_kohya: whether keys and flags of kohya's trainers are taken too.
    """

    name: str
    purpose: str
    schema: type[BaseModel]
    conflicts: Callable[[Any], Iterator[str]]
    takes_kohya: bool = False


LORA = Script("train_lora.py", "Train a LoRA.", TrainConfig, find_conflicts, takes_kohya=True)


def sections(script: Script = LORA) -> dict[str, type[BaseModel]]:
    """Return the schema's sections by name."""
    found = {name: field.annotation for name, field in script.schema.model_fields.items()}
    return {name: cls for name, cls in found.items() if isinstance(cls, type) and issubclass(cls, BaseModel)}


def fields(script: Script = LORA) -> Fields:
    """Return every key of the schema with its section and field."""
    return {key: (name, field) for name, cls in sections(script).items() for key, field in cls.model_fields.items()}
