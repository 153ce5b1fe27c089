"""The scripts that have a configuration, and their keys by name: which section each belongs to, and its field.

Other words for a key are those that people look for, in ``synonyms.toml``, and the names that other trainers have for
it, in the tables by which their configurations are translated (``kohya/flags.toml``, ``programs/*.toml``). The search
of the New run form and the remedy for an unknown key read them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from library.config.chat_schema import ChatTrainConfig
from library.config.kohya.flags import FLAGS
from library.config.markers import OnlyFor
from library.config.pretrain_schema import PretrainConfig
from library.config.run_schema import IMAGES
from library.config.schema import TrainConfig
from library.errors import nearest_of
from library.files import read_toml

Fields = Mapping[str, tuple[str, FieldInfo]]
Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True, eq=False)
class Script(Generic[Schema]):
    """A script and its schema.

    Attributes:
        name, purpose: for ``--help``.
        schema: all sections.
        training: what it trains; of the sections it has the options that are for that.
        takes_kohya: whether keys and flags of kohya's trainers are taken too.
        foreign_keys: options of other trainings, removed ones, and of what is not there -> what to say of them.
    """

    name: str
    purpose: str
    schema: type[Schema]
    training: Literal["images", "chats", "pretraining"]
    takes_kohya: bool = False
    foreign_keys: Mapping[str, str] = field(default_factory=dict)


def _sections(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    found = {name: field.annotation for name, field in schema.model_fields.items()}
    return {name: cls for name, cls in found.items() if isinstance(cls, type) and issubclass(cls, BaseModel)}


def _keys(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    return {key: field for cls in _sections(schema).values() for key, field in cls.model_fields.items()}


def _refusal(field: FieldInfo, training: str) -> str | None:
    """Return what to say of an option that ``training`` does not have, None of one that it has."""
    markers = (marker for marker in field.metadata if isinstance(marker, OnlyFor))
    return next((marker.otherwise for marker in markers if training not in marker.trainings), None)


def _foreign_keys(schema: type[BaseModel], training: str, others: type[BaseModel], message: str) -> dict[str, str]:
    """Return the options that a training lacks: those of ``others`` alone, and those its sections have for others."""
    refusals = {key: _refusal(field, training) for key, field in _keys(schema).items()}
    found = dict.fromkeys(_keys(others).keys() - _keys(schema).keys(), message)
    return found | {key: refusal for key, refusal in refusals.items() if refusal is not None}


_NOT_THERE = read_toml(Path(__file__).with_name("removed_keys.toml"))[0]
# Options that were removed -> the default they had, and what to say of another value.
REMOVED_KEYS: Mapping[str, tuple[Any, str]] = {
    key: (row["default"], row["remark"]) for key, row in _NOT_THERE.items() if "default" in row
}
_REMARKS = {key: row["remark"] for key, row in _NOT_THERE.items()}
_CHATS = 'is about language models; set model_type = "llama" or "gpt2", or remove it'

LORA = Script(
    "train_lora.py",
    "Train a LoRA.",
    TrainConfig,
    "images",
    takes_kohya=True,
    foreign_keys=_REMARKS | _foreign_keys(TrainConfig, "images", ChatTrainConfig, _CHATS),
)
LANGUAGE_LORA = Script(
    "train_lora.py",
    "Train a LoRA on a language model.",
    ChatTrainConfig,
    "chats",
    foreign_keys=_REMARKS | _foreign_keys(ChatTrainConfig, "chats", TrainConfig, IMAGES.otherwise),
)
LLM = Script(
    "train_llm.py",
    "Train all weights of a language model, on texts or on conversations.",
    PretrainConfig,
    "pretraining",
    foreign_keys=_REMARKS
    | _foreign_keys(
        PretrainConfig, "pretraining", ChatTrainConfig, "is about LoRAs, which train_lora.py trains; remove it"
    )
    | {"pretrained_model_name_or_path": "is called init_from where all weights are trained; rename it"},
)


def sections(script: Script[Any] = LORA) -> dict[str, type[BaseModel]]:
    """Return the schema's sections by name."""
    return _sections(script.schema)


def section_fields(script: Script[Any], section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the keys of one section that the script has, with their fields."""
    return {key: field for key, field in section.model_fields.items() if _refusal(field, script.training) is None}


@cache
def fields(script: Script[Any] = LORA) -> Fields:
    """Return every key of the schema with its section and field."""
    return {
        key: (name, field)
        for name, cls in sections(script).items()
        for key, field in section_fields(script, cls).items()
    }


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
