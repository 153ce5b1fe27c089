"""Draw the figures of ``docs/precision.md``.

    python dev/draw_precision_figures.py

They are measured on layers made from a seed (``dev/precision_numbers.py``); those of the seam are made by
``dev/measure_seam.py``. Everything is a function of the seeds. About a minute.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

import dev.precision_numbers as numbers
from dev.precision_numbers import heavy_tailed_weight
from library.errors import exit_on_user_error
from library.files import atomic_path
from library.precision.fp8_numbers import E4M3FN

ROOT = Path(__file__).resolve().parent.parent
COLOURS = {"fp32": "#222222", "bf16": "#1f77b4", "e4m3fn": "#d62728", "e5m2": "#ff9f1c"}
_MERGE_STYLES = {
    "plain cast, nearest": ("#d62728", "o-"),
    "block64, nearest": ("#ff9f1c", "s-"),
    "plain cast, stochastic": ("#7f7f7f", "^-"),
    "plain cast, compensated": ("#2ca02c", "D-"),
}
_GREY = "#999999"
_SOLID = 200  # numbers on an axis from which on they are drawn as a solid bar


def number_lines() -> Figure:
    """Which numbers there are in each format, around 1 and near zero, with weights of std 0.02 above the latter."""
    figure = Figure(figsize=(8.6, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    places = {name: len(COLOURS) - 1 - i for i, name in enumerate(COLOURS)}
    for axis, (low, high) in ((left, (0.85, 1.3)), (right, (0.0, 0.05))):
        for name, dtype in numbers.DTYPES.items():
            if (high - low) / numbers.step_at((low + high) / 2, dtype) > _SOLID:
                axis.plot([low, high], [places[name]] * 2, color=COLOURS[name], linewidth=9, solid_capstyle="butt")
                continue
            found = numbers.numbers_between(low, high, dtype)
            width = 0.5 if name == "bf16" else 1.6
            axis.vlines(found, places[name] - 0.25, places[name] + 0.25, color=COLOURS[name], linewidth=width)
        axis.set_yticks(list(places.values()), list(places))
        axis.set_xlim(low, high)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    left.set_title("around 1", loc="left")
    right.set_title("near zero, where weights are", loc="left")
    weights = heavy_tailed_weight(0.02).abs().flatten()
    density = torch.histc(weights, 100, 0.0, 0.05)
    middles = torch.linspace(0.00025, 0.04975, 100)
    right.fill_between(middles, 3.6, 3.6 + density / density.max(), color="#cccccc")
    right.text(0.049, 4.0, "weights of std 0.02", ha="right", color="#666666")
    right.axvline(E4M3FN.min_normal, color=_GREY, linewidth=0.8, linestyle="--", ymax=0.72)
    right.set_xlabel("dashed: 2⁻⁶, below which e4m3fn's step stays 2⁻⁹")
    return figure


def step_sizes() -> Figure:
    """Step against magnitude for all four formats."""
    figure = Figure(figsize=(6.6, 3.9), layout="constrained")
    axis = figure.subplots()
    magnitudes = [2.0 ** (exponent / 4) for exponent in range(-80, 66)]
    for name, dtype in numbers.DTYPES.items():
        steps = [numbers.step_at(magnitude, dtype) for magnitude in magnitudes]
        points = [(m, s) for m, s in zip(magnitudes, steps, strict=True) if s > 0]
        axis.loglog(*zip(*points, strict=True), color=COLOURS[name], label=name, drawstyle="steps-post")
    axis.axvspan(1e-3, 0.1, color="#eeeeee", zorder=0)
    axis.text(1e-2, 1e-13, "most weights", ha="center", color="#666666")
    axis.axvline(E4M3FN.max, color=COLOURS["e4m3fn"], linewidth=0.8, linestyle=":")
    axis.text(E4M3FN.max * 0.8, 1e-10, "448: e4m3fn ends", ha="right", color=COLOURS["e4m3fn"])
    axis.annotate("fixed step 2⁻⁹ below 2⁻⁶", (2e-5, 2**-9), (2e-6, 0.06), color=COLOURS["e4m3fn"],
                  arrowprops={"arrowstyle": "-", "color": COLOURS["e4m3fn"]})  # fmt: skip
    axis.set(xlabel="size of the number", ylabel="distance to the next number", xlim=(1e-6, 7e4))
    axis.legend(loc="lower right")
    return figure


def weight_error() -> Figure:
    """Relative error of a weight against its std by granularity, and what a plain cast makes of its entries."""
    stds = [0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16]
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = {"cast": "#d62728", "tensor": "#1f77b4", "row": "#9467bd", "block64": "#ff9f1c"}
    labels = {"cast": "plain cast", "tensor": "one scale a tensor", "row": "a scale a row", "block64": "block64"}
    for name, errors in numbers.weight_errors(stds, ("cast", "tensor", "row", "block64")).items():
        left.semilogx(stds, [100 * e for e in errors], marker=".", color=colours[name], label=labels[name])
    left.set(xlabel="std of the weights", ylabel="error, % of the weights' size")
    left.set_ylim(bottom=0)
    left.legend()
    shares = {name: [100 * s for s in line] for name, line in numbers.cast_shares(stds).items()}
    right.stackplot(stds, shares["zero"], shares["subnormal"], colors=["#d62728", "#f4b6b6"],
                    labels=["rounded to zero", "below 2⁻⁶: fixed step"])  # fmt: skip
    right.set_xscale("log")
    right.set(xlabel="std of the weights", ylabel="% of the weights, plain cast", ylim=(0, 100))
    right.legend(loc="upper right")
    for axis in (left, right):
        _std_ticks(axis, (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16))
    return figure


def merge_retention() -> Figure:
    """What is left of an update of 1 % after a merge into an fp8 file, and the error that the merge makes."""
    stds = [0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12]
    found = numbers.merges(stds)
    figure = Figure(figsize=(9.6, 3.7), layout="constrained")
    axes = figure.subplots(1, 3)
    panels = (
        (axes[0], found["anywhere"], "left of an update\nwithout direction"),
        (axes[1], found["along_inputs"], "left of the effect of one\nalong the inputs"),
        (axes[2], found["error"], "output error ÷ the LoRA's effect\n(1: as if there were no LoRA)"),
    )
    for axis, lines, title in panels:
        for name, values in lines.items():
            if axis is axes[0] and name.endswith("compensated"):
                continue  # keeps effects on outputs, which an update without direction hardly has
            colour, style = _MERGE_STYLES[name]
            axis.semilogx(stds, values, style, color=colour, markersize=4, label=name)
        axis.axhline(1, color=_GREY, linewidth=0.8, zorder=0)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("std of the weights")
        axis.set_ylim(bottom=0)
        _std_ticks(axis, (0.005, 0.01, 0.02, 0.04, 0.08))
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def saturation() -> Figure:
    """What a scale can hold, and merges with the file's old scales against fresh ones."""
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    values = torch.linspace(0, 0.15, 1501).tolist()
    for largest, colour in ((0.1, "#d62728"), (0.15, "#2ca02c")):
        stored = numbers.stored_with_scale(values, largest)
        left.plot(values, stored, color=colour, label=f"scale for weights up to {largest:g}")
    left.plot(values, values, color=_GREY, linewidth=0.8, label="exact")
    left.set(xlabel="weight with the update", ylabel="what the file can say", xlim=(0, 0.15), ylim=(0, 0.155))
    left.legend(loc="upper left")
    shares = [0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0]
    found = numbers.saturation(shares)
    percent = [100 * share for share in shares]
    right.loglog(percent, [100 * e for e in found["old_scale"]], "o-", color="#d62728", label="the file's scales")
    right.loglog(percent, [100 * e for e in found["new_scale"]], "o-", color="#2ca02c", label="scales computed again")
    right.set(xlabel="size of the update, % of the weights'", ylabel="error of the merged weight, %")
    right.set_xticks(percent, [f"{p:g}" for p in percent], minor=False)
    right.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"], minor=False)
    right.minorticks_off()
    right.legend(loc="upper left")
    return figure


def activations() -> Figure:
    """Errors of ordinary activations beside an outlier, and of activations that are clamped without a scale."""
    figure = Figure(figsize=(8.6, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    outliers = [10.0 ** (exponent / 4) for exponent in range(4, 25)]
    _, tensor_others = numbers.activation_errors(outliers, "tensor")
    row_own, row_others = numbers.activation_errors(outliers, "row")
    left.loglog(outliers, _percent(tensor_others), color="#f0a0a0", linewidth=4,
                label="one scale a tensor: all tokens")  # fmt: skip
    left.loglog(outliers, _percent(row_own), "--", color="#1f77b4", label="a scale a token: the outlier's token")
    left.loglog(outliers, _percent(row_others), color="#1f77b4", label="a scale a token: all other tokens")
    left.set(
        xlabel="one outlier, times the usual activation", ylabel="error of the usual activations, %", ylim=(1, 250)
    )
    left.legend(loc="upper left", fontsize=8.5)
    sizes = [10.0 ** (exponent / 4) for exponent in range(-16, 17)]
    found = numbers.unscaled_errors(sizes)
    right.loglog(sizes, _percent(found["unit"]), color="#9467bd", label="no scale, clamped to ±448 (ComfyUI --fast)")
    right.loglog(sizes, _percent(found["row"]), color="#1f77b4", label="a scale a token")
    right.set(xlabel="usual size of the activations", ylabel="error, %", ylim=(1, 600))
    right.text(1e-4, 4, "too small:\nzero", color="#9467bd", ha="left")
    right.text(1.4e4, 4, "too large:\nclamped", color="#9467bd", ha="right")
    right.legend(loc="upper center", fontsize=8.5)
    for axis in (left, right):
        axis.set_yticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"], minor=False)
        axis.tick_params(axis="y", which="minor", left=False)
    return figure


FIGURES = {
    "number_lines": number_lines,
    "steps": step_sizes,
    "weight_error": weight_error,
    "retention": merge_retention,
    "saturation": saturation,
    "activations": activations,
}


def _percent(values: list[float]) -> list[float]:
    return [100 * value for value in values]


def _std_ticks(axis: Axes, stds: tuple[float, ...]) -> None:
    axis.set_xticks(stds, [f"{std:g}".removeprefix("0") for std in stds], minor=False)
    axis.tick_params(axis="x", which="minor", bottom=False)
    axis.minorticks_off()


def save(figure: Figure, path: Path) -> Path:
    """Write ``figure`` as a PNG of 96 colours on white that is the same every time; return its path."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    image = Image.open(drawn).convert("RGB").quantize(96, dither=Image.Dither.NONE)
    with atomic_path(path) as temporary:
        image.save(temporary, format="PNG", optimize=True)
    return path


@exit_on_user_error
def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*FIGURES], default=[*FIGURES], help="of these")
    parser.add_argument("--save_to", type=Path, default=ROOT / "docs" / "images", help="folder (default: docs/images)")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    options.save_to.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        if name in options.only:
            console.print(str(save(draw(), options.save_to / f"precision_{name}.png")))


if __name__ == "__main__":
    main()
