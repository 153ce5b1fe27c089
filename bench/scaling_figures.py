"""The plots of ``bench/scaling.py``: steps against resolution, batch and rank, starts against the number of images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from dev.draw_precision_figures import save

Row = dict[str, Any]

_AXES = {"tokens": "image tokens", "batch": "images a step", "rank": "rank"}
_TRAINERS = {"tandem": ("Tandem", "#0072b2", "o-"), "peft": ("diffusers + peft", "#d55e00", "s--")}
_GOAL_SECONDS, _GOAL_GIB = 10, 2  # of a start with 100,000 images
_GREY = "#999999"


def draw(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw what ``rows`` hold into ``folder``; return what was written."""
    steps, starts = [r for r in rows if "trainer" in r], [r for r in rows if "start" in r]
    figures = {
        "scaling_steps.png": draw_steps(steps) if steps else None,
        "scaling_starts.png": draw_starts(starts) if starts else None,
    }
    return [save(figure, folder / name) for name, figure in figures.items() if figure is not None]


def draw_steps(rows: Sequence[Row]) -> Figure:
    """Seconds of a step, and memory it adds, against each axis; the base point belongs to all of them."""
    figure = Figure(figsize=(9.2, 5.2), layout="constrained")
    panels = figure.subplots(2, len(_AXES), sharex="col", sharey="row")
    for column, (axis, title) in zip(panels.T, _AXES.items(), strict=True):
        for trainer, (label, colour, style) in _TRAINERS.items():
            of_trainer = [row for row in rows if row["axis"] in (axis, "base") and row["trainer"] == trainer]
            points = sorted(of_trainer, key=partial(_size, axis=axis))
            xs = [_size(row, axis) for row in points]
            for panel, key in zip(column, ("step_s", "added_mib"), strict=True):
                panel.plot(xs, [row[key] for row in points], style, color=colour, label=label, markersize=4)
        column[1].set_xlabel(title)
        for panel in column:
            _powers(panel, xs)
    for panel, title in zip(panels[:, 0], ("CPU seconds of a step", "MiB that steps add"), strict=True):
        panel.set_ylabel(title)
        panel.set_yscale("log")  # with ticks at 1, 2 and 5 times powers of ten, written out
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
    panels[0, 0].legend(frameon=False)
    return figure


def _size(row: Row, axis: str) -> int:
    return row["rows"] * row["columns"] if axis == "tokens" else row[axis]


def draw_starts(rows: Sequence[Row]) -> Figure:
    """Seconds and memory of a start with everything cached, and images cached in a second, against their number."""
    figure = Figure(figsize=(9.2, 2.9), layout="constrained")
    seconds, memory, rate = figure.subplots(1, 3)
    by_images = sorted(rows, key=lambda row: row["images"])
    cached, cold = ([row for row in by_images if row["start"] == kind] for kind in ("cached", "cold"))
    xs = [row["images"] for row in cached]
    parts = {"read_s": ("dataset read", "#0072b2"), "cache_s": ("cache looked over", "#56b4e9")}
    parts |= {"first_batch_s": ("first batch", "#009e73")}
    bottom = [0.0] * len(xs)
    for key, (label, colour) in parts.items():
        top = [low + row[key] for low, row in zip(bottom, cached, strict=True)]
        seconds.fill_between(xs, bottom, top, color=colour, linewidth=0, label=label)
        bottom = top
    seconds.legend(frameon=False, loc="upper left", fontsize="small")
    seconds.set(ylabel="seconds until the first batch")
    _goal(seconds, _GOAL_SECONDS, f"goal: {_GOAL_SECONDS} s")
    memory.plot(xs, [row["peak_mib"] / 1024 for row in cached], "o-", color="#0072b2", markersize=4)
    memory.set(ylabel="GiB at most")
    _goal(memory, _GOAL_GIB, f"goal: {_GOAL_GIB} GiB")
    rates = [row["images_per_s"] for row in cold]
    rate.plot([row["images"] for row in cold], rates, "o-", color="#0072b2", markersize=4)
    rate.set(ylabel="images cached a second", ylim=(0, 1.2 * max(rates)))
    for panel in (seconds, memory, rate):
        panel.set(xlabel="images")
        panel.spines[["top", "right"]].set_visible(False)
        panel.xaxis.set_major_locator(MaxNLocator(2, steps=[1, 5, 10]))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    for panel in (seconds, memory):
        panel.set_xlim(0, 1.05 * max(xs))
    return figure


def _goal(panel: Axes, value: float, words: str) -> None:
    panel.axhline(value, color=_GREY, linewidth=0.8, linestyle="--")
    panel.annotate(words, (0, value), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                   color=_GREY)  # fmt: skip
    panel.set_ylim(0, 1.3 * max(value, panel.get_ylim()[1]))


def _powers(panel: Axes, xs: Sequence[int]) -> None:
    """A logarithmic axis with a tick at each of ``xs``."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(xs, [str(x) for x in xs])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.spines[["top", "right"]].set_visible(False)
