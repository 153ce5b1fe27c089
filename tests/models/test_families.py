"""What every family must say of itself; a new family is a row of ``MODEL_TYPES`` and is taken up here by itself."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from library.config.model_types import IMAGE_MODELS, LANGUAGE_MODELS, MODEL_TYPES
from library.models.family_by_name import family_class
from library.models.registry import lora_namings, lora_targets

pytestmark = pytest.mark.parametrize("name", IMAGE_MODELS)


@cache
def shallow(name: str) -> Any:
    """Return the published transformer with one block of each kind, on the meta device."""
    family = family_class(name)
    with torch.device("meta"):
        return family.build(family.published, most_blocks=1)


def test_the_options_of_its_parts_are_those_of_the_configurations_table(name: str) -> None:
    layout, row = family_class(name).layout, MODEL_TYPES[name]
    assert (layout.vae.option, *(part.option for part in layout.text_encoders)) == row.files
    assert {part.option: part.folder for part in layout.tokenizers} == row.tokenizers
    assert layout.title == row.title


def test_its_class_is_the_one_its_files_name(name: str) -> None:
    family, model = family_class(name), shallow(name)
    assert family.transformer_class.__name__ == family.layout.transformer
    assert all(model.config[depth] == 1 for depth in family.depths)
    assert all(hasattr(model, part) for part in family.tail)
    assert bool(family.tail) is not MODEL_TYPES[name].texts_differ_in_length


def test_every_layer_that_can_have_a_lora_is_in_the_table_of_names(name: str) -> None:
    targets = family_class(name).targets
    linears = [path for path, module in shallow(name).named_modules() if isinstance(module, nn.Linear)]
    for group in targets.layer_groups:
        found = [path for path in linears if re.fullmatch(group.pattern, path)]
        assert found, group.name
        for path in found:
            place = targets.keys.find(path)
            assert place is not None
            assert path in place.modules
    assert lora_targets()[name] is targets
    assert targets.family == name


def test_lora_files_have_one_row_for_each_naming(name: str) -> None:
    rows = lora_namings()
    assert sum(row.keys is lora_targets()[name].keys for row in rows) == 1
    assert {row.family for row in rows} >= set(LANGUAGE_MODELS)
