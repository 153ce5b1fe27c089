"""int8: ComfyUI's ``int8_tensorwise``, with and without ConvRot.

    weight[o, i]  ~  (values[o, :] @ R)[i] * scale[o or 0]

Values are -128..127 (those made here -127..127), scales fp32, one a tensor or a row: its largest magnitude / 127. The
steps of int8 are even, so one large weight makes them coarse for its whole row. *ConvRot* therefore rotates each run of
256 inputs before it rounds: a large entry is spread over the run, and errors fall by a factor of three to four where
weights or activations have outliers (https://arxiv.org/abs/2512.03673). R is block diagonal, each block the Kronecker
power of the regular Hadamard matrix of four, over the root of its size:

    1  1  1 -1
    1  1 -1  1                R = R' = inverse of R: rotating twice changes nothing
    1 -1  1  1
   -1  1  1  1

so x W' = (x R)(W R)'. A server rotates the inputs, one small product a layer, and multiplies in int8: each row of
inputs is rounded with its own scale, largest magnitude / 127, the sums are exact in int32. Training does just that, by
comfy-kitchen's kernels, on cards that are faster so. On others, and in backward, it multiplies with the dequantised,
still rotated weight: the inputs are rotated, never the weight.

In a file: ``<layer>.weight`` int8, ``<layer>.weight_scale`` of shape [], [1], [out] or [out, 1], and in ComfyUI's word
of the layer ``convrot`` and ``convrot_groupsize``, a power of four. Sources: comfy-kitchen (``tensor/int8.py``,
``tensor/int8_utils.py``, ``backends/eager/quantization.py``), ComfyUI ``comfy/ops.py`` (``_load_quantized_module``).
Layers whose inputs no run of 256 divides get runs of 64 or 16, which ComfyUI reads as well, or are not rotated.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from library.precision.files.base import QuantizedWeight, Scheme, StoredWeight, cached_tensor, nvidia_capability
from library.precision.files.comfy_quant import ComfyLayer, StoredComfyWeight, comfy_layers, new_fields
from library.precision.files.cut_weight import CutWeight, scale_of_rows
from library.precision.files.file_tensors import FileTensors, sampled
from library.precision.fp8_numbers import is_walked, refuse_nan, round_to_whole, scaled
from library.precision.names import LayoutKind

_LARGEST = 127.0
_SMALLEST_SCALE = 1e-30  # comfy-kitchen's, of a row of zeros
_GROUPS = (256, 64, 16)
_SCALE_DTYPES = ("F32", "BF16", "F16")
_CHUNK = 1 << 16  # numbers dequantised at a time on a CPU; four times as many are faster (2.5 of 3.8 ms for 3072 x
# 3072) and cost a step 8 MiB, all at once take 20 ms
# Compute capabilities of cards that are faster in int8 than in bf16 on dequantised weights: A100, RTX 30 and RTX 40. An
# H200 takes 0.54 ms for an int8 product and 0.46 for bf16's (docs/benchmarks.md), and Blackwell gains some 5 % at most.
_FASTER = ((8, 0), (8, 6), (8, 9))
_log = logging.getLogger(__name__)
_RUNS = 768  # rotated at a time on a CPU: products of one shape, of which oneDNN keeps a kernel each


@dataclass(frozen=True)
class Int8Weight(CutWeight):
    """Values [out, in] int8, ``scale`` [1 or out, 1] fp32, inputs rotated in runs of ``group`` (0: not rotated)."""

    scale: Tensor
    group: int = 0
    spans: ClassVar = {"values": 1}

    @property
    def scheme(self) -> Int8Scheme:
        """Rows or tensor, rotation."""
        return Int8Scheme(self.scale.shape[0] > 1, self.group)

    def steps(self) -> Tensor:
        """Return the scale."""
        return self.scale

    @property
    def column_block(self) -> int:
        """The run that is rotated together."""
        return self.group or 1

    def operand(self, dtype: torch.dtype) -> Tensor:
        """Return ``values * scale``, still rotated: the product in fp32, rounded once."""
        values, scale = self.values, self.scale
        if values.device.type != "cpu" or torch.compiler.is_compiling() or values.numel() <= _CHUNK:
            return scaled(values, scale, dtype)
        out = torch.empty(values.shape, dtype=dtype)
        step = max(1, _CHUNK // max(1, values.shape[1]))
        chunk = torch.empty(step, values.shape[1])
        for start in range(0, values.shape[0], step):
            rows = slice(start, start + step)
            numbers = chunk[: len(values[rows])].copy_(values[rows])
            out[rows].copy_(numbers.mul_(scale_of_rows(scale, rows)))
        return out

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, rotated back in fp32 and rounded once."""
        return rotated(self.operand(torch.float32), self.group).to(dtype) if self.group else self.operand(dtype)

    @property
    def rotates(self) -> bool:
        """Whether there are runs."""
        return self.group > 0

    def rotate(self, x: Tensor) -> Tensor:
        """Return inputs [..., in], each run of ``group`` rotated."""
        return rotated(x, self.group) if self.group else x

    def rotate_back(self, gradient: Tensor) -> Tensor:
        """Return ``gradient`` rotated: the rotation is its own inverse and transpose."""
        return self.rotate(gradient)

    def unrotated(self) -> Self:
        """Return the same numbers as a weight without rotation."""
        return replace(self, group=0)

    @property
    def is_operand(self) -> bool:
        """Whether its sides are aligned, as comfy-kitchen's kernels need them."""
        return all(side % 16 == 0 for side in self.shape)

    def multiplies_on(self, device: torch.device) -> bool:
        """Whether comfy-kitchen multiplies it on ``device``, a card that gains by it."""
        gains = nvidia_capability(device) in _FASTER and self.is_operand
        return gains and _has_products(device, self.shape[1], self.group)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias`` by comfy-kitchen, which rotates ``x`` [n, in] and rounds its rows.

        Dequantised where its kernels fail.
        """
        if not _has_products(x.device, self.shape[1], self.group):
            return torch.nn.functional.linear(self.rotate(x), self.operand(x.dtype), bias)
        return _product(x, self, bias)


@dataclass(frozen=True)
class Int8Scheme(Scheme):
    """How int8 weights are made.

    Attributes:
        rows: a scale a row, or one a tensor. group: inputs that are rotated together, 0: none.
        scale_dtype: that scales are stored in.
    """

    rows: bool = True
    group: int = 0
    scale_dtype: torch.dtype = torch.float32
    largest_unit = _LARGEST

    @property
    def name(self) -> str:  # type: ignore[override]
        """``int8``, ``int8_row`` or ``int8_convrot``."""
        return "int8_convrot" if self.group else "int8_row" if self.rows else "int8"

    def describe(self) -> str:
        """Return it in words."""
        turned = f", rotated in runs of {self.group}" if self.group else ""
        return f"int8{turned}, {'a scale a row' if self.rows else 'one scale a tensor'}"

    def lacking(self, device: torch.device) -> str | None:
        """Return that it is no card with int8, or that comfy-kitchen is not installed."""
        if nvidia_capability(device) < (7, 5):
            return "products in int8 need an NVIDIA GPU, Turing or newer"
        return None if _kitchen_is_there() else "products in int8 need comfy-kitchen: pip install comfy-kitchen"

    def fitting(self, shape: Sequence[int]) -> Int8Scheme:
        """Return the scheme with the largest runs up to its own that divide the inputs, without rotation if none do."""
        if not self.group or shape[1] % self.group == 0:
            return self
        return replace(self, group=next((g for g in _GROUPS if g < self.group and shape[1] % g == 0), 0))

    def rotate(self, weight: Tensor) -> Tensor:
        """Return ``weight`` [out, in] with each run of inputs rotated."""
        return rotated(weight, self.group) if self.group else weight

    def groups(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return a step a row or one."""
        return (shape[0] if self.rows else 1), 1

    def steps(self, largest: Tensor, before: Tensor | None = None) -> Tensor:
        """Return the scales: largest magnitude / 127."""
        scale = (largest / _LARGEST).clamp_min(_SMALLEST_SCALE).to(self.scale_dtype).float()
        scale = scale.clamp_min(torch.finfo(self.scale_dtype).smallest_normal)
        return scale if before is None else torch.where(scale > before * (1 + 2.0**-20), scale, before)

    def round(self, units: Tensor, stochastic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """See :meth:`Scheme.round`; whole numbers within -127..127."""
        refuse_nan(units, "int8")
        return round_to_whole(units, stochastic, generator).clamp_(-_LARGEST, _LARGEST)

    def pack(self, units: Tensor, steps: Tensor | None) -> Int8Weight:
        """Return the weight of whole numbers ``units`` and of scales."""
        assert steps is not None
        return Int8Weight(units.to(torch.int8), steps, self.group)

    def store(self, layout: LayoutKind, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredInt8:
        """See :meth:`Scheme.store`."""
        scheme, scale = self.fitting(shape), ("weight_scale", self.scale_dtype, (shape[0], 1) if self.rows else ())
        stored = {"values": ("weight", torch.int8, shape), "scale": scale}
        return StoredInt8(**new_fields(self.describe(), layout, name, shape, **stored), group=scheme.group)


@dataclass(frozen=True, kw_only=True)
class StoredInt8(StoredComfyWeight):
    """An int8 weight in a file, inputs rotated in runs of ``group``."""

    kind, rounding = "int8_tensorwise", "int8"
    group: int

    @property
    def scheme(self) -> Int8Scheme:
        """Rows or tensor, by the scale's shape."""
        dtype, shape = self.tensor_specs[self.tensors["scale"]]
        return Int8Scheme(torch.Size(shape).numel() > 1, self.group, dtype)

    @property
    def served_rounding(self) -> str:
        """``int8``, on every card and whatever the file asks for: comfy-kitchen has no other product with int8 weights.

        Its handler of ``F.linear`` rounds inputs that ComfyUI has left in high precision.
        """
        return self.rounding

    def comfy_config(self) -> dict[str, Any]:
        """Return the format, and how it is rotated."""
        turned = {"convrot": True, "convrot_groupsize": self.group} if self.group else {}
        return super().comfy_config() | turned

    def read(self, file: FileTensors, rows: slice = slice(None)) -> Int8Weight:
        """Return values and scale of some rows."""
        values = file.read(self.name, rows)
        name = self.tensors["scale"]
        scale = file.read_scale(name, zeros=True).reshape(-1, 1)
        file.refuse_shared(name, sampled(values).abs(), _LARGEST, self.shape[1], len(scale) > 1)
        scale = scale_of_rows(scale, rows)
        scale = file.used_scale(name, scale, lambda: values.reshape(len(scale), -1).any(-1, True), most=0)
        return Int8Weight(values, scale, self.group)

    def written(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Return values and scale as the file has them."""
        assert isinstance(weight, Int8Weight)
        assert weight.group == self.group
        dtype, shape = self.tensor_specs[self.tensors["scale"]]
        scale = weight.scale.expand(torch.Size(shape).numel(), 1)
        return {self.name: weight.values, self.tensors["scale"]: scale.to(dtype).reshape(shape)}


def find(file: FileTensors) -> dict[str, StoredWeight]:
    """Return the int8 weights of ``file``, by name."""
    return {layer.weight: _stored(layer) for layer in comfy_layers(file, "int8_tensorwise")}


def _stored(layer: ComfyLayer) -> StoredInt8:
    """Return where the weight of ``layer`` lies."""
    file, shape, scale = layer.file, layer.matrix(("I8",)), layer.tensor("weight_scale", _SCALE_DTYPES)
    found = file.entries[scale].shape
    if found not in ((), (1,), (1, 1), (shape[0],), (shape[0], 1)):
        raise file.damaged(scale, f"of shape {list(found)} is no scale of a tensor or its rows, {list(shape)}")
    group = layer.option("convrot_groupsize", _GROUPS[0]) if layer.option("convrot", False) else 0
    if group and (not _is_power_of_four(group) or shape[1] % group):
        why = f"rotates runs of {group!r} inputs, of {shape[1]}; they have to be a power of 4 that divides them"
        raise file.refuse(f"{layer.name}.comfy_quant", why)
    return StoredInt8(**layer.fields(shape, scale=scale), group=group)


def rotated(x: Tensor, group: int) -> Tensor:
    """Return ``x`` [..., in] with each run of ``group`` inputs rotated, in its own dtype.

    The rotation is transposed, which changes nothing but the order of sums: comfy-kitchen has weights so, and here they
    are its bits.
    """
    runs, rotation = x.reshape(-1, group), _rotation(group, x.dtype, x.device).T
    if x.device.type != "cpu" or x.requires_grad or torch.compiler.is_compiling():
        return (runs @ rotation).view(x.shape)
    out = torch.empty_like(runs)
    for chunk, turned in zip(runs.split(_RUNS), out.split(_RUNS), strict=True):
        torch.mm(chunk, rotation, out=turned)
    return out.view(x.shape)


@cached_tensor
def _rotation(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the rotation of ``size`` inputs; exact in every dtype, since the root of a power of four is one of two."""
    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    whole = four
    while len(whole) < size:
        whole = torch.kron(whole, four)
    return whole.to(device, dtype)


def _product(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """Return the product by comfy-kitchen's operator; 0, 1 and 2 are its codes of dtypes."""
    code = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}[x.dtype]
    return torch.ops.comfy_kitchen.int8_linear(
        x, weight.values, weight.scale.reshape(-1), bias, code, weight.rotates, weight.group or _GROUPS[0]
    )


@functools.cache
def _kitchen_is_there() -> bool:
    """Import comfy-kitchen, which takes a second and makes its operators known, and return whether it is installed."""
    return find_spec("comfy_kitchen") is not None and bool(import_module("comfy_kitchen"))


@torch.compiler.assume_constant_result
def _has_products(device: torch.device, inputs: int, group: int) -> bool:
    """Return whether comfy-kitchen multiplies weights of so many ``inputs`` on ``device``; found out once, and said.

    In a walk on fake tensors, whose numbers say nothing, it does. Modes, which may count or save what goes by, do not
    see the trial.
    """
    walked = is_walked(device)
    with _disable_current_modes():
        return _kitchen_is_there() and (walked or _products_work(device, inputs, group))


@functools.cache
def _products_work(device: torch.device, inputs: int, group: int) -> bool:
    """Return whether a product with normal inputs is right within 3 %; rounding them costs 1."""
    try:
        import comfy_kitchen

        kernels = comfy_kitchen.list_backends()["cuda"]
        if device.type == "cuda" and "int8_linear" not in kernels["capabilities"]:
            raise RuntimeError(f"comfy-kitchen has no kernels here ({kernels['unavailable_reason']})")
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(64, inputs, generator=draw).bfloat16()
        values = torch.randint(-127, 128, (64, inputs), generator=draw, dtype=torch.int8)
        weight = Int8Weight(values, torch.rand(64, 1, generator=draw), group)
        found, wanted = _product(x.to(device), weight.to(device), None), x.float() @ weight.dequantize(torch.float32).T
        if not (found.float().cpu() - wanted).norm() < 0.03 * wanted.norm():
            raise RuntimeError("its products are wrong")
    except Exception as error:
        _log.warning("int8 weights of %d inputs are dequantised for products on %s: %s", inputs, device, error)
        return False
    return True


def _is_power_of_four(number: object) -> bool:
    return type(number) is int and number >= 4 and number & (number - 1) == 0 and number.bit_length() % 2 == 1
