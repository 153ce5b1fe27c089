"""The table of families: what it says is so, and the schema follows it."""

from __future__ import annotations

from importlib import import_module

import pytest

from library.config.model_types import IMAGE_MODELS, LANGUAGE_MODELS, MODEL_TYPES
from library.config.schema import ModelConfig
from library.config.scripts import LANGUAGE_LORA, LORA, fields


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_a_row_is_of_the_class_it_names(name: str) -> None:
    row = MODEL_TYPES[name]
    module, attribute = row.family.split(":")
    family = getattr(import_module(module), attribute)
    assert family.name == name
    assert set(row.keys) <= ModelConfig.model_fields.keys()


def test_the_schemas_choices_are_the_rows() -> None:
    for script, names in ((LORA, IMAGE_MODELS), (LANGUAGE_LORA, LANGUAGE_MODELS)):
        assert fields(script)["model_type"][1].annotation.__args__ == names  # type: ignore[union-attr]
