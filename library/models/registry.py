"""The tables in the folders of all model families. Their classes: ``library.models.family_by_name``.

Nothing of a family is imported before it is asked for, and a family's ``files.py`` imports no diffusers: tools that
only look at names start fast.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import ModuleType

from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.models.layer_names import LoraTargets


@functools.cache
def family_modules() -> list[ModuleType]:
    """Return the module ``files`` of every family of image models."""
    folders = dict.fromkeys(MODEL_TYPES[name].family.rpartition(".")[0] for name in IMAGE_MODELS)
    return [importlib.import_module(f"{folder}.files") for folder in folders]


def all_modules() -> list[ModuleType]:
    """Return the module ``files`` of every family, language models last."""
    return [*family_modules(), importlib.import_module("library.models.llm.files")]


@functools.cache
def lora_targets() -> Mapping[str, LoraTargets]:
    """Return family -> what LoRAs call its layers; language models included."""
    return {row.family: row for module in all_modules() for row in module.LORA_TARGETS}


def lora_namings() -> list[LoraTargets]:
    """Return one row for each naming of layers: the first family that has it."""
    rows: list[LoraTargets] = []
    for targets in lora_targets().values():
        if not any(targets.keys is row.keys for row in rows):
            rows.append(targets)
    return rows
