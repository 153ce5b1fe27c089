"""A dataset as it begins: what its TOML says, and which files are put into it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from library.config.schema import DatasetArguments
from library.data.config import load_dataset_config
from library.data.new_dataset import CAPTION_SUFFIXES, IMAGE_SUFFIXES, add_file, refusal_of, write_dataset
from library.data.sources import is_image
from library.errors import UserError


def test_what_is_added_is_what_training_reads() -> None:
    Image.init()
    for suffix in {*Image.registered_extensions(), *IMAGE_SUFFIXES, ".txt", ".caption", ".zip"}:
        is_taken = refusal_of(f"a{suffix}") is None
        assert is_taken == (is_image(f"a{suffix}") or suffix in CAPTION_SUFFIXES), suffix


@pytest.mark.parametrize(
    ("names", "ending"),
    [((), ".txt"), (("a.txt",), ".txt"), (("a.caption", "a.png"), ".caption"), (("a.caption", "b.txt"), ".txt")],
)
def test_training_reads_what_is_written(tmp_path: Path, names: tuple[str, ...], ending: str) -> None:
    (tmp_path / "images").mkdir()
    for name in names:
        (tmp_path / "images" / name).touch()
    toml = write_dataset(tmp_path, "images", 'a "word" \\x', "512", "3")
    (dataset,) = load_dataset_config(toml, DatasetArguments(dataset_config=str(toml))).datasets
    (subset,) = dataset.subsets
    assert (subset.settings.caption_extension, subset.settings.num_repeats) == (ending, 3)
    assert (subset.settings.trigger_word, dataset.settings.batch_size) == ('a "word" \\x', 1)
    assert dataset.settings.enable_bucket
    assert "trigger_word" not in write_dataset(tmp_path, "images", "", "512", "3").read_text()


def test_no_numbers_write_nothing(tmp_path: Path) -> None:
    for wrong in ("512, 768", "", "x"):
        with pytest.raises(UserError, match="whole numbers"):
            write_dataset(tmp_path / "new", "images", "", wrong, "1")
    assert list(tmp_path.iterdir()) == []


def test_files_are_put_into_a_dataset_over_none(tmp_path: Path) -> None:
    path = tmp_path / "images/a.png"
    assert add_file(path, io.BytesIO(b"first")) is None
    assert str(add_file(path, io.BytesIO(b"other"))).startswith("there is one of this name already")
    assert path.read_bytes() == b"first"

    class Full(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        add_file(tmp_path / "images/b.png", Full())
    assert [file.name for file in path.parent.iterdir()] == ["a.png"]
    names = ("a.PNG", "b.txt", "c.exe", ".h.png", "../x.png", "con.png", "")
    assert [name for name in names if not refusal_of(name)] == ["a.PNG", "b.txt"]
