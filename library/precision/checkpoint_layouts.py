"""The reader of checkpoints (:class:`WeightFiles`), and what it knows of fp8: which layout, where each scale is.

An fp8 file is recognised by its names, dtypes and header:

    plain          fp8 tensors without scales. Whatever was cast is in fp8: linears, often biases and norms as well.
    comfy_scaled   ComfyUI, older: a tensor ``scaled_fp8`` marks the file; ``<layer>.scale_weight`` is one fp32 number,
                   ``<layer>.scale_input`` (optional) a calibrated scale for activations.
    comfy_quant    ComfyUI, newer: ``<layer>.comfy_quant`` holds JSON bytes, {"format": "float8_e4m3fn", ...}, or
                   ``_quantization_metadata`` in the header holds {"layers": {layer: {...}}}; the numbers are
                   ``<layer>.weight_scale`` and ``<layer>.input_scale``. Values may be in a uint8 tensor.
    musubi         musubi-tuner: ``<layer>.scale_weight`` of shape [1], [out, 1] or [out, in / block, 1], in the dtype
                   the weight had; no marker.

In all of them weight = values * scale. Sources: ComfyUI ``comfy/ops.py``, ``comfy/utils.py``
(``convert_old_quants``), ``QUANTIZATION.md``; musubi-tuner ``modules/fp8_optimization_utils.py``. Scales for
activations are not used: Tandem scales activations by their own size, or does not round them at all.

A tensor beside a quantised weight that none of these layouts knows (nvfp4's second scale, a codebook, a zero
point) is refused by name: leaving it out would train on wrong weights without a word.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from library.errors import UserError, did_you_mean
from library.precision.names import GRANULARITIES, Granularity, LayoutKind
from library.precision.quantize import FORMATS, Quantized, describe_scales, format_of, granularity_of, holds_nan_or_inf
from library.safetensors_io import (
    DTYPE_NAMES,
    RowRange,
    TensorEntry,
    read_entries,
    read_rows,
    read_tensor,
    weight_files,
)

_FP8 = {DTYPE_NAMES[fp8.dtype]: fp8 for fp8 in FORMATS}
_COMFY_FORMATS = {f"float8_{fp8.name}": fp8 for fp8 in FORMATS}
_WEIGHT_DTYPES = {"F64", "F32", "F16", "BF16", "U8", *_FP8}  # ComfyUI may keep fp8 in U8
_QUANTISED_DTYPES = {*_FP8, "U8", "I8", "F8_E8M0", "F4"}
_WEIGHT_SCALES, _INPUT_SCALES = ("scale_weight", "weight_scale"), ("scale_input", "input_scale")
_TITLES = {
    "plain": "plain cast",
    "comfy_scaled": "ComfyUI scaled fp8",
    "comfy_quant": "ComfyUI per-layer quantisation",
    "musubi": "musubi-tuner scaled fp8",
}


class WeightFiles:
    """The tensors of a model's safetensors files, known by name and read on request, as stored or as numbers.

    Attributes:
        path: what errors name.
        entries: name -> where the tensor lies; fp8 scales and markers are not among them.
        metadata: the files' strings.
        fp8: what of it is in fp8, or None.
    """

    entries: dict[str, TensorEntry]
    fp8: Fp8Layout | None

    def __init__(self, path: str | Path, files: Sequence[Path] | None = None) -> None:
        """Read the headers of ``path``: a ``.safetensors`` file, or a folder with one or with shards.

        Args:
            path: file or folder; with ``files`` only a name for messages.
            files: the model's files, where they are known already.
        """
        self.path = Path(path)
        self.entries, self.metadata = read_entries(weight_files(self.path) if files is None else files)
        self.fp8 = _Detector(self.path, self.entries, self.metadata).layout()
        if self.fp8 is not None:
            self.entries = {name: e for name, e in self.entries.items() if name not in self.fp8.bookkeeping}

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    @property
    def names(self) -> list[str]:
        """Every tensor's name, in file order."""
        return list(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor ``name``; raises a UserError if there is none."""
        if name not in self.entries:
            hint = did_you_mean(name, self.entries) or "; is this the right file?"
            raise UserError(f"{self.path}: tensor {name!r} is missing{hint}")
        return self.entries[name].shape

    def rows(self, rows: RowRange) -> tuple[int, ...]:
        """Return the shape of ``rows``."""
        return rows.of(self.shape(rows.source))

    def read(self, ranges: Sequence[RowRange]) -> Tensor:
        """Return the rows of ``ranges`` one below the other, in memory of their own, in the file's dtype."""
        dtype = self.entries[ranges[0].source].dtype
        if dtype not in _WEIGHT_DTYPES:
            raise UserError(f"{self.path}: tensor {ranges[0].source!r} has dtype {dtype}; use the bf16 or fp16 file")
        return read_rows(self.entries, ranges)

    def read_quantized(self, ranges: Sequence[RowRange]) -> Quantized | None:
        """Return the rows of ``ranges`` as fp8 and their scale; None where they are stored in higher precision.

        Raises:
            UserError: they hold NaN or infinity, or see :meth:`Fp8Layout.scale_of`.
        """
        if self.fp8 is None or not self.fp8.holds(ranges):
            return None
        values = self.read(ranges).view(self.fp8.dtypes[ranges[0].source])  # a uint8 container becomes what it holds
        if holds_nan_or_inf(values):
            raise UserError(f"{self.path}: {ranges[0].source!r} holds NaN or infinity; download it again")
        return Quantized(values, self.fp8.scale_of(ranges))

    def read_float(self, rows: RowRange, device: torch.device | str = "cpu") -> Tensor:
        """Return ``rows`` of a matrix in fp32 on ``device``, dequantised where they are fp8."""
        quantized = self.read_quantized([rows])
        if quantized is None:
            return self.read([rows]).to(device).float()
        return quantized.to(device).dequantize(torch.float32)


@dataclass(frozen=True)
class Fp8Layout:
    """The fp8 side of a checkpoint.

    Attributes:
        kind: the layout.
        bookkeeping: names of scales and markers; no parameter of a model takes them.
        dtypes: weight name -> dtype of its values.
        scales: weight name -> name of its scale tensor.
    """

    path: Path
    kind: LayoutKind
    bookkeeping: frozenset[str]
    dtypes: Mapping[str, torch.dtype]
    scales: Mapping[str, str]
    _entries: Mapping[str, TensorEntry]

    def describe(self) -> str:
        """Return what the file holds, in a line."""
        formats = Counter(format_of(dtype).name for dtype in self.dtypes.values())
        held = ", ".join(f"{count} {name}" for name, count in formats.most_common())
        kinds = Counter(describe_scales(self._granularity(weight)) for weight in self.scales)
        scaled = ", ".join(f"{count} with {what}" for what, count in kinds.most_common())
        others = len(self._entries) - len(self.bookkeeping) - len(self.dtypes)
        text = f"{self.path}: {_TITLES[self.kind]}: {held} tensors"
        text += f" ({scaled})" if scaled else ""
        text += f", {others} in higher precision"
        ignored = sum(name.endswith(_INPUT_SCALES) for name in self.bookkeeping)
        return text + (f"; {ignored} activation scales not used" if ignored else "")

    def holds(self, ranges: Sequence[RowRange]) -> bool:
        """Return whether all of ``ranges`` are fp8."""
        return all(rows.source in self.dtypes for rows in ranges)

    def scale_of(self, ranges: Sequence[RowRange]) -> Tensor | None:
        """Return the scale of the rows of ``ranges``, one below the other: [1 or rows, blocks] fp32, or None.

        A row's scale goes with its row; a tensor's scale is shared by all its rows.

        Raises:
            UserError: a scale has a shape that its weight does not explain, or is not positive and finite.
        """
        parts = [self._rows_scale(rows) for rows in ranges]
        if all(scale is None for scale, _ in parts):
            return None
        scales = [torch.ones(1, 1) if scale is None else scale for scale, _ in parts]
        if all(scale.shape == (1, 1) and torch.equal(scale, scales[0]) for scale in scales):
            return scales[0].clone()
        blocks = max(scale.shape[1] for scale in scales)
        for rows, scale in zip(ranges, scales, strict=True):
            if blocks % scale.shape[1]:
                raise UserError(
                    f"{self.path}: {self.scales.get(rows.source)!r} has {scale.shape[1]} blocks a row where a layer "
                    f"joined with it has {blocks}; quantise the model with one block size"
                )
        wide = [
            scale.repeat_interleave(blocks // scale.shape[1], dim=1).expand(count, blocks)
            for scale, (_, count) in zip(scales, parts, strict=True)
        ]
        return torch.cat(wide)

    def granularity_of(self, weight: str) -> Granularity:
        """Return the granularity of a weight's scales, one that can be written."""
        found = self._granularity(weight) if weight in self.scales else "cast"
        if found not in GRANULARITIES:
            raise UserError(f"{self.path}: {weight!r} has {describe_scales(found)}; 64 and 128 can be written")
        return found

    def _rows_scale(self, rows: RowRange) -> tuple[Tensor | None, int]:
        """Return the scale of ``rows``, and how many they are."""
        count = rows.of(self._entries[rows.source].shape)[0]
        if rows.source not in self.scales:
            return None, count
        scale = self._read_scale(rows.source)
        return (scale if scale.shape[0] == 1 else scale[rows.start : rows.stop]), count

    def _read_scale(self, weight: str) -> Tensor:
        name = self.scales[weight]
        scale = read_tensor(self._entries, name).float()
        if not (torch.isfinite(scale).all() and (scale > 0).all()):
            raise UserError(f"{self.path}: {name!r} holds a scale that is not positive and finite; download it again")
        return scale.reshape(self._scale_shape(weight))

    def _scale_shape(self, weight: str) -> tuple[int, int]:
        """Return (rows, blocks) of a weight's scale."""
        name = self.scales[weight]
        found, shape = self._entries[name].shape, self._entries[weight].shape
        if all(side == 1 for side in found):
            return (1, 1)
        if len(shape) == 2 and found[0] == shape[0] and all(side == 1 for side in found[2:]):
            blocks = found[1] if len(found) > 1 else 1
            if shape[1] % blocks == 0:
                return (shape[0], blocks)
        raise UserError(
            f"{self.path}: {name!r} of shape {list(found)} is no scale per tensor, row or block of a weight of shape "
            f"{list(shape)}; use the bf16 file or one of the layouts {', '.join(_TITLES)}"
        )

    def _granularity(self, weight: str) -> Granularity:
        return granularity_of(self._scale_shape(weight), math.prod(self._entries[weight].shape[1:]))


class _Detector:
    """Sorts the tensors of a checkpoint into weights, scales and markers."""

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> None:
        self.path, self.entries, self.metadata = path, entries, metadata
        self.markers = {n for n in self.entries if n.rpartition(".")[2] == "scaled_fp8"}

    def layout(self) -> Fp8Layout | None:
        marked = self.layer_configs
        dtypes, scales = self._weights(marked), {}
        companions: set[str] = set()
        for name in self.entries:
            layer, _, leaf = name.rpartition(".")
            weight = f"{layer}.weight"
            if leaf == "comfy_quant" or name in self.markers:
                companions.add(name)
            elif leaf in (*_WEIGHT_SCALES, *_INPUT_SCALES):
                if weight not in dtypes:
                    raise self._refuse(name, "is a scale without an fp8 weight")
                companions.add(name)
                if leaf in _WEIGHT_SCALES:
                    scales[weight] = name
            elif leaf not in ("weight", "bias") and self._dtype(weight) in _QUANTISED_DTYPES:
                raise self._refuse(name, "belongs to a quantisation that is not known here")
            elif leaf == "weight" and self._dtype(name) in _QUANTISED_DTYPES and name not in dtypes:
                raise self._refuse(name, f"has dtype {self._dtype(name)}, whose meaning no known layout gives")
            elif leaf in ("absmax", "quant_map", "SCB") or "quant_state" in name:
                raise self._refuse(name, "belongs to a bitsandbytes checkpoint")
        if not dtypes:
            return None
        kind = self._kind(bool(marked), scales)
        return Fp8Layout(self.path, kind, frozenset(companions), dtypes, scales, self.entries)

    def _kind(self, marked: bool, scales: Mapping[str, str]) -> LayoutKind:
        newer = next((name for name in scales.values() if name.endswith("weight_scale")), None)
        if newer is not None and not marked:
            raise self._refuse(newer, "comes without comfy_quant markers or _quantization_metadata")
        if marked:
            return "comfy_quant"
        if self.markers:
            return "comfy_scaled"
        return "musubi" if scales else "plain"

    def _weights(self, marked: Mapping[str, dict]) -> dict[str, torch.dtype]:
        """Return every fp8 tensor with the dtype of its values."""
        found = {name: _FP8[entry.dtype].dtype for name, entry in self.entries.items() if entry.dtype in _FP8}
        for layer, config in marked.items():
            weight = f"{layer}.weight"
            fp8 = _COMFY_FORMATS.get(config.get("format", ""))
            if fp8 is None:
                raise self._refuse(f"{layer}.comfy_quant", f"names the format {config.get('format')!r}")
            if weight not in self.entries:
                raise self._refuse(f"{layer}.comfy_quant", "marks a layer without a weight")
            if self._dtype(weight) in ("U8", DTYPE_NAMES[fp8.dtype]):
                found[weight] = fp8.dtype
            else:
                raise self._refuse(weight, f"has dtype {self._dtype(weight)} where its marker says {fp8.name}")
        return {name: dtype for name, dtype in found.items() if name not in self.markers}

    @cached_property
    def layer_configs(self) -> dict[str, dict]:
        """Layer -> what ComfyUI's newer layout says of it, from the header or the markers."""
        configs: dict[str, dict] = {}
        if "_quantization_metadata" in self.metadata:
            try:
                layers = json.loads(self.metadata["_quantization_metadata"])["layers"]
                configs |= {self._full_name(layer): dict(config) for layer, config in layers.items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise self._refuse("_quantization_metadata", "is not the JSON object ComfyUI writes") from None
        for name in (name for name in self.entries if name.rpartition(".")[2] == "comfy_quant"):
            try:
                raw = read_tensor(self.entries, name)
                configs[name.rpartition(".")[0]] = dict(json.loads(bytes(raw.tolist())))
            except (ValueError, TypeError):
                raise self._refuse(name, "is not the JSON object ComfyUI writes") from None
        return configs

    def _full_name(self, layer: str) -> str:
        """Return ``layer`` with the file's prefix, which some writers leave out of the header."""
        for prefix in ("", "model.diffusion_model."):
            if f"{prefix}{layer}.weight" in self.entries:
                return prefix + layer
        return layer

    def _dtype(self, name: str) -> str | None:
        entry = self.entries.get(name)
        return entry.dtype if entry is not None else None

    def _refuse(self, name: str, why: str) -> UserError:
        return UserError(
            f"{self.path}: {name!r} {why}; read are plain fp8, ComfyUI's scaled fp8 and musubi-tuner's: use such a "
            "file or the bf16 one"
        )
