"""Which family a LoRA file is of: as it was asked, as the file's metadata say, or as its keys allow.

Families whose layers have the same names (FLUX.1 dev, Fill and Kontext) are one here: their LoRA files differ in
nothing. An attention-only LoRA of Qwen-Image has FLUX's names too, and written by FLUX's table its keys would become
others; so where neither the command line nor the metadata decide between several, nothing is guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from library.config.markers import listed
from library.errors import UserError
from library.models.layer_names import LoraTargets
from library.models.registry import lora_targets
from library.safetensors_io import read_safetensors_header
from networks.files.adapters import load_lora
from networks.files.layouts import best_targets, fitting_targets
from networks.files.metadata import weight_file

_STATED = ("ss_base_model_version", "modelspec.architecture")  # "flux1", "qwen_image"; "flux-1-dev/lora", "Qwen-Image"


def load_loras(
    paths: Sequence[Path], model_type: str | None = None, load: Callable[[Path, LoraTargets], Any] = load_lora
) -> tuple[LoraTargets, list[Any]]:
    """Return the row of the family that LoRA files are of, and what is in them.

    Args:
        paths: LoRA files, or folders written by PEFT; of one family.
        model_type: the family's name, as asked; None: as the files say.
        load: what reads a file.

    Raises:
        UserError: no such file, a file's metadata contradict ``model_type``, the files are of several families, or a
            file without metadata fits several; and what ``load`` raises.
    """
    rows = [_targets_of(path, model_type) for path in paths]
    for path, row in zip(paths, rows, strict=True):
        if row.keys is not rows[0].keys:
            raise UserError(f"{path}: is a LoRA of {row.family}, {paths[0]} one of {rows[0].family}; keep one family's")
    return rows[0], [load(path, rows[0]) for path in paths]


def _targets_of(path: Path, model_type: str | None) -> LoraTargets:
    header = read_safetensors_header(weight_file(path))
    likely = likely_targets(header)
    if model_type is None:
        if len(likely) > 1:
            names = listed(tuple(row.family for row in likely))
            raise UserError(f"{path}: its keys fit {names}, and its metadata name none of them; set --model_type")
        return likely[0] if likely else best_targets(header)
    targets, stated = lora_targets()[model_type], stated_targets(header.get("__metadata__") or {})
    if stated and stated.keys is not targets.keys and stated in likely:  # otherwise its keys know better
        raise UserError(
            f"{path}: --model_type {model_type}, but its metadata name {stated.family}; "
            f"set --model_type {stated.family}, or leave it out"
        )
    return targets


def language_targets(path: Path) -> LoraTargets | None:
    """Return the row of the language model that ``path`` is a LoRA of, None if it is none of a language model's."""
    if not weight_file(path).is_file():
        return None
    likely = likely_targets(read_safetensors_header(weight_file(path)))
    return likely[0] if len(likely) == 1 and likely[0].own_names else None


def likely_targets(header: Mapping[str, dict]) -> list[LoraTargets]:
    """Return the row of the family that a LoRA's metadata name, if its keys fit, or else of each that they fit."""
    fitting = fitting_targets(header)
    stated = stated_targets(header.get("__metadata__") or {})
    return [stated] if stated and any(stated.keys is row.keys for row in fitting) else fitting


def stated_targets(metadata: Mapping[str, str]) -> LoraTargets | None:
    """Return the row of the family that a LoRA's metadata name, None if they name none that is known."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        return lora_targets()[json.loads(metadata["tandem.config"])["model"]["model_type"]]
    for key in _STATED:
        stated = re.sub(r"[^a-z0-9]", "", metadata.get(key, "").lower())
        named = [family for family in lora_targets() if stated.startswith(family.replace("_", ""))]
        if named:
            return lora_targets()[max(named, key=len)]
    return None
