"""LoRAs merged into a model as it is loaded, before another one is trained on it (kohya's ``base_weights``).

    W' = round(W + sum_k ratio_k * alpha_k / rank_k * B_k A_k)

in fp32, rounded once to what the file holds W in, and only then cast or quantised as the run asks: the base is the one
that ``tools/merge_lora.py`` would have written. A weight that the file has in fp8 is dequantised, changed, and
quantised again with fresh scales of its kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from library.errors import UserError
from library.files import fingerprint
from library.models.layer_names import LoraTargets
from networks.files.adapters import load_adapter
from networks.files.metadata import weight_file
from networks.files.weights import AdapterWeights


@dataclass(frozen=True)
class BaseWeights:
    """LoRA files and their strengths, read.

    Attributes:
        sources: file and strength of each.
        updates: module of the transformer -> its updates with their strengths, in the files' order.
        left_out: a line for each file with layers of text encoders, which are not merged.
    """

    sources: tuple[tuple[Path, float], ...]
    updates: Mapping[str, Sequence[tuple[AdapterWeights, float]]]
    left_out: tuple[str, ...]

    def changes(self, targets: LoraTargets) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return parameter of the transformer -> what makes the merged weight [out, in] fp32 of it."""

        def change(name: str) -> Callable[[Tensor], Tensor]:
            return lambda weight: self._merged(name, weight)

        return {f"{targets.path_in_model(name)}.weight": change(name) for name in self.updates}

    def _merged(self, name: str, weight: Tensor) -> Tensor:
        for update, strength in self.updates[name]:
            rows, columns = update.shape
            if weight.shape != (rows, columns or weight.shape[1]):
                shapes = f"{rows}x{columns or 'any'}, the model's has {weight.shape[0]}x{weight.shape[1]}"
                raise UserError(f"base_weights: {name} is for a layer of {shapes}; it was trained on another model")
            weight = update.apply(weight, strength)
        if not torch.isfinite(weight).all():
            raise UserError(
                f"base_weights: {name} leaves the finite numbers when merged; lower base_weights_multiplier"
            )
        return weight

    def fingerprint(self) -> str:
        """Return what a state remembers them by: contents and strengths, wherever the files lie; "" of none."""
        return ", ".join(f"{fingerprint(weight_file(path))} x {strength:g}" for path, strength in self.sources)

    def described(self) -> str:
        """Return names and strengths as JSON, as a LoRA's metadata have them; "" of none."""
        named = [{"lora": path.name, "ratio": strength} for path, strength in self.sources]
        return json.dumps(named) if named else ""


def read_base_weights(paths: Sequence[str], strengths: Sequence[float], targets: LoraTargets) -> BaseWeights:
    """Read LoRAs to merge; strengths that are not given are 1.

    Raises:
        UserError: a file is missing, damaged, or no LoRA of this family, or has nothing for the transformer.
    """
    sources = tuple(
        (Path(path).expanduser(), strengths[i] if i < len(strengths) else 1.0) for i, path in enumerate(paths)
    )
    updates: dict[str, list[tuple[AdapterWeights, float]]] = {}
    left_out = []
    for path, strength in sources:
        if not path.exists():
            raise UserError(f"base_weights: {path} does not exist; check the path")
        parts = targets.by_component(load_adapter(path, targets).weights)
        own = parts.pop(targets.file_prefix, {})
        if not own:
            raise UserError(f"base_weights: {path} has nothing for the transformer; give a LoRA that has")
        if parts:
            left_out.append(f"{path}: its layers of {' and '.join(sorted(parts))} are not merged")
        for name, weights in own.items():
            updates.setdefault(name, []).append((weights, strength))
    return BaseWeights(sources, updates, tuple(left_out))
