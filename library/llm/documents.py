"""Texts to train on, one document at a time, from the files that people have.

A folder is read file by file in the order of names, below it too; ``.txt`` and ``.md`` files are one document each
(or several, divided by a separator), ``.jsonl`` files one a line, ``.parquet`` and ``.arrow`` files one a row. A folder
may be a Hugging Face dataset (``library.llm.hf_datasets``). Nothing is held but what is being read.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from library.errors import UserError
from library.llm.hf_datasets import check_column, dataset_files, read_arrow

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet", ".arrow")
_PARQUET_ROWS = 1024  # read at once


def find_files(paths: Sequence[str | Path], split: str | None = None) -> list[Path]:
    """Return the files that ``paths`` name or hold, in order; with ``split``, those of folders that belong to it.

    Raises:
        UserError: a path does not exist or is of another kind, nothing is found, parquet or arrow files cannot be read
            here, or as ``library.llm.hf_datasets.dataset_files``.
    """
    if split is not None and not any(Path(path).is_dir() for path in paths):
        raise UserError("--split: has no effect on files; give the folder of a dataset, or remove it")
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += dataset_files(path, SUFFIXES, split)
        elif not path.exists():
            raise UserError(f"{path}: no such file or folder; check the path")
        elif path.suffix not in SUFFIXES:
            raise UserError(f"{path}: not one of {', '.join(SUFFIXES)}; rename or convert it")
        else:
            files.append(path)
    if not files:
        raise UserError(f"{paths[0]}: no {', '.join(SUFFIXES)} file in it; name the folder the texts lie in")
    if any(file.suffix in (".parquet", ".arrow") for file in files) and importlib.util.find_spec("pyarrow") is None:
        raise UserError(
            "parquet and arrow files need the package pyarrow; run pip install pyarrow==26.0.1, or convert to .jsonl"
        )
    return files


def read_documents(file: Path, text_key: str = "text", separator: str | None = None) -> Iterator[str]:
    """Yield the documents of ``file`` that hold anything.

    Args:
        file: of :func:`find_files`.
        text_key: the key of a jsonl line or the column of a parquet or arrow file that holds the text.
        separator: divides text files into documents.

    Raises:
        UserError: a line is no JSON, the key is missing, or the file is damaged or no UTF-8.
    """
    readers = {".jsonl": _jsonl, ".parquet": _parquet, ".arrow": read_arrow}
    try:
        read = readers.get(file.suffix)
        for text in read(file, text_key) if read is not None else _text(file, separator):
            if text.strip():
                yield text
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}; convert it") from None


def _text(file: Path, separator: str | None) -> Iterator[str]:
    if separator is None:
        yield file.read_text(encoding="utf-8")
        return
    rest = ""
    with open(file, encoding="utf-8") as lines:
        for line in lines:  # such files hold gigabytes
            rest += line
            if separator in line or separator in rest[-len(line) - len(separator) :]:
                *whole, rest = rest.split(separator)
                yield from whole
    yield rest


def _jsonl(file: Path, text_key: str) -> Iterator[str]:
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[text_key]
            except ValueError as error:
                raise UserError(f"{file}:{number}: no JSON ({error}); correct the line") from None
            except (KeyError, TypeError):
                raise UserError(f"{file}:{number}: no key {text_key!r}; set --text_key") from None
            if not isinstance(text, str):
                raise UserError(f"{file}:{number}: {text_key!r} holds no text; set --text_key")
            yield text


def _parquet(file: Path, text_key: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        check_column(file, table.schema_arrow, text_key)
        for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[text_key]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except pyarrow.ArrowException as error:
        raise UserError(f"{file}: not a readable parquet file ({error}); download it again") from None
