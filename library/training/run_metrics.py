"""Reading a run's ``metrics.jsonl`` back: one flat JSON object a line in, columns of steps and values out.

The file is read as it is found while a run is going on or after one crashed: a half-written line is passed
over, and where a resumed run went back to an earlier step, the steps it repeats replace the old ones. A line
may hold only some keys (``step`` and ``val_loss``); lines of one step are merged.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from library.errors import UserError

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
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        record = _parse(line)
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


def _parse(line: str) -> dict[str, float] | None:
    """Return a line's numbers, or ``None`` for one that is empty, half-written or no metrics."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int | float):
        return None
    return {key: float(value) for key, value in record.items() if isinstance(value, int | float)}


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
