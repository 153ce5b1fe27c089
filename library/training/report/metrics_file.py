"""``metrics.jsonl`` read back, while a run goes on or after it: what plots, reports and the page are made of;
and the curves of one run or of several over each other, as numbers, for whoever draws them (``charts_of``).

A file is read as it is found: a half-written line is ignored, and where a resumed run went back to an earlier step, the
steps it repeats replace the old ones. A line may hold only some keys; lines of one step are merged. Nothing heavy is
imported here.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from library.config.markers import MOST
from library.errors import UserError
from library.files import read_toml, reading

_LARGEST = 1e30  # of what is drawn: axes in logarithms of fp32 numbers
_PIECE = 2**22  # bytes that are read at a time; a line that is longer is none
_REMEMBERED = 512  # bytes before the place that was read up to: about a line

Values = NDArray[np.float64]
Series = tuple[Values, Values]  # steps, values


@dataclass(frozen=True)
class Run:
    """A run's name and its metrics by key."""

    name: str
    columns: dict[str, Series]

    def groups(self, prefix: str) -> dict[tuple[str, ...], Series]:
        """Return the columns ``<prefix><group>`` by group; groups with equal values as one."""
        found: dict[tuple[bytes, ...], list[str]] = {}
        for key in (key for key in self.columns if key.startswith(prefix)):
            numbers = tuple(column.tobytes() for column in self.columns[key])
            found[numbers] = [*found.pop(numbers, []), key.removeprefix(prefix)]
        return {tuple(names): self.columns[prefix + names[0]] for names in found.values()}


def read_run(path: Path, name: str | None = None) -> Run:
    """Read the metrics of the run at ``path`` (its folder or the file itself).

    Raises:
        UserError: there is no metrics file, or no step in it.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: no such file; name a run's output folder (one that holds metrics.jsonl)")
    reader = MetricsReader(file)
    columns = reader.read()
    if not reader.has_steps:
        raise UserError(f"{file}: holds no metrics yet; wait for the run's first step, or name another run")
    return Run(name or file.resolve().parent.name, columns)


class MetricsReader:
    """A metrics file that is read again and again while it grows, each time only what is new.

    A file that was exchanged or cut (a resumed run does so) is read from its beginning: what it held last before the
    place that was read up to must still be there.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._inode = file, 0
        self._forget()

    def _forget(self) -> None:
        self._columns: dict[str, tuple[array[float], array[float]]] = {}
        self._newest, self._end, self._before = -1, 0, b""

    @property
    def has_steps(self) -> bool:
        """Whether anything was read so far."""
        return bool(self._columns)

    def read(self) -> dict[str, Series]:
        """Return the metrics by key, of all that is in the file by now.

        Raises:
            UserError: it cannot be read.
        """
        with reading(self._file), open(self._file, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(self._end - len(self._before))
            if inode != self._inode or file.read(len(self._before)) != self._before:
                self._forget()
                file.seek(0)
            self._inode, rest = inode, b""
            while len(rest) < _PIECE and (piece := file.read(_PIECE)):
                rest = self._take(rest + piece)
        return {key: drawn for key, column in self._columns.items() if (drawn := _drawn(*column)) is not None}

    def _take(self, new: bytes) -> bytes:
        """Add the lines in ``new``; return the rest, half a line."""
        whole = len(new) if parse_line(new[new.rfind(b"\n") + 1 :]) else new.rfind(b"\n") + 1
        for line in new[:whole].splitlines():
            if record := parse_line(line):
                self._add(int(record.pop("step")), record)
        self._end += whole
        self._before = (self._before + new[:whole])[-_REMEMBERED:]
        return new[whole:]

    def _add(self, step: int, record: dict[str, float]) -> None:
        if "loss" in record:
            if step <= self._newest:  # a resumed run repeats steps: forget what was beyond
                for steps, values in self._columns.values():
                    at = bisect_left(steps, step)
                    del steps[at:], values[at:]
            self._newest = step
        for key, value in record.items():
            steps, values = self._columns.setdefault(key, (array("d"), array("d")))
            at = len(steps) if not steps or steps[-1] < step else bisect_left(steps, step)
            if at < len(steps) and steps[at] == step:
                values[at] = value
            else:
                steps.insert(at, step)
                values.insert(at, value)


def thin(series: Series, most: int) -> Series:
    """Keep the first and the last point, and the lowest and highest of each of ``most / 2`` stretches: every spike."""
    steps, values = series
    if len(values) <= most:
        return series
    width = -(-len(values) // max(1, most // 2 - 1))
    padded = np.full(-(-len(values) // width) * width, np.nan)
    padded[: len(values)] = values
    stretches = padded.reshape(-1, width)
    lowest = np.where(np.isnan(stretches), np.inf, stretches).argmin(1)  # of a stretch of gaps the first, a gap
    highest = np.where(np.isnan(stretches), -np.inf, stretches).argmax(1)
    first = np.arange(len(stretches)) * width
    kept = np.unique(np.concatenate([first + lowest, first + highest, [0, len(values) - 1]]))
    return steps[kept], values[kept]


def average(values: Values, decay: float) -> Values:
    """Return the exponential moving average that ``loss_ema`` is: it begins with the first value, gaps do not count."""
    averages, current = np.empty_like(values), math.nan
    for i, value in enumerate(values.tolist()):
        if not math.isnan(value):
            current = value if math.isnan(current) else decay * current + (1 - decay) * value
        averages[i] = current
    return averages


def parse_line(line: str | bytes) -> dict[str, float] | None:
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


def _drawn(steps: array[float], values: array[float]) -> Series | None:
    numbers = np.array(values)
    return (np.array(steps), numbers) if np.isfinite(numbers).any() else None  # others are drawn as gaps


_MOST_LINES = 100  # of a chart, far more than can be told apart
_POINTS = 1000  # of a curve, about what a screen has pixels
_CHARTS, _LABELS = itemgetter("charts", "labels")(read_toml(Path(__file__).with_name("charts.toml"))[0])


def charts_of(runs: Sequence[Run], decay: float) -> list[dict[str, Any]]:
    """Return the charts that there is something to draw in, in their order.

    Of several runs the curves by noise level and of layers are left out: there, colour is the run.

    Args:
        runs: beside each other.
        decay: of the running average that noisy curves are smoothed by, 0 for none.

    Returns:
        Of each chart ``title``, ``lines`` (``run`` and ``kind``: numbers to tell them apart by, ``label``, ``faint``,
        ``steps``, ``values``, of which None is a gap), ``points`` (single values, no curve), ``log`` (over more than a
        decade), ``loss``.
    """
    shown = {name: row for name, row in _CHARTS.items() if len(runs) == 1 or not {"level", "layers"} & {*name.split()}}
    return [chart for title, row in shown.items() if (chart := _chart(runs, decay, title, **row))["lines"]]


def _chart(runs: Sequence[Run], decay: float, title: str, keys: list[str], form: str, log: str) -> dict[str, Any]:
    lines = []
    for number, run in enumerate(runs):
        columns: dict[str, Series] = {_LABELS[key]: run.columns[key] for key in keys if key in run.columns}
        if keys[0][-1] in "/_":  # one of each group, or noise level
            before = "σ " if keys[0][-1] == "_" else ""
            groups = list(run.groups(keys[0]).items())[:_MOST_LINES]
            columns = {before + ", ".join(names): series for names, series in groups}
        # A curve keeps its number, and so its colour, when another one begins. Noise levels are all there soon.
        kinds = [_LABELS[key] for key in keys if key in _LABELS] or (sorted(columns) if "σ" in title else [*columns])
        for label, (steps, values) in sorted(columns.items()):
            values = values / 2**30 if "bytes" in keys[0] else values
            shown = [(label, average(values, decay) if form in ("noisy", "smooth") else values, False)]
            if form == "noisy" and decay > 0 and len(runs) == 1:
                shown.insert(0, (f"{label}, each step", values, True))  # behind it, each step's
            for text, column, faint in shown:
                xs, ys = thin((steps, column), _POINTS)
                numbers = [float(f"{y:.6g}") if y == y else None for y in ys.tolist()]
                lines.append({"run": number, "kind": kinds.index(label), "label": text, "faint": faint,
                              "steps": xs.astype(int).tolist(), "values": numbers})  # fmt: skip
    drawn = [y for line in lines for y in line["values"] if y]
    is_wide = log == "auto" and bool(drawn) and min(drawn) > 0 and max(drawn) > 10 * min(drawn)
    return {"title": title, "lines": lines, "points": form == "points", "log": is_wide, "loss": log == "loss"}
