"""The tables in the folders of all model families. Their classes: ``library.models.family_by_name``.

Nothing of a family is imported before it is asked for, and tables are no code: tools that only look at names start
fast.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.models.layer_names import LoraTargets, NameTables, read_names


def folder_of(model_type: str) -> str:
    """Return the name of the folder of a ``model_type``'s family."""
    return MODEL_TYPES[model_type].family.split(".")[2]


@functools.cache
def family_names(folder: str) -> NameTables:
    """Return the tables in the ``names.toml`` of a family's ``folder``."""
    return read_names(Path(__file__).parent / folder)


@functools.cache
def lora_targets() -> Mapping[str, LoraTargets]:
    """Return family -> what LoRAs call its layers; language models, last, included."""
    from library.models.llm.files import LORA_TARGETS

    images = (row for folder in dict.fromkeys(map(folder_of, IMAGE_MODELS)) for row in family_names(folder).targets)
    return {row.family: row for row in (*images, *LORA_TARGETS)}


def lora_namings() -> list[LoraTargets]:
    """Return one row for each naming of layers: the first family that has it."""
    rows: list[LoraTargets] = []
    for targets in lora_targets().values():
        if not any(targets.keys is row.keys for row in rows):
            rows.append(targets)
    return rows
