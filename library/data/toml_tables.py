"""Reading a dataset TOML, and finding the line a key stands on.

The ``toml`` package gives values without positions. Error messages want the line, so :func:`find_line`
walks the text once more: it follows the ``[general]``, ``[[datasets]]`` and ``[[datasets.subsets]]``
headings, counts them and looks for ``key =`` below the one asked for. Inline tables are not followed; the
line is then left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toml

from library.errors import UserError

_HEADING = re.compile(r"^\s*\[+\s*([A-Za-z_.]+)\s*\]+")


@dataclass(frozen=True)
class TomlFile:
    """A parsed TOML file together with its text."""

    path: Path
    text: str
    tables: dict[str, Any]

    def find_line(self, key: str, dataset: int | None = None, subset: int | None = None) -> int | None:
        """Return the line (from 1) of ``key`` in ``[general]``, a dataset or a subset (from 0), or None."""
        pattern = re.compile(rf"^\s*[\"']?{re.escape(key)}[\"']?\s*=")
        heading, dataset_at, subset_at = "", -1, -1
        for number, line in enumerate(self.text.splitlines(), start=1):
            if match := _HEADING.match(line):
                heading = match.group(1)
                if heading == "datasets":
                    dataset_at, subset_at = dataset_at + 1, -1
                elif heading == "datasets.subsets":
                    subset_at += 1
            elif pattern.match(line) and self._is_at(heading, dataset_at, subset_at, dataset, subset):
                return number
        return None

    @staticmethod
    def _is_at(heading: str, dataset_at: int, subset_at: int, dataset: int | None, subset: int | None) -> bool:
        if dataset is None:
            return heading in ("", "general")
        if subset is None:
            return heading == "datasets" and dataset_at == dataset
        return heading == "datasets.subsets" and (dataset_at, subset_at) == (dataset, subset)

    def where(self, table: str, key: str, dataset: int | None = None, subset: int | None = None) -> str:
        """Return ``"file.toml line 7: subset 2"``, the beginning of every message about a key."""
        line = self.find_line(key, dataset, subset)
        place = f"{self.path} line {line}" if line else f"{self.path}"
        return f"{place}: {table}" if table else place


def read_toml(path: str | Path) -> TomlFile:
    """Read and parse a TOML file.

    Raises:
        UserError: the file does not exist, is not UTF-8 or is not TOML.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; check dataset_config") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); check dataset_config") from None
    try:
        return TomlFile(file, text, toml.loads(text))
    except toml.TomlDecodeError as error:
        hint = "; in Windows paths write '/' or use single quotes" if "\\" in text else ""
        raise UserError(f"{file} line {error.lineno}: not valid TOML ({error.msg}); correct this line{hint}") from None
    except Exception as error:  # on some broken lines toml 0.10 raises whatever happens to it
        raise UserError(f"{file}: not valid TOML ({error}); compare it with docs/dataset.md") from None
