"""The reader of checkpoints: :class:`WeightFiles`, and their quantised tensors, :class:`QuantizedFile`.

Which format a tensor has is known by the modules of ``library.precision.files``, each of which claims its own weights;
layers of one file may have different ones. A tensor beside a quantised weight that none of them knows (a codebook, a
zero point) is refused by name: leaving it out would train on wrong weights without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from library.errors import UserError, did_you_mean
from library.precision.files import fp8, gguf, int8, mxfp8, nf4, nvfp4
from library.precision.files.base import QuantizedWeight, StoredWeight
from library.precision.files.file_tensors import FileTensors, refuse_unread
from library.precision.names import ActivationRounding, LayoutKind
from library.safetensors_io import RowRange, TensorEntry, read_entries, read_rows, weight_files

_FORMATS = (gguf, nf4, fp8, int8, nvfp4, mxfp8)
_WEIGHT_DTYPES = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
_QUANTISED_DTYPES = {"F8_E4M3", "F8_E5M2", "U8", "I8", "I32", "F8_E8M0", "F4"}
_SCALES = ("scale_weight", "weight_scale", "scale_input", "input_scale")
_TITLES: dict[LayoutKind, str] = {
    "plain": "plain cast",
    "comfy_scaled": "ComfyUI scaled fp8",
    "comfy_quant": "ComfyUI per-layer quantisation",
    "rows": "fp8 with a scale a row",
    "musubi": "musubi-tuner scaled fp8",
    "modelopt": "nvfp4 as NVIDIA ModelOpt has it",
    "gguf": "GGUF",
    "nf4": "bitsandbytes 4 bit",
}


class WeightFiles:
    """The tensors of a model's safetensors files, known by name and read on request, as stored or as numbers.

    Attributes:
        path: what errors name.
        entries: name -> where the tensor lies; scales and markers of quantised weights are not among them.
        metadata: the files' strings.
        quantized: what of it is quantised, or None.
    """

    entries: dict[str, TensorEntry]
    quantized: QuantizedFile | None

    def __init__(self, path: str | Path, files: Sequence[Path] | None = None) -> None:
        """Read the headers of ``path``: a ``.safetensors`` file, or a folder with one or with shards.

        Args:
            path: file or folder; with ``files`` only a name for messages.
            files: the model's files, where they are known already.
        """
        self.path = Path(path)
        self.entries, self.metadata = read_entries(weight_files(self.path) if files is None else files)
        self.quantized = quantized_file(FileTensors(self.path, self.entries, self.metadata))
        if self.quantized is not None:
            bookkeeping = self.quantized.bookkeeping
            self.entries = {name: e for name, e in self.entries.items() if name not in bookkeeping}

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    @property
    def names(self) -> list[str]:
        """Every tensor's name, in file order."""
        return list(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor ``name``, of a quantised weight its own; raises a UserError if there is none."""
        if name not in self.entries:
            hint = did_you_mean(name, self.entries) or "; is this the right file?"
            raise UserError(f"{self.path}: tensor {name!r} is missing{hint}")
        stored = self.quantized.weights.get(name) if self.quantized else None
        return self.entries[name].shape if stored is None else stored.shape

    def shape_of(self, ranges: Sequence[RowRange]) -> tuple[int, ...]:
        """Return the shape of the rows of ``ranges``, one below the other."""
        shapes = [rows.of(self.shape(rows.source)) for rows in ranges]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def read(self, ranges: Sequence[RowRange]) -> Tensor:
        """Return the rows of ``ranges`` one below the other, in memory of their own, in the file's dtype."""
        dtype = self.entries[ranges[0].source].dtype
        if dtype not in _WEIGHT_DTYPES:
            raise UserError(f"{self.path}: tensor {ranges[0].source!r} has dtype {dtype}; use the bf16 or fp16 file")
        found = read_rows(self.entries, ranges)
        if found.dtype.itemsize > 1 and not found.sum().isfinite() and not found.isfinite().all():  # the sum is quick
            names = " or ".join(dict.fromkeys(repr(rows.source) for rows in ranges))
            raise UserError(f"{self.path}: {names} holds NaN or infinity; download it again")
        return found

    def read_quantized(self, ranges: Sequence[RowRange]) -> QuantizedWeight | None:
        """Return the rows of ``ranges``, one below the other, as they are stored; None where that is no quantised way.

        Raises:
            UserError: a damaged file, or rows that no weight of their format can hold together.
        """
        if self.quantized is None or not all(rows.source in self.quantized.weights for rows in ranges):
            return None
        return self.quantized.read(ranges)

    def served_inputs(self, key_map: Mapping[str, Sequence[RowRange]]) -> dict[str, ServedInput]:
        """Return layer -> what the file says of its inputs; ``key_map``: parameter -> the rows it is made of."""
        found: dict[str, ServedInput] = {}
        stored = self.quantized.weights if self.quantized else {}
        for name, ranges in key_map.items():
            layer, _, leaf = name.rpartition(".")
            if leaf == "weight" and self.quantized and ranges and (weight := stored.get(ranges[0].source)):
                calibrated = weight.input_scale
                scale = None if calibrated is None else self.quantized.file.read_scale(calibrated)
                found[layer] = ServedInput(cast(Any, weight.served_rounding), scale, weight.layout)
        return found

    def read_float(self, rows: RowRange, device: torch.device | str = "cpu") -> Tensor:
        """Return ``rows`` of a matrix in fp32 on ``device``, dequantised where they are fp8."""
        quantized = self.read_quantized([rows])
        if quantized is None:
            return self.read([rows]).to(device).float()
        return quantized.to(device).dequantize(torch.float32)


@dataclass(frozen=True)
class ServedInput:
    """What a file says of the inputs of one quantised layer.

    Attributes:
        how: its server rounds them; None: not at all.
        scale: that was calibrated for them, fp32; None: there is none.
        layout: the convention that the layer is stored by.
    """

    how: ActivationRounding | None
    scale: Tensor | None
    layout: LayoutKind


@dataclass(frozen=True)
class QuantizedFile:
    """The quantised side of a checkpoint.

    Attributes:
        file: all its tensors. weights: tensor name -> where the weight lies.
    """

    file: FileTensors
    weights: Mapping[str, StoredWeight]

    @property
    def path(self) -> Path:
        """What errors name."""
        return self.file.path

    @cached_property
    def layout(self) -> LayoutKind:
        """The convention that most of the weights are stored by."""
        kinds = Counter(stored.layout for stored in self.weights.values())
        scaled = {kind: count for kind, count in kinds.items() if kind != "plain"}  # biases of scaled files may be cast
        return Counter(scaled or kinds).most_common(1)[0][0]

    @cached_property
    def bookkeeping(self) -> frozenset[str]:
        """Names of scales and markers; no parameter of a model takes them."""
        beside = {name for one in self.weights.values() for name in (*one.tensors.values(), *one.kept)}
        marks = {name for name in self.file.entries if name.rpartition(".")[2] in ("scaled_fp8", "comfy_quant")}
        return frozenset((beside | marks) - self.weights.keys())

    @property
    def formats(self) -> str:
        """How many weights have which format."""
        kinds = Counter(stored.scheme.describe() for stored in self.weights.values())
        return "; ".join(f"{count} {what}" for what, count in kinds.most_common())

    def describe(self) -> str:
        """Return what the file holds, in a line."""
        others = len(self.file.entries) - len(self.bookkeeping) - len(self.weights)
        text = f"{self.path}: {_TITLES[self.layout]}: {self.formats}; {others} in higher precision"
        inputs = sum(stored.input_scale is not None for stored in self.weights.values())
        return text + (f"; {inputs} with a scale for activations" if inputs else "")

    def read(self, ranges: Sequence[RowRange]) -> QuantizedWeight:
        """Return rows of weights, one below the other."""
        parts = [self.weights[rows.source].read(self.file, slice(rows.start, rows.stop)) for rows in ranges]
        for rows in ranges:
            if (name := self.weights[rows.source].input_scale) is not None and self.file.read_scale(name).numel() != 1:
                raise self.file.damaged(name, "is not one scale of a layer's inputs")
        if len(parts) == 1:
            return parts[0]
        names = " and ".join(dict.fromkeys(repr(rows.source) for rows in ranges))
        if len({type(part) for part in parts}) > 1:
            formats = " and ".join(dict.fromkeys(part.scheme.describe() for part in parts))
            raise UserError(f"{self.path}: {names} are one layer here and stored as {formats}; quantise them alike")
        try:
            return type(parts[0]).stack(parts)
        except ValueError as error:
            raise UserError(f"{self.path}: {names} are one layer here: {error}; quantise them alike") from None


def quantized_file(file: FileTensors) -> QuantizedFile | None:
    """Return what of ``file`` is quantised, or None.

    Raises:
        UserError: something belongs to a quantisation that no format here knows.
    """
    refuse_unread(file)
    weights = {name: stored for format in _FORMATS for name, stored in format.find(file).items()}
    found = QuantizedFile(file, weights)
    for layer, config in file.layer_configs.items():
        if f"{layer}.weight" not in weights:
            raise file.refuse(f"{layer}.comfy_quant", f"names the format {config.get('format')!r}, which is not read")
    for name, entry in file.entries.items():
        if name in weights or name in found.bookkeeping:
            continue
        layer, _, leaf = name.rpartition(".")
        unread = f"{layer}.weight" not in weights and file.dtype(f"{layer}.weight") in _QUANTISED_DTYPES
        if leaf in _SCALES and not unread:
            raise file.damaged(name, "is a scale without a quantised weight")
        if leaf in ("absmax", "quant_map", "SCB") or "quant_state" in name:
            raise file.refuse(name, "belongs to a bitsandbytes checkpoint")
        if leaf not in ("weight", "bias", *_SCALES) and file.dtype(f"{layer}.weight") in _QUANTISED_DTYPES:
            raise file.refuse(name, "belongs to a quantisation that is not known here")
        if leaf == "weight_scale_2":
            raise file.damaged(name, "is a scale without a quantised weight")
        if leaf == "weight" and entry.dtype in _QUANTISED_DTYPES:
            refuse = file.damaged if weights else file.refuse
            raise refuse(name, f"has dtype {entry.dtype}, whose meaning no known layout gives")
    return found if weights else None
