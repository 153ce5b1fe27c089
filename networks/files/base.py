"""A base model's weights on disk: finding them, where each linear layer lies in them, making room for a changed copy.

A base is one safetensors file, or a diffusers folder: a pipeline (weights in ``transformer/``) or a transformer alone,
in one file or in shards named by an index. Only headers are read to open it. The copy of a folder appears under its
final name when it is complete, by renaming.

A module (diffusers' name) is some rows of a tensor: all of them in diffusers' layout, a part of them where the original
checkpoint stacks several modules (qkv). Quantised weights are given back dequantised.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from library.errors import UserError
from library.files import atomic_folder, broken_link, check_new_folder, check_room, read_json, write_text
from library.models.layer_names import KeyNames, LoraTargets
from library.models.registry import lora_namings
from library.precision.checkpoint import WeightFiles
from library.precision.files.base import ReadOnlyScheme
from library.precision.files.file_tensors import MODEL_PREFIXES
from library.safetensors_io import DTYPES, RowRange, TensorSpecs, find_index, tensor_bytes, weight_files
from networks.files.layouts import of_other_family

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt"}


@dataclass(frozen=True)
class Base:
    """A base model on disk.

    Attributes:
        path: what the user named.
        folder: the folder with the transformer's weights; None where ``path`` is a single file.
        weights: the transformer's.
        quantized: whether quantised weights are let in.
    """

    path: Path
    folder: Path | None
    weights: WeightFiles
    quantized: bool = False

    @property
    def weights_path(self) -> Path:
        """The file or folder whose fingerprint stands for the weights."""
        return self.folder or self.path

    def component(self, name: str) -> WeightFiles | None:
        """Return the weights of another component of a pipeline (``text_encoder``), if there is one."""
        if self.folder is None or self.folder == self.path or not (self.path / name).is_dir():
            return None
        return _open(self.path / name, _weight_files(self.path / name), self.quantized)


def open_base(path: Path, option: str = "--model", quantized: bool = False) -> Base:
    """Read the headers of a base model.

    Args:
        path: file or folder.
        option: that named it, for messages.
        quantized: let in quantised weights; they are refused otherwise.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder{broken_link(path)}; check {option}")
    if path.is_file():
        return Base(path, None, _open(path, [path], quantized), quantized)
    folder = path / "transformer" if (path / "transformer").is_dir() else path
    return Base(path, folder, _open(path, _weight_files(folder), quantized), quantized)


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder; one that is alone may have any name."""
    found = list(folder.glob("*.safetensors"))
    return found if len(found) == 1 and find_index(folder) is None else weight_files(folder)


def _open(path: Path, files: list[Path], quantized: bool) -> WeightFiles:
    weights = WeightFiles(path, files)
    found = weights.quantized.weights if weights.quantized else {}
    for name, entry in weights.entries.items():
        if not quantized if name in found else entry.dtype not in DTYPES:
            raise UserError(f"{entry.file}: {name} is stored as {entry.dtype}; merge into the bf16 or fp16 file")
    return weights


def saved_specs(weights: WeightFiles, dtype: torch.dtype | None) -> TensorSpecs:
    """Return name -> (dtype, shape) as written when floats become ``dtype`` (None: stay as they are)."""
    specs = {name: entry.spec for name, entry in weights.entries.items()}
    return {name: (dtype if dtype and stored in _FLOATS else stored, s) for name, (stored, s) in specs.items()}


def _saved_bytes(base: Base, dtype: torch.dtype | None) -> int:
    return sum(tensor_bytes(*spec) for spec in saved_specs(base.weights, dtype).values())


def check_target(base: Base, save_to: Path, dtype: torch.dtype | None) -> None:
    """Refuse a base whose format is not written, a target of the wrong kind, one that is there, or lacks the room."""
    for stored in base.weights.quantized.weights.values() if base.weights.quantized else ():
        if isinstance(stored.scheme, ReadOnlyScheme):
            raise UserError(f"{base.path}: {stored.scheme.refusal}")
    needed = _saved_bytes(base, dtype)
    if base.folder is None:
        if save_to.suffix != ".safetensors":
            raise UserError(f"{save_to}: the base is one file; end --save_to in .safetensors")
        if save_to.exists() and save_to.samefile(base.path):
            raise UserError(f"{save_to}: is the base itself; choose another --save_to")
    else:
        if save_to.suffix == ".safetensors":
            raise UserError(f"{save_to}: the base is a folder; give --save_to a folder's name")
        check_new_folder(save_to)
        if save_to.resolve().is_relative_to(base.path.resolve()):
            raise UserError(f"{save_to}: lies inside the base; choose another --save_to")
        needed += sum(path.stat().st_size for path in _other_files(base))
    check_room(save_to, needed)


@contextmanager
def folder_copy(
    base: Base, target: Path, dtype: torch.dtype | None, rewritten: Collection[Path] = ()
) -> Iterator[Path]:
    """Yield the weight folder of a copy of ``base`` without its weights; it becomes ``target`` at the end.

    Configs, the other components and the index (with its new size) are there already, but for files in ``rewritten``.
    """
    assert base.folder is not None
    with atomic_folder(target) as temporary:
        for path in (path for path in _other_files(base) if path not in rewritten):
            copy = temporary / path.relative_to(base.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        inside = temporary / base.folder.relative_to(base.path)
        if index := find_index(base.folder):
            content = read_json(index)
            content.setdefault("metadata", {})["total_size"] = _saved_bytes(base, dtype)
            write_text(inside / index.name, json.dumps(content, indent=2) + "\n")
        yield inside


def _other_files(base: Base) -> list[Path]:
    """Return the folder's files but for the transformer's weights, in whatever form, and their index."""

    def is_weights(path: Path) -> bool:
        named = path.suffix in _WEIGHT_SUFFIXES or re.search(r"\.index(\.\w+)?\.json$", path.name) is not None
        return named and path.parent == base.folder

    return [path for path in sorted(base.path.rglob("*")) if path.is_file() and not is_weights(path)]


_LEFT_OUT = "transformer."  # what GPT-2's published file leaves out of transformers' names


@dataclass(frozen=True)
class BaseModule:
    """One module's place: ``rows`` of ``tensor``.

    ``swapped``: their two halves come in the other order. ``transposed``: the tensor is [in, out], columns are meant.
    """

    tensor: str
    rows: slice
    columns: int
    swapped: bool = False
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Output rows and input columns."""
        return self.rows.stop - self.rows.start, self.columns

    def bias(self, weights: WeightFiles) -> BaseModule | None:
        """Return the place of the module's bias, a tensor of one axis; None: it has none."""
        name = self.tensor.removesuffix("weight") + "bias"
        return replace(self, tensor=name, columns=1, transposed=False) if name in weights else None

    def read(self, weights: WeightFiles, device: torch.device | str = "cpu") -> Tensor:
        """Return the module's weight, [out, in] fp32 on ``device``, rows in diffusers' order."""
        if self.transposed:
            return weights.read_float(RowRange(self.tensor), device).t()[self.rows]
        return self.swap(weights.read_float(RowRange(self.tensor, self.rows.start, self.rows.stop), device))

    def swap(self, rows: Tensor) -> Tensor:
        """Return ``rows`` with their halves exchanged if they are stored so; twice is nothing."""
        return torch.cat(rows.chunk(2)[::-1]) if self.swapped else rows


def find_modules(weights: WeightFiles, keys: KeyNames, model_name: str) -> dict[str, BaseModule]:
    """Return diffusers module name -> its place.

    Raises:
        UserError: the files hold no such model, more of another one, or one whose parts do not add up.
    """
    places = _modules(weights, keys, model_name)
    fullest = fullest_targets(weights)
    if fullest and len(_modules_found(weights, fullest[0])) > len(places):
        raise of_other_family(weights.path, "model", fullest[0].family, model_name)
    if not places:
        raise UserError(f"{weights.path}: holds no transformer of {model_name}; give its transformer file")
    return places


def fullest_targets(weights: WeightFiles) -> list[LoraTargets]:
    """Return the row of the architecture that ``weights`` hold most layers of; several if they are equal, or none."""
    counts = {row.family: len(_modules_found(weights, row)) for row in lora_namings()}
    most = max(counts.values())
    return [row for row in lora_namings() if most and counts[row.family] == most]


def _modules_found(weights: WeightFiles, row: LoraTargets) -> dict[str, BaseModule]:
    try:
        return _modules(weights, row.keys, row.family)
    except UserError:  # the names of another architecture's layers, in other shapes
        return {}


def _modules(weights: WeightFiles, keys: KeyNames, model_name: str) -> dict[str, BaseModule]:
    places: dict[str, BaseModule] = {}
    for key, entry in weights.entries.items():
        name = key.removesuffix(".weight")
        names = [*(name.removeprefix(p) for p in MODEL_PREFIXES if name.startswith(p)), _LEFT_OUT + name]
        place = next(filter(None, map(keys.find, names)), None)
        if not key.endswith(".weight") or place is None or len(weights.shape(key)) != 2:
            continue
        height, width = weights.shape(key)
        if place.part is not None:
            rows, columns = (width, height) if place.row.transposed else (height, width)
            module = BaseModule(key, slice(0, rows), columns, transposed=place.row.transposed)
            places[place.modules[place.part]] = module
            continue
        try:
            heights = place.row.part_rows(height, width)
        except ValueError as error:
            raise UserError(f"{entry.file}: {key}: {error}; not a {model_name} model") from None
        top = 0
        for name, part in zip(place.modules, heights, strict=True):
            places[name] = BaseModule(key, slice(top, top + part), width, place.row.halves_swapped)
            top += part
    return places
