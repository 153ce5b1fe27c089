"""The files of a base model: finding them, describing them, and making room for a changed copy.

A base is one safetensors file, or a diffusers folder: a pipeline (weights in ``transformer/``) or a
transformer alone, in one file or in shards named by an index. Only headers are read here. The copy of a
folder appears under its final name when it is complete, by renaming.

Where the linear layers of a family lie in the files of a base model, and their weights one at a time.

A module (diffusers' name) is some rows of a tensor: all of them in diffusers' layout, a part of them where the
original checkpoint stacks several modules (qkv). Weights in fp8 are given back as the numbers they stand for.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from library.errors import UserError
from library.files import DTYPES, TensorSpecs, read_safetensors_header, shard_names, tensor_bytes, write_text
from library.models.layer_names import KeyNames, LoraTargets
from library.models.registry import lora_namings
from library.precision.checkpoint_layouts import detect_layout
from library.precision.quantize import dequantize

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt"}


@dataclass(frozen=True)
class BaseFile:
    """One weight file: its path, each tensor's dtype and shape, its metadata."""

    path: Path
    tensors: TensorSpecs
    metadata: Mapping[str, str]

    def saved_layout(self, dtype: torch.dtype | None) -> TensorSpecs:
        """Return name -> (dtype, shape) as written when floats become ``dtype`` (None: stay as they are)."""
        return {
            name: (dtype if dtype and own in _FLOATS else own, shape) for name, (own, shape) in self.tensors.items()
        }


@dataclass(frozen=True)
class Base:
    """A base model on disk.

    Attributes:
        path: what the user named.
        folder: the folder with the transformer's weights; None where ``path`` is a single file.
        files: the transformer's weight files.
        fp8: whether weights in fp8 are let in.
    """

    path: Path
    folder: Path | None
    files: tuple[BaseFile, ...]
    fp8: bool = False

    @property
    def weights(self) -> Path:
        """The file or folder whose fingerprint stands for the weights."""
        return self.folder or self.path

    def saved_bytes(self, dtype: torch.dtype | None) -> int:
        """Return the size of all weights as written."""
        return sum(tensor_bytes(*entry) for file in self.files for entry in file.saved_layout(dtype).values())

    def component(self, name: str) -> tuple[BaseFile, ...]:
        """Return the weight files of another component of a pipeline (``text_encoder``); none where there is none."""
        if self.folder is None or self.folder == self.path or not (self.path / name).is_dir():
            return ()
        return _weights_of(self.path / name, "model.safetensors", self.fp8)


def open_base(path: Path, option: str = "--model", fp8: bool = False) -> Base:
    """Read the headers of a base model.

    Args:
        path: file or folder.
        option: that named it, for messages.
        fp8: let in weights in fp8; they are refused otherwise.

    Raises:
        UserError: nothing is there, no weights or several sets of them, or quantised weights.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; check {option}")
    if path.is_file():
        return Base(path, None, (_read_base_file(path, fp8),), fp8)
    folder = path / "transformer" if (path / "transformer").is_dir() else path
    return Base(path, folder, _weights_of(folder, "diffusion_pytorch_model.safetensors", fp8), fp8)


def _weights_of(folder: Path, usual_name: str, fp8: bool) -> tuple[BaseFile, ...]:
    """Return the weight files of a folder: the shards of its index, or the one that is usual or alone."""
    if index := _index_of(folder):
        return tuple(_read_base_file(folder / name, fp8) for name in shard_names(index))
    found = sorted(folder.glob("*.safetensors"))
    usual = folder / usual_name
    if usual not in found and len(found) != 1:
        raise UserError(f"{folder}: {len(found)} safetensors files and no index; give one file to --model")
    return (_read_base_file(usual if usual in found else found[0], fp8),)


def check_target(base: Base, save_to: Path, dtype: torch.dtype | None) -> None:
    """Refuse a target of the wrong kind, one that would overwrite something, or one without room.

    Raises:
        UserError: with the reason.
    """
    needed = base.saved_bytes(dtype)
    if base.folder is None:
        if save_to.suffix != ".safetensors":
            raise UserError(f"{save_to}: the base is one file; end --save_to in .safetensors")
        if save_to.exists() and save_to.samefile(base.path):
            raise UserError(f"{save_to}: is the base itself; choose another --save_to")
    else:
        if save_to.suffix == ".safetensors":
            raise UserError(f"{save_to}: the base is a folder; give --save_to a folder's name")
        if save_to.exists() and (not save_to.is_dir() or any(save_to.iterdir())):
            raise UserError(f"{save_to}: exists and is no empty folder; choose another --save_to")
        if save_to.resolve().is_relative_to(base.path.resolve()):
            raise UserError(f"{save_to}: lies inside the base; choose another --save_to")
        needed += sum(path.stat().st_size for path in _other_files(base))
    existing = next(parent for parent in save_to.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        sizes = f"needs {needed / 1e9:.1f} GB, {existing} has {free / 1e9:.1f} GB"
        raise UserError(f"{save_to}: {sizes}; free some space or choose another disk")


@contextmanager
def folder_copy(
    base: Base, target: Path, dtype: torch.dtype | None, rewritten: Collection[Path] = ()
) -> Iterator[Path]:
    """Yield the weight folder of a copy of ``base`` without its weights; it becomes ``target`` at the end.

    Configs, the other components and the index (with its new size) are there already, but for files in ``rewritten``.
    """
    assert base.folder is not None
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        for path in (path for path in _other_files(base) if path not in rewritten):
            copy = temporary / path.relative_to(base.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        inside = temporary / base.folder.relative_to(base.path)
        if index := _index_of(base.folder):
            content = json.loads(index.read_text(encoding="utf-8"))
            content.setdefault("metadata", {})["total_size"] = base.saved_bytes(dtype)
            write_text(inside / index.name, json.dumps(content, indent=2) + "\n")
        yield inside
        if target.exists():
            target.rmdir()
        os.replace(temporary, target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}); choose another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read_base_file(path: Path, fp8: bool) -> BaseFile:
    header = read_safetensors_header(path)
    metadata = header.pop("__metadata__", {})
    tensors: TensorSpecs = {}
    for name, entry in header.items():
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None or (dtype.is_floating_point and dtype.itemsize == 1 and not fp8):
            raise UserError(f"{path}: {name} is stored as {entry['dtype']}; merge into the bf16 or fp16 file")
        tensors[name] = (dtype, tuple(entry["shape"]))
    return BaseFile(path, tensors, metadata)


def _index_of(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)


def _other_files(base: Base) -> list[Path]:
    """Return the folder's files but for the transformer's weights, in whatever form, and their index."""

    def is_weights(path: Path) -> bool:
        named = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        return named and path.parent == base.folder

    return [path for path in sorted(base.path.rglob("*")) if path.is_file() and not is_weights(path)]


_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")
_LEFT_OUT = "transformer."  # what GPT-2's published file leaves out of transformers' names


@dataclass(frozen=True)
class BaseModule:
    """One module's place: ``rows`` of ``tensor`` in ``file``.

    ``swapped``: their two halves come in the other order. ``transposed``: the tensor is [in, out], columns are meant.
    """

    file: Path
    tensor: str
    rows: slice
    columns: int
    swapped: bool = False
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Output rows and input columns."""
        return self.rows.stop - self.rows.start, self.columns


def find_modules(files: Sequence[BaseFile], keys: KeyNames, model_name: str) -> dict[str, BaseModule]:
    """Return diffusers module name -> its place.

    Raises:
        UserError: the files hold no such model, more of another one, or one whose parts do not add up.
    """
    places = _modules(files, keys, model_name)
    fullest = fullest_targets(files)
    if fullest and len(_held(files, fullest[0])) > len(places):
        family = fullest[0].family
        raise UserError(f"{files[0].path}: is a model of {family}, not of {model_name}; set --model_type {family}")
    if not places:
        raise UserError(f"{files[0].path}: holds no transformer of {model_name}; give its transformer file")
    return places


def fullest_targets(files: Sequence[BaseFile]) -> list[LoraTargets]:
    """Return the row of the architecture most of whose layers lie in ``files``; several if they are equal, or none."""
    counts = {row.family: len(_held(files, row)) for row in lora_namings()}
    most = max(counts.values())
    return [row for row in lora_namings() if most and counts[row.family] == most]


def _held(files: Sequence[BaseFile], row: LoraTargets) -> dict[str, BaseModule]:
    try:
        return _modules(files, row.keys, row.family)
    except UserError:  # the names of another architecture's layers, in other shapes
        return {}


def _modules(files: Sequence[BaseFile], keys: KeyNames, model_name: str) -> dict[str, BaseModule]:
    places: dict[str, BaseModule] = {}
    for file in files:
        for key, (_, shape) in file.tensors.items():
            prefix = next(p for p in _PREFIXES if key.startswith(p))
            name = key.removeprefix(prefix).removesuffix(".weight")
            place = keys.find(name) or keys.find(_LEFT_OUT + name)
            if not key.endswith(".weight") or place is None or len(shape) != 2:
                continue
            if place.part is not None:
                rows, columns = shape[::-1] if place.row.transposed else shape
                module = BaseModule(file.path, key, slice(0, rows), columns, transposed=place.row.transposed)
                places[place.modules[place.part]] = module
                continue
            try:
                heights = place.row.part_rows(shape[0], shape[1])
            except ValueError as error:
                raise UserError(f"{file.path}: {key}: {error}; not a {model_name} model") from None
            top = 0
            for name, height in zip(place.modules, heights, strict=True):
                part = slice(top, top + height)
                places[name] = BaseModule(file.path, key, part, shape[1], place.row.halves_swapped)
                top += height
    return places


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor, as ``library.precision.checkpoint_layouts`` asks for them."""

    source: str
    start: int
    stop: int | None


class WeightReader:
    """Reads the weights of one model's modules, fp8 ones too; nothing is kept.

    Raises:
        UserError: the files hold a quantisation that is not known.
    """

    def __init__(self, files: Sequence[BaseFile]) -> None:
        self._layout = detect_layout(files[0].path, [file.path for file in files])

    def read(self, module: BaseModule, device: torch.device | str = "cpu") -> Tensor:
        """Return the weight of ``module``, [out, in] fp32 on ``device``, rows in diffusers' order."""
        with safe_open(module.file, framework="pt") as file:
            tensor = file.get_slice(module.tensor)
            rows = (tensor[:].t() if module.transposed else tensor[module.rows]).to(device)
        piece = _Piece(module.tensor, module.rows.start, module.rows.stop)
        if self._layout is not None and self._layout.holds_codes([piece]):
            scale = self._layout.scale_of([piece])
            codes = rows.view(self._layout.dtypes[module.tensor])
            rows = dequantize(codes, None if scale is None else scale.to(device), torch.float32)
        rows = rows.float()
        return torch.cat(rows.chunk(2)[::-1]) if module.swapped else rows

    def is_bookkeeping(self, name: str) -> bool:
        """Return whether the tensor ``name`` is a scale or marker of the quantisation."""
        return self._layout is not None and name in self._layout.bookkeeping
