"""A LoRA as PEFT keeps one: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

Language models' LoRAs are kept so, because what loads them (peft, transformers, vLLM) takes such a folder. The weights'
file alone is enough for us: its metadata have the alphas, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from library.errors import UserError
from library.files import write_text
from library.models.layer_names import LoraTargets
from networks.files.metadata import peft_config
from networks.files.weights import LoraWeights

PEFT_PREFIX = "base_model.model."  # of the model that peft wraps
BASE_MODEL = "tandem.base_model"  # metadata: the base's name, where it is known
_WEIGHTS = "adapter_model.safetensors"


def check_layout(targets: LoraTargets, save_format: str) -> None:
    """Raise a UserError if no program would load the family's LoRAs from the layout."""
    if targets.own_names and save_format != "peft":
        raise UserError(f"save_format: LoRAs of {targets.family} are kept in PEFT's layout alone; leave it out")


def save_peft_config(
    folder: str | Path,
    weights: Mapping[str, LoraWeights],
    targets: LoraTargets,
    metadata: Mapping[str, str],
    use_dora: bool = False,
) -> Path:
    """Write ``adapter_config.json`` into ``folder``, made if needed; return where the weights go, beside it.

    A ``.safetensors`` file instead of a folder is the weights' file alone.
    """
    if Path(folder).suffix == ".safetensors":
        return Path(folder)
    fields = peft_config(weights) | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": metadata.get(BASE_MODEL),
        "fan_in_fan_out": targets.fan_in_fan_out,
        "use_dora": use_dora,
        "inference_mode": True,
    }
    write_text(Path(folder) / "adapter_config.json", json.dumps(fields, indent=2, sort_keys=True) + "\n")
    return Path(folder) / _WEIGHTS


def weight_file(path: Path) -> Path:
    """Return the weights' file of a LoRA, which may be a folder."""
    return path / _WEIGHTS if path.is_dir() else path
