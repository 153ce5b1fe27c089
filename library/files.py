"""Writing files and folders in one step, and putting right what a killed process left behind.

What is written goes to a temporary name in the same folder, ``.<name>.<process>.tmp``, is flushed to the disk and then
renamed, which the operating system does in one step: a reader sees the old content or the new, never half of one. A
folder that exists cannot be renamed onto, so the two change places where the file system can do that (Linux'
``renameat2``), and elsewhere the old one steps aside as ``.<name>.<process>.old`` for a moment. A folder that is to go
is renamed to ``.<name>.<process>.gone`` first, so that a half-deleted one is never taken for a whole one.

``<process>`` names machine (or container), process and when it began. ``clear_leftovers`` thereby knows whose work in
progress it must leave alone: that of processes still running, and for ten minutes that of other machines on the same
disk.

A safetensors file's header, believed only after it has been checked.

The format (https://github.com/huggingface/safetensors#format): eight bytes, the header's length as a little-endian
u64; the header, JSON; the data. Such files are downloaded from strangers, and some are cut off on the way. So before
anything is allocated or read by what a header says, this is held against the file:

- the header is no longer than the file, nor than 100 MB, the limit of the safetensors library;
- no name is there twice (JSON readers keep the last one, others may keep the first), and metadata are strings;
- shapes are lists of whole numbers, and every tensor has as many bytes as its shape and dtype take;
- the data of all tensors lie within the file, one after the other: none overlap, and nothing lies between or
  behind them where something could hide. An offset that is no multiple of the item size is allowed, as it is by
  the safetensors library: bytes are copied, never addressed in place.

Writing a safetensors file one tensor at a time.

``safetensors.torch.save_file`` wants all tensors at once; a 24 GB model then needs 24 GB of memory. The
format (https://github.com/huggingface/safetensors#format) allows less: the header only needs dtypes and
shapes, and the data follows tensor by tensor. Header: a little-endian u64 with its length, then JSON,
padded with spaces to a multiple of 8. Tensors are ordered by falling item size, then by name, as
safetensors itself does, so that each begins at a multiple of its item size. Metadata is sorted, so that
equal content gives equal bytes.

Writing files so that nothing already on disk is lost (see :mod:`library.files`), and recognising them again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
import os
import platform
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from library.errors import UserError, WriteError

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<begun>\d+)\.(?P<kind>tmp|old|gone)")
# Another machine's leftover is one when it has not been touched for so long; two renames take no time.
_FOREIGN_SECONDS = {"tmp": 600.0, "gone": 600.0, "old": 5.0}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it to ``path`` when the block ends without an error.

    Parent folders are made. When the block raises, the temporary file is removed and ``path`` is untouched.

    Raises:
        WriteError: the folder cannot be written to, or the disk is full.
    """
    target = Path(path)
    temporary = _beside(target, "tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _flush(temporary)
        os.replace(temporary, target)
    except OSError as error:
        raise WriteError(target, error.strerror or str(error)) from error
    finally:
        with suppress(OSError):  # the folder itself may be what cannot be used
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path]:
    """Yield an empty temporary folder; it takes the place of ``folder`` when the block ends without an error.

    Raises:
        WriteError: it, or a file in it, cannot be written; ``folder`` is as it was.
    """
    target = Path(folder)
    temporary = _beside(target, "tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for inner in [path for path in temporary.rglob("*") if path.is_dir()]:
            _flush_names(inner)
        _flush_names(temporary)
        _replace_folder(temporary, target)
        _flush_names(target.parent)
    except OSError as error:
        raise WriteError(target, error.strerror or str(error)) from error
    except WriteError as error:  # a file in it, by a name that nobody has seen
        raise WriteError(target, error.reason) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def discard(path: str | Path) -> None:
    """Delete a file or folder; a folder is never seen half deleted under its name."""
    path = Path(path)
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    gone = _beside(path, "gone")
    os.replace(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def clear_leftovers(folder: str | Path) -> list[Path]:
    """Delete what killed processes left half-written in ``folder``; return what was put back in its place.

    Put back is a folder that was being replaced when its process was killed, and has no successor yet.

    Args:
        folder: not looked into deeper; may be missing.
    """
    restored: list[Path] = []
    try:
        with os.scandir(folder) as entries:  # pathlib takes seconds for a cache of 100,000 files
            names = sorted(entry.name for entry in entries if entry.name.startswith("."))
    except OSError:
        return restored
    for name in names:
        match = _LEFTOVER.fullmatch(name)
        leftover = Path(folder) / name
        if match is None or _in_use(match, leftover):
            continue
        final = leftover.with_name(match["name"])
        with suppress(OSError):
            if match["kind"] == "old" and not final.exists():
                os.replace(leftover, final)
                restored.append(final)
            elif leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
    return restored


def _in_use(match: re.Match[str], leftover: Path) -> bool:
    machine, pid, owner = match["machine"], match["pid"], f"{match['machine']}-{match['pid']}-{match['begun']}"
    if owner == _this_process():
        return False  # what is looked for at the start was not made by this process, but by one of the same numbers
    if machine == _machine() and match["begun"] != "0":
        return _begun(int(pid)) == int(match["begun"])
    try:
        return time.time() - leftover.stat().st_ctime < _FOREIGN_SECONDS[match["kind"]]
    except OSError:
        return False


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{_this_process()}.{kind}")


def _this_process() -> str:
    return _process_name(os.getpid())


@functools.lru_cache(maxsize=4)  # a forked process has another number
def _process_name(pid: int) -> str:
    return f"{_machine()}-{pid}-{_begun(pid)}"


@functools.cache
def _machine() -> str:
    """Return eight hex digits for what numbers its processes together: this boot of this machine, or a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        known = f"{boot}{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        known = platform.node()
    return hashlib.blake2b(known.encode(), digest_size=4).hexdigest()


def _begun(pid: int) -> int:
    """Return when a process began, in clock ticks since boot (proc(5): field 22 of stat); 0 if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces
        return 0 if state in ("Z", "X") else int(fields[18])
    except (OSError, ValueError, IndexError):
        return 0


def _replace_folder(new: Path, folder: Path) -> None:
    if not folder.exists():
        os.replace(new, folder)
    elif not _exchange(new, folder):
        old = _beside(folder, "old")
        os.replace(folder, old)
        os.replace(new, folder)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places in one step; return whether this system and file system can."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return False
    paths = os.fsencode(one), os.fsencode(other)
    return bool(renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0)


def _flush_names(folder: Path) -> None:
    """Wait until a folder's list of names is on the disk; some network file systems have no such thing."""
    with suppress(OSError):
        _flush(folder)


def _flush(path: Path) -> None:
    """Wait until what ``path`` holds is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
TensorSpecs = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> (dtype, shape)


def tensor_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor's data."""
    return dtype.itemsize * math.prod(shape)


def stream_safetensors(
    path: str | Path,
    layout: TensorSpecs,
    produce: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file in one step, holding one tensor at a time.

    Args:
        path: the file.
        layout: name -> (dtype, shape) of every tensor.
        produce: called once per name; returns the tensor, on any device.
        metadata: strings for the header.

    Raises:
        UserError: the file cannot be written.
        ValueError: ``produce`` returned another dtype or shape than ``layout`` says.
    """
    names = sorted(layout, key=lambda name: (-layout[name][0].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in names:
        dtype, shape = layout[name]
        start, end = end, end + tensor_bytes(dtype, shape)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name in names:
            tensor = produce(name).detach().cpu().contiguous()
            if (tensor.dtype, tuple(tensor.shape)) != layout[name]:
                raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, announced as {layout[name]}")
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


_FINGERPRINT_SLICES = 256  # evenly spaced slices hashed from a weight file ...
_FINGERPRINT_SLICE_BYTES = 16384  # ... of this many bytes each: 4 MiB read from a file of any size


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path`` in one step."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_safetensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write ``tensors`` and string ``metadata`` as a safetensors file in one step; tensors may lie on any device.

    ``safetensors``' own writer takes a temporary name that nobody can recognise after a crash, and leaves files that
    only their owner may read.

    Raises:
        WriteError: see :func:`library.files.atomic_path`.
    """
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    stream_safetensors(path, layout, lambda name: tensors[name], metadata)


def written_path(text: str, where: str) -> Path:
    """Return the path that a person wrote, with ``~`` resolved; it need not exist. ``where`` begins the message.

    Raises:
        UserError: it can be no path here: too long, of somebody without a home, with characters no name may have.
    """
    try:
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Path(text).expanduser()
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{where} {text[:80]!r} is no path that can be looked at ({reason}); correct it") from None
    return path


def shard_names(index: Path) -> list[str]:
    """Return the names of the weight files that a ``*.safetensors.index.json`` lists, sorted.

    Raises:
        UserError: it is no such list, or names a file elsewhere than beside itself.
    """
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"{index}: not a list of weight files; download it again") from None
    for name in names:
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise UserError(f"{index}: lists {name!r}, which is no file beside it; download the model again")
    return names


def fingerprint(path: str | Path) -> str:
    """Return 16 hex digits that change when the weights or configs under ``path`` change.

    A file's size and 256 evenly spaced slices of it are hashed, so a 24 GB checkpoint takes milliseconds. Any
    retrained or requantised file differs in every slice; a file edited by hand in a few bytes may be missed.
    A folder is the hash of its ``*.json``, ``*.safetensors`` and tokenizer files by relative name; where there are no
    safetensors, of PyTorch's and TensorFlow's weight files.

    Raises:
        UserError: ``path`` does not exist.
    """
    root = Path(path)
    if not root.exists():
        raise UserError(f"{path}: no such file or folder; check the path")
    wanted = {".json", ".safetensors", ".txt", ".model"}
    files = [root] if root.is_file() else sorted(f for f in root.rglob("*") if f.is_file())
    if root.is_dir():
        if not any(file.suffix == ".safetensors" for file in files):
            wanted |= {".bin", ".pth", *(file.suffix for file in files if file.suffix.startswith(".data-"))}
        files = [file for file in files if file.suffix in wanted]
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{'' if file == root else file.relative_to(root)}|{size}|".encode())
        with open(file, "rb") as data:
            if size <= _FINGERPRINT_SLICES * _FINGERPRINT_SLICE_BYTES:
                digest.update(data.read())
                continue
            for i in range(_FINGERPRINT_SLICES):
                data.seek(i * (size - _FINGERPRINT_SLICE_BYTES) // (_FINGERPRINT_SLICES - 1))
                digest.update(data.read(_FINGERPRINT_SLICE_BYTES))
    return digest.hexdigest()[:16]


def weights_fingerprint(path: str | Path) -> str:
    """Return the fingerprint of a network's weights, the same for a folder and for the only weight file in it.

    So a LoRA knows its base again, whether the folder is named or its file.

    Raises:
        UserError: ``path`` does not exist.
    """
    files = list(Path(path).glob("*.safetensors"))  # of a file: nothing
    return fingerprint(files[0] if len(files) == 1 else path)
