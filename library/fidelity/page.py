"""The report as one HTML file (``page.html`` filled) with its plots and images inside, and as JSON."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from library.fidelity.border import LIMITS, Border
from library.fidelity.causes import CAUSES
from library.fidelity.differences import Differences, mask_in_pixels
from library.fidelity.fixes import FIX_COLUMNS, Fix, fix_rows
from library.fidelity.layers import LayerRow
from library.fidelity.report import Report
from library.fidelity.runs import EvalSet, Outcome
from library.fidelity.verdict import Attribution
from library.files import atomic_path, write_text

_LAYERS_SHOWN, _IMAGES_SHOWN = 60, 4


def write_report(report: Report, folder: Path, fixes: Sequence[Fix] = (), best: Fix | None = None) -> list[Path]:
    """Write ``report.html``, ``report.json`` and, where images were decoded, ``images.png``; return their paths.

    Args:
        report: what was measured.
        folder: made if needed.
        fixes: that were tried.
        best: the one whose images are shown beside the deployment's.
    """
    paths = [folder / "report.html", folder / "report.json"]
    columns = {"as deployed": report.deployed} | ({f"with {best.name}": best.outcome} if best else {})
    images = image_rows(report.reference, columns, report.eval_set)
    if images is not None:
        paths.append(folder / "images.png")
        with atomic_path(paths[-1]) as temporary:
            images.savefig(temporary, format="png", dpi=110)
    write_text(paths[0], _page(report, fixes, images))
    write_text(paths[1], json.dumps(_plain(_measured(report, fixes)), indent=1))
    return paths


def _page(report: Report, fixes: Sequence[Fix], images: Figure | None) -> str:
    full = report.full
    named = {"deployment": full}
    named |= {each.cause: each.alone for each in report.attributions if len(report.attributions) > 1}
    figures: list[tuple[str, Figure]] = []
    if report.attributions:
        figures.append(("Causes, one at a time", attribution_bars(full, report.attributions)))
    with_border = {name: each.border for name, each in named.items() if each.border}
    if with_border:
        figures.append(("Along the mask border", border_figures(with_border)))
    figures.append(("By noise level", error_by_sigma(dict(list(named.items())[:3]))))
    if full.latents_by_step:
        figures.append(("Over a sampling run", error_over_steps(named)))
    # the layers whose return to bf16 buys most per megabyte, or those that err most where that was not measured
    measured = any(row.benefit is not None for row in report.comparison.layers)
    worst = sorted(
        report.comparison.layers, key=lambda row: -(row.benefit_per_megabyte if measured else row.output_error)
    )
    source = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(source)
    return template.render(
        report=report,
        verdict=report.verdict.lines(report.full),
        fix_headings=FIX_COLUMNS,
        fixes=fix_rows(fixes, full) if fixes else [],
        images=images,
        figures=figures,
        layer_errors=layer_errors(report.comparison.layers),
        layers=worst[:_LAYERS_SHOWN],
        data_uri=as_data_uri,
        percent=lambda share, digits: f"{share:.{digits}%}",
    )


def _measured(report: Report, fixes: Sequence[Fix]) -> dict[str, Any]:
    """Return what ``report.json`` holds."""
    verdict = report.verdict
    return {
        "title": report.title,
        "settings": report.settings,
        "verdict": {
            "cause": verdict.cause,
            "alarm": verdict.alarm,
            "border": verdict.border and asdict(verdict.border) | {"state": verdict.border.state},
            "border_cause": verdict.border_cause and verdict.border_cause.as_json(),
            "explained": verdict.explained,
            "findings": [finding.as_json() for finding in verdict.findings],
            "words": report.verdict.lines(report.full),
        },
        "deployment": report.full,
        "causes": {each.cause: {"alone": each.alone, "without": each.without} for each in report.attributions},
        "layers": [
            asdict(row) | {"benefit_per_megabyte": row.benefit_per_megabyte} for row in report.comparison.layers
        ],
        "tensors": list(report.comparison.tensors),
        "explained_by": report.comparison.groups,
        "fixes": [
            {key: getattr(fix, key) for key in ("name", "cost", "seconds", "files", "differences")} for fix in fixes
        ],
    }


def _plain(value: Any) -> Any:
    """Return what JSON can hold: dataclasses are objects, paths strings; it has no NaN and no infinity: null."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


_REGIONS = {"all": "#222222", "filled": "#1f77b4", "known": "#7f7f7f", "ring": "#d62728"}


def error_by_sigma(named: Mapping[str, Differences]) -> Figure:
    """Relative velocity error against the noise level, a panel for each of ``named``, a line for each region."""
    figure = Figure(figsize=(4.2 * len(named), 3.2), layout="constrained")
    axes = figure.subplots(1, len(named), sharey=True, squeeze=False)[0]
    for axis, (title, differences) in zip(axes, named.items(), strict=True):
        sigmas = sorted(differences.velocity_by_sigma)
        for region, colour in _REGIONS.items():
            values = [100 * differences.velocity_by_sigma[sigma].get(region, math.nan) for sigma in sigmas]
            if not all(map(math.isnan, values)):
                axis.plot(sigmas, values, marker="o", color=colour, label=region)
        axis.set(xlabel="noise level σ", title=title)
    axes[0].set_ylabel("velocity error, % of its size")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    return figure


def error_over_steps(named: Mapping[str, Differences]) -> Figure:
    """Relative error of the latents after every step of a sampling run."""
    figure, axis = _plot(5, "sampling step", "latents' error, % of their size")
    for title, differences in named.items():
        values = [100 * value for value in differences.latents_by_step]
        axis.plot(range(1, len(values) + 1), values, marker=".", label=title)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure


def border_figures(named: Mapping[str, Border]) -> Figure:
    """Each figure over white noise's, with its interval over images; the line is the limit."""
    figure, axis = _plot(8, "", "times white noise")
    for number, (title, border) in enumerate(named.items()):
        places = [place + 0.8 * (number + 0.5) / len(named) - 0.4 for place in range(len(LIMITS))]
        times = [each.times for each in border.figures]
        axis.plot(places, times, "o", label=title)
        if border.images > 1:
            ends = [each.low for each in border.figures], [each.high for each in border.figures]
            axis.vlines(places, *ends, color=f"C{number}")
    axis.plot(range(len(LIMITS)), [*LIMITS.values()], "_", color="#d62728", markersize=30, label="limit")
    axis.set_xticks(range(len(LIMITS)), LIMITS)
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure


def attribution_bars(full: Differences, attributions: Sequence[Attribution]) -> Figure:
    """Each cause alone, and the deployment without it, by the error people see and its step across the border."""
    figure = Figure(figsize=(9, 1.4 + 0.5 * (len(attributions) + 1)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    labels = ["all together", *(CAUSES[each.cause] for each in attributions)]
    alone = [full, *(each.alone for each in attributions)]
    without = [None, *(each.without for each in attributions)]
    places = range(len(labels))
    for name, shift, colour, of in (("alone", -0.18, "#1f77b4", alone), ("all without it", 0.18, "#bbbbbb", without)):
        heights = [place + shift for place in places]
        left.barh(heights, [math.nan if d is None else 100 * d.error for d in of], 0.34, color=colour, label=name)
        right.barh(heights, [d.border.worst.times if d and d.border else math.nan for d in of], 0.34, color=colour)
    left.set_yticks(places, labels)
    left.invert_yaxis()
    left.set_xlabel("error, %")
    right.set(xlabel="worst border figure, times white noise", xscale="log")
    right.axvline(1, color="#999999", linewidth=0.8)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def layer_errors(rows: Sequence[LayerRow]) -> Figure:
    """Output error of every layer in the model's order, beside what its format must cost and the LoRA's effect."""
    figure, axis = _plot(10, "layer, in the model's order", "% of the layer's output")
    places = range(len(rows))
    axis.bar(places, [100 * row.output_error for row in rows], color="#1f77b4", label="deployed", width=0.8)
    expected = [100 * row.expected_output_error for row in rows]
    axis.plot(places, expected, "_", color="#222222", label="rounding to nearest")
    effects = [(i, 100 * row.lora_effect) for i, row in enumerate(rows) if row.lora_effect is not None]
    if effects:
        axis.plot(*zip(*effects, strict=True), "v", color="#ff7f0e", markersize=4, label="the LoRA's effect")
    axis.set_yscale("log")
    axis.legend()
    return figure


def _plot(width: float, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, 3.2), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axis


def image_rows(reference: Outcome, others: Mapping[str, Outcome], eval_set: EvalSet) -> Figure | None:
    """Return images side by side, a row a sample: the reference, then each of ``others`` with its error.

    Errors of a row share one scale; the border of the filled region is drawn over them. None without images.
    """
    count = min(_IMAGES_SHOWN, len(reference.images), *(len(other.images) for other in others.values()))
    if not count:
        return None
    titles = ["reference", *(title for name in others for title in (name, "error"))]
    heights = [image.shape[-2] / image.shape[-1] for image in reference.images[:count]]
    figure = Figure(figsize=(2.1 * len(titles), 0.3 + 2.1 * sum(heights)), layout="constrained")
    axes = figure.subplots(count, len(titles), squeeze=False, height_ratios=heights)
    for number, row in enumerate(axes):
        ours = reference.images[number]
        errors = [(other.images[number] - ours).abs().mean(0) for other in others.values()]
        largest = max(float(errors[0].quantile(0.995)), 1e-6)
        show_image(row[0], ours)
        for other, error, own, beside in zip(others.values(), errors, row[1::2], row[2::2], strict=True):
            show_image(own, other.images[number])
            show_error(beside, error, largest)
            if (mask := eval_set.mask(number)) is not None:
                draw_border(beside, mask, error)
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, loc="left", fontsize=10)
    return figure


def show_image(axis: Axes, image: Tensor) -> None:
    """Show ``image`` [3, H, W] in about [-1, 1]."""
    axis.imshow(((image.clamp(-1, 1) + 1) / 2).permute(1, 2, 0), interpolation="nearest")
    axis.set_axis_off()


def show_error(axis: Axes, error: Tensor, largest: float) -> None:
    """Show ``error`` [H, W], black at 0 and lightest at ``largest``."""
    axis.imshow(error, cmap="magma", vmin=0, vmax=largest, interpolation="nearest")
    axis.set_axis_off()


def draw_border(axis: Axes, mask: Tensor, image: Tensor) -> None:
    """Draw the border of ``mask`` [h, w] of latent cells over an ``image`` [..., H, W]."""
    axis.contour(mask_in_pixels(mask, image).float(), levels=[0.5], colors="#00d5ff", linewidths=0.9)


def as_data_uri(figure: Figure) -> str:
    """Return a PNG as a data URI, for a page without files beside it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
