"""The header of a GGUF file, and what its metadata says; both checked before they are believed.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), all little-endian: the magic ``GGUF``, a version
(u32), the numbers of tensors and of metadata (u64); the metadata, each a name, a type and a value; for each tensor its
name, its sides *from the innermost to the outermost*, its type and its place; padding up to a multiple of
``general.alignment``; the data, in which each tensor begins at such a multiple too.

Sides are turned round here, so that a linear weight is [out, in]. ComfyUI's converters reshape tensors whose rows do
not fill whole blocks and note the shape they had (``comfy.gguf.orig_shape.<tensor>``); it is given back. Files of
language models hold a tokenizer of some hundred thousand strings; :func:`read_gguf_metadata` reads these too, the
header passes over arrays. Text encoders and language models, which llama.cpp converts, get transformers' names back
(``tensor_mapping.py`` of the ``gguf`` package); image models have kept theirs.

The ``gguf`` package's ``GGUFReader`` would map the file and believe it: with a damaged length it runs through billions
of entries. What the package knows of types and their sizes is used.
"""

from __future__ import annotations

import math
import re
import struct
import tomllib
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from library.errors import UserError, error_prefix

MAGIC = b"GGUF"
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
_MAX_STRING = 1 << 24  # bytes; a chat template has some ten thousand
_MAX_DIMENSIONS = 4  # of ggml
# a value's type -> its struct format; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BLOCK = re.compile(r"(.*\b(?:blk|layers))\.(\d+)\.(.*)")
LANGUAGE_MODELS = ("llama", "qwen2", "qwen3", "smollm3")  # those that are read, by general.architecture; Mistral: llama
_TABLES = tomllib.loads(Path(__file__).with_name("gguf_names.toml").read_text(encoding="utf-8"))
# general.architecture -> llama.cpp's names against transformers', * for the block
_NAMES = dict.fromkeys(("t5", "t5encoder"), _TABLES["t5"])
_NAMES |= dict.fromkeys((*LANGUAGE_MODELS, "qwen2vl", "qwen3vl"), _TABLES["qwen"])
_TYPES: dict[str, Any] = {  # what llama.cpp writes, by the end of the name
    **dict.fromkeys(("general.architecture", "ggml.model", "ggml.pre", "chat_template", "rope.scaling.type"), str),
    **dict.fromkeys(("general.alignment", "split.count", "_token_id"), int),
    "ggml.tokens": list[str],
    "ggml.merges": list[str],
    "ggml.token_type": list[int],
    "ggml.scores": list[float],
}


def read_gguf_metadata(path: str | Path, arrays: bool = True) -> dict[str, Any]:
    """Return the metadata of a file by name: numbers, strings and lists; without ``arrays`` long ones are empty.

    Raises:
        UserError: as :func:`read_gguf_header`.
    """
    with error_prefix(str(path)), open(path, "rb") as file:
        return _checked(_Header(file, arrays), may_be_cut=True)[2]


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that ``path`` is, or that a folder without ``config.json`` holds; None: neither.

    Raises:
        UserError: the folder holds several.
    """
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" else None
    files = sorted(path.glob("*.gguf")) if not (path / "config.json").is_file() else []
    if len(files) > 1:
        raise UserError(f"{path}: {len(files)} GGUF files, {files[0].name} the first; give the path of one")
    return files[0] if files else None


def has_language_model(file: Path) -> bool:
    """Return whether a GGUF file holds a language model and its tokenizer, and not an image model's text encoder."""
    try:
        metadata = read_gguf_metadata(file, arrays=False)
    except (UserError, OSError):
        return False
    return metadata.get("general.architecture") in LANGUAGE_MODELS and "tokenizer.ggml.tokens" in metadata


def read_gguf_header(path: str | Path, file: BufferedReader, may_be_cut: bool = False) -> tuple[dict[str, Any], int]:
    """Return the header in the form of a safetensors file's, and where the data begins.

    Dtypes are safetensors' names where it has the type (``F16``, ``BF16``, ``F32``), else ggml's (``Q4_K``).

    Args:
        path: for messages.
        file: opened for reading, anywhere in it.
        may_be_cut: also of a file whose end is missing.

    Raises:
        UserError: the header is not true of the file, or of a kind that is not read.
    """
    with error_prefix(str(path)):
        return _checked(_Header(file), may_be_cut)[:2]


def _checked(header: _Header, may_be_cut: bool) -> tuple[dict[str, Any], int, dict[str, Any]]:
    try:
        return header.read(may_be_cut)
    except UserError:
        raise
    except (ValueError, struct.error, OverflowError) as error:
        raise UserError(f"a damaged GGUF file ({error}); download it again") from None


class _Header:
    """``whole``: arrays are read, too."""

    def __init__(self, file: BufferedReader, whole: bool = False) -> None:
        self.file, self.whole = file, whole
        self.size = file.seek(0, 2)
        file.seek(0)

    def read(self, may_be_cut: bool) -> tuple[dict[str, Any], int, dict[str, Any]]:
        """Return the header in the form of a safetensors file's, where the data begins, and the metadata."""
        if self._take(len(MAGIC)) != MAGIC:
            raise UserError("no GGUF file; download it again")
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise UserError("a big-endian GGUF file; use the little-endian one")
        if version not in (2, 3):
            raise UserError(f"GGUF version {version}; 2 and 3 are read: convert it again")
        tensors, values = self._number("Q"), self._number("Q")
        metadata = self._metadata(values)
        alignment = metadata.get("general.alignment", 32)
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"an alignment of {alignment}")
        if int(metadata.get("split.count", 1)) > 1:
            raise UserError("one of several parts of a GGUF model; join them first (llama-gguf-split --merge)")
        header = self._tensors(tensors, metadata)
        start = -(-self.file.tell() // alignment) * alignment
        self._check_places(header, None if may_be_cut else self.size - start, alignment)
        names = _NAMES.get(metadata.get("general.architecture", ""), {})
        texts = {name: str(value) for name, value in metadata.items() if not isinstance(value, list)}
        named = {_renamed(name, names): entry for name, entry in header.items()}
        return {"__metadata__": texts, **named}, start, metadata

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            name, kind = self._string(), self._number("I")
            if name in metadata:
                raise ValueError(f"the header has {name!r} twice")
            keep = self.whole or name.startswith(_ORIGINAL_SHAPE)
            metadata[name] = self._array(keep) if kind == _ARRAY else self._value(kind)
        for name, value in metadata.items():
            _check_type(name, value)
        return metadata

    def _tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        header: dict[str, dict[str, Any]] = {}
        for _ in range(count):
            name = self._string()
            if name in header or name == "__metadata__":
                raise ValueError(f"the header has {name!r} twice")
            dimensions = self._number("I")
            if dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"{name!r} has {dimensions} dimensions")
            sides = [self._number("Q") for _ in range(dimensions)]
            number, offset = self._number("I"), self._number("Q")
            try:
                kind = GGMLQuantizationType(number)
            except ValueError:
                raise UserError(f"{name!r} is of ggml's type {number}, which is not known; use a Q8_0 file") from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            numbers = math.prod(sides)
            if (sides[0] if sides else 1) % block or numbers >= 2**63:
                raise ValueError(f"{name!r} of shape {sides[::-1]} is no whole number of blocks of {kind.name}")
            shape = metadata.get(f"{_ORIGINAL_SHAPE}{name}")
            if not (isinstance(shape, list) and 0 < len(shape) < 64 and all(type(side) is int for side in shape)):
                shape = sides[::-1]
            if math.prod(shape) != numbers or min(shape, default=1) < 0:
                raise ValueError(f"{name!r} holds {numbers} numbers and had the shape {shape}")
            end = offset + numbers // block * block_bytes
            header[name] = {"dtype": kind.name, "shape": shape, "data_offsets": [offset, end]}
        return header

    def _check_places(self, header: dict[str, dict[str, Any]], data_bytes: int | None, alignment: int) -> None:
        """Hold the tensors' places against each other and against the size of the data."""
        reached = 0
        for begin, end, name in sorted((*entry["data_offsets"], name) for name, entry in header.items()):
            if data_bytes is not None and end > data_bytes:
                raise ValueError(f"the file ends before tensor {name!r}")
            if begin < reached or begin % alignment:
                raise ValueError(f"tensor {name!r} overlaps another one or is not aligned")
            if begin - reached >= alignment:
                raise ValueError(f"{begin - reached} bytes before tensor {name!r} belong to none")
            reached = end

    def _array(self, keep: bool) -> list[Any]:
        """Return an array, or pass over it if it is long and not to be kept."""
        kind, length = self._number("I"), self._number("Q")
        keep |= length <= (8 if kind == _STRING else 1024)  # which messages show where one value is wanted
        if kind == _STRING:
            if keep:
                return [self._string() for _ in range(length)]
            for _ in range(length):
                self._skip(self._number("Q"))
            return []
        if kind not in _SCALARS:
            raise ValueError(f"an array of type {kind}")
        start, size = self.file.tell(), length * struct.calcsize("<" + _SCALARS[kind])
        self._skip(size)
        if not keep:
            return []
        self.file.seek(start)
        return [value for (value,) in struct.iter_unpack("<" + _SCALARS[kind], self._take(size))]

    def _value(self, kind: int) -> str | int | float | bool:
        if kind == _STRING:
            return self._string()
        if kind not in _SCALARS:
            raise ValueError(f"a value of type {kind}")
        return self._number(_SCALARS[kind])

    def _string(self) -> str:
        length = self._number("Q")
        if length > _MAX_STRING:
            raise ValueError(f"a name or text of {length} bytes")
        return self._take(length).decode("utf-8")

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _take(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) < count:
            raise ValueError("it ends within its header")
        return data

    def _skip(self, count: int) -> None:
        if self.file.tell() + count > self.size:
            raise ValueError("it ends within its header")
        self.file.seek(count, 1)


def _check_type(name: str, value: Any) -> None:
    """Refuse a value of another type than llama.cpp's."""
    kind = next((kind for end, kind in _TYPES.items() if name.endswith(end)), Any)
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        raise ValueError(f"{name} = {value!r:.40}, of another type than llama.cpp writes") from None


def gguf_name(name: str) -> str:
    """Return llama.cpp's name for a tensor of a language model that transformers calls ``name``."""
    return _renamed(name, {theirs: ours for ours, theirs in _TABLES["qwen"].items()})


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Return the name that ``names`` has for a tensor, or its own."""
    stem, _, leaf = name.rpartition(".")
    block = _BLOCK.fullmatch(stem)
    new_stem = names.get(f"{block[1]}.*.{block[3]}" if block else stem)
    return name if new_stem is None else f"{new_stem.replace('*', block[2] if block else '')}.{leaf}"
