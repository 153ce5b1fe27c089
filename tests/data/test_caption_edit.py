"""Captions changed as text; what is looked for is taken as it is typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from library.data.caption_edit import Change, Journal, Text, edited, read
from library.errors import UserError


def all_edited(*asked: str) -> list[str]:
    return [edited(text, *asked) for text in ("ohwx man, tall", "a dog, tall\n b", "")]


def test_captions_are_edited_as_text() -> None:
    assert all_edited("replace", "a", r"\1") == [r"ohwx m\1n, t\1ll", "\\1 dog, t\\1ll\n b", ""]
    assert all_edited("replace", "A", "x") == all_edited("replace", "(a+)+$", "x") == all_edited("remove", "TALL", "")
    assert all_edited("before", "", "ohwx") == ["ohwx man, tall", "ohwx, a dog, tall\nohwx,  b", "ohwx"]
    assert all_edited("before", "", "Ohwx")[0] == "Ohwx, ohwx man, tall"
    assert all_edited("before", "", "see ")[0] == "see ohwx man, tall"
    assert all_edited("after", "", ", big") == ["ohwx man, tall, big", "a dog, tall, big\n b, big", "big"]
    assert all_edited("after", "", ", tall") == ["ohwx man, tall", "a dog, tall\n b, tall", "tall"]
    assert all_edited("remove", "tall", "") == ["ohwx man", "a dog\n b", ""]
    for asked in (("replace", "", "x"), ("before", "x", " ,"), ("remove", ",", "x")):
        with pytest.raises(UserError, match="nothing to look for"):
            all_edited(*asked)


@pytest.mark.parametrize(
    "data",
    [b"a dog\r\n b\r\n", b"\xef\xbb\xbfa dog\n", "a dog \u00e9\r b".encode("utf-16"), b"a dog"],
    ids=["line ends", "mark", "UTF-16", "plain"],
)
def test_a_change_keeps_what_is_not_seen_and_can_be_taken_back(tmp_path: Path, data: bytes) -> None:
    path, journal = tmp_path / "a.txt", Journal(tmp_path / "undo.json", Path)
    path.write_bytes(data)
    old = read(path)
    encoding = "utf-16-le" if old.encoding == "utf-16-le" else "utf-8"
    change: Change = (str(path), old.raw, old.changed(old.shown.replace("dog", "cat")), old.encoding)
    assert journal.write("a change", [change]) == []
    wanted = data.replace("dog".encode(encoding), "cat".encode(encoding))
    assert path.read_bytes() == wanted != data
    assert journal.step(back=True) == ("a change", [])
    assert path.read_bytes() == data
    assert journal.step(back=False) == ("a change", [])
    assert path.read_bytes() == wanted
    path.write_bytes(b"by hand")
    assert journal.step(back=True) == ("a change", [str(path)])
    assert journal.write("another", [change]) == [str(path)]
    assert path.read_bytes() == b"by hand"


@pytest.mark.parametrize("others", ["caf\xe9, an hour's work".encode("latin-1"), b"x " * 600_000])
def test_undo_leaves_a_file_of_somebody_elses_alone(tmp_path: Path, others: bytes) -> None:
    path, journal = tmp_path / "a.txt", Journal(tmp_path / "undo.json", Path)
    path.write_text("words\n")
    journal.write("delete", [(str(path), "words\n", None, "utf-8")])
    assert not path.exists()
    path.write_bytes(others)  # what the page cannot read
    assert journal.step(back=True) == ("delete", [str(path)])
    assert path.read_bytes() == others
    assert journal.write("write", [(str(path), None, "more", "utf-8")]) == [str(path)]
    assert path.read_bytes() == others


def test_what_cannot_be_edited_says_why(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\x00")
    (tmp_path / "big.txt").write_bytes(bytes(2**20 + 1))
    assert "not UTF-8" in read(tmp_path / "a.txt").why
    assert "too much" in read(tmp_path / "big.txt").why
    assert "only as" in read(tmp_path / "a.py").why
    assert read(tmp_path / "absent.txt") == Text(None)


def test_neither_torch_nor_the_page_is_imported() -> None:
    code = "import sys, library.data.caption_edit; assert not {'torch', 'library.web', 'PIL'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
