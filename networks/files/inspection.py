"""What is in a LoRA file, layer by layer: rank, alpha and the size of the update.

Files of a known family are read as for training, so that the same LoRA shows the same layers in whatever layout it is,
q, k and v apart; of another kind that Tandem merges (DoRA, LoKr, ...) the layers are counted. Of other
files (another architecture, convolutions) every pair of tensors that looks like a LoRA is shown under its key, and what
is left over is named.

The update's size is its Frobenius norm |scale * B A|, and the root mean square of its elements, norm / sqrt(out * in),
by which layers of different sizes can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from library.errors import UserError, printable
from library.models.layer_names import LoraTargets
from library.safetensors_io import TensorEntry, read_entries, read_safetensors_header, read_tensor
from networks.files.adapters import load_adapter
from networks.files.detection import likely_targets
from networks.files.layouts import best_targets, split_key
from networks.files.metadata import read_alphas
from networks.files.verify import LoadsIn, loads_in
from networks.files.weights import LoraWeights
from networks.merging.low_rank import update_norm

_BLOCK = re.compile(r"^(.*?)[._](\d+)[._](.+)$")  # kohya's keys have underscores


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
    """A LoRA file, or one of its relatives.

    Attributes:
        kind: "LoRA", "DoRA", "LoKr", "LoHa", "OFT" or "BOFT".
        families: the family named in the metadata, or each whose layers' names the keys are; none of an unknown one.
        layout: of a LoRA of a known family "kohya", "diffusers", ...; "" otherwise.
        count: how many layers it changes.
        layers: of a LoRA, in the model's order, of an unknown family in the file's; of other kinds none.
        others: keys that are no part of a LoRA of linear layers.
        notes: why the file cannot be loaded, or what can be done with it.
        loads_in: what each program makes of it, against what Tandem does; of a known family.
    """

    kind: str
    families: tuple[str, ...]
    layout: str
    count: int
    layers: tuple[LoraLayer, ...]
    others: tuple[str, ...]
    notes: tuple[str, ...]
    loads_in: tuple[LoadsIn, ...] = ()


def inspect_lora(path: Path) -> LoraReport:
    """Return what the LoRA file ``path`` holds; its (small) tensors are read."""
    header = read_safetensors_header(path)
    rows = likely_targets(header)
    targets = rows[0] if rows else best_targets(header)
    families = tuple(row.family for row in rows)
    try:
        file = load_adapter(path, targets)
    except UserError as error:
        pairs, others = _pairs(path)
        return LoraReport("LoRA", (), "", len(pairs), tuple(pairs), tuple(others), (f"cannot be loaded: {error}",))
    loras = {name: weights for name, weights in file.weights.items() if isinstance(weights, LoraWeights)}
    layers = tuple(_layer(name, loras[name]) for name in sorted(loras, key=lambda name: _order(name, targets)))
    title = next((weights.title for weights in file.weights.values() if weights.kind != "lora"), LoraWeights.title)
    notes: tuple[str, ...] = () if layers else (f"is no LoRA; merge_lora.py merges a {title} into a model",)
    programs = tuple(loads_in(path, file.weights, targets)) if rows else ()
    notes += file.notes
    return LoraReport(title, families, file.layout if loras else "", len(file.weights), layers, (), notes, programs)


def _order(name: str, targets: LoraTargets) -> tuple[int, int, str]:
    """Return a key that sorts layers as data goes through the model: by kind, then block; text encoders last."""
    rows = targets.keys.rows
    place = targets.keys.find(name)
    match = _BLOCK.match(name)
    index = rows.index(place.row) * 100 + (place.part or 0) if place else 100 * len(rows)
    return index, int(match[2]) if match else 0, name


def _layer(name: str, weights: LoraWeights) -> LoraLayer:
    name = printable(name)
    match = _BLOCK.match(name)
    part, block, layer = (match[1], int(match[2]), match[3]) if match else ("", None, name)
    norm = update_norm(weights)
    size = weights.up.shape[0] * weights.down.shape[1]
    return LoraLayer(name, part, block, layer, weights.rank, weights.alpha, norm, norm / size**0.5)


def _pairs(path: Path) -> tuple[list[LoraLayer], list[str]]:
    """Return every complete pair as a layer, under its key's stem, and the keys that belong to none."""
    entries, metadata = read_entries([path])
    found: dict[str, dict[str, str]] = {}  # stem -> name in memory -> key
    for key in entries:
        stem, name = split_key(key)
        found.setdefault(stem if name else key, {})[name or ""] = key
    layers, others = [], []
    for stem, keys in found.items():
        if weights := _pair(entries, metadata, stem, keys):
            layers.append(_layer(stem, weights))
            keys = {name: key for name, key in keys.items() if name not in weights.tensors}
        others += [key for name, key in keys.items() if name != "alpha"]
    return layers, others


def _pair(
    entries: Mapping[str, TensorEntry], metadata: Mapping[str, str], stem: str, keys: Mapping[str, str]
) -> LoraWeights | None:
    """Return the LoRA that the tensors of one module are, None if they are none."""
    if not {"down", "up"} <= keys.keys():
        return None
    down, up = read_tensor(entries, keys["down"]), read_tensor(entries, keys["up"])
    if min(down.ndim, up.ndim) < 2 or not down.numel() * up.numel():
        return None
    down, up = down.flatten(1), up.flatten(1)  # convolutions as matrices
    rank, alpha = down.shape[0], 0.0
    if up.shape[1] != rank:
        return None
    if "alpha" in keys and (own := read_tensor(entries, keys["alpha"])).numel() == 1:
        alpha = float(own)
    prefix, _, name = stem.partition(".")
    with suppress(UserError):  # broken metadata; why the file cannot be loaded is in the notes already
        stated = read_alphas(entries[keys["down"]].file, metadata, prefix, dora=True)
        alpha = alpha or (stated.alpha_of(name, rank) if stated else 0.0)
    return LoraWeights(down, up, alpha or float(rank))
