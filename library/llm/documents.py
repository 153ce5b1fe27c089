"""Texts for pretraining, one document at a time, from the files that people have.

A folder is read file by file in the order of names, below it too; ``.txt`` and ``.md`` files are one document each
(or several, divided by a separator), ``.jsonl`` files one a line, ``.parquet`` files one a row. A file that is named
itself is text if it has another suffix. Only what is being read is in memory. A folder may be a dataset in the cache of
the Hugging Face hub's client; its README is not read.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from library.config.model_layouts import snapshot_of
from library.errors import UserError
from library.files import read_json_lines, reading

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
_ROWS = 1024  # read at once


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files that ``paths`` name or hold, in order."""
    files = named_files(paths, (), _files_inside)
    if not files:
        named = "name the folder the texts lie in; Dataset.to_parquet writes one from arrow files"
        raise UserError(f"{paths[0]}: no {', '.join(SUFFIXES)} file in it; {named}")
    require_pyarrow(files)
    return files


def named_files(
    paths: Iterable[str | Path], suffixes: tuple[str, ...], inside: Callable[[Path], list[Path]]
) -> list[Path]:
    """Return the files that ``paths`` name, in order, and of folders what ``inside`` finds in them.

    A file that is named must have one of the ``suffixes``, if there are any.
    """
    files: list[Path] = []
    for path in (Path(path).expanduser() for path in paths):
        if path.is_dir():
            files += inside(path)
        elif not path.exists():
            raise UserError(f"{path}: no such file or folder; check the path")
        elif suffixes and path.suffix not in suffixes:
            raise UserError(f"{path}: not one of {', '.join(suffixes)}; rename or convert it")
        else:
            files.append(path)
    return files


def require_pyarrow(files: Sequence[Path]) -> None:
    """Raise a UserError if any of ``files`` needs pyarrow and it is not installed."""
    if any(file.suffix == ".parquet" for file in files) and importlib.util.find_spec("pyarrow") is None:
        raise UserError("parquet files need the package pyarrow; run pip install pyarrow==26.0.1, or convert to .jsonl")


def read_documents(file: Path, text_key: str = "text", separator: str | None = None) -> Iterator[str]:
    """Yield the documents of ``file`` that hold anything.

    Args:
        file: of :func:`find_files`.
        text_key: the key of a jsonl line or the column of a parquet file that holds the text.
        separator: divides text files into documents.
    """
    readers = {".jsonl": _jsonl, ".parquet": read_parquet}
    texts = readers[file.suffix](file, text_key) if file.suffix in readers else _text(file, separator)
    yield from (text for text in texts if text is not None and text.strip())


def _text(file: Path, separator: str | None) -> Iterator[str]:
    with reading(file), open(file, encoding="utf-8-sig") as lines:
        if separator is None:
            yield lines.read()
            return
        rest = ""
        for line in lines:  # such files hold gigabytes
            rest += line
            if separator in line or separator in rest[-len(line) - len(separator) :]:
                *whole, rest = rest.split(separator)
                yield from whole
        yield rest


def _jsonl(file: Path, text_key: str) -> Iterator[str]:
    for where, row in read_json_lines(file):
        if not isinstance(row, dict) or text_key not in row:
            raise UserError(f"{where}: no key {text_key!r}; set --text_key of prepare_text.py")
        if not isinstance(row[text_key], str):
            raise UserError(f"{where}: {text_key!r} holds no text; set --text_key of prepare_text.py")
        yield row[text_key]


def read_parquet(file: Path, text_key: str | None = None) -> Iterator[Any]:
    """Yield the rows of a parquet file, or what its column of texts ``text_key`` holds."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        if text_key is not None:
            _check_column(file, table.schema_arrow, text_key)
        for batch in table.iter_batches(batch_size=_ROWS, columns=None if text_key is None else [text_key]):
            yield from (batch if text_key is None else batch.column(0)).to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{file}: not a readable parquet file ({error}); download it again") from None


def _files_inside(folder: Path) -> list[Path]:
    """Return the files of texts in ``folder``, in order."""
    root = snapshot_of(folder)
    found = (Path(top, name) for top, _, names in os.walk(root) for name in names)  # a folder may vanish meanwhile
    files = sorted(file for file in found if file.suffix in SUFFIXES and file.is_file())
    return [file for file in files if root == folder or file.suffix != ".md"]  # the dataset's card


def _check_column(file: Path, schema: Any, text_key: str) -> None:
    """Raise a UserError if a pyarrow ``schema`` has no column of texts called ``text_key``."""
    import pyarrow

    if text_key not in schema.names:
        raise UserError(
            f"{file}: no column {text_key!r}; set --text_key of prepare_text.py to one of {', '.join(schema.names)}"
        )
    kind = schema.field(text_key).type
    types = pyarrow.types
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise UserError(f"{file}: column {text_key!r} holds {kind}, not text; set --text_key of prepare_text.py")
