"""Why the border first: the trained tiny fill model with a LoRA, run in the ways that go wrong, and where they err.

Deployments, runs and figures are those of ``tools/precision_report.py``, on the demo's pictures with generated masks.
Where known pixels are pasted, they are pasted into the reference too: what is left is what fp8 did, without the tiny
model's own way of repainting what it was told to keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console

from library.config.schema import ModelConfig
from library.training.calibration import CalibrationOptions, prepare_calibration
from tools.generate import read_loras
from tools.merge_lora import parse_source
from tools.report.deployments import REFERENCE, Models, Variant, parse_deployment
from tools.report.differences import Differences, compare
from tools.report.measure import run_named
from tools.report.runs import Outcome, Probe

_SERVED = replace(REFERENCE, weights=True)
CASES: dict[str, Variant] = {
    "fp8 weights, LoRA beside them": _SERVED,
    "bf16 weights, LoRA at strength 0.65": replace(REFERENCE, strength=0.65),
    "LoRA rounded into the fp8 file": replace(_SERVED, merge="nearest"),
    "fp8 weights, known pixels pasted": replace(_SERVED, paste="end"),
}
_COLOURS = ("#1f77b4", "#9467bd", "#d62728", "#2ca02c")


@dataclass(frozen=True)
class BorderRuns:
    """What was run: case -> its reference, its outcome and its figures."""

    probe: Probe
    references: Mapping[str, Outcome]
    outcomes: Mapping[str, Outcome]
    differences: Mapping[str, Differences]


def run_cases(
    model: str, deploy: Path, lora: Path, dataset: str, cache: Path, images: int, steps: int, console: Console
) -> BorderRuns:
    """Run the reference and all cases on the same pictures, in fp32 on the CPU.

    Args:
        model: a fill model in bf16. deploy: the same in plain-cast fp8.
        lora: trained on ``model``. dataset: its TOML. cache: for latents and text.
        images, steps: how many pictures; sampling steps of each.

    Raises:
        UserError: anything wrong with model, LoRA or dataset.
    """
    config = ModelConfig(pretrained_model_name_or_path=model, model_type="flux_fill")
    models = Models(config, parse_deployment(str(deploy)), {}, torch.float32, torch.device("cpu"))
    models.loras = read_loras([parse_source(str(lora))], models.family, console)
    options = CalibrationOptions(dataset, images=images, guidance_scale=1.0, cache_directory=str(cache))
    calibration = prepare_calibration(models.family, options, models.dtype, models.device, console)
    probe = Probe([*calibration.fit, *calibration.check], [], (0.5,), steps, options.guidance_scale, options.seed)
    plain = run_named(models, REFERENCE, probe, console, "reference")
    pasted = run_named(models, replace(REFERENCE, paste="end"), probe, console, "reference, known pixels pasted")
    references = {name: pasted if variant.paste else plain for name, variant in CASES.items()}
    outcomes = {name: run_named(models, variant, probe, console, name) for name, variant in CASES.items()}
    differences = {name: compare(references[name], outcome, probe) for name, outcome in outcomes.items()}
    return BorderRuns(probe, references, outcomes, differences)


def rings(runs: BorderRuns) -> Figure:
    """Error of rings of pixels over the interior's, its signed difference, and its step across the border."""
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(2.2, 1, 1))
    for (name, each), colour in zip(runs.differences.items(), _COLOURS, strict=True):
        inside, outside = each.picture_seam["inside"], each.picture_seam["outside"]
        places = [-width for width in sorted(outside, reverse=True)] + sorted(inside)
        values = [(outside[-place] if place < 0 else inside[place]) for place in places]
        left.plot(range(len(places)), values, "o-", color=colour, markersize=4, label=name)
        left.set_xticks(range(len(places)), [str(abs(place)) for place in places])
    left.axvline(len(outside) - 0.5, color="#d62728", linewidth=1, linestyle="--")
    left.axhline(1, color="#999999", linewidth=0.8, zorder=0)
    left.set(xlabel="known side  ←  within so many pixels  →  filled side", ylabel="error ÷ the interior's")
    left.set_ylim(bottom=0)
    signed = [100 * each.picture_seam["signed"][8] for each in runs.differences.values()]
    steps = [each.picture_seam["step"] for each in runs.differences.values()]
    for axis, values, title, form in (
        (middle, signed, "ring less interior,\nwith its sign, %", "%+.2f"),
        (right, steps, "step of the error across the\nborder (1: as in the interior)", "%.1f"),
    ):
        bars = axis.bar(range(len(values)), values, color=_COLOURS)
        axis.bar_label(bars, fmt=form, padding=2, fontsize=8.5)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xticks([])
        axis.margins(y=0.15)
        axis.axhline(0 if axis is middle else 1, color="#999999", linewidth=0.8)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def pictures(runs: BorderRuns) -> Figure:
    """One picture of the reference, and every case's error on it, each on a scale of its own."""
    number = _example(runs.probe)
    figure = Figure(figsize=(9.6, 2.6), layout="constrained")
    axes = figure.subplots(1, 1 + len(runs.outcomes))
    mask = runs.probe.mask(number)
    assert mask is not None, "a fill model's samples have masks"
    own = next(iter(runs.references.values())).pictures[number]
    factor = own.shape[-1] // mask.shape[-1]
    pixels = mask.repeat_interleave(factor, 0).repeat_interleave(factor, 1)
    axes[0].imshow(((own.clamp(-1, 1) + 1) / 2).permute(1, 2, 0), interpolation="nearest")
    axes[0].set_title("reference;\nfilled inside the line", fontsize=8)
    for axis, (name, outcome) in zip(axes[1:], runs.outcomes.items(), strict=True):
        error = (outcome.pictures[number] - runs.references[name].pictures[number]).abs().mean(0)
        largest = float(error.quantile(0.995))
        axis.imshow(error, cmap="magma", vmin=0, vmax=largest, interpolation="nearest")
        axis.set_title(f"{name.replace(', ', chr(10))}\nwhite: {largest / 2:.0%} of the range", fontsize=8)
    for axis in axes:
        axis.contour(pixels.float(), levels=[0.5], colors="#00d5ff", linewidths=0.9)
        axis.set_axis_off()
    return figure


def _example(probe: Probe) -> int:
    """Return the sample whose filled region is largest among those whose region leaves the picture's rim alone."""
    best, size = 0, 0.0
    for number in range(len(probe.batches)):
        mask = probe.mask(number)
        if mask is None:
            continue
        inside = not (mask[0].any() or mask[-1].any() or mask[:, 0].any() or mask[:, -1].any())
        if inside and float(mask.float().mean()) > size:
            best, size = number, float(mask.float().mean())
    return best
