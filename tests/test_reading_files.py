"""What a person names is read if it is a file of sensible size, and told in one line if not; it is never waited for."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import toml
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library.checksums import fingerprint, weights_fingerprint
from library.config.schema import DatasetArguments
from library.data.config import load_dataset_config
from library.errors import UserError, exit_on_user_error
from library.files import parse_json, read_bytes, read_json, read_json_lines, read_text, read_toml, toml_text
from library.folder_lock import FolderLock
from library.models.hub import find_model
from library.models.inspection import weight_sets
from library.safetensors_io import read_safetensors_header, stream_safetensors, weight_files

READERS: list[Callable[[Path], object]] = [
    read_text,
    read_toml,
    read_json,
    read_bytes,
    read_safetensors_header,
    lambda path: list(read_json_lines(path)),
]


def refusal(read: Callable[[Path], object], path: Path) -> str:
    """Return what ``read`` says of ``path``, within ten seconds."""
    said: list[str] = []

    def attempt() -> None:
        try:
            read(path)
        except UserError as error:
            said.append(str(error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it waits"
    assert len(said) == 1
    assert "\n" not in said[0]
    return said[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such files")
@pytest.mark.parametrize("read", READERS)
def test_what_is_no_regular_file_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    pipe, folder, loop, door = tmp_path / "pipe", tmp_path / "folder", tmp_path / "loop", tmp_path / "door"
    os.mkfifo(pipe)
    folder.mkdir()
    loop.symlink_to(loop)
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(tmp_path)  # a socket's path is short
        listener.bind("door")
        assert f"{door}: is a socket, where a file is wanted; " in refusal(read, door)
    assert f"{pipe}: is a pipe, where a file is wanted; " in refusal(read, pipe)
    assert f"{folder}: is a folder, where a file is wanted; " in refusal(read, folder)
    assert f"{loop}: cannot be read (its symbolic links form a loop); " in refusal(read, loop)
    assert "/dev/zero: is a device, where a file is wanted; " in refusal(read, Path("/dev/zero"))
    assert "can be no file's name" in refusal(read, Path("a\0b"))


def _dataset(path: Path) -> object:
    toml_path = Path(tempfile.mkdtemp(), "broken.toml")
    toml_path.write_text(f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{path}'\n")
    return load_dataset_config(toml_path, DatasetArguments(dataset_config=str(toml_path)))


@pytest.mark.parametrize(
    "take",
    [
        *READERS,
        fingerprint,
        weight_files,
        weight_sets,
        lambda path: find_model(path, "--vae"),
        lambda path: FolderLock(path, "a").acquire(),
        _dataset,
    ],
)
@pytest.mark.parametrize("given", ["link.json", "link.json/x", "loop"])
def test_what_a_broken_link_names_is_told_with_the_link(
    tmp_path: Path, take: Callable[[Path], object], given: str
) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "link_json")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    said = refusal(take, tmp_path / given)
    assert given == "loop" or f": {tmp_path / 'link.json'} is a link to {tmp_path / 'link_json'}; " in said
    assert "did you mean" not in said
    assert "is a file" not in said


def test_a_file_of_gigabytes_is_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    with open(path, "wb") as file:
        file.truncate(10 * 2**30)  # takes no room on the disk
    for read, most in ((read_toml, 4), (read_text, 64), (read_json, 64)):
        with pytest.raises(UserError, match=f"has more than {most} MiB, too much for such a file"):
            read(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_what_windows_editors_write_is_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes("name = 'Grüße'\r\nrank = 4\r\n".encode(encoding))
    assert read_toml(path)[0] == {"name": "Grüße", "rank": 4}
    path.write_bytes('"Grüße"\r\n\r\n4\r\n'.encode(encoding))
    assert [value for _, value in read_json_lines(path)] == ["Grüße", 4]
    path.write_bytes("\ufeffGrüße".encode(encoding))  # as two programs, each with a mark of its own, leave it
    assert read_text(path) == "Grüße"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("cafe".encode("utf-16-le"), "holds NUL, so it is UTF-16, or no text; save it as UTF-8"),
        ("cafe".encode("utf-16-be"), "holds NUL, so it is UTF-16, or no text; save it as UTF-8"),
        ("cafe".encode("utf-32"), "holds NUL, so it is UTF-16, or no text; save it as UTF-8"),
        (b"a\0b", "holds NUL"),
        ("café".encode("latin-1"), "not UTF-8 .byte 3.; save it as UTF-8"),
        (b"\xff\xfea", "not UTF-16 .byte 2.; save it as UTF-8"),
    ],
)
def test_other_encodings_are_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(UserError, match=said):
        read_text(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, NaN]", "not valid JSON .NaN is no number"),
        ('{"a": -Infinity}', "not valid JSON .-Infinity is no number"),
        ('{"a": "x \\ud83d y"}', "\\\\ud83d is half of a character"),
        ("[" * 5000, "not valid JSON"),
        ("[" * 500 + "]" * 500, "tables or lists more than 64 deep"),
        ("1" * 5000, "not valid JSON"),
        ('{"a": 1, "b": [{"c": 1, "c": 1}]}', "not valid JSON .'c' stands there twice; keep one"),
    ],
)
def test_json_that_would_fail_later_fails_here(text: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^a.json: {said}") as refused:
        parse_json(text, "a.json")
    assert "\n" not in str(refused.value)


def test_whole_characters_by_their_halves_are_taken() -> None:
    assert parse_json('"\\ud83d\\ude00"', "a.json") == "😀"


@pytest.mark.parametrize("text", ["[]", "null", "3", '"a"', "true"])
def test_a_configuration_in_json_is_an_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="config.json: holds no JSON object; download it again"):
        read_json(path)


@pytest.mark.parametrize(
    "text", ["\x1b[31m", "C:\\x\\xylophone", "a\nb\t\x7f", "\\x1b", '\'"""', "Grüße 日本 𝕏", "\\", ""]
)
def test_any_text_of_a_configuration_is_written_as_toml_that_says_it(text: str) -> None:
    written = toml_text({"section": {"key": text, "list": [text, "b"], "number": 1e-4, "switch": True}})
    expected = {"key": text, "list": [text, "b"], "number": 1e-4, "switch": True}
    assert tomllib.loads(written) == {"section": expected}
    assert toml.loads(written) == {"section": expected}


def test_lists_are_read_as_toml_defines_them(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('separators = [","]\nstrengths = [1, 0.5]\n', encoding="utf-8")  # toml 0.10.2: ["", ""], an error
    assert read_toml(path)[0] == {"separators": [","], "strengths": [1, 0.5]}


def test_toml_that_is_deeper_than_a_person_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    for text in (".".join(["a"] * 5000) + " = 1", "a = " + "[" * 5000 + "]" * 5000):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="a.toml: (not valid TOML|tables or lists more than 64 deep)") as refused:
            read_toml(path)
        assert "\n" not in str(refused.value)


def test_a_windows_path_in_toml_gets_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('image_dir = "C:\\Users\\me"\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"line 1: not valid TOML .*; in Windows paths write '/', or single quotes"):
        read_toml(path)


def test_a_fingerprint_takes_any_file_name_and_tells_names_contents_and_sizes_apart(tmp_path: Path) -> None:
    contents = {  # name -> bytes, as the system gives them: the first two are no UTF-8, and alike once spelt with "?"
        "latin": {b"caf\xe9.safetensors": b"1"},
        "other name": {b"caf\xe8.safetensors": b"1"},
        "other content": {b"caf\xe9.safetensors": b"2"},
        "other size": {b"caf\xe9.safetensors": b"11"},
        "in a folder": {b"\xff/caf\xe9.safetensors": b"1"},
        "with a config": {b"caf\xe9.safetensors": b"1", b"caf\xe9.json": b"{}"},
        "UTF-8": {"caf\u00e9.safetensors".encode(): b"1"},
        "line break": {b"caf\n.safetensors": b"1"},
    }
    for folder, files in contents.items():
        for name, data in files.items():
            path = Path(os.fsdecode(os.fsencode(tmp_path / folder) + b"/" + name))
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            except OSError:
                pytest.skip("this file system takes names in UTF-8 only")
    found = {folder: fingerprint(tmp_path / folder) for folder in contents}
    assert len(set(found.values())) == len(contents), found
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in found.values())
    shutil.move(tmp_path / "latin", tmp_path / os.fsdecode(b"moved \xfc"))
    assert fingerprint(tmp_path / os.fsdecode(b"moved \xfc")) == found["latin"]
    assert weights_fingerprint(tmp_path / "other size") == weights_fingerprint(
        tmp_path / "other size" / os.fsdecode(b"caf\xe9.safetensors")
    )


def test_the_home_of_nobody_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for read in (read_text, read_toml):
        with pytest.raises(
            UserError, match="^~nobody-of-this-name/x: no home folder is known for this user; check the path$"
        ):
            read(Path("~nobody-of-this-name/x"))
    with pytest.raises(SystemExit) as ended:  # wherever else a path is resolved
        exit_on_user_error(lambda: print(Path("~nobody-of-this-name/x").expanduser()))()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: a path begins with '~' and no home is known for it; write the path out\n"
    with pytest.raises(RuntimeError, match="another"):
        exit_on_user_error(lambda: (_ for _ in ()).throw(RuntimeError("another")))()


TENSORS = {
    "b.weight": torch.randn(3, 5),
    "a.half": torch.randn(7).half(),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "count": torch.tensor([1, 2, 3]),
    "brain": torch.randn(3, 3).bfloat16().t(),
    "eight": torch.randn(3).to(torch.float8_e4m3fn),
}


def stream(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    stream_safetensors(path, specs, tensors.__getitem__, metadata)


def test_the_library_reads_back_what_was_streamed(tmp_path: Path) -> None:
    stream(tmp_path / "a", TENSORS, {"key": "välue"})
    read = load_file(tmp_path / "a")
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].float(), tensor.float())
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.metadata() == {"key": "välue"}


def test_data_is_laid_out_as_the_library_does(tmp_path: Path) -> None:
    floats = {name: tensor for name, tensor in TENSORS.items() if tensor.dtype in (torch.float32, torch.bfloat16)}
    stream(tmp_path / "ours", floats)
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_tensor_other_than_announced_is_a_bug_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x: torch.float32"):
        stream_safetensors(tmp_path / "a", {"x": (torch.float16, (2,))}, lambda name: torch.zeros(2))
    assert list(tmp_path.iterdir()) == []
