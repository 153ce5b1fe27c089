"""Where the tensors of a TensorFlow checkpoint lie, read without TensorFlow.

A checkpoint ``model.ckpt`` is ``model.ckpt.index`` and ``model.ckpt.data-00000-of-00001``. The data file is tensors
one behind the other; the index is a table of LevelDB's kind
(https://github.com/google/leveldb/blob/main/doc/table_format.md): a footer of 48 bytes points to an index block, whose
values point to data blocks. A block is entries with the prefix they share with the one before, then the restart points.
The keys are tensor names, the values ``BundleEntryProto`` messages (tensorflow/core/protobuf/tensor_bundle.proto):
dtype = 1, shape = 2, shard_id = 3, offset = 4, size = 5. The entry without a name is the header. TensorFlow writes the
index without compression (``TableBuilderOptions`` in tensor_bundle.cc).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

from library.errors import UserError
from library.models.weights import Stored, WeightFiles

_MAGIC = 0xDB4775248B80FB57
_DTYPES = {1: ("F32", 4), 2: ("F64", 8), 14: ("BF16", 2), 19: ("F16", 2)}  # tensorflow/core/framework/types.proto


class TensorFlowFiles(WeightFiles):
    """The floating point tensors of a checkpoint, by TensorFlow's names."""

    def __init__(self, index: Path) -> None:
        """Read ``index``, a ``*.index`` file, and find the data beside it.

        Raises:
            UserError: a file is missing, damaged, compressed, or cut off.
        """
        self.path, self.fp8 = index, None
        self._tensors: dict[str, Stored] = {}
        data = index.read_bytes()
        try:
            entries = dict(_table(data))
            shards = _message(entries.get(b"", b""))[0].get(1, 1)
            for key, value in entries.items():
                if key:
                    self._add(key.decode(), value, shards)
        except (IndexError, struct.error, UnicodeDecodeError, TypeError) as error:
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
        self._tensors[name] = Stored(file, dtype, shape, offset)


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
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                numbers[tag >> 3], at = _varint(message, at)
            case 2:
                length, at = _varint(message, at)
                parts.setdefault(tag >> 3, []).append(message[at : at + length])
                at += length
            case 5:
                at += 4  # the checksum
            case 1:
                at += 8
            case kind:
                raise IndexError(f"wire type {kind}")
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
