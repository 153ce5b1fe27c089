"""Safetensors files: headers that are checked before they are believed, tensors read by rows, written one at a time.

The format (https://github.com/huggingface/safetensors#format): eight bytes, the header's length as a little-endian u64;
the header, JSON, name -> dtype, shape, place; then the data.

*Checking.* Such files are downloaded from strangers, and some are cut off on the way. So before anything is allocated
or read by what a header says, the safetensors library compares it with the file: dtypes and shapes, that every tensor
has as many bytes as these take, that the data of all tensors lie within the file, one after the other, and that nothing
lies between or behind them where something could hide. It maps the file for that and reads no tensor. Beside that no
name may be there twice (JSON readers keep the last one, others may keep the first).

*Reading.* A :class:`TensorEntry` says where a tensor lies, a :class:`RowRange` which of its rows are meant, and
:func:`read_rows` copies them into memory of their own. Mapping the file (``mmap``) would cost the same only as long as
no cast follows; with one, the mapped pages stay resident beside the copies (docs/benchmarks.md: 1.7 times the model).
Mapped rows of a fused qkv would also keep all of it alive, and a file that is overwritten during training would take
the weights with it.

*Checksums.* Files that Tandem alone reads again, its caches, carry a CRC-32 of themselves in their metadata: of their
name, which says what they hold, and of all bytes, header included, with zeros in its own place. :func:`read_checked`
reads nothing that does not fit it, nor a whole file in the place of another. A CRC-32
finds every change of up to 32 neighbouring bits and all but one in 2^32 of the others, at several GB/s.

*Writing.* ``safetensors.torch.save_file`` wants all tensors at once; a 24 GB model then needs 24 GB of memory. The
format allows less: the header only needs dtypes and shapes, and the data follows tensor by tensor, ordered by falling
item size, then by name, as safetensors itself does, so that each begins at a multiple of its item size. Metadata is
sorted, so that equal content gives equal bytes.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from library.checksums import shards_of
from library.errors import UserError, reason_of
from library.files import atomic_path, broken_link, keys_once, make_way, open_own, read_json, read_toml, reading
from library.gguf_header import MAGIC, read_gguf_header

MAX_HEADER_BYTES = 100_000_000
_NAMES = read_toml(Path(__file__).with_name("dtype_names.toml"))[0]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in _NAMES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHECKSUM = "crc32_with_name"  # in the metadata, eight hex digits
_CHECKSUM_PLACE = re.compile(rb'"crc32_with_name":"([0-9a-f]{8})"')  # a quote within a string would be escaped
TensorSpecs = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> (dtype, shape)


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: ``dtype`` as headers write it, ``offset`` of the first of its ``bytes`` in ``file``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int

    @property
    def numbers(self) -> int:
        """How many numbers it holds, of a format with one number an element."""
        return math.prod(self.shape)

    @property
    def spec(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Its dtype and shape as :func:`stream_safetensors` takes them; KeyError for a dtype torch does not have."""
        return DTYPES[self.dtype], self.shape


@dataclass(frozen=True)
class RowRange:
    """Rows ``start:stop`` of the tensor ``source``; all of them where ``stop`` is None."""

    source: str
    start: int = 0
    stop: int | None = None

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of these rows of a tensor of ``shape``; a scalar counts as one row."""
        stop = self.stop if self.stop is not None else (shape[0] if shape else 1)
        return (stop - self.start, *shape[1:])


def read_entries(files: Iterable[Path], may_be_cut: bool = False) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return name -> entry of all tensors in ``files``, in file order, and their metadata; only headers are read.

    ``may_be_cut``: also of a file whose end is missing; for those who only describe it.
    """
    entries: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    for file in files:
        header, data_start = _read_header(file, may_be_cut)
        metadata |= header.pop("__metadata__", {})
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            entries[name] = TensorEntry(Path(file), entry["dtype"], shape, data_start + begin, end - begin)
    return entries, metadata


def read_rows(entries: Mapping[str, TensorEntry], ranges: Sequence[RowRange]) -> Tensor:
    """Return the rows of ``ranges`` one below the other, in memory of their own, in the file's dtype."""
    first = entries[ranges[0].source]
    if first.dtype not in DTYPES:
        raise UserError(f"{first.file}: tensor {ranges[0].source!r} has dtype {first.dtype}; use the bf16 or fp16 file")
    for each in ranges:
        if (other := entries[each.source]).dtype != first.dtype:
            raise UserError(
                f"{other.file}: tensor {each.source!r} is {other.dtype}, {ranges[0].source!r} beside it {first.dtype}; "
                "save the model in one dtype"
            )
    dtype = DTYPES[first.dtype]
    shapes = [each.of(entries[each.source].shape) for each in ranges]
    total = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if first.shape else ()
    tensor = torch.empty(total, dtype=dtype)
    if type(tensor) is not Tensor:  # a fake one, of a walk that computes nothing: it has no memory to read into
        return tensor
    buffer = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # it is one
    filled = 0
    for each, shape in zip(ranges, shapes, strict=True):
        entry = entries[each.source]
        row_bytes = math.prod(entry.shape[1:]) * dtype.itemsize
        count = shape[0] * row_bytes
        with open(entry.file, "rb", buffering=0) as file:
            file.seek(entry.offset + each.start * row_bytes)
            _read_exactly(file, buffer[filled : filled + count])
        filled += count
    return tensor


def read_tensor(entries: Mapping[str, TensorEntry], name: str) -> Tensor:
    """Return the tensor ``name``; see :func:`read_rows`."""
    return read_rows(entries, [RowRange(name)])


def _read_exactly(file: RawIOBase | BufferedReader, view: memoryview) -> None:
    """Fill ``view`` from ``file``; a single read gives at most 2 GiB on Linux."""
    done = 0
    while done < len(view):
        got = file.readinto(view[done:])
        if not got:
            raise OSError(f"{getattr(file, 'name', 'file')} became shorter while it was read")
        done += got


def weight_files(path: Path) -> list[Path]:
    """Return the files of weights behind ``path``: itself, or those of a diffusers or transformers folder.

    A file that is one of several, ``model-00001-of-00004.safetensors``, stands for all of them.
    """
    if path.is_file():
        if path.suffix.lower() not in (".safetensors", ".gguf"):
            raise UserError(
                f"{path}: weights are read from .safetensors and .gguf files; convert it or download such a file"
            )
        shards = shards_of(path)
        if missing := [shard.name for shard in shards if not shard.is_file()]:
            raise UserError(f"{path}: one of {len(shards)} files, {missing[0]} is not beside it; download it too")
        return shards
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder{broken_link(path)}; check the path")
    if index := find_index(path):
        shards = [path / name for name in shard_names(index)]
        for shard in shards:
            if not shard.is_file():
                raise UserError(f"{shard}: missing, but {index.name} lists it; download it again")
        return shards
    if whole := [path / name for name in _WHOLE if (path / name).is_file()]:
        return whole[:1]
    variants = [file for name in _WHOLE for file in path.glob(name.replace(".", ".*.")) if shards_of(file) == [file]]
    if len(variants) == 1:
        return variants
    if several := len(list(path.glob("*.safetensors"))):
        raise UserError(f"{path}: {several} safetensors files and no index; give one of the files")
    raise UserError(f"{path}: no .safetensors weights in this folder; download the model with its safetensors files")


_WHOLE = ("diffusion_pytorch_model.safetensors", "model.safetensors")  # of a folder whose weights are one file


def find_index(folder: Path) -> Path | None:
    """Return the list of a folder's shards, if there is one: of the weights, else of their only form (``fp16``).

    diffusers and transformers write the latter as ``model.safetensors.index.fp16.json``.
    """
    plain = sorted(folder.glob("*.safetensors.index.json"))
    variants = sorted(folder.glob("*.safetensors.index.*.json"))
    if any((folder / name).is_file() for name in _WHOLE) or len(variants) != 1:
        variants = []
    return next(iter([*plain, *variants]), None)


def shard_names(index: Path) -> list[str]:
    """Return the names of the weight files that a ``*.safetensors.index.json`` lists, sorted.

    Raises:
        UserError: it is no such list, or names a file elsewhere than beside itself.
    """
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"{index}: not a list of weight files; download it again") from None
    for name in names:
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise UserError(f"{index}: lists {name!r}, which is no file beside it; download the model again")
    return names


def read_safetensors_header(path: str | Path) -> dict[str, dict]:
    """Return a safetensors file's JSON header, read without touching a tensor.

    Raises:
        UserError: the file does not exist, cannot be read, or its header is not true of it.
    """
    return _read_header(path)[0]


_NOT_SAFETENSORS = {  # how files begin that people take for one, what they are, and the remedy
    b"PK\x03\x04": "but a pickled PyTorch file, which is not opened; convert it to safetensors",
    b"version ": "but the pointer that git-lfs leaves; fetch the file itself (git lfs pull)",
    b"<!": "but a web page, as a download that needs a login leaves; download it again",
}


def _read_header(path: str | Path, may_be_cut: bool = False) -> tuple[dict[str, dict], int]:
    """Return the header and where the data begins."""
    try:
        with reading(path), open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            beginning = file.read(8)
            if not size:
                raise UserError(f"{path}: is empty; download or convert it again")
            if beginning.startswith(MAGIC):
                return read_gguf_header(path, file, may_be_cut)
            if size < 8:
                raise ValueError(f"only {size} bytes")
            (length,) = struct.unpack("<Q", beginning)
            if length > size - 8:
                raise ValueError("header longer than the file")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
            text = file.read(length)
        header = json.loads(text.decode("utf-8"), object_pairs_hook=keys_once)
        with reading(path):
            _check_header(path, may_be_cut)
        if wrong := next((name for name, entry in header.items() if not isinstance(entry, dict | None)), None):
            raise ValueError(f"{wrong!r} is no object in its header")
    except MemoryError:
        raise UserError(f"{path}: cannot be mapped into memory; raise ulimit -v") from None
    except UserError:
        raise
    except (ValueError, struct.error, RecursionError) as error:
        known = (what for begins, what in _NOT_SAFETENSORS.items() if beginning.startswith(begins))
        gguf = Path(path).suffix.lower() == ".gguf"
        reason, kind = ("it does not begin with GGUF's magic", "GGUF") if gguf else (error, "safetensors")
        why = next(known, f"or a damaged one ({reason}); download or convert it again")
        raise UserError(f"{path}: not a {kind} file {why}") from None
    if header.get("__metadata__", "") is None:  # the library allows it
        del header["__metadata__"]
    return header, 8 + length


def _check_header(path: str | Path, may_be_cut: bool) -> None:
    """Let the safetensors library check a file's header against the file.

    Raises:
        ValueError: the header is not true of the file.
    """
    try:
        with safe_open(path, "np"):
            return
    except SafetensorError as error:
        if "not fully covered" not in str(error):
            raise ValueError(reason_of(error).removeprefix("Error while deserializing header: ")) from None
        if not may_be_cut:  # the library looks at the length last: all else is right
            raise ValueError("its end is missing, or more follows than the header says") from None


def tensor_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor's data."""
    return dtype.itemsize * math.prod(shape)


def stream_safetensors(
    path: str | Path,
    layout: TensorSpecs,
    produce: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
    checked: bool = False,
) -> None:
    """Write a safetensors file in one step, holding one tensor at a time.

    Args:
        path: the file.
        layout: name -> (dtype, shape) of every tensor.
        produce: called once per name; returns the tensor, on any device.
        metadata: strings for the header.
        checked: with a checksum, for :func:`read_checked`.

    Raises:
        UserError: the file cannot be written.
        ValueError: ``produce`` returned another dtype or shape than ``layout`` says.
    """
    names = sorted(layout, key=lambda name: (-layout[name][0].itemsize, name))
    metadata = {**(metadata or {}), **({_CHECKSUM: "0" * 8} if checked else {})}
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in names:
        dtype, shape = layout[name]
        start, end = end, end + tensor_bytes(dtype, shape)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = struct.pack("<Q", len(text)) + text
    checksum = zlib.crc32(text, _of_name(path))
    if checked:
        make_way(path)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(text)
        for name in names:
            tensor = produce(name).detach().cpu().contiguous()
            if (tensor.dtype, tuple(tensor.shape)) != layout[name]:
                raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, announced as {layout[name]}")
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            file.write(data)
            if checked:
                checksum = zlib.crc32(data, checksum)
        if checked and (place := _CHECKSUM_PLACE.search(text)):
            file.seek(place.start(1))
            file.write(b"%08x" % checksum)


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    checked: bool = False,
) -> None:
    """Write ``tensors`` and string ``metadata`` as a safetensors file in one step; tensors may lie on any device.

    With ``checked`` it carries a checksum, for :func:`read_checked`.

    ``safetensors``' own writer takes a temporary name that nobody can recognise after a crash, and leaves files that
    only their owner may read.
    """
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    stream_safetensors(path, layout, lambda name: tensors[name], metadata, checked)


def _of_name(path: str | Path) -> int:
    return zlib.crc32(os.fsencode(Path(path).name))


def is_complete(path: Path) -> bool:
    """Whether a file has the length that its header says, and a checksum, which those of earlier versions have not."""
    try:
        return _CHECKSUM in read_safetensors_header(path).get("__metadata__", {})
    except UserError:
        return False


def read_checked(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a cache file that was written ``checked``, in memory of their own.

    Raises:
        UserError: it is missing, cannot be read, has no checksum, or another one than its content. It is deleted then,
            so that the next start makes it again.
    """
    try:
        with open_own(path) as file:
            whole = torch.empty(file.seek(0, 2), dtype=torch.uint8)
            content = memoryview(whole.numpy())  # type: ignore[arg-type]  # it is one
            file.seek(0)
            _read_exactly(file, content)
    except FileNotFoundError:
        raise _made_again(path, "missing") from None
    except OSError as error:
        raise _made_again(path, f"cannot be read ({error.strerror or error})") from None
    end = 8 + int.from_bytes(content[:8], "little")
    place = _CHECKSUM_PLACE.search(content, 8, min(end, len(content)))
    if place is None:
        raise _made_again(path, "damaged (no checksum in it)")
    begin, stored = place.start(1), bytes(place[1])
    crc = zlib.crc32(content[begin + 8 :], zlib.crc32(b"0" * 8, zlib.crc32(content[:begin], _of_name(path))))
    if b"%08x" % crc != stored:
        raise _made_again(path, "damaged (its checksum does not fit)")
    tensors = {}
    for name, entry in json.loads(bytes(content[8:end])).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            data = whole[end + first : end + last]
            tensors[name] = data.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def _made_again(path: str | Path, reason: str) -> UserError:
    """Delete a cache file that cannot be used; return the error that says so."""
    with suppress(OSError):  # it is gone, or a folder lies in its place
        Path(path).unlink()
    return UserError(f"{path}: {reason}; start again with --resume auto: it is made anew before the model is loaded")
