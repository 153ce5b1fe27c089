"""The file a run leaves, read back and held to the network it was written from.

Two questions. Does every layer of the file do what the live layer does, as exactly as the file's dtype can say it? And
what do the programs make of it that people will load it with? For the second the file is read again as each of them
reads it (``networks.files.readers``: their rules, written down apart from the writer's tables), and every layer's
update held to the trained one. Programs that would read less than is trained are named, with what to do; a program that
should read a layer, and does not or does not rightly, is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from library.errors import UserError, counted, names_in_short
from library.models.layer_names import LoraTargets
from library.safetensors_io import read_entries, read_tensor
from networks.files.adapters import load_adapter
from networks.files.layouts import PRECISIONS
from networks.files.metadata import read_alphas, weight_file
from networks.files.readers import READERS, Reader, Reading, read_as, readable, remedy
from networks.files.weights import AdapterWeights, FullWeights, LokrWeights, LoraWeights, TokenRowWeights
from networks.merging.low_rank import relative_difference, update_norm
from networks.network import AdapterNetwork

# Two factors, each rounded to the dtype's half unit in the last place; fp32 is written as it is, but for splitting
# and joining fused layers (exact), the alpha's rounding to fp32, and the scale in B.
_TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 2.0**-20}
_SMALLEST_HALF = 2.0**-25  # half of fp16's smallest step: what a number near zero is off by
_NAMES = {dtype: name for name, dtype in PRECISIONS.items()}
_Readings = tuple[Reader, Reading, dict[str, float]]  # a program, what it takes, layer -> how far from what is meant


@dataclass(frozen=True)
class LoadsIn:
    """What one program makes of a file.

    Attributes:
        program: its name.
        layers: how many it reads. total: how many there are.
        difference: the largest relative distance of a layer it reads from the trained one; None: it is another update.
        remedy: what to do if that is not all of them, or not right.
    """

    program: str
    layers: int
    total: int
    difference: float | None
    remedy: str

    @property
    def is_right(self) -> bool:
        """Whether the program does what was trained."""
        return not self.remedy

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The program's row of the table "loads in"."""
        difference = "another update" if self.difference is None else f"{self.difference:.1g}"
        return self.program, f"{self.layers} of {self.total}", difference if self.layers else "", self.remedy


@dataclass(frozen=True)
class ExportCheck:
    """What came of it."""

    layers: int
    largest: float  # relative distance of a layer's update in the file from the live one
    layer: str  # whose
    dtype: str
    layout: str
    programs: tuple[LoadsIn, ...]

    def __str__(self) -> str:
        right = [each.program for each in self.programs if each.is_right]
        read = f", read rightly by {', '.join(right)}" if right else ""
        return f"{counted(self.layers, 'layer')}, largest difference {self.largest:.1g} ({self.dtype}){read}"


def check_file(path: Path, network: AdapterNetwork, save_format: str) -> ExportCheck:
    """Read a saved file back and hold it to ``network``'s present weights.

    Raises:
        UserError: it cannot be read, a layer is missing, more, or does something else, or a program that knows a
            layer's keys would pass over it.
    """
    targets, live = network.targets, network.weights(save_format)
    file = _File(path, targets)
    updates = load_adapter(path, targets).weights
    if wrong := sorted(updates.keys() ^ live.keys()):
        raise UserError(f"{path}: its layers are not those trained ({names_in_short(wrong)}); do not use it")
    distances = {name: distance(updates[name], live[name]) for name in live}
    layer = max(distances, key=lambda name: math.inf if math.isnan(distances[name]) else distances[name])
    for name, found in distances.items():
        if not found <= file.tolerance(updates[name]):
            raise UserError(
                f"{path}: {name} differs from what was trained by {found:.2g} of its update; save again from "
                "the state, and check disk and memory"
            )
    live = {name: weights for name, weights in live.items() if not isinstance(weights, TokenRowWeights)}  # peft's alone
    readings = file.readings(live)
    programs = tuple(file.loads_in(readings, live, network.options.kind))
    for reader, reading, differences in readings:
        known = readable(reader, live, targets, save_format, network.options.kind)
        if (lost := sorted(known - reading.weights.keys())) and not reading.refused:
            raise UserError(f"{path}: {reader.name} would pass over {names_in_short(lost)}; save again from the state")
        judged = known & differences.keys()
        wrong = sorted(name for name in judged if not differences[name] <= file.tolerance(reading.weights[name]))
        if wrong:
            raise UserError(
                f"{path}: {reader.name} would read {names_in_short(wrong)} otherwise than was trained; "
                "save in another save_format"
            )
    return ExportCheck(len(distances), distances[layer], layer, _NAMES[file.dtype], save_format, programs)


def loads_in(path: Path, meant: Mapping[str, AdapterWeights], targets: LoraTargets) -> list[LoadsIn]:
    """Return what each program that has the model makes of a file, against what is ``meant``."""
    kinds = [module.kind for module in meant.values()]
    kind = FullWeights.kind if FullWeights.kind in kinds else next(iter(kinds), "lora")
    file = _File(path, targets)
    return list(file.loads_in(file.readings(meant), meant, kind))


class _File:
    """A file's tensors, read once, as each program reads them."""

    def __init__(self, path: Path, targets: LoraTargets) -> None:
        self.path, self.targets = path, targets
        entries, metadata = read_entries([weight_file(path)])
        tensors = {key: read_tensor(entries, key) for key in entries}
        self.tensors = {key: t.float() if t.element_size() == 1 else t for key, t in tensors.items()}  # of fp8 files
        dtypes = {t.dtype for key, t in tensors.items() if not key.endswith(".alpha")}
        self.dtype = next((dtype for dtype in _TOLERANCE if dtype in dtypes), torch.bfloat16)
        components = (targets.file_prefix, *(encoder.name for encoder in targets.text_encoders))
        self.alphas = {name: read_alphas(weight_file(path), metadata, name, dora=True) for name in components}

    def tolerance(self, weights: AdapterWeights) -> float:
        """Return how far a layer may be off for its dtype; fp16 has few bits for small numbers."""
        extra = 0.0
        if self.dtype == torch.float16:
            for tensor in weights.tensors.values():
                norm = float(tensor.double().norm())
                extra += _SMALLEST_HALF * tensor.numel() ** 0.5 / norm if norm else 0.0
            if isinstance(weights, LoraWeights) and not update_norm(weights):
                extra = 1.0  # all of it was too small
        return _TOLERANCE[self.dtype] + 2 * extra

    def readings(self, meant: Mapping[str, AdapterWeights]) -> list[_Readings]:
        """Return for each program that has the model what it takes, and how far each layer is from what is meant."""
        known: dict[tuple[object, ...], float] = {}  # of what several programs read from the same keys
        found = []
        for reader in (reader for reader in READERS if self.targets.family in reader.families):
            reading = read_as(reader, self.tensors, self.alphas, self.targets)
            differences = {}
            for name, weights in reading.weights.items():
                if name not in meant:
                    continue
                key = (name, weights.kind, *reading.source[name])
                if key not in known:
                    known[key] = distance(weights, meant[name])
                differences[name] = known[key]
            found.append((reader, reading, differences))
        return found

    def loads_in(
        self, readings: Iterable[_Readings], meant: Mapping[str, AdapterWeights], kind: str
    ) -> Iterable[LoadsIn]:
        """Yield what each of ``readings`` makes of the file."""
        for reader, reading, differences in readings:
            largest = max(differences.values(), default=0.0)
            wrong = any(not found <= self.tolerance(reading.weights[name]) for name, found in differences.items())
            missing = len(differences) < len(meant)
            what = reading.refused or remedy(reader, meant.keys(), self.targets, kind) if wrong or missing else ""
            yield LoadsIn(reader.name, len(differences), len(meant), largest if math.isfinite(largest) else None, what)


def distance(one: AdapterWeights, other: AdapterWeights) -> float:
    """Return how far a file's ``one`` is from a layer's ``other``, relative to it; NaN where one is not finite."""
    if isinstance(one, LokrWeights) and isinstance(other, LokrWeights):  # a scale of 1 has several forms
        one, other = one.with_plain_w1(), other.with_plain_w1()
    if one.kind != other.kind or not one.tensors.keys() <= other.tensors.keys():  # a DoRA's lengths have two forms
        return math.inf
    apart = [_apart(one.tensors[name], other.tensors[name]) for name in one.tensors if name not in ("down", "up")]
    if "down" in one.tensors:
        update, meant = _low_rank(one), _low_rank(other)
        apart.append(relative_difference(meant, update) if update.shape == meant.shape else math.inf)
    elif abs(one.scale - other.scale) > 1e-6 * abs(other.scale):
        return math.inf
    return max(apart)


def _low_rank(module: AdapterWeights) -> LoraWeights:
    return LoraWeights(module.tensors["down"], module.tensors["up"], module.alpha)


def _apart(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().cpu().double(), other.detach().cpu().double()
    if one.shape != other.shape:
        return math.inf
    size = float(other.norm())
    return float((one - other).norm()) / (size or 1.0)
