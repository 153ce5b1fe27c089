"""Datasets as the hub's client leaves them in its cache."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from library.errors import UserError
from library.llm.documents import find_files, read_documents


def texts(path: Path, split: str | None = None) -> list[str]:
    return [text for file in find_files([path], split) for text in read_documents(file)]


def test_a_snapshot_of_the_hub_is_the_one_that_main_names(tmp_path: Path) -> None:
    hub = tmp_path / "datasets--owner--name"
    (hub / "blobs").mkdir(parents=True)
    for revision in ("aaa", "bbb"):
        data = hub / "snapshots" / revision / "data"
        data.mkdir(parents=True)
        (data.parent / "README.md").write_text("the dataset's card")
        for split in ("train", "test"):
            blob = hub / "blobs" / f"{revision}{split}"
            pyarrow.parquet.write_table(pyarrow.table({"text": [f"{revision} {split}"]}), blob)
            (data / f"{split}-00000-of-00001.parquet").symlink_to(blob)
    with pytest.raises(UserError, match="2 snapshots"):
        find_files([hub])
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("bbb\n")
    assert sorted(texts(hub)) == ["bbb test", "bbb train"]
    assert texts(hub, "train") == ["bbb train"]
    with pytest.raises(UserError, match="no file of a split 'rain'"):
        find_files([hub], "rain")


def test_columns_of_text_alone_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    for kind in (pyarrow.string(), pyarrow.large_string()):
        table = pyarrow.table({"n": [1, 2, 3], "text": pyarrow.array(["a", None, "c"], kind)})
        pyarrow.parquet.write_table(table, path)
        assert list(read_documents(path)) == ["a", "c"]
        with pytest.raises(UserError, match="no column 'body'; set --text_key of prepare_text.py to one of n, text"):
            list(read_documents(path, "body"))
        with pytest.raises(UserError, match="column 'n' holds int64, not text"):
            list(read_documents(path, "n"))
    with pytest.raises(UserError, match="--split: has no effect on files"):
        find_files([path], "train")
    path.write_bytes(b"no parquet file at all")
    with pytest.raises(UserError, match=r"rows\.parquet: not a readable parquet file"):
        list(read_documents(path))


def test_a_folder_of_arrow_files_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "data-00000-of-00001.arrow").touch()
    with pytest.raises(UserError, match="Dataset.to_parquet writes one from arrow files"):
        find_files([tmp_path])
