"""What is in a LoRA file, layer by layer: rank, alpha and the size of the update.

Files of a known family are read with ``networks.formats``, so that the same LoRA shows the same layers in whatever
layout it lies, q, k and v apart. Of other files (another architecture, text encoders, LoKr) every pair of tensors that
looks like a LoRA is shown under its key, and what is left over is named.

The update's size is its Frobenius norm |scale * B A|, and the root mean square of its elements, norm / sqrt(out * in),
by which layers of different sizes can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from library.errors import UserError
from library.files import read_safetensors_header
from networks.adapter_metadata import AlphaTable, read_alphas
from networks.formats import load_lora
from networks.low_rank import update_norm
from networks.targets import TARGETS, LoraTargets
from networks.weights import LoraWeights

_BLOCK = re.compile(r"^(.*?)[._](\d+)[._](.+)$")  # kohya's keys have underscores
_PAIR = re.compile(
    r"(?P<stem>.*)\.(?P<role>lora_A|lora_B|lora_down|lora_up|lora(?:_linear_layer)?\.down|lora(?:_linear_layer)?\.up)"
    r"(\.[^.]+)?\.weight"
)


@dataclass(frozen=True)
class LoraLayer:
    """One layer's update.

    Attributes:
        name: the layer. part, block, layer: the name before its block's number, the number, the rest; part is "" and
            block None outside the blocks.
        rank, alpha: scale is alpha / rank.
        norm: Frobenius norm of the update. rms: root mean square of its elements.
    """

    name: str
    part: str
    block: int | None
    layer: str
    rank: int
    alpha: float
    norm: float
    rms: float


@dataclass(frozen=True)
class LoraReport:
    """A LoRA file.

    Attributes:
        family: "flux", or None if the layers are of no known family.
        layout: "kohya", "diffusers", ...; "" without a family.
        layers: in the model's order, of an unknown family in the file's.
        others: keys that are no part of a LoRA of linear layers.
        notes: why the file cannot be loaded, if so.
    """

    family: str | None
    layout: str
    layers: tuple[LoraLayer, ...]
    others: tuple[str, ...]
    notes: tuple[str, ...]


def inspect_lora(path: Path) -> LoraReport:
    """Return what the LoRA file ``path`` holds; its (small) tensors are read.

    Raises:
        UserError: no such file, or no safetensors.
    """
    problems: list[str] = []
    for family, targets in TARGETS.items():
        try:
            lora = load_lora(path, targets)
        except UserError as error:
            problems.append(str(error))
        else:
            names = sorted(lora.weights, key=lambda name: _order(name, targets))
            layers = tuple(_layer(name, lora.weights[name]) for name in names)
            return LoraReport(family, lora.layout, layers, (), ())
    pairs, others = _pairs(path)
    layers = tuple(_layer(name, weights) for name, weights in pairs)
    return LoraReport(None, "", layers, tuple(others), tuple(problems))


def _order(name: str, targets: LoraTargets) -> tuple[int, int, str]:
    """Return a key that sorts layers as data goes through the model: by kind, then block; text encoders last."""
    rows = targets.keys.rows
    place = targets.keys.find(name)
    match = _BLOCK.match(name)
    index = rows.index(place.row) * 100 + (place.part or 0) if place else 100 * len(rows)
    return index, int(match[2]) if match else 0, name


def _layer(name: str, weights: LoraWeights) -> LoraLayer:
    match = _BLOCK.match(name)
    part, block, layer = (match[1], int(match[2]), match[3]) if match else ("", None, name)
    norm = update_norm(weights)
    size = weights.up.shape[0] * weights.down.shape[1]
    return LoraLayer(name, part, block, layer, weights.rank, weights.alpha, norm, norm / size**0.5)


def _pairs(path: Path) -> tuple[list[tuple[str, LoraWeights]], list[str]]:
    """Return every complete pair under its key's stem, and the keys that belong to none."""
    metadata = dict(read_safetensors_header(path).get("__metadata__") or {})
    found: dict[str, dict[str, str]] = {}
    others: list[str] = []
    try:
        with safe_open(path, framework="pt") as file:
            keys = list(file.keys())
            for key in keys:
                if match := _PAIR.fullmatch(key):
                    role = "down" if match["role"].endswith(("_A", "down")) else "up"
                    found.setdefault(match["stem"], {})[role] = key
                elif not key.endswith(".alpha"):
                    others.append(key)
            pairs = list(_read_pairs(path, file, found, metadata, set(keys)))
    except SafetensorError as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error}); download it again") from None
    complete = {stem for stem, _ in pairs}
    others += [key for stem, roles in found.items() if stem not in complete for key in roles.values()]
    return pairs, others


def _read_pairs(
    path: Path, file: safe_open, found: Mapping[str, Mapping[str, str]], metadata: Mapping[str, str], keys: set[str]
) -> Iterator[tuple[str, LoraWeights]]:
    stated: AlphaTable | None = None
    for stem, roles in found.items():
        if len(roles) < 2:
            continue
        down, up = file.get_tensor(roles["down"]), file.get_tensor(roles["up"])
        down, up = down.reshape(down.shape[0], -1), up.reshape(up.shape[0], -1)  # convolutions as matrices
        if up.shape[1] != down.shape[0]:
            continue
        prefix, _, name = stem.partition(".")
        with suppress(UserError):  # of a DoRA, say; why it cannot be loaded is in the notes already
            stated = read_alphas(path, metadata, prefix)
        alpha = stated.alpha_of(name, down.shape[0]) if stated else float(down.shape[0])
        if f"{stem}.alpha" in keys:
            alpha = float(file.get_tensor(f"{stem}.alpha")) or alpha
        yield stem, LoraWeights(down, up, alpha)
