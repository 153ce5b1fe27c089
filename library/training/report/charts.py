"""The curves of one run or of several over each other, as numbers, for whoever draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from library.training.report.metrics_file import Run, Series, average, thin

_MOST_LINES = 100  # of a chart, far more than can be told apart
_POINTS = 1000  # of a curve, about what a screen has pixels
# title, keys (those that end in / or _ begin so), how it is drawn, logarithmic: "loss" as chosen, "auto" over a decade
_CHARTS = (
    ("Loss", ("loss",), "noisy", "loss"),
    ("Held-out loss", ("val_loss", "val_prior_loss"), "points", "loss"),
    ("Learning rate", ("lr/",), "line", "auto"),
    ("Step size d · lr", ("d*lr/",), "line", "auto"),
    ("Distance estimate d", ("d/",), "line", "auto"),
    ("Gradient norm", ("grad_norm",), "noisy", "auto"),
    ("Loss by noise level σ", ("loss/sigma_",), "smooth", "loss"),
    ("Held-out loss by noise level σ", ("val_loss/sigma_",), "points", "loss"),
    ("Peak memory, GiB", ("peak_mem_bytes",), "line", ""),
    ("Seconds a step", ("s_per_it", "data_wait_s"), "smooth", ""),
)
_LABELS = {
    "loss": "training", "val_loss": "held out", "val_prior_loss": "held out, to be preserved", "grad_norm": "norm",
    "peak_mem_bytes": "peak", "s_per_it": "in all", "data_wait_s": "waiting for data",
}  # fmt: skip


def charts_of(runs: Sequence[Run], decay: float) -> list[dict[str, Any]]:
    """Return the charts that there is something to draw in, in their order.

    Of several runs the curves by noise level are left out: there, colour is the run.

    Args:
        runs: beside each other.
        decay: of the running average that noisy curves are smoothed by, 0 for none.

    Returns:
        Of each chart ``title``, ``lines`` (``run`` and ``kind``: numbers to tell them apart by, ``label``, ``faint``,
        ``steps``, ``values``, of which None is a gap), ``points`` (single values, no curve), ``log`` (over more than a
        decade), ``loss``.
    """
    rows = [row for row in _CHARTS if len(runs) == 1 or "noise level" not in row[0]]
    return [chart for row in rows if (chart := _chart(runs, decay, *row))["lines"]]


def _chart(runs: Sequence[Run], decay: float, title: str, keys: tuple[str, ...], look: str, log: str) -> dict[str, Any]:
    lines = []
    for number, run in enumerate(runs):
        columns: dict[str, Series] = {_LABELS[key]: run.columns[key] for key in keys if key in run.columns}
        if keys[0][-1] in "/_":  # one of each group, or noise level
            before = "σ " if keys[0][-1] == "_" else ""
            groups = list(run.groups(keys[0]).items())[:_MOST_LINES]
            columns = {before + ", ".join(names): series for names, series in groups}
        for kind, (label, (steps, values)) in enumerate(sorted(columns.items())):
            values = values / 2**30 if "bytes" in keys[0] else values
            shown = [(label, average(values, decay) if look in ("noisy", "smooth") else values, False)]
            if look == "noisy" and decay > 0 and len(runs) == 1:
                shown.insert(0, (f"{label}, each step", values, True))  # behind it, each step's
            for text, column, faint in shown:
                xs, ys = thin((steps, column), _POINTS)
                numbers = [float(f"{y:.6g}") if y == y else None for y in ys.tolist()]
                lines.append({"run": number, "kind": kind, "label": text, "faint": faint,
                              "steps": xs.astype(int).tolist(), "values": numbers})  # fmt: skip
    seen = [y for line in lines for y in line["values"] if y]
    is_wide = log == "auto" and bool(seen) and min(seen) > 0 and max(seen) > 10 * min(seen)
    return {"title": title, "lines": lines, "points": look == "points", "log": is_wide, "loss": log == "loss"}
