"""Headers of GGUF files: odd ones are refused in a line, damaged ones too, and none costs time or memory."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from library.errors import UserError
from library.safetensors_io import read_entries, read_safetensors_header
from tests.fuzz import harmless, share_of_cases
from tests.precision.files.gguf_files import write_gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(
    tensors: list[tuple[str, list[int], int, int]], values: bytes = b"", count: int = 0, version: int = 3
) -> bytes:
    """Return a header of ``tensors`` (name, sides from the innermost, type, offset) and ``count`` metadata."""
    infos = b"".join(
        text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, kind, offset)
        for name, sides, kind, offset in tensors
    )
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), count) + values + infos


def write(path: Path, content: bytes, data: int) -> Path:
    path.write_bytes(content + bytes(-len(content) % 32 + data))
    return path


F32, Q8_0 = 0, 8
ALIGNMENT_OF_3 = text("general.alignment") + struct.pack("<II", 4, 3)
FOURS = struct.pack("<IIQII", 9, 4, 2, 4, 4)  # an array of numbers
SPLIT = text("split.count") + struct.pack("<IH", 2, 2)


@pytest.mark.parametrize(
    ("content", "data", "said"),
    [
        (header([("a", [4], F32, 0)]), 8, "file ends before tensor 'a'"),
        (header([("a", [4], F32, 0), ("a", [4], F32, 32)]), 48, "the header has 'a' twice"),
        (header([("a", [4], F32, 0), ("b", [4], F32, 8)]), 48, "tensor 'b' overlaps another one or is not aligned"),
        (header([("a", [4], F32, 0), ("b", [16], F32, 0)]), 64, "overlaps another one or is not aligned"),
        (header([("a", [4], F32, 64)]), 128, "64 bytes before tensor 'a' belong to none"),
        (header([("a", [40], Q8_0, 0)]), 34, "is no whole number of blocks of Q8_0"),
        (header([("a", [2**40, 2**40], F32, 0)]), 34, "is no whole number of blocks"),
        (header([("a", [4] * 5, F32, 0)]), 4096, "'a' has 5 dimensions"),
        (header([("a", [4], 99, 0)]), 64, "'a' is of ggml's type 99, which is not known"),
        (header([("__metadata__", [4], F32, 0)]), 16, "'__metadata__' twice"),
        (header([], ALIGNMENT_OF_3, 1), 0, "an alignment of 3"),
        (header([], SPLIT, 1), 0, r"one of several parts of a GGUF model; join them first"),
        (header([], text("x") + struct.pack("<I", 77), 1), 0, "a value of type 77"),
        (header([], text("x") + struct.pack("<IIQ", 9, 9, 1), 1), 0, "an array of type 9"),
        (header([], text("x") + struct.pack("<IIQ", 9, 4, 2**62), 1), 0, "it ends within its header"),
        (header([], text("x") + struct.pack("<IIQ", 9, 8, 2**62), 1), 0, "it ends within its header"),
        (header([], text("general.architecture") + FOURS, 1), 0, r"general.architecture = \[4, 4\], of another type"),
        (header([], struct.pack("<Q", 2**60), 1), 0, "a name or text of"),
        (header([], b"", 2**60), 0, "it ends within its header"),
        (header([], version=1), 0, "GGUF version 1; 2 and 3 are read"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), 0, "a big-endian GGUF file"),
        (b"GGUF\x03", 0, "it ends within its header"),
        (header([("\udcff".encode("utf-8", "surrogatepass").decode("latin1"), [4], F32, 0)]), 16, None),
    ],
)
def test_what_a_header_says_is_held_against_the_file(
    content: bytes, data: int, said: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write(path, content, data) if len(content) > 8 else path.write_bytes(content)
    if said is None:
        read_entries([path])
        return
    with pytest.raises(UserError, match=said) as refusal:
        read_entries([path])
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)


def test_a_file_that_was_cut_off_is_refused_and_still_described(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"a.weight": torch.randn(8, 64), "b.weight": torch.randn(8, 64)})
    whole = path.read_bytes()
    for length in (len(whole) - 100, len(whole) // 2):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"m.gguf: a damaged GGUF file \(.*\); download it again"):
            read_safetensors_header(path)
    path.write_bytes(whole[:-100])
    assert read_entries([path], may_be_cut=True)[0]["b.weight"].shape == (8, 64)


def test_places_are_those_that_the_package_reads_from(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 32), "b": torch.randn(5), "c": torch.randn(2, 64)}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "flux")
    writer.add_custom_alignment(128)
    writer.add_bool("yes", True)
    writer.add_array("numbers", [1, 2, 3])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    entries, metadata = read_entries([tmp_path / "m.gguf"])
    for theirs in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        own = entries[theirs.name]
        assert (own.offset, own.bytes, own.dtype) == (theirs.data_offset, theirs.n_bytes, "F32")
        assert own.shape == tuple(np.flip(theirs.shape))
    assert metadata["yes"] == "True"


@share_of_cases(0.03)
@given(place=st.integers(0, 400), value=st.integers(0, 255), cut=st.none() | st.integers(0, 900))
def test_any_damage_is_taken_or_refused_in_a_line(
    place: int, value: int, cut: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    path = write_gguf(folder / "m.gguf", {"a.weight": torch.ones(4, 64)}, tokens=["x"], strings={"k": "v"})
    content = bytearray(path.read_bytes())
    content[min(place, len(content) - 1)] = value
    path.write_bytes(content[:cut])
    if (read := harmless(read_entries, [path])) is not None:
        assert all(entry.offset + entry.bytes <= len(content[:cut]) for entry in read[0].values())
