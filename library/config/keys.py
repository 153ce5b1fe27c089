"""The keys of the schema, by name: which section each belongs to, and its field."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from library.config.schema import TrainConfig

Fields = dict[str, tuple[str, FieldInfo]]


def sections() -> dict[str, type[BaseModel]]:
    """Return the schema's sections by name."""
    found = {name: field.annotation for name, field in TrainConfig.model_fields.items()}
    return {name: cls for name, cls in found.items() if isinstance(cls, type) and issubclass(cls, BaseModel)}


def fields() -> Fields:
    """Return every key of the schema with its section and field."""
    return {key: (name, field) for name, cls in sections().items() for key, field in cls.model_fields.items()}
