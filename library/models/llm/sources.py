"""Checkpoints that are not safetensors, or whose tensors do not lie the way the model wants them.

The loader (``library.models.weights``) reads rows of named tensors, each from its place in a file. Everything here ends
in that form, so that every layout costs the same memory, one model and one tensor:

- :class:`TorchFiles` finds where the tensors of a ``.pth`` or ``.bin`` file lie without reading them. Unpickling is
  restricted to tensors (``weights_only``), and under ``FakeTensorMode`` PyTorch reports each storage's place in the
  file instead of filling it. Files from before PyTorch 1.6 (July 2020), which are no archives, are refused.
- :class:`DerivedWeights` adds tensors that are computed when they are read: a transpose, a permutation.
- :class:`DequantisedWeights` has no quantised ones.
- :class:`TensorFlowFiles` finds the tensors of a TensorFlow checkpoint without TensorFlow. The data file
  ``model.ckpt.data-00000-of-00001`` is tensors one behind the other; ``model.ckpt.index`` is a table of LevelDB's kind
  (https://github.com/google/leveldb/blob/main/doc/table_format.md): a footer of 48 bytes points to an index block,
  whose values point to data blocks. A block is entries with the prefix they share with the one before, then the restart
  points. The keys are tensor names, the values ``BundleEntryProto`` messages
  (tensorflow/core/protobuf/tensor_bundle.proto): dtype = 1, shape = 2, shard_id = 3, offset = 4, size = 5. The entry
  without a name is the header. TensorFlow writes the index without compression (``TableBuilderOptions`` in
  tensor_bundle.cc).
"""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from library.errors import UserError, reason_of
from library.precision.checkpoint import WeightFiles
from library.precision.files.base import QuantizedWeight
from library.safetensors_io import DTYPE_NAMES, RowRange, TensorEntry


class TorchFiles(WeightFiles):
    """The tensors of files that ``torch.save`` wrote."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        """Find every tensor in ``files``; ``path`` is what errors name."""
        self.path, self.quantized, self.entries, self.metadata = path, None, {}, {}
        for file in files:
            for name, tensor in _outline(file).items():
                if not isinstance(tensor, Tensor):
                    continue
                offset = tensor.untyped_storage()._checkpoint_offset
                if not tensor.is_contiguous() or offset is None or tensor.dtype not in DTYPE_NAMES:
                    raise UserError(f"{file}: tensor {name!r} is stored in pieces; save it again with safetensors")
                start = offset + int(tensor.storage_offset()) * tensor.element_size()
                dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
                self.entries[name] = TensorEntry(file, dtype, shape, start, tensor.nbytes)


# what the unpickler raises where a file is damaged, or would do something else than hold tensors
_DAMAGED = (
    *(pickle.UnpicklingError, struct.error, RuntimeError, EOFError, ValueError),
    *(LookupError, TypeError, AttributeError, OverflowError),
)


def _outline(file: Path) -> dict[str, Tensor]:
    """Return a file's tensors, which know where they lie in it."""
    if file.is_file() and not zipfile.is_zipfile(file):
        raise UserError(
            f"{file}: cut off, or no file of PyTorch 1.6 or newer; download it again, or use the model's safetensors"
        )
    try:
        with FakeTensorMode():
            state = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; download it again") from None
    except _DAMAGED as error:
        reason = reason_of(error)
        raise UserError(f"{file}: not a PyTorch checkpoint of tensors alone ({reason}); use safetensors") from None
    if not isinstance(state, dict):
        raise UserError(f"{file}: holds a {type(state).__name__}, not named tensors; use another file")
    return state


@dataclass(frozen=True)
class Derived:
    """A tensor made of a whole stored one."""

    shape: tuple[int, ...]
    source: str
    make: Callable[[Tensor], Tensor]


class DerivedWeights(WeightFiles):
    """The tensors of ``base`` and derived ones beside them; fp8 values keep their layout."""

    def __init__(self, base: WeightFiles, derived: Mapping[str, Derived]) -> None:
        self.path, self.quantized = base.path, base.quantized
        self._base, self._derived = base, dict(derived)

    def __contains__(self, name: str) -> bool:
        return (self._derived[name].source if name in self._derived else name) in self._base

    @property
    def names(self) -> list[str]:
        """Every tensor's name, stored ones first."""
        return [*self._base.names, *self._derived]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor ``name``; raises a UserError if there is none."""
        return self._derived[name].shape if name in self._derived else self._base.shape(name)

    def read(self, ranges: Sequence[RowRange]) -> Tensor:
        """Return the rows of ``ranges`` one below the other, in memory of their own, in the file's dtype."""
        if not any(rows.source in self._derived for rows in ranges):
            return self._base.read(ranges)
        parts = [self._rows(rows) for rows in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_quantized(self, ranges: Sequence[RowRange]) -> QuantizedWeight | None:
        """Return the rows of ``ranges`` as they are stored; a derived tensor is its source's, rows put in order."""
        stored = self.quantized.weights if self.quantized else {}
        parts = []
        for rows in ranges:
            derived = self._derived.get(rows.source)
            if (derived.source if derived else rows.source) not in stored:
                return None
            part = self._base.read_quantized([RowRange(derived.source) if derived else rows])
            assert part is not None
            if derived:
                part = part.with_tensors({name: derived.make(tensor) for name, tensor in part.tensors().items()})
                part = part.part(slice(rows.start, rows.stop))
            parts.append(part)
        return parts[0] if len(parts) == 1 else type(parts[0]).stack(parts)

    def _rows(self, rows: RowRange) -> Tensor:
        derived = self._derived.get(rows.source)
        if derived is None:
            return self._base.read([rows])
        return derived.make(self._base.read([RowRange(derived.source)]))[rows.start : rows.stop].contiguous()


class DequantisedWeights(WeightFiles):
    """The tensors of ``base``, in high precision all of them."""

    def __init__(self, base: WeightFiles) -> None:
        self.path, self.quantized, self._base = base.path, None, base

    def __contains__(self, name: str) -> bool:
        return name in self._base

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor ``name``; raises a UserError if there is none."""
        return self._base.shape(name)

    def read(self, ranges: Sequence[RowRange]) -> Tensor:
        """Return the rows of ``ranges`` one below the other, fp32 where they are quantised."""
        parts = []
        for rows in ranges:
            quantized = self._base.read_quantized([rows])
            parts.append(self._base.read([rows]) if quantized is None else quantized.dequantize(torch.float32))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


_MAGIC = 0xDB4775248B80FB57
_DTYPES = {1: ("F32", 4), 2: ("F64", 8), 14: ("BF16", 2), 19: ("F16", 2)}  # tensorflow/core/framework/types.proto


class TensorFlowFiles(WeightFiles):
    """The floating point tensors of a checkpoint, by TensorFlow's names."""

    def __init__(self, index: Path) -> None:
        """Read ``index``, a ``*.index`` file, and find the data beside it."""
        self.path, self.quantized, self.entries = index, None, {}
        data = index.read_bytes()
        try:
            entries = dict(_table(data))
            shards = _message(entries.get(b"", b""))[0].get(1, 1)
            for key, value in entries.items():
                if key:
                    self._add(key.decode(), value, shards)
        except (IndexError, struct.error, UnicodeDecodeError, TypeError, DecodeError) as error:
            raise UserError(f"{index}: not an index of a TensorFlow checkpoint ({error}); download it again") from None

    def _add(self, name: str, entry: bytes, shards: int) -> None:
        """Record one tensor, unless it is no number that a model is made of (a step counter)."""
        numbers, parts = _message(entry)
        if numbers.get(1) not in _DTYPES:
            return
        dtype, width = _DTYPES[numbers[1]]
        dims = _message(parts[2][0])[1].get(2, []) if 2 in parts else []
        shape = tuple(_message(dim)[0].get(1, 0) for dim in dims)
        file = self.path.with_name(f"{self.path.stem}.data-{numbers.get(3, 0):05d}-of-{shards:05d}")
        offset, size, count = numbers.get(4, 0), numbers.get(5, 0), width * math.prod(shape)
        if not file.is_file() or file.stat().st_size < offset + size or size != count:
            raise UserError(f"{file}: missing or cut off (tensor {name!r}); download it again")
        self.entries[name] = TensorEntry(file, dtype, shape, offset, size)


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield every key and value of a table."""
    if len(data) < 48 or struct.unpack("<Q", data[-8:])[0] != _MAGIC:
        raise IndexError("no footer")
    footer = data[-48:]
    _, at = _varint(footer, 0)  # of the metaindex block: offset ...
    _, at = _varint(footer, at)  # ... and size
    for _, handle in _block(data, *_handle(footer, at)):
        yield from _block(data, *_handle(handle, 0))


def _handle(buffer: bytes, at: int) -> tuple[int, int]:
    offset, at = _varint(buffer, at)
    return offset, _varint(buffer, at)[0]


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries of the block at ``offset``; a byte behind it names its compression."""
    if data[offset + size] != 0:
        raise IndexError("compressed")
    block = data[offset : offset + size]
    end = size - 4 - 4 * struct.unpack("<I", block[-4:])[0]
    key, at = b"", 0
    while at < end:
        shared, at = _varint(block, at)
        unshared, at = _varint(block, at)
        length, at = _varint(block, at)
        key = key[:shared] + block[at : at + unshared]
        at += unshared
        yield key, block[at : at + length]
        at += length


def _message(message: bytes) -> tuple[dict[int, int], dict[int, list[bytes]]]:
    """Return a protobuf message's numbers and its submessages or strings, both by field."""
    numbers: dict[int, int] = {}
    parts: dict[int, list[bytes]] = {}
    for field in UnknownFieldSet(Empty.FromString(message)):
        if isinstance(field.data, bytes):
            parts.setdefault(field.field_number, []).append(field.data)
        else:
            numbers[field.field_number] = field.data
    return numbers, parts


def _varint(buffer: bytes, at: int) -> tuple[int, int]:
    """Return the number at ``at`` and where it ends: seven bits a byte, the lowest first."""
    value = shift = 0
    while True:
        byte = buffer[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
