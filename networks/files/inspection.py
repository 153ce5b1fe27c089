"""What is in a LoRA file, layer by layer: rank, alpha and the size of the update.

Files of a known family are read as for training, so that the same LoRA shows the same layers in whatever layout it is,
q, k and v apart; of DoRAs the layers are counted. Of other files (another architecture, convolutions) the reason is
shown why they cannot be loaded.

The update's size is its Frobenius norm |scale * B A|, and the root mean square of its elements, norm / sqrt(out * in),
by which layers of different sizes can be compared.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from library.errors import UserError, printable
from library.models.layer_names import LoraTargets
from library.safetensors_io import read_safetensors_header
from networks.files.adapters import load_adapter
from networks.files.detection import likely_targets
from networks.files.layouts import best_targets
from networks.files.verify import LoadsIn, loads_in
from networks.files.weights import FullWeights, LohaWeights, LokrWeights, LoraWeights
from networks.merging.low_rank import update_norm

_BLOCK = re.compile(r"^(.*?)[._](\d+)[._](.+)$")  # kohya's keys have underscores


@dataclass(frozen=True)
class LoraLayer:
    """One layer's update.

    Attributes:
        name: the layer. part, block, layer: the name before its block's number, the number, the rest; part is "" and
            block None outside the blocks.
        rank, alpha: scale is alpha / rank. Of a LoKr of full matrices the rank is 0, and alpha nothing.
        w1: "8x8", of a LoKr; else "".
        norm: Frobenius norm of the update. rms: root mean square of its elements.
    """

    name: str
    part: str
    block: int | None
    layer: str
    rank: int
    alpha: float
    w1: str
    norm: float
    rms: float


@dataclass(frozen=True)
class LoraReport:
    """A LoRA file, or one of its relatives.

    Attributes:
        kind: "LoRA", "DoRA", "LoKr" or "LoHa".
        families: the family named in the metadata, or each whose layers' names the keys are; none of an unknown one.
        layout: of a LoRA of a known family "kohya", "diffusers", ...; "" otherwise.
        count: how many layers it changes.
        layers: of a LoRA, LoKr or LoHa, in the model's order; of other kinds none.
        notes: why the file cannot be loaded, or what can be done with it.
        loads_in: what each program makes of it, against what Tandem does; of a known family.
    """

    kind: str
    families: tuple[str, ...]
    layout: str
    count: int
    layers: tuple[LoraLayer, ...]
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
        return LoraReport("LoRA", (), "", 0, (), (f"cannot be loaded: {error}",))
    sized = {n: w for n, w in file.weights.items() if isinstance(w, (LoraWeights, LokrWeights, LohaWeights))}
    layers = tuple(_layer(name, sized[name]) for name in sorted(sized, key=lambda name: _order(name, targets)))
    kinds = Counter(type(weights) for weights in file.weights.values())
    title = next((kind.title for kind in kinds if kind not in (LoraWeights, FullWeights)), LoraWeights.title)
    notes: tuple[str, ...] = () if layers else (f"is no LoRA; merge_lora.py merges a {title} into a model",)
    if full := kinds[FullWeights]:
        notes += (
            f"changes {full} biases or weights as a whole; merge it into a model, or train on it as base_weights",
        )
    programs = tuple(loads_in(path, file.weights, targets)) if rows else ()
    notes += file.notes
    return LoraReport(title, families, file.layout if sized else "", len(file.weights), layers, notes, programs)


def _order(name: str, targets: LoraTargets) -> tuple[int, int, str]:
    """Return a key that sorts layers as data goes through the model: by kind, then block; text encoders last."""
    rows = targets.keys.rows
    place = targets.keys.find(name)
    match = _BLOCK.match(name)
    index = rows.index(place.row) * 100 + (place.part or 0) if place else 100 * len(rows)
    return index, int(match[2]) if match else 0, name


def _layer(name: str, weights: LoraWeights | LokrWeights | LohaWeights) -> LoraLayer:
    name = printable(name)
    match = _BLOCK.match(name)
    part, block, layer = (match[1], int(match[2]), match[3]) if match else ("", None, name)
    norm = update_norm(weights)
    rows, columns = weights.shape
    rms = norm / (rows * (columns or 1)) ** 0.5
    w1 = "{}x{}".format(*weights.w1().shape) if isinstance(weights, LokrWeights) else ""
    return LoraLayer(name, part, block, layer, weights.rank, weights.alpha, w1, norm, rms)
