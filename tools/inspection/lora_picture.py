"""A LoRA as a picture: above, the size of each block's update; below, every layer's, with ranks and alphas.

The blocks of each part of the network (FLUX: double and single) stand side by side on one scale. Above, bars show a
block's whole update, the root of the sum of its layers' squared norms, with the block's number. Below, a cell is a
layer of a block, its colour the root mean square of the update's elements, on a logarithmic scale, so that layers of
all sizes compare. Ranks and alphas that are the same everywhere are in the title; those that differ are in their part's
title, or at the right of their rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from library.errors import UserError
from library.files import atomic_path
from networks.files.inspection import LoraLayer

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito 2008
_DECADES = 3  # of the colour scale below the largest update; what is smaller is shown as smallest
_SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}


def draw_lora(layers: Sequence[LoraLayer], title: str, save_to: Path) -> Path:
    """Draw ``layers`` to the PNG ``save_to``; return its path.

    Raises:
        UserError: no layers, or the folder cannot be written to.
    """
    if not layers:
        raise UserError(f"{title}: no layers to draw; only LoRAs of linear layers have a picture")
    with matplotlib.rc_context(_SETTINGS):
        figure = _figure(layers, title)
        with atomic_path(save_to) as temporary:
            figure.savefig(temporary, format="png", dpi=140)
    return save_to


def _figure(layers: Sequence[LoraLayer], title: str) -> Figure:
    parts = {part: [layer for layer in layers if layer.part == part] for part in _parts(layers)}
    columns = [len(_blocks(part)) for part in parts.values()]
    rows = max(len(_rows(part)) for part in parts.values())
    width = min(24.0, 3.0 + 1.9 * len(parts) + 0.2 * sum(columns))
    figure = Figure(figsize=(width, 3.1 + 0.27 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_headline(layers, title), x=0.01, ha="left", fontsize=12, fontweight="bold")
    ratios = [max(count, 6) for count in columns]
    grid = figure.add_gridspec(2, len(parts), width_ratios=ratios, height_ratios=[1.5, max(1.5, 0.27 * rows)])
    scale = _colour_scale([layer.rms for layer in layers])
    heat: list[Axes] = []
    bars: Axes | None = None
    for column, (part, members) in enumerate(parts.items()):
        bars = figure.add_subplot(grid[0, column], sharey=bars)
        _draw_bars(bars, members, _part_title(part, members, layers), _COLOURS[column % len(_COLOURS)])
        bars.tick_params(labelleft=column == 0)
        if column == 0:
            bars.set_ylabel("norm of the update")
        heat.append(figure.add_subplot(grid[1, column]))
        image = _draw_cells(heat[-1], members, scale, rows)
    figure.colorbar(image, ax=heat, label="update, root mean square", pad=0.01, aspect=30)
    return figure


def _colour_scale(values: Sequence[float]) -> LogNorm:
    """Return the scale from the smallest update to the largest; half a decade at least, ``_DECADES`` at most."""
    largest = max(values) or 1.0
    smallest = min((value for value in values if value > 0), default=largest)
    return LogNorm(min(max(smallest, largest / 10**_DECADES), largest / 10**0.5), largest, clip=True)


def _headline(layers: Sequence[LoraLayer], title: str) -> str:
    ranks, alphas = {layer.rank for layer in layers}, {layer.alpha for layer in layers}
    rank = f"rank {ranks.pop()}" if len(ranks) == 1 else f"ranks {min(ranks)}–{max(ranks)}"
    alpha = f"alpha {alphas.pop():g}" if len(alphas) == 1 else f"alphas {min(alphas):g}–{max(alphas):g}"
    whole = math.hypot(*(layer.norm for layer in layers))
    return f"{title}   {len(layers)} layers, {rank}, {alpha}, norm {whole:.3g}"


def _part_title(part: str, members: Sequence[LoraLayer], layers: Sequence[LoraLayer]) -> str:
    """Return a part's name, with its rank and alpha where the part has one of each and the whole LoRA has not."""
    name = part.replace("_", " ") or "outside the blocks"
    own = {(layer.rank, layer.alpha) for layer in members}
    if len(own) > 1 or own == {(layer.rank, layer.alpha) for layer in layers}:
        return name
    rank, alpha = own.pop()
    return f"{name}\nrank {rank}, alpha {alpha:g}"


def _draw_bars(axes: Axes, members: Sequence[LoraLayer], title: str, colour: str) -> None:
    blocks = _blocks(members)
    heights = [math.hypot(*(layer.norm for layer in members if (layer.block or 0) == block)) for block in blocks]
    axes.bar(range(len(blocks)), heights, color=colour, width=0.8)
    axes.set_title(title)
    axes.set_xlim(-0.5, len(blocks) - 0.5)
    every = max(1, math.ceil(len(blocks) / 20))
    axes.set_xticks(range(0, len(blocks), every), [str(block) for block in blocks[::every]], fontsize=8)
    if not members[0].part:
        axes.set_xticks([])
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)


def _draw_cells(axes: Axes, members: Sequence[LoraLayer], scale: LogNorm, most_rows: int) -> Any:
    """Draw one part's layers over its blocks; return the image, for the colour bar."""
    blocks, rows = _blocks(members), _rows(members)
    values = np.full((len(rows), len(blocks)), np.nan)
    for layer in members:
        values[rows.index(layer.layer), blocks.index(layer.block or 0)] = max(layer.rms, float(scale.vmin or 0.0))
    image = axes.imshow(values, aspect="auto", norm=scale, cmap="viridis", interpolation="nearest")
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_xticks([])
    axes.set_ylim(most_rows - 0.5, -0.5)  # rows of all parts are of one height
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    for row, name in enumerate(rows):
        if text := _differing(name, members):
            axes.annotate(text, (1.0, row), (3, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=7)
    return image


def _differing(name: str, members: Sequence[LoraLayer]) -> str:
    """Return a row's rank and alpha where the part has several."""
    if len({(layer.rank, layer.alpha) for layer in members}) == 1:
        return ""
    own = sorted({(layer.rank, layer.alpha) for layer in members if layer.layer == name})
    (rank, alpha), (last_rank, last_alpha) = own[0], own[-1]
    return f"r {rank}, α {alpha:g}" if len(own) == 1 else f"r {rank}–{last_rank}, α {alpha:g}–{last_alpha:g}"


def _parts(layers: Sequence[LoraLayer]) -> list[str]:
    """Return the parts in file order, what is outside the blocks last."""
    return sorted(dict.fromkeys(layer.part for layer in layers), key=lambda part: part == "")


def _blocks(members: Sequence[LoraLayer]) -> list[int]:
    return sorted({layer.block or 0 for layer in members})


def _rows(members: Sequence[LoraLayer]) -> list[str]:
    return list(dict.fromkeys(layer.layer for layer in members))
