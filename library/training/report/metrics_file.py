"""``metrics.jsonl`` read back, while a run goes on or after it: what plots, reports and the page are made of.

A file is read as it is found: a half-written line is ignored, and where a resumed run went back to an earlier step, the
steps it repeats replace the old ones. A line may hold only some keys; lines of one step are merged. Nothing heavy is
imported here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from library.config.markers import MOST
from library.errors import UserError
from library.files import read_bytes

_LARGEST = 1e30  # of what is drawn: axes in logarithms of fp32 numbers

Values = NDArray[np.float64]
Series = tuple[Values, Values]  # steps, values


@dataclass(frozen=True)
class Run:
    """A run's name and its metrics by key."""

    name: str
    columns: dict[str, Series]

    def groups(self, prefix: str) -> dict[tuple[str, ...], Series]:
        """Return the columns ``<prefix><group>`` by group; groups with equal values as one."""
        merged: dict[tuple[str, ...], Series] = {}
        for key in (key for key in self.columns if key.startswith(prefix)):
            name, series = key.removeprefix(prefix), self.columns[key]
            equal = next((names for names, known in merged.items() if _equal(known, series)), ())
            merged.pop(equal, None)
            merged[(*equal, name)] = series
        return merged


def read_run(path: Path, name: str | None = None) -> Run:
    """Read the metrics of the run at ``path`` (its folder or the file itself).

    Raises:
        UserError: there is no metrics file, or no step in it.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: no such file; name a run's output folder (one that holds metrics.jsonl)")
    by_step: dict[int, dict[str, float]] = {}
    newest = -1
    for line in read_bytes(file).decode("utf-8", errors="replace").splitlines():
        record = parse_line(line)
        if record is None:
            continue
        step = int(record.pop("step"))
        if "loss" in record:
            if step <= newest:  # a resumed run repeats steps: forget what was beyond
                by_step = {known: values for known, values in by_step.items() if known < step}
            newest = step
        by_step.setdefault(step, {}).update(record)
    if not any(by_step.values()):
        raise UserError(f"{file}: holds no metrics yet; wait for the run's first step, or name another run")
    return Run(name or file.resolve().parent.name, _columns(by_step))


def parse_line(line: str) -> dict[str, float] | None:
    """Return a line's numbers, or ``None`` for one that is empty, half-written or no metrics."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    numbers = {key: _number(value) for key, value in record.items() if isinstance(value, int | float)}
    return numbers if 0 <= numbers.get("step", -1.0) <= MOST else None


def _number(value: float) -> float:
    """Return a metric as it is drawn; one that no plot has room for is none."""
    return float(value) if abs(value) < _LARGEST else math.nan


def _columns(by_step: dict[int, dict[str, float]]) -> dict[str, Series]:
    keys = dict.fromkeys(key for record in by_step.values() for key in record)
    columns: dict[str, Series] = {}
    for key in keys:
        points = [(step, by_step[step][key]) for step in sorted(by_step) if key in by_step[step]]
        steps, values = np.array(points, dtype=np.float64).T
        values[~np.isfinite(values)] = np.nan  # drawn as gaps
        if np.isfinite(values).any():
            columns[key] = (steps, values)
    return columns


def _equal(one: Series, other: Series) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))
