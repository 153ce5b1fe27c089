"""The scripts that have a configuration, and their keys by name: which section each belongs to, and its field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from library.config.chat_schema import ChatTrainConfig
from library.config.markers import OnlyFor
from library.config.pretrain_schema import PretrainConfig
from library.config.schema import IMAGES, TrainConfig

Fields = dict[str, tuple[str, FieldInfo]]
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


# Of docs/distributed.md: what people look for, and why it is not there.
UNSUPPORTED_KEYS = {
    "cp": "diffusers splits an image's tokens (_cp_plan) in its own attention processors only; with those used here "
    "each process would attend to its own tokens alone, and learn something wrong; remove it, and set tp",
}
# Options that were removed -> the default they had, and what to say of another value. The configuration that a run
# saved before holds them; at the default they are read without complaint.
REMOVED_KEYS: Mapping[str, tuple[Any, str]] = {
    "allow_partial": (
        False,
        "was removed, all of network_weights is taken; remove it, and choose the file's layers with network_args",
    ),
    "best_prior_weight": (
        0.0,
        "was removed, save_best and early_stop_patience go by val_loss; remove it, and compare val_prior_loss in the "
        "curves",
    ),
    "checkpoint_every_n_blocks": (
        1,
        "was removed; remove it, and set activation_budget_mb, which keeps what costs most to recompute",
    ),
    "strict_dataset": (False, "was removed; run tools/check_dataset.py --strict before training"),
    "shard_lora": (
        False,
        "was removed, shard splits the base alone; remove it, or set zero = 3, which splits the "
        "LoRA's gradients and optimizer state too",
    ),
    "schedule": (
        "1f1b",
        "was removed with the gpipe schedule; remove it, 1f1b gives the same numbers with less memory",
    ),
}
_NOT_THERE = UNSUPPORTED_KEYS | {key: message for key, (_, message) in REMOVED_KEYS.items()}
_CHATS = 'is about language models; set model_type = "llama" or "gpt2", or remove it'

LORA = Script(
    "train_lora.py",
    "Train a LoRA.",
    TrainConfig,
    "images",
    takes_kohya=True,
    foreign_keys=_NOT_THERE | _foreign_keys(TrainConfig, "images", ChatTrainConfig, _CHATS),
)
LANGUAGE_LORA = Script(
    "train_lora.py",
    "Train a LoRA on a language model.",
    ChatTrainConfig,
    "chats",
    foreign_keys=_NOT_THERE | _foreign_keys(ChatTrainConfig, "chats", TrainConfig, IMAGES.otherwise),
)
LLM = Script(
    "train_llm.py",
    "Pretrain a language model.",
    PretrainConfig,
    "pretraining",
    foreign_keys=_NOT_THERE | _foreign_keys(PretrainConfig, "pretraining", PretrainConfig, ""),
)


def sections(script: Script[Any] = LORA) -> dict[str, type[BaseModel]]:
    """Return the schema's sections by name."""
    return _sections(script.schema)


def section_fields(script: Script[Any], section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the keys of one section that the script has, with their fields."""
    return {key: field for key, field in section.model_fields.items() if _refusal(field, script.training) is None}


def fields(script: Script[Any] = LORA) -> Fields:
    """Return every key of the schema with its section and field."""
    return {
        key: (name, field)
        for name, cls in sections(script).items()
        for key, field in section_fields(script, cls).items()
    }
