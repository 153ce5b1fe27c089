"""A safetensors file's header, believed only after it has been checked.

The format (https://github.com/huggingface/safetensors#format): eight bytes, the header's length as a little-endian
u64; the header, JSON; the data. Such files are downloaded from strangers, and some are cut off on the way. So before
anything is allocated or read by what a header says, this is held against the file:

- the header is no longer than the file, nor than 100 MB, the limit of the safetensors library;
- no name is there twice (JSON readers keep the last one, others may keep the first), and metadata are strings;
- shapes are lists of whole numbers, and every tensor has as many bytes as its shape and dtype take;
- the data of all tensors lie within the file, one after the other: none overlap, and nothing lies between or
  behind them where something could hide. An offset that is no multiple of the item size is allowed, as it is by
  the safetensors library: bytes are copied, never addressed in place.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, cast

from library.errors import UserError

MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 64  # of a tensor in PyTorch
_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


def read_safetensors_header(path: str | Path, may_be_cut: bool = False) -> dict[str, dict]:
    """Return a safetensors file's JSON header, read without touching a tensor.

    Args:
        path: the file.
        may_be_cut: also of a file whose end is missing; for those who only describe it.

    Raises:
        UserError: the file does not exist, cannot be read, or its header is not true of it.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ValueError("header longer than the file")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_without_repetition)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path and its rights") from None
    except (ValueError, struct.error, RecursionError) as error:
        raise UserError(f"{path}: not a safetensors file ({error}); download or convert it again") from None
    _check_header(path, header, None if may_be_cut else size - 8 - length)
    return header


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the header has {twice!r} twice")
    return found


def _check_header(path: str | Path, header: object, data_bytes: int | None) -> None:
    """Hold every entry of a header against the others, and against the size of the file's data."""

    def refused(reason: str) -> UserError:
        return UserError(f"{path}: {reason}; download it again")

    if not isinstance(header, dict):
        raise refused("not a safetensors file (its header is no object)")
    if header.get("__metadata__", "") is None:  # allowed by the safetensors library
        del header["__metadata__"]
    metadata = header.get("__metadata__")
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise refused("its metadata are not strings by name")
    spans = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if problem := _entry_problem(entry):
            raise refused(f"tensor {name!r} {problem}")
        begin, end = entry["data_offsets"]
        if data_bytes is not None and end > data_bytes:
            raise refused(f"the file ends before tensor {name!r}")
        spans.append((begin, end, name))
    reached = 0
    for begin, end, name in sorted(spans):
        if begin < reached:
            raise refused(f"tensor {name!r} overlaps another one")
        if begin > reached:
            raise refused(f"{begin - reached} bytes before tensor {name!r} belong to none")
        reached = end
    if data_bytes is not None and reached < data_bytes:
        raise refused(f"{data_bytes - reached} bytes behind the last tensor belong to none")


def _entry_problem(entry: object) -> str | None:
    """Return what is wrong with one tensor's entry by itself."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return "has no dtype"
    shape, offsets = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        return "has no shape and data_offsets of whole numbers"
    if len(shape) > _MAX_DIMENSIONS:
        return f"has {len(shape)} dimensions"
    begin, end = offsets
    if end < begin:
        return f"ends at {end}, before it begins at {begin}"
    bits = _BITS.get(entry["dtype"])  # of a dtype that is not known here, no tensor is ever read
    if bits is not None and 8 * (end - begin) != bits * math.prod(shape):
        return f"has {end - begin} bytes, which are not {shape} of {entry['dtype']}"
    return None


def _sizes(values: object) -> list[int] | None:
    whole = isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)
    return cast(list[int], values) if whole else None
