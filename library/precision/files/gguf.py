"""GGUF: the block formats of llama.cpp, which ComfyUI-GGUF, stable-diffusion.cpp and diffusers serve image models in.

A row of a weight is cut into blocks of 32 inputs (``Q4_0``, ``Q4_1``, ``Q5_0``, ``Q5_1``, ``Q8_0``, ``IQ4_NL``) or of
256 (the K-quants and ``IQ4_XS``). A block is a run of bytes that holds its numbers in 2 to 8 bits, and one or two fp16
scales; in a block of 256, runs of 16 or 32 inputs have scales of 4 to 8 bits of their own below these. Files mix types:
``Q4_K_M`` is Q4_K with some layers in Q5_K or Q6_K, and norms, biases and embedders in F32, F16 or BF16, which are read
as any other tensor is. The header is read by :mod:`library.gguf_header`.

Blocks stay as they are in memory, ``[out, blocks, bytes]``, so that rows and whole blocks of columns can be cut out of
them. They are dequantised by diffusers' functions (themselves ComfyUI-GGUF's) in fp32 and rounded once; the servers
compute the same in 16 bits. Programs that serve GGUF add a LoRA while they run and multiply in 16 bits, so nothing has
to be merged and no activation is rounded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from library.files import read_toml
from library.precision.files.base import LevelledWeight, ReadOnlyScheme, StoredReadOnly, StoredWeight, cached_tensor
from library.precision.files.cut_weight import CutWeight, in_chunks
from library.precision.files.file_tensors import FileTensors
from library.safetensors_io import DTYPES

_TABLE = read_toml(Path(__file__).with_name("gguf.toml"))[0]
# type -> inputs and bytes of a block, and where its fp16 scales begin
TYPES: dict[str, tuple[int, int, tuple[int, ...]]] = {
    name: (row["inputs"], row["bytes"], tuple(row["scales"])) for name, row in _TABLE.items()
}
INT4 = {"Q4_0": 2, "Q4_1": 4, "Q4_K": 16}  # types of 4 even bits, and where the quantised values of a block begin
_READ_ONLY = "of GGUF is read only here; its servers add a LoRA at run time, so nothing needs to be merged"


@dataclass(frozen=True)
class GgufWeight(CutWeight, LevelledWeight):
    """Blocks ``values`` [out, blocks, bytes] (uint8) of a ``type`` of :data:`TYPES`."""

    type: str

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], self.values.shape[1] * self.column_block

    @property
    def scheme(self) -> ReadOnlyScheme:
        """The type; never written."""
        return ReadOnlyScheme(self.type, _READ_ONLY)

    @property
    def spans(self) -> dict[str, int]:  # type: ignore[override]
        """Inputs of a block."""
        return {"values": TYPES[self.type][0]}

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] that it stands for: fp32 arithmetic, rounded once to ``dtype``."""
        block, block_bytes, _ = TYPES[self.type]
        dequantize = _dequantizer(self.type)

        def numbers(weight: GgufWeight) -> Tensor:
            blocks = dequantize(weight.values.reshape(-1, block_bytes), block, block_bytes, torch.float32)
            return blocks.reshape(weight.shape)

        return in_chunks(self, numbers, dtype)

    @property
    def levels(self) -> Tensor:
        """Even ones; those of IQ4 are sixteen other numbers."""
        from gguf.quants import IQ4_NL

        if not self.type.startswith("IQ4"):
            return torch.linspace(0, 1, _TABLE[self.type]["levels"], device=self.values.device)
        numbers = torch.tensor(IQ4_NL.kvalues, dtype=torch.float32, device=self.values.device)
        return (numbers - numbers[0]) / (numbers[-1] - numbers[0])

    def ends(self) -> tuple[Tensor, Tensor]:
        """See :class:`LevelledWeight`; what these blocks hold if all quantised values are the least, or the largest."""
        codes, run = slice(*_TABLE[self.type]["codes"]), _TABLE[self.type]["run"]
        found = []
        for byte in (0x81, 0x7F) if self.type == "Q8_0" else (0x00, 0xFF):
            blocks = self.values.clone()
            blocks[..., codes] = byte
            found.append(GgufWeight(blocks, self.type).dequantize(torch.float32)[:, ::run])
        return found[0], found[1]

    def ends_for(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`LevelledWeight`; the largest number of a run, or its range with zero."""
        runs, ratio = weight.float().view(len(weight), -1, _TABLE[self.type]["run"]), _TABLE[self.type].get("ratio")
        low, high = runs.amin(-1).clamp_max(0), runs.amax(-1).clamp_min(0)
        if ratio is None:
            return low, high
        largest = torch.where(-low > high, low, high)
        return largest, ratio * largest

    @property
    def is_int4(self) -> bool:
        """Whether its values are integers of 4 bits with a scale and an offset (:meth:`int4`)."""
        return self.type in INT4

    def int4(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return quantised values 0..15 [out, in] uint8, scale and offset [out, in / 32] fp32; None of other types.

        weight = value * scale + offset
        """
        from diffusers.quantizers.gguf.utils import get_scale_min

        if not self.is_int4:
            return None
        start = INT4[self.type]
        head = self.values[..., :start].contiguous()
        low_high = self.values[..., start:].unflatten(-1, (-1, 32 if self.type == "Q4_K" else 16))
        values = torch.stack((low_high & 15, low_high >> 4), dim=-2).reshape(self.shape)
        scale = head[..., :4].view(torch.float16).float() if start > 2 else head.view(torch.float16).float()
        if self.type == "Q4_0":
            return values, scale[..., 0], -8 * scale[..., 0]
        if self.type == "Q4_1":
            return values, scale[..., 0], scale[..., 1]
        factors = [part.reshape(*scale.shape[:2], 8) for part in get_scale_min(head[..., 4:].reshape(-1, 12))]
        scale, offset = (scale[..., i : i + 1] * factors[i] for i in range(2))
        return values, scale.flatten(1), -offset.flatten(1)


def _dequantizer(kind: str) -> Callable[..., Tensor]:
    """Return diffusers' function for a type, as it is for a compiler, which cannot read one with kept tables."""
    from diffusers.quantizers.gguf.utils import dequantize_functions
    from gguf import GGMLQuantizationType

    found: Any = dequantize_functions[GGMLQuantizationType[kind]]
    return found if torch.compiler.is_compiling() else _with_kept_tables(found)


@functools.cache
def _with_kept_tables(found: FunctionType) -> Callable[..., Tensor]:
    """Return one of diffusers' functions with another ``torch.tensor``.

    It makes tables of a few numbers at every call, for which the host would wait until they are copied to the device.
    """
    names = found.__globals__ | {"torch": SimpleNamespace(**{**vars(torch), "tensor": _table})}
    return FunctionType(found.__code__, names, found.__name__, found.__defaults__)


def _table(numbers: list[float], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _kept_table(tuple(numbers), dtype, device)


@cached_tensor
def _kept_table(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True)
class StoredGguf(StoredReadOnly):
    """A weight in a GGUF file; ``kind``: of :data:`TYPES`."""

    reason = _READ_ONLY

    def read(self, file: FileTensors, rows: slice = slice(None)) -> GgufWeight:
        """Return the blocks of some rows."""
        block, block_bytes, scales = TYPES[self.kind]
        values = file.read(self.name, rows, (self.shape[0], math.prod(self.shape[1:]) // block, block_bytes))
        for offset in scales:
            if not torch.isfinite(values[..., offset : offset + 2].contiguous().view(torch.float16)).all():
                raise file.damaged(self.name, "holds NaN or infinity")
        first = (values[..., scales[0] : scales[0] + 2] != 0).any(-1)
        # blocks of zeros are all alike
        file.used_scale(self.name, first, lambda: (values != values[~first][0]).any(-1))
        return GgufWeight(values, self.kind)


def find(file: FileTensors) -> dict[str, StoredWeight]:
    """Return the quantised weights of a GGUF ``file``, by name.

    Raises:
        UserError: a type that cannot be dequantised here, or rows that are no whole blocks.
    """
    found: dict[str, StoredWeight] = {}
    for name, entry in file.entries.items():
        if entry.dtype not in TYPES:
            if entry.file.suffix.lower() != ".gguf" or entry.dtype in (*DTYPES, "F64"):
                continue
            known = ", ".join(TYPES)
            raise file.refuse(name, f"is of GGUF's type {entry.dtype}, which is not read", f"use a file in {known}")
        if len(entry.shape) < 2 or math.prod(entry.shape[1:]) % TYPES[entry.dtype][0]:
            raise file.damaged(
                name, f"of shape {list(entry.shape)} is {entry.dtype} with rows that are no whole blocks"
            )
        found[name] = StoredGguf(
            name=name, shape=entry.shape, layout="gguf", tensors={"values": name}, kind=entry.dtype
        )
    return found
