"""fp8: plain casts, ComfyUI's scaled files in both layouts, BFL's row scales, musubi-tuner's rows and blocks.

    weight[o, i]  ~  values[o, i] * scale[o or 0, i // block]

Values are e4m3fn or e5m2 (``library.precision.fp8_numbers``). Scales are fp32 and two-dimensional in memory, ``[rows,
blocks]`` with rows 1 or ``out`` and blocks 1 or ``in / block``:

    cast              no scale            every number rounded as it is (kohya's fp8_base)
    tensor            [1, 1]              one scale for the matrix
    row               [out, 1]            one for each output
    block64, 128      [out, in / block]   one for each run of inputs of a row

and in files:

    plain          fp8 tensors without scales. Whatever was cast is in fp8: linears, often biases and norms as well.
    comfy_scaled   ComfyUI, older: a tensor ``scaled_fp8`` marks the file; ``<layer>.scale_weight`` is one fp32 number,
                   ``<layer>.scale_input`` (optional) a calibrated scale for activations. A marker of two elements asks
                   for products in high precision.
    comfy_quant    ComfyUI, newer: ``<layer>.comfy_quant`` holds JSON bytes, {"format": "float8_e4m3fn", ...}, or
                   ``_quantization_metadata`` in the header holds {"layers": {layer: {...}}}; the numbers are
                   ``<layer>.weight_scale`` and ``<layer>.input_scale``. Values may be in a uint8 tensor.
    rows           ``<layer>.weight_scale`` of a number a row, no marker (Black Forest Labs' fp8 files).
    musubi         musubi-tuner: ``<layer>.scale_weight`` of shape [1], [out, 1] or [out, in / block, 1], in the dtype
                   the weight had; no marker.

Sources: ComfyUI ``comfy/ops.py``, ``comfy/utils.py`` (``convert_old_quants``), ``QUANTIZATION.md``; musubi-tuner
``modules/fp8_optimization_utils.py``. ComfyUI casts a scale to the dtype of the products, so those that are written for
it are exact in bf16.

*Products in fp8*, on GPUs whose tensor cores have it (compute capability 8.9, Ada, or 9.0 and above): both operands
have to be fp8, so activations are rounded to e4m3fn on the way in, each row by its own largest value, which costs about
2.5 % of each row's length.

    x[n, i] ~ qx[n, i] * sx[n]      w[o, i] = qw[o, i] * sw[o]
    y[n, o] = sx[n] * sw[o] * sum_i qx[n, i] * qw[o, i]

Scales can be taken out of the sum only where they do not change along it: one a tensor or a row. Block-scaled weights
are dequantised instead. In the input gradient the weight's row scales sit on the summed index, so they go into the
gradient before it is rounded: ``dx = q(dy * sw) @ qw``. ``torch._scaled_mm`` also runs on CPUs, slowly, for tests.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import torch
from torch import Tensor

from library.errors import UserError
from library.precision.files.base import (
    HIGH_PRODUCTS,
    QuantizedWeight,
    Scheme,
    StoredWeight,
    nvidia_capability,
    runs_of,
)
from library.precision.files.comfy_quant import comfy_layers
from library.precision.files.cut_weight import block_slice, scale_of_rows
from library.precision.files.file_tensors import FileTensors, sampled
from library.precision.fp8_numbers import (
    E4M3FN,
    FORMATS,
    Fp8Format,
    dequantize,
    format_of,
    holds_nan_or_inf,
    round_stochastically,
    round_to_nearest,
    rounded_rows,
)
from library.precision.names import WRITTEN_LAYOUTS, Granularity, LayoutKind
from library.safetensors_io import DTYPE_NAMES

_ALIGNMENT = 16  # rows and columns of the fp8 operands, a rule of cuBLASLt
_FP8 = {DTYPE_NAMES[fp8.dtype]: fp8 for fp8 in FORMATS}
_COMFY_FORMATS = {f"float8_{fp8.name}": fp8 for fp8 in FORMATS}
_HIGH = (torch.float32, torch.bfloat16, torch.float16)
_SCALE_DTYPES = tuple(DTYPE_NAMES[dtype] for dtype in _HIGH)
_SCALES, _INPUT_SCALES = ("scale_weight", "weight_scale"), ("scale_input", "input_scale")


@dataclass(frozen=True)
class Fp8Weight(QuantizedWeight):
    """Values ``[out, in]`` (an fp8 dtype) and their scale ``[1 or out, blocks]``, or None for a plain cast.

    The scale is in fp32, or in bf16 where that loses nothing. A plain cast of a bias or a norm has values of any shape.
    """

    scale: Tensor | None = None
    scale_dtype: torch.dtype = torch.float32  # that fresh scales have to be exact in, see Fp8Scheme

    @property
    def fp8(self) -> Fp8Format:
        """The format of the values."""
        return format_of(self.values.dtype)

    @property
    def granularity(self) -> Granularity:
        """What shares a scale; blocks may be of any size."""
        return granularity_of(None if self.scale is None else self.scale.shape, self.values.shape[-1])

    @property
    def scheme(self) -> Fp8Scheme:
        """Format and granularity."""
        return Fp8Scheme(self.granularity, self.fp8, self.scale_dtype)

    def steps(self) -> Tensor | None:
        """Return the scale, fp32."""
        return None if self.scale is None else self.scale.float()

    @property
    def factors(self) -> Tensor:
        """The scale, fp32; of a plain cast 1."""
        return torch.ones(1, 1, device=self.values.device) if self.scale is None else self.scale.float()

    @property
    def column_block(self) -> int:
        """The inputs that share a scale, where a row has several."""
        return 1 if self.scale is None or self.scale.shape[1] == 1 else self.values.shape[1] // self.scale.shape[1]

    def part(self, rows: slice = slice(None), columns: slice = slice(None)) -> Self:
        """Return some rows and columns, as views; within a block of a scale too, which becomes several finer ones."""
        scale, values = self.scale, self.values[rows, columns]
        if scale is not None:
            scale = scale_of_rows(scale, rows)
        if scale is not None and scale.shape[1] > 1:
            fine = math.gcd(self.column_block, columns.start or 0, values.shape[1])
            scale = _in_blocks(scale, self.values.shape[1] // fine)[:, block_slice(columns, fine)]
        return replace(self, values=values, scale=scale)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the inputs of ``parts`` side by side: blocks of their scales become as fine as the finest."""
        values = torch.cat([part.values for part in parts], dim=1)
        scales = [part.factors for part in parts]
        if all(torch.equal(scale, scales[0]) and scale.shape[1] == 1 for scale in scales):
            return replace(parts[0], values=values)
        fine = math.gcd(*(part.values.shape[1] // scale.shape[1] for part, scale in zip(parts, scales, strict=True)))
        wide = [_in_blocks(scale, part.values.shape[1] // fine) for part, scale in zip(parts, scales, strict=True)]
        return replace(parts[0], values=values, scale=torch.cat(wide, dim=1))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in ``dtype``, of the values' own shape."""
        flat = self.values.reshape(self.values.shape[0] if self.values.ndim else 1, -1)
        return dequantize(flat, self.scale, dtype).reshape(self.values.shape)

    def multiplies_on(self, device: torch.device) -> bool:
        """Whether ``device`` is a GPU with fp8 tensor cores, and the weight can be an operand."""
        return device_has_fp8_matmul(device) and self.is_operand

    @property
    def is_operand(self) -> bool:
        """Whether fp8 products take it: e4m3fn, no blocks, aligned sides."""
        one_scale_a_row = self.scale is None or self.scale.shape[1] == 1
        return self.values.dtype == E4M3FN.dtype and one_scale_a_row and all(s % _ALIGNMENT == 0 for s in self.shape)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias`` with ``x`` [n, in] (bf16, fp16, fp32) rounded to fp8; summed in fp32."""
        rounded, scale = rounded_rows(x)
        columns = self.factors.reshape(1, -1).expand(1, len(self.values)).contiguous()
        return _scaled_mm(rounded, self.values.t(), scale, columns, bias, x.dtype)

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Return weights one below the other: a row's scale goes with its row, coarser blocks become finer ones."""
        values = torch.cat([part.values for part in parts])
        scales = [part.factors for part in parts]
        if all(part.scale is None for part in parts):
            return replace(parts[0], values=values)
        if all(scale.shape == (1, 1) and torch.equal(scale, scales[0]) for scale in scales):
            return replace(parts[0], values=values, scale=scales[0].clone())
        blocks = max(scale.shape[1] for scale in scales)
        if any(blocks % scale.shape[1] for scale in scales):
            raise ValueError(f"{' and '.join(str(s.shape[1]) for s in scales)} blocks a row do not go into one another")
        wide = [
            _in_blocks(scale, blocks).expand(len(part.values), -1) for scale, part in zip(scales, parts, strict=True)
        ]
        return replace(parts[0], values=values, scale=torch.cat(wide))


@dataclass(frozen=True)
class Fp8Scheme(Scheme):
    """How fp8 weights are made.

    Attributes:
        granularity: of the scales. fp8: the format.
        scale_dtype: that scales have to be exact in, as they are stored or as a reader casts them: each is rounded up
            to it before the values are made, so that nothing is lost between the two.
    """

    granularity: Granularity = "cast"
    fp8: Fp8Format = E4M3FN
    scale_dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:  # type: ignore[override]
        """The granularity's word."""
        return self.granularity

    @property
    def largest_unit(self) -> float:  # type: ignore[override]
        """The format's largest number."""
        return self.fp8.max

    def describe(self) -> str:
        """Return format and scales in words."""
        words = {"cast": "plain cast", "tensor": "one scale a tensor", "row": "a scale a row"}
        scales = words.get(self.granularity) or f"a scale per {block_size(self.granularity)} inputs"
        return f"{self.fp8.name}, {scales}"

    def lacking(self, device: torch.device) -> str | None:
        """Return that it is no card with fp8."""
        return None if device_has_fp8_matmul(device) else "products in fp8 need an Ada, Hopper or newer GPU"

    def fitting(self, shape: Sequence[int]) -> Fp8Scheme:
        """Return the scheme, with rows where blocks do not divide the inputs (as musubi-tuner does)."""
        block = block_size(self.granularity)
        return replace(self, granularity="row") if block is not None and shape[1] % block else self

    def groups(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return (rows, blocks) of the scale."""
        block = block_size(self.granularity)
        runs = 1 if block is None else runs_of(shape[1], block)
        return 1 if self.granularity in ("cast", "tensor") else shape[0], runs

    def steps(self, largest: Tensor, before: Tensor | None = None) -> Tensor | None:
        """Return the scales: a group's largest magnitude over the format's largest number, 1 for a group of zeros."""
        if self.granularity == "cast":
            return None
        needed = largest.float() / self.fp8.max
        scale = _rounded_up(needed, self.scale_dtype)
        if before is not None:
            return torch.where(needed > before * (1 + 2.0**-20), scale, before)
        return torch.where(scale > 0, scale, torch.ones_like(scale))

    def round(self, units: Tensor, stochastic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """See :meth:`Scheme.round`; in fp8."""
        return round_stochastically(units, self.fp8, generator) if stochastic else round_to_nearest(units, self.fp8)

    def pack(self, units: Tensor, steps: Tensor | None) -> Fp8Weight:
        """Return values and scale."""
        return Fp8Weight(units.to(self.fp8.dtype), _narrowed(steps), self.scale_dtype)

    def store(self, layout: LayoutKind, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredFp8:
        """See :meth:`Scheme.store`; musubi-tuner's scales have the dtype of the weight."""
        allowed = WRITTEN_LAYOUTS.get(layout, ())
        if self.granularity not in allowed:
            raise UserError(
                f"layout {layout}: scales {self.granularity!r} cannot be written in it; use {' or '.join(allowed)}"
            )
        if layout == "comfy_scaled" and self.fp8 is not E4M3FN:
            raise UserError(
                "layout comfy_scaled: ComfyUI reads its weights as e4m3fn whatever they are; use comfy_quant for e5m2"
            )
        fitted = self.fitting(shape)
        groups = None if layout == "plain" else fitted.groups(shape)
        stored: tuple[torch.dtype, tuple[int, ...]] = (torch.float32, ())
        if groups is not None and layout == "rows":
            stored = (torch.float32, (groups[0],))
        elif groups is not None and layout == "musubi":
            whole = {"tensor": (1,), "row": groups}.get(fitted.granularity, (*groups, 1))
            stored = (dtype if dtype in _HIGH else torch.bfloat16, whole)
        leaf = "weight_scale" if layout in ("comfy_quant", "rows") else "scale_weight"
        scale = {} if groups is None else {"scale": f"{name.removesuffix('.weight')}.{leaf}"}
        tensor_specs = {name: (self.fp8.dtype, shape), **dict.fromkeys(scale.values(), stored)}
        tensors = {"values": name, **scale}
        return StoredFp8(
            name=name,
            shape=shape,
            layout=layout,
            tensors=tensors,
            tensor_specs=tensor_specs,
            fp8=self.fp8,
            scale_shape=groups,
        )


@dataclass(frozen=True, kw_only=True)
class StoredFp8(StoredWeight):
    """An fp8 weight in a file.

    Attributes:
        fp8: the format, of values that ComfyUI may keep in a uint8 tensor.
        scale_shape: (rows, blocks) of its scale, None for a plain cast.
    """

    fp8: Fp8Format
    scale_shape: tuple[int, int] | None = None

    @property
    def scheme(self) -> Fp8Scheme:
        """Format and granularity; ComfyUI casts scales to the dtype of products, so they are exact in bf16."""
        granularity = granularity_of(self.scale_shape, self.shape[-1] if self.shape else 1)
        stored = self.tensor_specs[self.tensors["scale"]][0] if self.scale_shape else torch.float32
        exact = torch.bfloat16 if self.layout in ("comfy_scaled", "comfy_quant") else stored
        return Fp8Scheme(granularity, self.fp8, exact)

    @property
    def served_rounding(self) -> str | None:
        """ComfyUI multiplies scaled files in fp8 unless they ask for high precision; scale 1 where none is given.

        diffusers multiplies Black Forest Labs' files, which have a scale a row, with a scale a token.
        """
        if self.layout == "rows":
            return "row"
        if self.layout not in ("comfy_scaled", "comfy_quant") or self.full_precision:
            return None
        return "static" if self.input_scale else "unit"

    def comfy_config(self) -> dict[str, str]:
        """Return the format."""
        return {"format": f"float8_{self.fp8.name}"}

    def read(self, file: FileTensors, rows: slice = slice(None)) -> Fp8Weight:
        """Return values and scale of some rows."""
        values = file.read(self.name, rows).view(self.fp8.dtype)
        if holds_nan_or_inf(values):
            raise file.damaged(self.name, "holds NaN or infinity")
        codes = values.view(torch.uint8)
        if self.scale_shape is None:
            scaled = any(name.rpartition(".")[2] in (*_SCALES, "scaled_fp8") for name in file.entries)
            if (
                scaled
                and values.ndim == 2
                and values.numel()
                and ((codes & 0x7F) >= _code(self.fp8, self.fp8.max / 4)).any()
            ):
                why = "reaches numbers that only scaled weights do, as others of the file are, and its scale is missing"
                raise file.damaged(self.name, why)
            return Fp8Weight(values)
        name, (outputs, blocks) = self.tensors["scale"], self.scale_shape
        if values.ndim == 2:
            largest, run = _code(self.fp8, self.fp8.max), self.shape[1] // blocks
            file.refuse_shared(name, sampled(codes) & 0x7F, largest, run, outputs > 1)
        scale = scale_of_rows(file.read_scale(name, zeros=True).reshape(self.scale_shape), rows)
        scale = file.used_scale(name, scale, lambda: (codes & 0x7F).reshape(*scale.shape, -1).any(-1), most=0)
        return Fp8Weight(values, _narrowed(scale), self.scheme.scale_dtype)

    def written(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Return values and scale as the file has them."""
        assert isinstance(weight, Fp8Weight)
        found = {self.name: weight.values.view(self.tensor_specs[self.name][0])}
        if self.scale_shape is None:
            return found
        assert weight.scale is not None
        dtype, shape = self.tensor_specs[self.tensors["scale"]]
        return found | {self.tensors["scale"]: weight.scale.expand(self.scale_shape).to(dtype).reshape(shape)}


def find(file: FileTensors) -> dict[str, StoredWeight]:
    """Return the fp8 tensors of ``file``, by name."""
    formats = {name: _FP8[entry.dtype] for name, entry in file.entries.items() if entry.dtype in _FP8}
    for kind, fp8 in _COMFY_FORMATS.items():
        formats |= {layer.tensor("weight", ("U8", DTYPE_NAMES[fp8.dtype])): fp8 for layer in comfy_layers(file, kind)}
    others = {f"{layer}.weight" for layer, c in file.layer_configs.items() if c.get("format") not in _COMFY_FORMATS}
    markers = [name for name in formats if name.rpartition(".")[2] == "scaled_fp8"]
    precise = file.entries[markers[0]].shape[0] == 2 if markers and file.entries[markers[0]].shape else None
    return {
        name: _stored(file, name, fp8, bool(markers), precise)
        for name, fp8 in formats.items()
        if name not in others and name not in markers and not name.endswith((*_SCALES, *_INPUT_SCALES))
    }


def _stored(file: FileTensors, name: str, fp8: Fp8Format, marked: bool, precise: bool | None) -> StoredFp8:
    """Return where the weight ``name`` lies, and what the file says of it."""
    layer, shape = name.removesuffix(".weight"), file.entries[name].shape
    config = file.layer_configs.get(layer) if name.endswith(".weight") else None
    beside = [f"{layer}.{leaf}" for leaf in _SCALES if f"{layer}.{leaf}" in file.entries and name.endswith(".weight")]
    inputs = [f"{layer}.{leaf}" for leaf in _INPUT_SCALES if f"{layer}.{leaf}" in file.entries]
    markers = [each for each in (f"{layer}.comfy_quant",) if each in file.entries]
    layout: LayoutKind = "plain"
    scale_shape = None
    if beside:
        scale_shape = _scale_shape(file, beside[0], shape)
        newer = beside[0].endswith("weight_scale")
        layout = "rows" if newer else "comfy_scaled" if marked else "musubi"
    if config is not None:
        layout, precise = "comfy_quant", bool(config.get(HIGH_PRODUCTS))
        if not beside:
            raise file.damaged(name, "is quantised by its marker and has no weight_scale")
    elif layout == "rows" and scale_shape is not None and scale_shape[0] == 1 and shape[:1] != (1,):
        raise file.refuse(beside[0], "is one scale without a comfy_quant marker or _quantization_metadata")
    elif marked and layout == "plain":
        layout = "comfy_scaled"
    tensors = {"values": name} | ({"scale": beside[0]} if beside else {})
    return StoredFp8(
        name=name,
        shape=shape,
        layout=layout,
        tensors=tensors,
        tensor_specs={tensor: file.entries[tensor].spec for tensor in tensors.values()},
        kept=(*markers, *inputs),
        full_precision=precise if layout.startswith("comfy") else None,
        input_scale=inputs[0] if inputs else None,
        fp8=fp8,
        scale_shape=scale_shape,
    )


def _scale_shape(file: FileTensors, name: str, shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, blocks) of the scale ``name`` beside a weight of ``shape``."""
    found, dtype = file.entries[name].shape, file.dtype(name)
    if dtype not in _SCALE_DTYPES:
        raise file.refuse(name, f"has dtype {dtype} where scales of fp8 have {', '.join(_SCALE_DTYPES)}")
    if all(side == 1 for side in found):
        return (1, 1)
    if len(shape) == 2 and found[0] == shape[0] and all(side == 1 for side in found[2:]):
        blocks = found[1] if len(found) > 1 else 1
        if shape[1] % blocks == 0:
            return (shape[0], blocks)
    raise file.damaged(
        name, f"of shape {list(found)} is no scale per tensor, row or block of a weight of shape {list(shape)}"
    )


def loaded_scheme(granularity: Granularity, fp8: Fp8Format = E4M3FN) -> Fp8Scheme:
    """Return how a model becomes fp8 while it is loaded: scales of blocks are made exact in bf16, as they are held."""
    narrow = block_size(granularity) is not None
    return Fp8Scheme(granularity, fp8, torch.bfloat16 if narrow else torch.float32)


def granularity_of(scale: Sequence[int] | None, in_features: int) -> Granularity:
    """Return the granularity of a scale of shape [rows, blocks] beside ``in_features`` inputs; None is a plain cast."""
    if scale is None:
        return "cast"
    rows, blocks = scale
    if blocks == 1:
        return "row" if rows > 1 else "tensor"
    return cast(Granularity, f"block{in_features // blocks}")


def block_size(granularity: Granularity) -> int | None:
    """Return the run of inputs that shares a scale, or None if all inputs of a row do."""
    return int(granularity.removeprefix("block")) if granularity.startswith("block") else None


def device_has_fp8_matmul(device: torch.device) -> bool:
    """Return whether ``device`` is a CUDA GPU with fp8 tensor cores (compute capability 8.9 or more), not on Windows.

    PyTorch for Windows is built without products that have a scale a row (``RowwiseScaledMM.cu``).
    """
    return sys.platform != "win32" and nvidia_capability(device) >= (8, 9)


def _code(fp8: Fp8Format, number: float) -> int:
    """Return the byte that stands for ``number``."""
    return int(torch.tensor(number).to(fp8.dtype).view(torch.uint8))


def _rounded_up(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``scale`` fp32 as the next number not below it that ``dtype`` has, fp32."""
    if dtype == torch.float32:
        return scale
    stored = scale.to(dtype)
    above = torch.nextafter(stored, torch.full_like(stored, math.inf))
    return torch.where(stored.float() < scale, above, stored).float()


def _narrowed(scale: Tensor | None) -> Tensor | None:
    """Return ``scale`` [rows, blocks] as it lies in memory: of many blocks in bf16, where every one is exact in it.

    A scale per 64 inputs of FLUX takes 0.7 GiB in fp32.
    """
    if scale is None or scale.shape[1] == 1 or scale.dtype == torch.bfloat16:
        return scale
    narrow = scale.to(torch.bfloat16)
    return narrow if torch.equal(narrow.float(), scale.float()) else scale


def _in_blocks(scale: Tensor, blocks: int) -> Tensor:
    """Return ``scale`` [rows, n] as the same scales of finer blocks, [rows, blocks]."""
    return scale if scale.shape[1] == blocks else scale.repeat_interleave(blocks // scale.shape[1], dim=1)


def _scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``(a * scale_a) @ (b * scale_b) + bias`` in ``dtype``, scales and bias within the product.

    With a scale a row the op gives bf16 only; for other dtypes the sums come out in fp32 and are scaled here.
    """
    if dtype == torch.bfloat16:
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=dtype)
    one = torch.ones((), device=a.device)
    out = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.float32).mul_(scale_a).mul_(scale_b)
    return (out if bias is None else out.add_(bias)).to(dtype)
