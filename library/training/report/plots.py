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

import itertools
import math
from collections.abc import Sequence
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
from library.training.report.metrics_file import Run, Series, Values, average, read_run, thin
from library.training.report.run_folder import settings_of

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LEVEL_COLOURS = ("#E69F00", "#D55E00", "#CC79A7", "#0072B2", "#000000")  # from detail to composition
_GREY = "#555555"  # what a legend shows that stands for every colour
_STYLES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
_HELD_OUT: dict[str, Any] = {"marker": "o", "markersize": 5, "markeredgecolor": "white"}
_HELD_OUT |= {"markeredgewidth": 0.8, "linewidth": 1.1, "linestyle": "--"}
_BESIDE_TITLE: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.1}
_POINTS = 2000  # drawn per line: two for each of a thousand pixels, the lowest and the highest
_EMA_DECAY = 0.98  # where a run wrote no loss_ema
_LR_SPAN = 1e3  # a schedule that ends at 0 is shown this far below its peak
_BY_LEVEL = {"Loss by σ": "loss/sigma_", "Held out by σ": "val_loss/sigma_"}
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
    """Draw the figure: the loss at the left, the other quantities one below the other at the right.

    Axes are logarithmic where values span more than a factor of ten. ``subject`` says behind the name of a single run
    what was trained.
    """
    panels = [
        (title, prefix)
        for title, prefix in (
            ("Learning rate", "lr/"),
            ("Distance estimate d", "d/"),
            ("Step size d · lr", "d*lr/"),
            ("Gradient norm", "grad_norm"),
            ("Learnt, and changed elsewhere", "val_prior_loss"),
            *(_BY_LEVEL.items() if len(runs) == 1 else ()),  # colour is the run, of several
        )
        if any(key.startswith(prefix) for run in runs for key in run.columns)
    ]
    has_loss = any(key in run.columns for run in runs for key in ("loss", "val_loss"))
    figure = Figure(figsize=(11, max(4.2, 1.9 * len(panels))), layout="constrained")
    FigureCanvasAgg(figure)
    columns = [*([0] if has_loss else []), *([1] if panels else [])]
    grid = figure.add_gridspec(max(1, len(panels)), len(columns), width_ratios=[1.15, 1][2 - len(columns) :])
    first: Axes | None = None
    if has_loss:
        first = figure.add_subplot(grid[:, 0])
        _draw_loss(first, runs)
    for row, (title, prefix) in enumerate(panels):
        axes = figure.add_subplot(grid[row, -1], sharex=first)
        first = first or axes
        _draw_panel(axes, runs, title, prefix)
        axes.tick_params(labelbottom=row == len(panels) - 1)
    for lowest in {figure.axes[0 if has_loss else -1], figure.axes[-1]}:  # of each column
        lowest.set_xlabel("optimizer step")
        lowest.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _head(figure, runs, subject)
    return figure


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


def _width(run: int, runs: Sequence[Run]) -> float:
    """Return how wide a run's lines are: those of earlier runs are seen at both sides of a later one's."""
    return 1.8 + 1.2 * (len(runs) - 1 - run)


def _draw_loss(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw every run's loss as a moving average (one run's steps too), its validation loss as dots."""
    shown: list[Values] = []
    for i, run in enumerate(runs):
        if (loss := run.columns.get("loss")) is not None:
            shown += _draw_noisy(axes, loss, run.columns.get("loss_ema"), i, runs)
        if (held_out := run.columns.get("val_loss")) is not None:
            axes.plot(*held_out, color=_held_out_colour(i, runs), zorder=3, **_HELD_OUT)
            shown.append(held_out[1])
    axes.set_title("Loss")
    _scale(axes, shown, margin=0.06)
    axes.legend(handles=_loss_legend(runs), ncols=3, **_BESIDE_TITLE)


def _draw_noisy(axes: Axes, series: Series, smooth: Series | None, number: int, runs: Sequence[Run]) -> list[Values]:
    """Draw a run's moving average, of a single run over the steps themselves; return the values the axis must show."""
    smooth, colour, alone = smooth or (series[0], average(series[1], _EMA_DECAY)), _colour(number), len(runs) == 1
    if alone:
        axes.plot(*thin(series, _POINTS), color=colour, alpha=0.28, linewidth=0.8)
    axes.plot(*thin(smooth, _POINTS), color=colour, linewidth=_width(number, runs), **_dot(smooth))
    return [smooth[1], np.nanpercentile(series[1], [1.0, 99.0])] if alone else [smooth[1]]


def _dot(series: Series) -> dict[str, Any]:
    """Return what makes a series of one value visible: a line through one point has no length."""
    return {"marker": "o", "markersize": 4.5} if len(series[0]) == 1 else {}


def _loss_legend(runs: Sequence[Run]) -> list[Line2D]:
    colour = _colour(0) if len(runs) == 1 else _GREY
    entries = []
    if any("loss" in run.columns for run in runs):
        entries.append(Line2D([], [], color=colour, linewidth=2, label="moving average"))
        if len(runs) == 1:
            entries.insert(0, Line2D([], [], color=colour, alpha=0.35, linewidth=1, label="each step"))
    if any("val_loss" in run.columns for run in runs):
        held_out = _held_out_colour(0, runs) if len(runs) == 1 else _GREY
        entries.append(Line2D([], [], color=held_out, label="held-out data", **_HELD_OUT))
    return entries


def _draw_panel(axes: Axes, runs: Sequence[Run], title: str, prefix: str) -> None:
    """Draw one quantity of every run and parameter group."""
    axes.set_title(title)
    shown: list[Values] = []
    if prefix == "grad_norm":
        for i, run in enumerate(runs):
            if (series := run.columns.get(prefix)) is not None:
                shown += _draw_noisy(axes, series, None, i, runs)
        _scale(axes, shown)
        return
    if prefix == "val_prior_loss":
        _draw_learnt(axes, runs)
        return
    if prefix in _BY_LEVEL.values():
        _draw_levels(axes, runs[0], prefix)
        return
    names = sorted({name for run in runs for group in run.groups(prefix) for name in group})
    for i, run in enumerate(runs):
        for group, series in run.groups(prefix).items():
            style, width = _style(names.index(group[0])), _width(i, runs)
            axes.plot(*thin(series, _POINTS), color=_colour(i), linestyle=style, linewidth=width, **_dot(series))
            shown.append(series[1])
    lowest_peak = min(float(np.nanmax(values)) for values in shown)
    _scale(axes, shown, lowest=lowest_peak / _LR_SPAN if prefix == "lr/" else 0.0, from_zero=True)
    if prefix == "lr/" and any(len(run.groups(key)) > 1 for run in runs for key in ("lr/", "d/")):
        handles = [
            Line2D([], [], color=_GREY, linestyle=_style(j), label=as_written(name)) for j, name in enumerate(names)
        ]
        axes.legend(handles=handles, ncols=4, handlelength=2.6, **_BESIDE_TITLE)


def _draw_learnt(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw by how much the held-out loss fell, and how far the model is from the base on other prompts.

    Both are mean squared differences of velocities, so they share the axis.
    """
    shown: list[Values] = []
    for key, label, style in (("val_loss", "learnt", "-"), ("val_prior_loss", "elsewhere", "--")):
        measured = [i for i, run in enumerate(runs) if {key, "val_prior_loss"} <= run.columns.keys()]
        for i in measured:  # of a run that holds nothing out only the second
            steps, values = runs[i].columns[key]
            shown.append(values[0] - values if key == "val_loss" else values)
            colour = _COLOURS[key != "val_loss"] if len(runs) == 1 else _colour(i)
            name = label if i == measured[0] else "_"  # once in the legend
            axes.plot(steps, shown[-1], color=colour, marker="o", markersize=4, linestyle=style, label=name)
    _scale(axes, shown, linear=True)
    axes.legend(ncols=2, columnspacing=1.0, **_BESIDE_TITLE)


def _draw_levels(axes: Axes, run: Run, prefix: str) -> None:
    """Draw a run's loss at each noise level: in training as a moving average, held out as it was measured."""
    shown: list[Values] = []
    for (level, *_), colour in zip(sorted(run.groups(prefix)), itertools.cycle(_LEVEL_COLOURS), strict=False):
        steps, values = run.columns[prefix + level]
        if prefix == "loss/sigma_":
            values = average(values, _EMA_DECAY)
        style = _HELD_OUT if prefix.startswith("val") else {"linewidth": 1.6, **_dot((steps, values))}
        axes.plot(*thin((steps, values), _POINTS), color=colour, label=level.replace("-", "–"), **style)
        shown.append(values)
    _scale(axes, shown, from_zero=True)
    axes.legend(ncols=5, columnspacing=0.7, handlelength=1.0, handletextpad=0.3, **_BESIDE_TITLE)


def _scale(
    axes: Axes,
    shown: Sequence[Values],
    linear: bool = False,
    margin: float = 0.1,
    lowest: float = 0.0,
    from_zero: bool = False,
) -> None:
    """Choose an axis and its limits from the values shown: logarithmic over a decade, unless it is to be ``linear``.

    A logarithmic axis does not go below ``lowest``; a linear one begins at 0 with ``from_zero``.
    """
    values = np.concatenate([np.asarray(v, dtype=np.float64) for v in shown])
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    if not linear and positive.size and positive.max() / positive.min() > 10:
        low, high = math.log10(max(positive.min(), lowest)), math.log10(positive.max())
        room = margin * max(high - low, 0.3)
        axes.set_yscale("log")
        axes.set_ylim(10 ** (low - room), 10 ** (high + room))
        if high - low < 2:  # too few powers of ten to read the axis by
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        return
    low, high = float(values.min()), float(values.max())
    room = margin * ((high - low) or abs(high) or 1.0)
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


def _held_out_colour(run: int, runs: Sequence[Run]) -> str:
    return _COLOURS[1] if len(runs) == 1 else _colour(run)


def _style(group: int) -> Literal["-", "--", ":", "-."]:
    return _STYLES[group % len(_STYLES)]
