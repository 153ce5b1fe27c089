"""What the steps draw and check with; nothing of a language model is in here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import psutil
from matplotlib.axes import Axes
from torch import Tensor

OUTPUT = Path("output/walkthrough")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito, for any kind of eyes
_STYLE = Path(__file__).resolve().parent.parent / "library/training/report/plots.mplstyle"


@contextmanager
def draw(name: str, *titles: str, width: float = 10, height: float = 3.2, **grid: Any) -> Iterator[list[Axes]]:
    """Give one chart for each of ``titles``, side by side; save them as ``name``.png."""
    with plt.style.context(_STYLE), plt.rc_context({"axes.prop_cycle": plt.cycler("color", COLOURS)}):
        grid |= {"figsize": (width, height), "squeeze": False, "layout": "constrained"}
        figure, axes = plt.subplots(1, len(titles), **grid)
        for chart, title in zip(axes.flat, titles):
            chart.set_title(title)
            chart.set_axisbelow(True)
        yield list(axes.flat)
        OUTPUT.mkdir(parents=True, exist_ok=True)
        figure.savefig(OUTPUT / f"{name}.png", dpi=80)
    print(f"drawn: {OUTPUT / name}.png")


def check(what: str, ours: Tensor, theirs: Tensor, limit: float) -> None:
    """Say how far ``ours`` is from ``theirs``, as a share of the largest number; more than ``limit`` is an error."""
    off = float((ours - theirs).abs().max() / theirs.abs().max())
    print(f"check: {what}: off by {off:.0e} of the largest number, {limit:.0e} is allowed")
    assert off <= limit, what


def seconds(function: Callable[[], object]) -> float:
    """Return how long a call takes, after one that is not counted."""
    function()
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def private_mib() -> float:
    """Return the memory of this process; on Linux without mapped files."""
    memory = psutil.Process().memory_info()
    return (memory.rss - getattr(memory, "shared", 0)) / 2**20
