"""Files from strangers: whatever they say of themselves, one clear line, nothing run and nothing huge allocated."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from library.data.config import refuse_climbing
from library.data.images import decode, read_size
from library.errors import UserError
from library.files import write_text, written_path
from library.models.llm.sources import _outline
from library.precision.checkpoint import WeightFiles
from library.safetensors_io import read_safetensors_header, shard_names


def entry(begin: int, end: int, shape: list | None = None, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def write(path: Path, header: object, data: int, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data))
    return path


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "invalid offset for tensor `b`"),
        ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "invalid offset for tensor `.`"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16, "invalid offset for tensor `b`"),
        ({"a": entry(0, 8)}, 12, "its end is missing, or more follows"),
        ({"a": entry(0, 8)}, 4, "its end is missing, or more follows"),
        ({"a": entry(0, 2**62, [2**60])}, 8, "overflow computing buffer size"),
        ({"a": entry(0, 8, [3])}, 8, "invalid shape, data type, or offset"),
        ({"a": entry(0, 6, [1])}, 6, "invalid shape, data type, or offset"),
        ({"a": entry(8, 0, [2])}, 8, "invalid"),
        ({"a": entry(0, 8, [-2])}, 8, "invalid value: integer `-2`"),
        ({"a": entry(0, 8, [2.0])}, 8, "invalid type: floating point"),
        ({"a": entry(0, 8, [True])}, 8, "invalid type: boolean"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "missing field `data_offsets`"),
        ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8, "missing field `dtype`"),
        ({"a": ["F32", [2], [0, 8]]}, 8, "'a' is no object"),
        ({"a": None}, 0, "invalid type: null"),
        ({"__metadata__": {"a": 1}}, 0, "invalid type: integer"),
        ([], 0, "not a safetensors file"),
        (b'{"a": 1, "a": 2}', 0, "'a' stands there twice"),
        (b"[" * 100_000, 0, "not a safetensors file"),
        (b"\xff\xfe", 0, "not a safetensors file"),
        (b"1" * 5000, 0, "not a safetensors file"),
    ],
)
def test_a_header_that_is_not_true_of_its_file_is_refused(
    tmp_path: Path, header: object, data: int, message: str
) -> None:
    path = write(tmp_path / "a.safetensors", header, data)
    with pytest.raises(UserError, match=message) as refusal:
        read_safetensors_header(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match=message):
        WeightFiles(path)


def test_headers_of_absurd_length_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "long.safetensors", {}, 0, length=2**63)
    with pytest.raises(UserError, match="header longer than the file"):
        read_safetensors_header(path)
    with open(path, "r+b") as file:  # sparse: takes no room on the disk
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)
    with pytest.raises(UserError, match="a header of 100000001 bytes; at most 100000000 are read"):
        read_safetensors_header(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04\x00\x00\x08\x08" + bytes(16), "but a pickled PyTorch file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "the pointer that git-lfs leaves"),
        (b"<!doctype html><html></html>", "but a web page"),
    ],
)
def test_what_is_often_taken_for_a_safetensors_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_safetensors_header(tmp_path / "a.safetensors")


def test_a_header_as_long_as_a_web_page_begins_is_no_web_page(tmp_path: Path) -> None:
    length = int.from_bytes(b"<!", "little")
    text = json.dumps({"__metadata__": {"x": ""}})
    text = json.dumps({"__metadata__": {"x": "a" * (length - len(text))}})
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", length) + text.encode())
    assert read_safetensors_header(tmp_path / "a.safetensors")["__metadata__"]["x"].startswith("aaa")


def test_headers_that_safetensors_writes_are_taken(tmp_path: Path) -> None:
    tensors = {
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(1.0),
        "half": torch.zeros(3, dtype=torch.float16),
        "codes": torch.zeros(5, dtype=torch.float8_e4m3fn),
        "flags": torch.zeros(3, dtype=torch.bool),
        "complex": torch.zeros(2, dtype=torch.complex64),
    }
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt"})
    header = read_safetensors_header(tmp_path / "a.safetensors")
    assert {k: tuple(v["shape"]) for k, v in header.items() if k != "__metadata__"} == {
        k: tuple(t.shape) for k, t in tensors.items()
    }


@pytest.mark.parametrize("name", ["../a.safetensors", "/a.safetensors", "sub/a.safetensors", "..", 3])
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, name: object) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="lists .*, which is no file beside it|not a list of weight files"):
        shard_names(index)


class Malice:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("legacy", [True, False])
def test_pickles_are_never_executed(tmp_path: Path, legacy: bool) -> None:
    proof, path = tmp_path / "executed", tmp_path / "pytorch_model.bin"
    torch.save({"a": Malice(proof)}, path, _use_new_zipfile_serialization=not legacy)
    refusal = "no file of PyTorch 1.6 or newer" if legacy else "not a PyTorch checkpoint of tensors alone"
    with pytest.raises(UserError, match=refusal):
        _outline(path)
    path.write_bytes(pickle.dumps(Malice(proof)))
    with pytest.raises(UserError, match="no file of PyTorch 1.6 or newer"):
        _outline(path)
    assert not proof.exists()
    pickle.loads(path.read_bytes())
    assert proof.exists()  # it would have


def test_nothing_in_the_code_unpickles() -> None:
    root = Path(__file__).resolve().parents[1]
    files = [*root.glob("*.py"), *(f for name in ("library", "networks", "tools") for f in (root / name).rglob("*.py"))]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    loads = [line for line in lines if "torch.load(" in line]
    assert loads
    assert all("weights_only=True" in line for line in loads)
    assert not [line for line in lines if "pickle.load" in line or "allow_pickle=True" in line]


def png(width: int, height: int) -> bytes:
    """A PNG of nothing but its header's claim."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(13_378, 13_378), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_decompression_bombs_are_refused_by_name(tmp_path: Path, width: int, height: int) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png(width, height))
    for read in (lambda: read_size(str(path)), lambda: decode(path.read_bytes(), str(path))):
        with pytest.raises(UserError, match="bomb.png: more than 178956970 pixels; make it smaller or remove it"):
            read()


def test_a_bomb_in_an_images_text_is_refused(tmp_path: Path) -> None:
    packed = zlib.compress(bytes(100_000_000))
    text = b"Comment\0\0" + packed
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    data = image.getvalue()
    with pytest.raises(UserError, match="bomb.png: damaged image"):
        decode(data[:33] + chunk + data[33:], "bomb.png")


@pytest.mark.parametrize("value", ["../x", "a/../../x", "..", "./../x"])
def test_paths_of_a_dataset_do_not_climb_out(value: str) -> None:
    with pytest.raises(UserError, match="write its absolute path"):
        refuse_climbing("d.toml: subset 1", "image_dir", value)


@pytest.mark.parametrize("value", ["x", "a/../x", "/srv/x/../y", "~/x", "..x", "."])
def test_paths_within_and_absolute_ones_are_taken(value: str) -> None:
    refuse_climbing("d.toml: subset 1", "image_dir", value)


@pytest.mark.parametrize("value", ["a\0b", "a" * 5000, "~nobody-of-this-name/x", "\ud800"])
def test_what_can_be_no_path_is_refused(value: str) -> None:
    with pytest.raises(UserError, match="d.toml: image_dir .* is no path that can be looked at"):
        written_path(value, "d.toml: image_dir")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_nothing_is_written_in_the_place_of_a_pipe_or_device(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match=r"pipe: cannot be written \(is a pipe, socket or device\)"):
        write_text(pipe, "text")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
