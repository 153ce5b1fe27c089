"""From a ``model_type`` to its family: the class, or the family of one model with its paths checked.

A family's module is imported when it is asked for, since it imports diffusers.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from library.config.model_layouts import pipeline_of
from library.config.model_types import MODEL_TYPES
from library.config.schema import ModelConfig
from library.errors import UserError

if TYPE_CHECKING:
    from library.models.family import Family  # imports diffusers


def family_class(model_type: str) -> Any:
    """Return the family's class: the architecture, of which what needs no files can be asked."""
    module, _, name = MODEL_TYPES[model_type].family.partition(":")
    return getattr(importlib.import_module(module), name)


def model_family(config: ModelConfig) -> Family:
    """Return the family that ``config`` names, its paths checked and nothing loaded."""
    return family_class(config.model_type)(config)


def with_transformer(config: ModelConfig, path: Path) -> ModelConfig:
    """Return the config of the model in ``path``: a pipeline, or a transformer beside ``config``'s other parts.

    For a second model of the same family, such as the fp8 file of a bf16 folder.
    """
    root = Path(config.pretrained_model_name_or_path).expanduser()
    if path.is_dir() and pipeline_of(path) is None and not (path / "config.json").is_file():
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise UserError(f"{path}: {len(files)} safetensors files; give one file, or a complete pipeline folder")
        path = files[0]
    values = {"pretrained_model_name_or_path": str(path)}
    if pipeline_of(path) is None and root.is_dir():
        layout = family_class(config.model_type).layout
        parts = (layout.vae, *layout.text_encoders)
        values |= {part.option: str(root) for part in parts if getattr(config, part.option) is None}
        folders = {part.option: root / part.folder for part in layout.tokenizers}
        values |= {option: str(folder) for option, folder in folders.items() if folder.is_dir()}
    return config.model_copy(update=values)
