"""The index remembers what it may, and nothing that could have changed."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import library.data.file_index as module
from library.data.file_index import FileIndex, SourceFile, content_hash, list_folder
from library.errors import UserError
from tests.data.folders import add_image, make_old


def record(index: FileIndex, path: Path) -> SourceFile:
    return index.image(str(path), list_folder(path.parent)[path.name])


def test_a_second_run_opens_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = add_image(tmp_path, "a.png", (30, 20), caption="hello")
    index = FileIndex(tmp_path / ".tandem_cache")
    first = record(index, path)
    index.measure([first])
    index.hash_contents([first])
    caption_stat = list_folder(tmp_path)["a.txt"]
    assert index.caption(str(tmp_path / "a.txt"), caption_stat) == "hello"
    index.save()

    def forbidden(path: str) -> None:
        raise AssertionError(f"{path} was opened")

    monkeypatch.setattr(module, "read_header", forbidden)
    monkeypatch.setattr(module, "read_bytes", forbidden)
    again = FileIndex(tmp_path / ".tandem_cache")
    second = record(again, path)
    again.measure([second])
    again.hash_contents([second])
    assert (second.size, second.content) == (first.size, first.content) == ((30, 20), first.content)
    assert again.caption(str(tmp_path / "a.txt"), caption_stat) == "hello"


def test_a_file_just_written_is_not_remembered(tmp_path: Path) -> None:
    path = add_image(tmp_path, "a.png")
    os.utime(path, (time.time(), time.time()))
    index = FileIndex(tmp_path / ".tandem_cache")
    index.measure([record(index, path)])
    index.save()
    assert record(FileIndex(tmp_path / ".tandem_cache"), path).size is None


def test_a_folder_moved_with_its_cache_is_still_known(tmp_path: Path) -> None:
    path = add_image(tmp_path / "before", "a.png")
    index = FileIndex(tmp_path / "before" / ".tandem_cache")
    index.measure([record(index, path)])
    index.save()
    (tmp_path / "before").rename(tmp_path / "after")
    moved = FileIndex(tmp_path / "after" / ".tandem_cache")
    assert record(moved, tmp_path / "after" / "a.png").size == (64, 64)


def _in_place(path: Path, other: bytes) -> None:
    path.write_bytes(other)


def _renamed(path: Path, other: bytes) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(other)
    shutil.copystat(path, beside)
    beside.replace(path)


@pytest.mark.parametrize("swap", [_in_place, _renamed])
@pytest.mark.parametrize("seed", range(3))
def test_a_file_swapped_for_one_of_equal_length_and_time_is_read_again(
    swap: Callable[[Path, bytes], None], seed: int, tmp_path: Path
) -> None:
    draw, path, kinds = random.Random(seed), add_image(tmp_path, "a.png", caption="a cat"), (".png", ".txt")
    index = FileIndex(tmp_path / ".tandem_cache")
    index.hash_contents([first := record(index, path)])
    index.caption(str(path.with_suffix(".txt")), list_folder(tmp_path)["a.txt"])
    index.save()
    for file in map(path.with_suffix, kinds):
        times, content = file.stat(), bytearray(file.read_bytes())
        content[-1 - draw.randrange(4)] ^= 1
        swap(file, bytes(content))
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert (file.stat().st_size, file.stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)
    again = FileIndex(tmp_path / ".tandem_cache")
    again.hash_contents([second := record(again, path)])
    assert second.content == content_hash(path.read_bytes()) != first.content
    caption = again.caption(str(path.with_suffix(".txt")), list_folder(tmp_path)["a.txt"])
    assert caption == path.with_suffix(".txt").read_text() != "a cat"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 1, "images": 5, "captions": {}}'])
def test_a_damaged_index_is_begun_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / ".tandem_cache").mkdir()
    (tmp_path / ".tandem_cache" / "index.json").write_text(text)
    path = add_image(tmp_path, "a.png", (30, 20))
    index = FileIndex(tmp_path / ".tandem_cache")
    file = record(index, path)
    index.measure([file])
    assert file.size == (30, 20)


def test_a_changed_byte_of_the_index_changes_no_size_and_no_caption(tmp_path: Path) -> None:
    path = add_image(tmp_path, "a.png", (30, 20), caption="a cat")
    stat = list_folder(tmp_path)["a.txt"]
    index = FileIndex(tmp_path / ".tandem_cache")
    index.measure([record(index, path)])
    index.caption(str(path.with_suffix(".txt")), stat)
    index.save()
    stored = tmp_path / ".tandem_cache" / "index.json"
    whole, draw = stored.read_bytes(), random.Random(0)
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << draw.randrange(8)
        stored.write_bytes(changed)
        again = FileIndex(tmp_path / ".tandem_cache")
        assert record(again, path).size is None, place  # nothing is remembered
        assert again.caption(str(path.with_suffix(".txt")), stat) == "a cat", place


def test_hidden_files_and_folders_are_not_listed(tmp_path: Path) -> None:
    add_image(tmp_path, "b.png", caption=None)
    add_image(tmp_path, "a.png", caption=None)
    add_image(tmp_path, ".hidden.png", caption=None)
    add_image(tmp_path / "folder.png", "x.png", caption=None)
    assert list(list_folder(tmp_path)) == ["a.png", "b.png"]


def test_unreadable_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone: cannot be read \(No such file or directory\); check its permissions$"):
        list_folder(tmp_path / "gone")
    index = FileIndex(tmp_path / ".tandem_cache")
    with pytest.raises(UserError, match=r"gone\.txt: no such file; check the path$"):
        index.caption(str(tmp_path / "gone.txt"), (0, 0, 0))
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    make_old(tmp_path / "latin.txt")
    with pytest.raises(UserError, match=r"latin\.txt: not UTF-8 \(byte 0\); save it as UTF-8$"):
        index.caption(str(tmp_path / "latin.txt"), (1, 1, 1))


def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    path = add_image(tmp_path, "a.png")
    (tmp_path / ".tandem_cache").write_text("a file where the folder should be")
    index = FileIndex(tmp_path / ".tandem_cache")
    index.measure([record(index, path)])
    with pytest.raises(UserError, match=r"index\.json: cannot be written \(.*\); .*: set cache_directory$"):
        index.save()


def test_a_file_that_is_deleted_while_its_folder_is_listed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_image(tmp_path, "a.png", caption=None)
    gone = add_image(tmp_path, "b.png", caption=None)
    walk = module._walk

    def slowly(*where: object) -> Iterator[tuple[str, os.DirEntry[str]]]:
        entries = list(walk(*where))  # type: ignore[arg-type]
        gone.unlink()
        yield from entries

    monkeypatch.setattr(module, "_walk", slowly)
    assert list(list_folder(tmp_path)) == ["a.png"]
