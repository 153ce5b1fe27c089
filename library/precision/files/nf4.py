"""bitsandbytes' 4 bits, as diffusers and transformers save them: nf4, and fp4, which differs in its sixteen numbers.

    weight.flatten()[i]  ~  quant_map[nibble i] * absmax[i // blocksize]

A weight ``<name>`` is stored as

    <name>                                    its nibbles, two a byte, the first one in the high half; in any dtype
    <name>.absmax                             the largest magnitude of each block: fp32, or one byte (see below)
    <name>.quant_map                          sixteen numbers, fp32
    <name>.quant_state.bitsandbytes__nf4      JSON bytes: shape, blocksize (64), ...
    <name>.nested_absmax, .nested_quant_map   with double quantisation, where absmax is

        absmax[j] = nested_quant_map[byte j] * nested_absmax[j // nested_blocksize] + nested_offset

in a diffusers folder or in a single file (lllyasviel's flux1-dev-bnb-nf4). Sources: bitsandbytes ``functional.py``
(``QuantState``, ``dequantize_4bit``), diffusers ``quantizers/bitsandbytes``.

In memory nibbles are [out, in / 2] and absmax [out, runs], bytes where they are bytes in the file. Where a row is no
whole number of blocks (Qwen2.5-VL's image encoder has rows of 3420), each row's runs are made as fine as the blocks'
edges need, with the same numbers. ``dequantize`` is ours: bitsandbytes' wants a whole weight, and parts are what is
multiplied with. diffusers multiplies in 16 bits and puts a LoRA beside the weight (peft), so nothing has to be merged.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from library.precision.files.base import LevelledWeight, ReadOnlyScheme, StoredReadOnly, StoredWeight
from library.precision.files.cut_weight import block_slice, in_chunks
from library.precision.files.file_tensors import FileTensors

_FROM_MEAN = 0.05  # how far the mean of nested magnitudes may be from zero, in nested_offset; rounding moves it by 0.01
_STATE = ".quant_state.bitsandbytes__"
_READ_ONLY = "of bitsandbytes is read only here; diffusers puts a LoRA beside it, so nothing needs to be merged"


@dataclass(frozen=True)
class Nf4Weight(LevelledWeight):
    """Nibbles ``values`` [out, in / 2] (uint8) and the largest magnitude of each run of inputs.

    Attributes:
        absmax: [out, runs] fp32, or uint8 where ``nested_absmax`` is there.
        quant_map: [16] fp32.
        nested_absmax: fp32, of each ``nested_block`` runs. nested_quant_map: [256] fp32. nested_offset: [] fp32.
        first: number of the first run among those that ``nested_absmax`` begins with. stride: runs from row to row.
        kind: ``nf4`` or ``fp4``.
    """

    absmax: Tensor
    quant_map: Tensor
    nested_absmax: Tensor | None = None
    nested_quant_map: Tensor | None = None
    nested_offset: Tensor | None = None
    nested_block: int = 0
    first: int = 0
    stride: int = 0
    kind: str = "nf4"

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], 2 * self.values.shape[1]

    @property
    def scheme(self) -> ReadOnlyScheme:
        """bitsandbytes'; never written."""
        return ReadOnlyScheme(self.kind, _READ_ONLY)

    @property
    def column_block(self) -> int:
        """Inputs of a run, at least the two of a byte."""
        return self.shape[1] // self.absmax.shape[1]

    def part(self, rows: slice = slice(None), columns: slice = slice(None)) -> Self:
        """Return some rows, and columns in whole runs, as views."""
        block = self.column_block
        runs = block_slice(columns, block)
        values = self.values[rows, runs.start * block // 2 : None if runs.stop is None else runs.stop * block // 2]
        first = self.first + rows.indices(self.shape[0])[0] * self.stride + runs.start
        stride = self.stride * (rows.step or 1)
        return replace(self, values=values, absmax=self.absmax[rows, runs], first=first, stride=stride)

    def magnitudes(self) -> Tensor:
        """Return the largest magnitude of each run, [out, runs] fp32."""
        if self.nested_absmax is None or self.nested_quant_map is None or self.nested_offset is None:
            return self.absmax
        rows, runs = self.absmax.shape
        down = torch.arange(rows, device=self.absmax.device) * self.stride
        blocks = (self.first + down[:, None] + torch.arange(runs, device=down.device)) // self.nested_block
        return self.nested_quant_map[self.absmax.int()] * self.nested_absmax[blocks] + self.nested_offset

    @property
    def levels(self) -> Tensor:
        """The sixteen numbers, ascending."""
        numbers = self.quant_map.sort().values
        return (numbers - numbers[0]) / (numbers[-1] - numbers[0])

    def ends(self) -> tuple[Tensor, Tensor]:
        """See :class:`LevelledWeight`; the smallest and the largest of the sixteen times the run's magnitude."""
        return self._times(self.magnitudes())

    def ends_for(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`LevelledWeight`; the block's largest magnitude, which is not rounded here."""
        return self._times(weight.float().view(*self.absmax.shape, -1).abs().amax(-1))

    def _times(self, magnitudes: Tensor) -> tuple[Tensor, Tensor]:
        return magnitudes * self.quant_map.amin(), magnitudes * self.quant_map.amax()

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] that it stands for: fp32 arithmetic, rounded once to ``dtype``."""
        pairs = torch.stack((self.quant_map.repeat_interleave(16), self.quant_map.repeat(16)), dim=-1)  # of each byte

        def numbers(weight: Nf4Weight) -> Tensor:
            runs = functional.embedding(weight.values.int(), pairs).view(*weight.absmax.shape, weight.column_block)
            return runs.mul_(weight.magnitudes().unsqueeze(-1)).view(weight.shape)

        return in_chunks(self, numbers, dtype)

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Return weights one below the other; each's magnitudes are fp32 then, since their offsets differ."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        if any(not torch.equal(part.quant_map, first.quant_map) for part in parts):
            raise ValueError("their sixteen numbers differ")
        block = math.gcd(*(part.column_block for part in parts))
        absmax = [part.magnitudes().repeat_interleave(part.column_block // block, dim=1) for part in parts]
        values = torch.cat([part.values for part in parts])
        return cls(values, torch.cat(absmax), first.quant_map, kind=first.kind)


@dataclass(frozen=True, kw_only=True)
class StoredNf4(StoredReadOnly):
    """A weight of 4 bits in a file; ``state``: what its JSON says. ``kind``: ``nf4`` or ``fp4``."""

    reason = _READ_ONLY
    state: Mapping[str, Any]

    def read(self, file: FileTensors, rows: slice = slice(None)) -> Nf4Weight:
        """Return some rows, with the magnitudes of their own runs only."""
        outputs, inputs = self.shape
        start, stop, _ = rows.indices(outputs)
        values = file.read(self.name, rows, (outputs, inputs // 2))
        absmax, nested = self._vector(file, "absmax"), self._nested(file)
        block = self.state["blocksize"]
        self._check(file, absmax, nested)
        if inputs % block == 0:
            runs, beside = inputs // block, {"first": start * (inputs // block), "stride": inputs // block}
            row_absmax = absmax.view(outputs, runs)[start:stop].clone()
            return Nf4Weight(values, row_absmax, self._vector(file, "quant_map"), kind=self.kind, **nested, **beside)
        if nested:
            one_row = Nf4Weight(values, absmax.view(1, -1), absmax, **nested)
            absmax = one_row.magnitudes().view(-1)
        fine = math.gcd(inputs, block)
        row_absmax = absmax[torch.arange(start * inputs, stop * inputs, fine) // block].view(stop - start, -1)
        return Nf4Weight(values, row_absmax, self._vector(file, "quant_map"), kind=self.kind)

    def _check(self, file: FileTensors, absmax: Tensor, nested: Mapping[str, Any]) -> None:
        """Raise a UserError for what bitsandbytes never writes."""
        if ((self._vector(file, "quant_map") - _numbers_of(self.kind)).abs() > 1e-5).any():
            raise file.damaged(self.tensors["quant_map"], f"holds other numbers than {self.kind} has")
        name, scale, block = self.tensors["absmax"], absmax, self.state["blocksize"] // 2
        if nested:
            scale, steps, block = nested["nested_absmax"], nested["nested_quant_map"], nested["nested_block"]
            if (steps.diff() <= 0).any() or (steps[-1:] != 1).any():
                raise file.damaged(self.tensors["nested_quant_map"], "does not rise to 1, as bitsandbytes' does")
            mean = (steps[absmax.int()] * scale.repeat_interleave(block)[: len(absmax)]).mean()
            if (mean.abs() > _FROM_MEAN * nested["nested_offset"]).any():
                raise file.damaged(name, f"is not around nested_offset, its mean in {self.name!r}")
            name = self.tensors["nested_absmax"]

        def used() -> Tensor:
            """In a block of zeros, whatever they stand for, all bytes are alike."""
            units = absmax if nested else file.read(self.name, byte_shape=(math.prod(self.shape) // 2,))
            blocks = torch.cat([units, units[-1:].expand(-len(units) % block)]).view(-1, block)
            return (blocks != blocks[:, :1]).any(-1)

        file.used_scale(name, scale, used)

    def _nested(self, file: FileTensors) -> dict[str, Any]:
        if "nested_absmax" not in self.tensors:
            return {}
        return {
            "nested_absmax": self._vector(file, "nested_absmax"),
            "nested_quant_map": self._vector(file, "nested_quant_map"),
            "nested_offset": torch.tensor(float(self.state["nested_offset"])),
            "nested_block": self.state["nested_blocksize"],
        }

    def _vector(self, file: FileTensors, field: str) -> Tensor:
        """Return a field's tensor: bytes as they are, numbers finite and in fp32."""
        name = self.tensors[field]
        if field.endswith("absmax") and file.dtype(name) != "U8":
            return file.read_scale(name, zeros=True).flatten()
        values = file.read(name).flatten()
        if not values.is_floating_point():
            return values
        if not torch.isfinite(values).all():
            raise file.damaged(name, "holds NaN or infinity")
        return values.float()


def find(file: FileTensors) -> dict[str, StoredWeight]:
    """Return the weights of 4 bits in ``file``, by name.

    Raises:
        UserError: a part of one is missing, or its parts do not fit each other.
    """
    return {name.partition(_STATE)[0]: _stored(file, name) for name in file.entries if _STATE in name}


def _stored(file: FileTensors, marker: str) -> StoredNf4:
    """Return where the weight lies that the JSON bytes ``marker`` describe."""
    name, _, kind = marker.partition(_STATE)
    state = _state(file, marker)
    outputs, inputs = state["shape"]
    runs = -(-outputs * inputs // state["blocksize"])
    sizes = {"absmax": runs, "quant_map": 16}
    if "nested_offset" in state:
        sizes |= {"nested_absmax": -(-runs // state["nested_blocksize"]), "nested_quant_map": 256}
    tensors = {"values": name, **{field: f"{name}.{field}" for field in sizes}}
    for tensor in tensors.values():
        if tensor not in file.entries:
            raise file.damaged(tensor, f"is missing, and {marker!r} asks for it")
    if file.entries[name].bytes * 2 != outputs * inputs or inputs % 2:
        raise file.damaged(name, f"of {file.entries[name].bytes} bytes is no {kind} weight of {outputs} x {inputs}")
    for field, size in sizes.items():
        entry, wanted = file.entries[tensors[field]], "U8" if field == "absmax" and "nested_offset" in state else "F32"
        if entry.numbers != size or entry.dtype != wanted:
            why = f"is {entry.numbers} of {entry.dtype} where its weight of {outputs} x {inputs} has {size} of {wanted}"
            raise file.damaged(tensors[field], why)
    return StoredNf4(
        name=name, shape=(outputs, inputs), layout="nf4", tensors=tensors, kept=(marker,), state=state, kind=kind
    )


@functools.cache
def _numbers_of(kind: str) -> Tensor:
    """Return the sixteen numbers of ``kind``, fp32.

    nf4: quantiles of the normal distribution, eight above zero and seven below, over the largest (Dettmers et al. 2023,
    https://arxiv.org/abs/2305.14314, appendix E). fp4: sign, two bits of exponent, one of mantissa, over the largest.
    """
    if kind == "fp4":
        above = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
        return torch.cat([above, -above])
    tail = 0.9677083  # of the first and last quantile: the mean of 1 - 1/30 and 1 - 1/32
    above, below = (torch.special.ndtri(torch.linspace(tail, 0.5, steps, dtype=torch.float64)[:-1]) for steps in (9, 8))
    return (torch.cat([-below, torch.zeros(1), above.flip(0)]) / above[0]).float()


def _state(file: FileTensors, marker: str) -> dict[str, Any]:
    """Return what the JSON bytes ``marker`` say, checked."""
    kind = marker.partition(_STATE)[2]
    if kind not in ("nf4", "fp4") or file.dtype(marker) != "U8":
        raise file.refuse(marker, "is no mark of bitsandbytes' nf4 or fp4")
    try:
        state = json.loads(bytes(file.read(marker).flatten().tolist()))
        whole = [*state["shape"], state["blocksize"]]
        if "nested_offset" in state:
            whole.append(state["nested_blocksize"])
            if not 0 <= float(state["nested_offset"]) < math.inf:
                raise ValueError
        if len(state["shape"]) != 2 or not all(type(side) is int and side > 0 for side in whole):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise file.damaged(marker, "is not the JSON object bitsandbytes writes") from None
    return dict(state)
