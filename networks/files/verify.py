"""The file a run leaves, read back and held to the network it was written from.

Two questions. Does every layer of the file do what the live layer does, as exactly as the file's dtype can say it? And
would the programs that the layout is for take every key? The first is answered by the relative difference of the
updates (``networks.merging.low_rank``), of other kinds than LoRA tensor by tensor. The second by the rules of the
loaders (``_RULES``), which are written down here apart from the writer's tables:

- diffusers ``FluxLoraLoaderMixin.lora_state_dict`` and peft: ``<component>.<module>.lora_A.weight`` and ``lora_B``;
- sd-scripts ``networks/lora_flux.py``: ``lora_unet_<module, underscores>.lora_down.weight``, ``lora_up``, ``alpha``;
- ComfyUI ``comfy/lora.py`` ``model_lora_keys_unet``: ``diffusion_model.<module>.lora_down.weight``, the same roles.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from library.errors import UserError
from library.safetensors_io import read_safetensors_header
from networks.files.adapters import load_adapter
from networks.files.metadata import weight_file
from networks.files.weights import AdapterWeights, LoraWeights, names_in_short
from networks.merging.low_rank import relative_difference
from networks.network import AdapterNetwork

# Two factors, each rounded to the dtype's half unit in the last place; fp32 is written as it is, but for splitting
# and joining fused layers (exact) and the alpha's rounding to fp32.
_TOLERANCE = {"F32": 2.0**-20, "BF16": 2.0**-7, "F16": 2.0**-9}

_PAIR = {"lora_A.weight", "lora_B.weight"}
_TRIPLE = {"lora_down.weight", "lora_up.weight", "alpha"}
_RULES: dict[str, tuple[str, set[str]]] = {  # layout -> a key without its role, the roles that belong together
    "diffusers": (r"(?:transformer|text_encoder(?:_2)?)\.[\w.]+", _PAIR),
    "peft": (r"base_model\.model\.[\w.]+", _PAIR),
    "kohya": (r"lora_(?:unet|te1|te3)_\w+", _TRIPLE),
    "comfy": (r"diffusion_model\.[\w.]+|lora_te[13]_\w+", _TRIPLE),
    "lycoris": (r"lycoris_\w+|lora_te[13]_\w+", set()),  # comfy's for other kinds, whose roles differ
}


@dataclass(frozen=True)
class ExportCheck:
    """What came of it."""

    layers: int
    largest: float  # relative distance of a layer's update in the file from the live one
    layer: str  # whose
    dtype: str
    layout: str

    def __str__(self) -> str:
        kind = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}[self.dtype]
        return (
            f"{self.layers} layers, largest difference {self.largest:.1g} ({kind}), "
            f"every key as {self.layout} programs read it"
        )


def check_file(path: Path, network: AdapterNetwork, save_format: str) -> ExportCheck:
    """Read a saved file back and hold it to ``network``'s present weights.

    Raises:
        UserError: it cannot be read, a layer is missing, more, or does something else, or a key would not be loaded.
    """
    is_lora = network.options.kind == "lora"
    dtype = _check_keys(path, read_safetensors_header(weight_file(path)), save_format, is_lora)
    updates, live = load_adapter(path, network.targets).weights, network.weights(save_format)
    if wrong := sorted(updates.keys() ^ live.keys()):
        raise UserError(f"{path}: its layers are not those trained ({names_in_short(wrong)}); do not use it")
    distances = {name: distance(updates[name], live[name]) for name in live}
    layer = max(distances, key=lambda name: math.inf if math.isnan(distances[name]) else distances[name])
    if not distances[layer] <= _TOLERANCE[dtype]:
        raise UserError(
            f"{path}: {layer} differs from what was trained by {distances[layer]:.2g} of its update; save again from "
            "the state, and check disk and memory"
        )
    return ExportCheck(len(live), distances[layer], layer, dtype, save_format)


def distance(one: AdapterWeights, other: AdapterWeights) -> float:
    """Return how far a file's ``one`` is from a layer's ``other``, relative to it; NaN where one is not finite."""
    if isinstance(one, LoraWeights) and isinstance(other, LoraWeights):
        return relative_difference(other, one) if one.shape == other.shape else math.inf
    known = one.kind == other.kind and one.tensors.keys() <= other.tensors.keys()  # a DoRA's lengths have two forms
    if not known or abs(one.scale - other.scale) > 1e-6 * abs(other.scale):
        return math.inf
    return max(_apart(one.tensors[name], other.tensors[name]) for name in one.tensors)


def _apart(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().cpu().double(), other.detach().cpu().double()
    if one.shape != other.shape:
        return math.inf
    size = float(other.norm())
    return float((one - other).norm()) / (size or 1.0)


def _check_keys(path: Path, header: Mapping[str, dict], save_format: str, is_lora: bool) -> str:
    """Refuse keys that the layout's programs would not load; return the dtype of the weights."""
    found: dict[str, set[str]] = defaultdict(set)
    dtypes: set[str] = set()
    stem, roles = _RULES["lycoris" if save_format == "comfy" and not is_lora else save_format]
    roles = roles if is_lora else set()
    role = "|".join(map(re.escape, sorted(roles))) if roles else r"[\w.]+?"
    pattern = re.compile(rf"({stem})\.({role})")
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        match = pattern.fullmatch(key)
        if match is None:
            raise UserError(f"{path}: {key} is no key that {save_format} programs load; convert it with another format")
        found[match[1]].add(match[2])
        if match[2] != "alpha":
            dtypes.add(entry["dtype"])
    if partial := next((name for name, has in found.items() if roles and has != roles), None):
        missing = ", ".join(sorted(roles - found[partial]))
        raise UserError(f"{path}: {partial} has no {missing}; {save_format} programs would pass over it")
    lowest = [dtype for dtype in ("BF16", "F16", "F32") if dtype in dtypes]
    if not lowest:
        raise UserError(f"{path}: holds no weights that can be compared ({', '.join(sorted(dtypes))})")
    return lowest[0]
