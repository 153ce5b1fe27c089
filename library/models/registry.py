"""The model families by name: their classes, and the rows of what LoRAs call their layers.

Nothing of a family is imported before it is asked for, and the rows (in each family's ``files.py``) need no diffusers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.family import Family
from library.models.layer_names import LoraTargets

FAMILIES: Mapping[str, str] = {  # model_type -> module and class
    "flux": "library.models.flux.spec:FluxFamily",
    "flux_fill": "library.models.flux.spec:FluxFillFamily",
    "flux_kontext": "library.models.flux.spec:FluxKontextFamily",
    "qwen_image": "library.models.qwen_image.spec:QwenImageFamily",
    "qwen_image_edit": "library.models.qwen_image.spec:QwenImageEditFamily",
    "qwen_image_edit_plus": "library.models.qwen_image.spec:QwenImageEditPlusFamily",
    "z_image": "library.models.z_image.spec:ZImageFamily",
}
_LANGUAGE_MODELS = "library.models.llm"


def family_class(model_type: str) -> Any:
    """Return the family's class, of which what needs no files can be asked."""
    module, _, name = FAMILIES[model_type].partition(":")
    return getattr(importlib.import_module(module), name)


def model_family(config: ModelConfig) -> Family:
    """Return the family that ``config`` names, its paths checked and nothing loaded.

    Raises:
        UserError: a path is missing or leads to another kind of model.
    """
    return family_class(config.model_type)(config)


@functools.cache
def lora_targets() -> Mapping[str, LoraTargets]:
    """Return family -> what LoRAs call its layers; language models included."""
    folders = dict.fromkeys(path.rpartition(".")[0] for path in FAMILIES.values())
    modules = [importlib.import_module(f"{folder}.files") for folder in (*folders, _LANGUAGE_MODELS)]
    return {row.family: row for module in modules for row in module.LORA_TARGETS}


def lora_namings() -> list[LoraTargets]:
    """Return one row for each naming of layers: the first family that has it."""
    rows: list[LoraTargets] = []
    for targets in lora_targets().values():
        if not any(targets.keys is row.keys for row in rows):
            rows.append(targets)
    return rows


def with_transformer(config: ModelConfig, path: Path) -> ModelConfig:
    """Return the config of the model in ``path``: a pipeline, or a transformer beside ``config``'s other parts.

    For a second model of the same family, such as the fp8 file of a bf16 folder.

    Raises:
        UserError: a folder that is no pipeline holds no weights, or several files of them.
    """
    whole = Path(config.pretrained_model_name_or_path).expanduser()
    if path.is_dir() and not (path / "model_index.json").is_file():
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise UserError(f"{path}: {len(files)} safetensors files; give one file, or a whole pipeline folder")
        path = files[0]
    values = {"pretrained_model_name_or_path": str(path)}
    if path.is_file() and whole.is_dir():
        flux = config.model_type.startswith("flux")
        parts = ("ae", "clip_l", "t5xxl") if flux else ("vae", "text_encoder")
        values |= {name: str(whole) for name in parts if getattr(config, name) is None}
        two = {"clip_l_tokenizer": whole / "tokenizer", "t5xxl_tokenizer": whole / "tokenizer_2"}
        tokenizers = two if flux else {"qwen_tokenizer": whole / "tokenizer"}
        values |= {name: str(folder) for name, folder in tokenizers.items() if folder.is_dir()}
    return config.model_copy(update=values)
