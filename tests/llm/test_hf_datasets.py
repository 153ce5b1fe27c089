"""Datasets as the datasets package (5.2.0) and the hub's cache leave them on disk.

``files/saved_dataset`` is a ``DatasetDict.save_to_disk``, ``files/dataset_cache`` what ``load_dataset`` and a ``map``
left in the cache; both were written by that package.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from library.errors import UserError
from library.llm.documents import find_files, read_documents
from tools.prepare_text import parser, prepare

FILES = Path(__file__).parent / "files"
TEXTS = [f"Saved document {i}, with an ümlaut." for i in range(5)]


def texts(path: Path, split: str | None = None) -> list[str]:
    return [text for file in find_files([path], split) for text in read_documents(file)]


def test_a_saved_dataset_is_read_by_split() -> None:
    assert texts(FILES / "saved_dataset", "train") == TEXTS
    assert texts(FILES / "saved_dataset", "test") == TEXTS[:2]
    assert texts(FILES / "saved_dataset" / "test") == TEXTS[:2]


def test_the_cache_of_load_dataset_is_read_without_what_map_left_there() -> None:
    assert len(list((FILES / "dataset_cache").glob("*.arrow"))) == 2
    assert texts(FILES / "dataset_cache") == TEXTS
    assert texts(FILES / "dataset_cache", "train") == TEXTS


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


def test_arrow_files_of_both_formats_and_kinds_of_text_are_read(tmp_path: Path) -> None:
    for kind in (pyarrow.string(), pyarrow.large_string()):
        table = pyarrow.table({"n": [1, 2, 3], "text": pyarrow.array(["a", None, "c"], kind)})
        for name, writer in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
            path = tmp_path / f"{name}.arrow"
            with writer(str(path), table.schema) as out:
                out.write_table(table, max_chunksize=2)
            assert list(read_documents(path)) == ["a", "c"]
            with pytest.raises(UserError, match="no column 'body'; set --text_key to one of n, text"):
                list(read_documents(path, "body"))
            with pytest.raises(UserError, match="column 'n' holds int64, not text"):
                list(read_documents(path, "n"))


def test_damage_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.arrow").write_bytes(b"no arrow file at all")
    with pytest.raises(UserError, match=r"x\.arrow: not a readable arrow file"):
        list(read_documents(tmp_path / "x.arrow"))
    (tmp_path / "empty.arrow").touch()
    with pytest.raises(UserError, match=r"empty\.arrow: not a readable arrow file"):
        list(read_documents(tmp_path / "empty.arrow"))
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "gone.arrow"}]}))
    with pytest.raises(UserError, match=r"gone\.arrow: missing, though state\.json names it"):
        find_files([tmp_path])
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"state\.json: damaged"):
        find_files([tmp_path])


def test_splits_that_do_not_exist_or_are_not_chosen_are_named() -> None:
    with pytest.raises(UserError, match="several splits; choose one with --split: train, test"):
        find_files([FILES / "saved_dataset"])
    with pytest.raises(UserError, match="no split 'trian'; did you mean 'train'"):
        find_files([FILES / "saved_dataset"], "trian")
    with pytest.raises(UserError, match="--split: has no effect on files"):
        find_files([FILES / "dataset_cache" / "pq-train.arrow"], "train")


def run(folder: Path, *words: str) -> dict:
    flags = ["--train_tokenizer", "280", "--workers", "0", "--validation_share", "0", "--save_to", str(folder / "out")]
    return prepare(parser().parse_args([*words, *flags]))


def test_a_saved_dataset_becomes_a_corpus(tmp_path: Path) -> None:
    assert run(tmp_path, str(FILES / "saved_dataset"), "--split", "train")["train"].documents == 5
