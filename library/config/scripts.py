"""The scripts that have a configuration, and their keys by name: which section each belongs to, and its field."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from library.config.chat_schema import IMAGE_ONLY_KEYS, ChatTrainConfig
from library.config.pretrain_schema import PretrainConfig
from library.config.rules import (
    find_conflicts,
    find_instruction_conflicts,
    find_llm_conflicts,
)
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
        excluded_keys: keys of the sections that the script does not have.
        elsewhere: keys of other models that the same script trains, and of what is not there -> what to say of them.
    """

    name: str
    purpose: str
    schema: type[BaseModel]
    conflicts: Callable[[Any], Iterator[str]]
    takes_kohya: bool = False
    excluded_keys: frozenset[str] = frozenset()
    elsewhere: Mapping[str, str] = field(default_factory=dict)


def _sections(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    found = {name: field.annotation for name, field in schema.model_fields.items()}
    return {name: cls for name, cls in found.items() if isinstance(cls, type) and issubclass(cls, BaseModel)}


def _keys(schema: type[BaseModel]) -> set[str]:
    return {key for cls in _sections(schema).values() for key in cls.model_fields}


# Of docs/distributed.md: what people look for, and why it is not there.
UNSUPPORTED_KEYS = {
    "cp": "diffusers splits an image's tokens (_cp_plan) in its own attention processors only; with those used here "
    "each process would attend to its own tokens alone, and learn something wrong; remove it, and set tp",
}

_IMAGE_KEYS = (_keys(TrainConfig) - _keys(ChatTrainConfig)) | IMAGE_ONLY_KEYS
_LANGUAGE_KEYS = _keys(ChatTrainConfig) - _keys(TrainConfig)

LORA = Script(
    "train_lora.py",
    "Train a LoRA.",
    TrainConfig,
    find_conflicts,
    takes_kohya=True,
    elsewhere=UNSUPPORTED_KEYS
    | dict.fromkeys(_LANGUAGE_KEYS, 'is about language models; set model_type = "llama" or "gpt2", or remove it'),
)
LANGUAGE_LORA = Script(
    "train_lora.py",
    "Train a LoRA on a language model.",
    ChatTrainConfig,
    find_instruction_conflicts,
    excluded_keys=IMAGE_ONLY_KEYS,
    elsewhere=UNSUPPORTED_KEYS
    | dict.fromkeys(_IMAGE_KEYS, "is about image models, this is a language model; remove it"),
)


def sections(script: Script = LORA) -> dict[str, type[BaseModel]]:
    """Return the schema's sections by name."""
    return _sections(script.schema)


def section_fields(script: Script, section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the keys of one section that the script has, with their fields."""
    return {key: field for key, field in section.model_fields.items() if key not in script.excluded_keys}


def fields(script: Script = LORA) -> Fields:
    """Return every key of the schema with its section and field."""
    return {
        key: (name, field)
        for name, cls in sections(script).items()
        for key, field in section_fields(script, cls).items()
    }


LLM = Script(
    "train_llm.py", "Pretrain a language model.", PretrainConfig, find_llm_conflicts, elsewhere=UNSUPPORTED_KEYS
)
