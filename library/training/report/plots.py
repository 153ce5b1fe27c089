"""One image of how runs went: learning rate, d, d*lr, loss and gradient norm, from their ``metrics.jsonl``.

``plot_runs`` draws one run or several over each other, of one run the loss by noise level too, and writes the image as
PNG (to look at) and SVG (to print and zoom). Nothing here needs a display or changes matplotlib's global settings:
figures are made without pyplot.

Colour means run, line style means parameter group (groups with equal values share a line). The lines of earlier runs
are wider, so that those of later ones do not hide them. The palette is Okabe and Ito's (2008, "Color Universal
Design"), which people with any kind of colour blindness can tell apart. A run is called by its ``output_name``, from
the ``config.toml`` beside its metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from library.errors import UserError, WriteError
from library.files import atomic_path
from library.training.report.metrics_file import Run, Values, charts_of, read_run
from library.training.report.run_folder import settings_of

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_GREY = "#555555"  # what a legend shows that stands for every colour
_STYLES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
_BESIDE_TITLE: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.1}
_EMA_DECAY = 0.98  # of noisy curves
_LR_SPAN = 1e3  # a schedule that ends at 0 is shown this far below its peak
_PANELS = (
    "Learning rate",
    "Step size d · lr",
    "Distance estimate d",
    "Gradient norm",
    "Held-out loss",
    "Loss by noise level σ",
    "Held-out loss by noise level σ",
)  # of charts.toml
_STYLE: Any = matplotlib.rc_params_from_file(Path(__file__).with_name("plots.mplstyle"), use_default_template=False)


def plot_runs(runs: Sequence[Path], save_to: Path) -> list[Path]:
    """Draw ``runs`` (folders with a ``metrics.jsonl``, or such files) and return the paths of the PNG and
    the SVG.

    Args:
        runs: one or several; colours repeat after seven.
        save_to: where the image goes; ``.png`` and ``.svg`` take the place of its suffix.

    Raises:
        UserError: no run, a run without metrics, or a folder that cannot be written to.
    """
    if not runs:
        raise UserError("no run to plot; name at least one output folder")
    loaded = [read_run(Path(run), name) for run, name in zip(runs, _distinct_names(runs), strict=True)]
    subject = _subject(_folder(Path(runs[0]))) if len(runs) == 1 else ""
    return save_figure(draw_runs(loaded, subject), Path(save_to))


def save_figure(figure: Figure, save_to: Path) -> list[Path]:
    """Write ``figure`` as PNG and SVG; return their paths."""
    if not save_to.name:  # "." and "/"
        raise WriteError(save_to, "is a folder")
    written = [save_to.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in written:
        with atomic_path(path) as temporary, matplotlib.rc_context(_STYLE):
            figure.savefig(temporary, format=path.suffix[1:], dpi=160)
    return written


def as_written(text: str) -> str:
    """Return a name for Matplotlib, which reads what stands between dollars as TeX (numbers of its axes are that)."""
    return text.replace("$", r"\$")


@matplotlib.rc_context(_STYLE)
def draw_runs(runs: Sequence[Run], subject: str = "") -> Figure:
    """Draw the figure: the loss at the left, the other charts one below the other at the right.

    Axes are logarithmic where values span more than a factor of ten. ``subject`` says behind the name of a single run
    what was trained.
    """
    charts = {chart["title"]: chart for chart in charts_of(runs, _EMA_DECAY)}
    loss = charts.get("Loss")
    panels = [charts[title] for title in _PANELS if title in charts]
    figure = Figure(figsize=(11, max(4.2, 1.9 * len(panels))), layout="constrained")
    FigureCanvasAgg(figure)
    columns = [*([0] if loss else []), *([1] if panels else [])]
    grid = figure.add_gridspec(max(1, len(panels)), len(columns), width_ratios=[1.15, 1][2 - len(columns) :])
    first: Axes | None = None
    if loss:
        first = figure.add_subplot(grid[:, 0])
        _draw(first, loss, runs)
    for row, panel in enumerate(panels):
        axes = figure.add_subplot(grid[row, -1], sharex=first)
        first = first or axes
        _draw(axes, panel, runs)
        axes.tick_params(labelbottom=row == len(panels) - 1)
    for lowest in {figure.axes[0 if loss else -1], figure.axes[-1]}:  # of each column
        lowest.set_xlabel("optimizer step")
        lowest.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _head(figure, runs, subject)
    return figure


def _draw(axes: Axes, chart: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """Draw a chart's lines: of one run a colour for each kind; of several a colour for each run, a style for each kind.

    Lines of earlier runs are wider, so that they are seen at both sides of a later one's.
    """
    shown, alone = [], len(runs) == 1
    named: dict[str, Line2D] = {}
    for line in chart["lines"]:
        steps, values, run, kind = line["steps"], np.array(line["values"], dtype=np.float64), line["run"], line["kind"]
        shown.append(np.nanpercentile(values, [1.0, 99.0]) if line["faint"] else values)
        (drawn,) = axes.plot(
            steps,
            values,
            color=_colour(kind if alone else run),
            linestyle="-" if alone else _STYLES[kind % len(_STYLES)],
            linewidth=0.8 if line["faint"] else 1.8 + 1.2 * (len(runs) - 1 - run),
            alpha=0.28 if line["faint"] else 1.0,
            marker="o" if chart["points"] or len(steps) == 1 else "",
            markersize=4.5,
        )
        named.setdefault(
            line["label"], drawn if alone else Line2D([], [], color=_GREY, linestyle=drawn.get_linestyle())
        )
    axes.set_title(chart["title"].replace("noise level ", ""))
    is_rate = chart["title"] == "Learning rate"
    lowest = min(float(np.nanmax(values)) for values in shown) / _LR_SPAN if is_rate else 0.0
    _scale(axes, shown, lowest, from_zero=is_rate)
    if len(named) > 1:
        axes.legend(
            named.values(),
            [as_written(name.removeprefix("σ ")) for name in named],
            ncols=5,
            columnspacing=0.7,
            handlelength=1.4,
            **_BESIDE_TITLE,
        )


def _head(figure: Figure, runs: Sequence[Run], subject: str) -> None:
    """Put the run's name and subject, or a legend of all runs, above the panels."""
    if len(runs) == 1:
        title = as_written("   ".join(filter(None, (runs[0].name, subject))))
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        return
    labels = [as_written(run.name) for run in runs]
    handles = [Line2D([], [], color=_colour(i), linewidth=2.5, label=label) for i, label in enumerate(labels)]
    across = min(len(runs), max(1, 100 // max(map(len, labels))))
    figure.legend(handles=handles, loc="outside upper left", ncols=across, fontsize=10.5)


def _scale(axes: Axes, shown: Sequence[Values], lowest: float, from_zero: bool) -> None:
    """Choose an axis and its limits from the values shown: logarithmic over a decade, or linear.

    A logarithmic axis does not go below ``lowest``; a linear one begins at 0 with ``from_zero``.
    """
    values = np.concatenate([np.asarray(v, dtype=np.float64) for v in shown])
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    if positive.size and positive.max() / positive.min() > 10:
        low, high = math.log10(max(positive.min(), lowest)), math.log10(positive.max())
        room = 0.1 * max(high - low, 0.3)
        axes.set_yscale("log")
        axes.set_ylim(10 ** (low - room), 10 ** (high + room))
        if high - low < 2:  # too few powers of ten to read the axis by
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        return
    low, high = float(values.min()), float(values.max())
    room = 0.1 * ((high - low) or abs(high) or 1.0)
    axes.set_ylim(0.0 if from_zero and low >= 0 else low - room, high + room)
    axes.ticklabel_format(axis="y", scilimits=(-3, 4), useMathText=True)


def _folder(run: Path) -> Path:
    return (run if run.is_dir() else run.parent).resolve()


def _subject(folder: Path) -> str:
    """Return what the run in ``folder`` trained, and how, as far as its settings say."""
    given = settings_of(folder)
    model = given.get("pretrained_model_name_or_path") or given.get("init_from") or given.get("preset")
    shown = {
        Path(str(model)).name: model,
        given.get("network_type", "lora"): "network_dim" in given,
        f"rank {given.get('network_dim')}": "network_dim" in given,
        given.get("optimizer_type"): "optimizer_type" in given,
        f"lr {given.get('learning_rate')}": "learning_rate" in given,
    }
    return ", ".join(str(words) for words, is_given in shown.items() if is_given)


def _distinct_names(runs: Sequence[Path]) -> list[str]:
    """Return each run's output name, or its folder's; of those that share it with the folders that differ."""
    folders = [_folder(path) for path in map(Path, runs)]
    names = [str(settings_of(folder).get("output_name") or folder.name) for folder in folders]
    shared = {name for name in names if names.count(name) > 1}
    named = [name if name not in shared else folder.name for name, folder in zip(names, folders, strict=True)]
    return [
        name if named.count(name) == 1 else f"{folder.parent.name}/{folder.name}"
        for name, folder in zip(named, folders, strict=True)
    ]


def _colour(run: int) -> str:
    return _COLOURS[run % len(_COLOURS)]
