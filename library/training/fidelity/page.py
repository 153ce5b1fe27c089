"""The report as one HTML file with its plots and images inside, and as JSON."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from library.files import atomic_path, write_text
from library.precision.parity.seam import border_distance
from library.training.fidelity.causes import CAUSES, Attribution, Differences
from library.training.fidelity.deployments import EvalSet, Outcome
from library.training.fidelity.layers import LayerRow
from library.training.fidelity.report import FIX_COLUMNS, Fix, Report, fix_rows

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1080px; color: #222; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.verdict { background: #f4f6fa; border-left: 4px solid #1f77b4; padding: .8rem 1.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
table { display: block; overflow-x: auto }
td, th { padding: 2px 10px; text-align: right; border-bottom: 1px solid #e4e4e4 }
td:first-child, th:first-child { text-align: left } tr.flagged td { background: #fdecea }
img { max-width: 100% } p.note { color: #666; font-size: 13px } dt { font-weight: 600 } dd { margin: 0 0 .5rem 0 }
"""


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
            images.save(temporary, format="PNG")
    write_text(paths[0], _page(report, fixes, images))
    measured = _as_json(report) | {"fixes": [fix.as_json() for fix in fixes]}
    write_text(paths[1], json.dumps(_without_nan(measured), indent=1))
    return paths


def verdict_lines(report: Report) -> list[str]:
    """Return the verdict in words, a line a sentence: the cause, the border, the error, the layers to keep."""
    verdict, full = report.verdict, report.full
    lines = [f"Look here first: {CAUSES[verdict.cause]}."]
    if verdict.border:
        lines.append(f"On the border: {verdict.border.sentence()}")
    elif full.seam:
        lines.append(
            f"The border is no worse than the interior: ring over interior {full.seam['inside'][2]:.2f}, "
            f"step across it {full.seam['step']:.2f}."
        )
    lines += [f"{finding.share:.0%} of the error: {finding.sentence()}" for finding in verdict.findings[:4]]
    sizes = f"velocity {full.velocity:.2%}"
    sizes += f", finished latents {full.latents:.2%}" if math.isfinite(full.latents) else ""
    sizes += f", decoded image {full.image:.2%}" if math.isfinite(full.image) else ""
    return [*lines, f"Off by: {sizes}."]


def _page(report: Report, fixes: Sequence[Fix], images: Image.Image | None) -> str:
    named = {"deployment": report.full}
    named |= {each.cause: each.alone for each in report.attributions if len(report.attributions) > 1}
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        f'<div class="verdict">{"".join(f"<p>{escape(line)}</p>" for line in verdict_lines(report))}</div>',
    ]
    if fixes:
        parts += ["<h2>Fixes</h2>", _table(FIX_COLUMNS, fix_rows(fixes, report.full))]
    if images is not None:
        parts += ["<h2>Images</h2>", _image(images)]
    if report.attributions:
        parts += ["<h2>Causes, one at a time</h2>", _image(attribution_bars(report.full, report.attributions))]
    if report.full.seam:
        parts += ["<h2>Along the seam</h2>", _image(rings(_with_seam(named))), _seam_table(report.full)]
    else:
        text = f"no masks; error on the images' own edges over that on flat parts: {report.full.edges:.2f}"
        parts.append(f"<h2>Edges</h2><p>{text}</p>")
    parts += ["<h2>By noise level</h2>", _image(error_by_sigma(dict(list(named.items())[:3])))]
    if report.full.latents_by_step:
        parts += ["<h2>Over a sampling run</h2>", _image(error_over_steps(named))]
        spectra = {name: each for name, each in named.items() if each.spectrum[0]}
        parts += ["<h2>Spectrum of the error</h2>", _image(error_spectrum(spectra))] if spectra else []
    parts += ["<h2>Layers</h2>", _image(layer_errors(report.layers)), _layer_table(report.layers)]
    settings = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in report.settings.items())
    parts.append(f"<h2>Settings</h2><dl>{settings}</dl>")
    head = f'<meta charset="utf-8"><title>{escape(report.title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>"


def _image(image: Any) -> str:
    return f'<img alt="" src="{as_data_uri(image)}">'


def _with_seam(named: Mapping[str, Differences]) -> dict[str, Differences]:
    """Those with an error to put in relation."""
    return {name: each for name, each in named.items() if each.seam and each.latents > 0}


def _seam_table(full: Differences) -> str:
    header = ["", "ring 2 / interior", "high-pass", "signed", "step of error", "jump ref.", "jump depl."]
    header += ["bend ref.", "bend depl."]
    rows = []
    for title, seam in (("latents", full.seam), ("image", full.image_seam)):
        if seam:
            cells = [seam["inside"][2], seam["high_pass"][2], seam["signed"][2], seam["step"]]
            cells += [seam[key] for key in ("jump_reference", "jump_deployed", "bend_reference", "bend_deployed")]
            rows.append([title, *(f"{cell:.3f}" for cell in cells)])
    return _table(header, rows)


def _layer_table(layers: Sequence[LayerRow], most: int = 60) -> str:
    """The layers whose return to bf16 buys most per megabyte, or those that err most where that was not measured."""
    measured = any(row.benefit is not None for row in layers)
    ordered = sorted(layers, key=lambda row: -(row.benefit_per_megabyte if measured else row.output_error))
    header = ["layer", "kind", "benefit / MB", "weight err.", "rounding", "SQNR dB", "gain", "zeros", "subnormal"]
    header += ["saturated", "output err.", "rounding", "LoRA effect", "survival", "input rms", "max / rms", "outliers"]
    header += ["filled", "known", "border"]
    rows, flags = [], []
    for row in ordered[:most]:
        sizes = row.activations
        cells = [row.name, row.kind, f"{row.benefit_per_megabyte:.2e}" if measured else ""]
        cells += [f"{row.weight_error:.2%}", f"{row.expected_error:.2%}", f"{row.sqnr_db:.1f}", f"{row.gain:.3f}"]
        cells += [f"{row.zeros:.1%}", f"{row.subnormals:.1%}", f"{row.saturated:.1%}"]
        cells += [f"{row.output_error:.2%}", f"{row.expected_output_error:.2%}"]
        cells += ["" if value is None else f"{value:.3f}" for value in (row.lora_effect, row.survival)]
        cells += [f"{sizes.rms:.3g}", f"{sizes.largest / sizes.rms if sizes.rms else 0:.0f}"]
        cells += [str(len(sizes.outlier_channels))]
        cells += [f"{sizes.by_region[region]:.3g}" if region in sizes.by_region else "" for region in header[-3:]]
        rows.append(cells)
        flags.append((row.survival is not None and row.survival < 0.95) or row.weight_error > 1.5 * row.expected_error)
    note = f"<p class='note'>{len(layers)} layers, {min(most, len(layers))} shown; all are in report.json</p>"
    return _table(header, rows, flags) + note


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], flags: Sequence[bool] = ()) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>"]
    for number, row in enumerate(rows):
        kind = ' class="flagged"' if number < len(flags) and flags[number] else ""
        lines.append(f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


def _as_json(report: Report) -> dict[str, Any]:
    causes = {
        each.cause: {
            "alone": each.alone.as_json(),
            "without": each.without.as_json() if each.without else None,
        }
        for each in report.attributions
    }
    return {
        "title": report.title,
        "settings": dict(report.settings),
        "verdict": report.verdict.as_json() | {"words": verdict_lines(report)},
        "deployment": report.full.as_json(),
        "causes": causes,
        "layers": [row.as_json() for row in report.layers],
    }


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_CELL, _HEADER = 224, 28  # pixels of an image and of the titles above
_REGIONS = {"whole": "#222222", "filled": "#1f77b4", "known": "#7f7f7f", "ring": "#d62728"}


def error_by_sigma(named: Mapping[str, Differences]) -> Figure:
    """Relative velocity error against the noise level, a panel for each of ``named``, a line for each region."""
    figure = Figure(figsize=(4.2 * len(named), 3.2), layout="constrained")
    axes = figure.subplots(1, len(named), sharey=True, squeeze=False)[0]
    for axis, (title, differences) in zip(axes, named.items(), strict=True):
        sigmas = sorted(differences.velocity_by_sigma)
        for region, colour in _REGIONS.items():
            values = [differences.velocity_by_sigma[sigma].get(region, math.nan) for sigma in sigmas]
            if not all(map(math.isnan, values)):
                axis.plot(sigmas, [100 * v for v in values], marker="o", color=colour, label=region)
        axis.set(xlabel="noise level σ", title=title)
    axes[0].set_ylabel("velocity error, % of its size")
    axes[0].legend()
    _from_zero(axes)
    return figure


def error_over_steps(named: Mapping[str, Differences]) -> Figure:
    """Relative error of the latents after every step of a sampling run."""
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axis = figure.subplots()
    for title, differences in named.items():
        values = [100 * value for value in differences.latents_by_step]
        axis.plot(range(1, len(values) + 1), values, marker=".", label=title)
    axis.set(xlabel="sampling step", ylabel="latents' error, % of their size")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend()
    _from_zero([axis])
    return figure


def rings(named: Mapping[str, Differences]) -> Figure:
    """rms error of rings inside and outside the border over the interior's; 1 is no seam."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axis = figure.subplots()
    outside: Mapping[int, float] = {}
    for number, (title, differences) in enumerate(named.items()):
        inside, outside = differences.seam["inside"], differences.seam["outside"]
        places = [*(-width for width in sorted(outside, reverse=True)), *sorted(inside)]
        values = [*(outside[w] for w in sorted(outside, reverse=True)), *(inside[w] for w in sorted(inside))]
        axis.plot(range(len(places)), values, marker="o", label=title, color=f"C{number}")
        axis.set_xticks(range(len(places)), [f"{abs(place)}" for place in places])
    axis.axhline(1, color="#999999", linewidth=0.8)
    axis.axvline(len(outside) - 0.5, color="#d62728", linewidth=1, linestyle="--")
    axis.set(xlabel="known side   ←   within so many latent cells of the border   →   filled side")
    axis.set_ylabel("error over the interior's")
    axis.legend()
    _from_zero([axis])
    return figure


def error_spectrum(named: Mapping[str, Differences]) -> Figure:
    """Mean power of the finished latents' error against frequency; a flat line is white noise."""
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axis = figure.subplots()
    for title, differences in named.items():
        frequencies, powers = differences.spectrum
        axis.semilogy(frequencies, powers, label=title)
    axis.axhline(1, color="#999999", linewidth=0.8)
    axis.set(xlabel="cycles per latent cell", ylabel="power of the error (1: mean)")
    axis.legend()
    return figure


def attribution_bars(full: Differences, attributions: Sequence[Attribution]) -> Figure:
    """Each cause alone, and the deployment without it, by the finished latents' error and the border's step."""
    figure = Figure(figsize=(9, 1.2 + 0.5 * (len(attributions) + 1)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    labels = ["all together", *(CAUSES[each.cause] for each in attributions)]
    alone = [_size(full), *(_size(each.alone) for each in attributions)]
    without = [math.nan, *(_size(each.without) if each.without else math.nan for each in attributions)]
    _pair(left, labels, [100 * v for v in alone], [100 * v for v in without], "error, %")
    steps = [_step(full), *(_step(each.alone) for each in attributions)]
    steps_without = [math.nan, *(_step(each.without) if each.without else math.nan for each in attributions)]
    _pair(right, labels, steps, steps_without, "error's step across the border")
    right.set_xscale("log")
    right.axvline(1, color="#999999", linewidth=0.8)
    left.legend(["alone", "all without it"], loc="lower right")
    return figure


def layer_errors(rows: Sequence[LayerRow]) -> Figure:
    """Output error of every layer in the model's order, beside what its format must cost and the LoRA's effect."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axis = figure.subplots()
    places = range(len(rows))
    axis.bar(places, [100 * row.output_error for row in rows], color="#1f77b4", label="deployed", width=0.8)
    expected = [100 * row.expected_output_error for row in rows]
    axis.plot(places, expected, "_", color="#222222", label="rounding to nearest")
    effects = [(i, 100 * row.lora_effect) for i, row in enumerate(rows) if row.lora_effect is not None]
    if effects:
        axis.plot(*zip(*effects, strict=True), "v", color="#ff7f0e", markersize=4, label="the LoRA's effect")
    axis.set(xlabel="layer, in the model's order", ylabel="% of the layer's output")
    axis.set_yscale("log")
    axis.legend()
    return figure


def image_rows(
    reference: Outcome, others: Mapping[str, Outcome], eval_set: EvalSet, most: int = 4
) -> Image.Image | None:
    """Return images side by side, a row a sample: the reference, then each of ``others`` with its error.

    Errors of a row share one scale; the border of the filled region is drawn over them. None without images.
    """
    count = min(most, len(reference.images), *(len(other.images) for other in others.values()))
    if not count:
        return None
    titles = ["reference", *(title for name in others for title in (name, "error"))]
    sheet = Image.new("RGB", (len(titles) * (_CELL + 6), _HEADER + count * (_CELL + 6)), "white")
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(titles):
        draw.text((column * (_CELL + 6) + 6, 6), title, fill="black", font=ImageFont.load_default(16))
    for number in range(count):
        ours = reference.images[number]
        errors = [(other.images[number] - ours).abs().mean(0) for other in others.values()]
        largest = max(float(errors[0].quantile(0.995)), 1e-6)
        cells = [_as_uint8(ours)]
        for other, error in zip(others.values(), errors, strict=True):
            heat = _with_border(_heat(error / largest), eval_set.mask(number))
            cells += [_as_uint8(other.images[number]), heat]
        for column, cell in enumerate(cells):
            image = Image.fromarray(cell.contiguous().numpy()).resize((_CELL, _CELL), Image.Resampling.NEAREST)
            sheet.paste(image, (column * (_CELL + 6) + 3, _HEADER + number * (_CELL + 6) + 3))
    return sheet


def as_data_uri(image: Figure | Image.Image) -> str:
    """Return a PNG as a data URI, for a page without files beside it."""
    buffer = io.BytesIO()
    if isinstance(image, Figure):
        image.savefig(buffer, format="png", dpi=110)
    else:
        image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _pair(axis, labels, first, second, title) -> None:  # type: ignore[no-untyped-def]
    places = range(len(labels))
    axis.barh([p - 0.18 for p in places], first, height=0.34, color="#1f77b4")
    axis.barh([p + 0.18 for p in places], second, height=0.34, color="#bbbbbb")
    axis.set_yticks(list(places), labels)
    axis.set_xlabel(title)
    if not axis.yaxis_inverted():
        axis.invert_yaxis()


def _from_zero(axes) -> None:  # type: ignore[no-untyped-def]
    for axis in axes:
        axis.set_ylim(bottom=0)


def _size(differences: Differences) -> float:
    return differences.latents if math.isfinite(differences.latents) else differences.velocity


def _step(differences: Differences) -> float:
    seam = differences.image_seam or differences.seam
    return seam["step"] if seam else math.nan


def _as_uint8(image: Tensor) -> Tensor:
    """[3, H, W] in about [-1, 1] -> [H, W, 3] uint8."""
    return ((image.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0)


def _heat(error: Tensor) -> Tensor:
    """[H, W] in 0..1 -> [H, W, 3] uint8, black over red and yellow to white."""
    e = error.clamp(0, 1)
    channels = torch.stack([(3 * e).clamp(0, 1), (3 * e - 1).clamp(0, 1), (3 * e - 2).clamp(0, 1)], dim=-1)
    return (255 * channels).round().to(torch.uint8)


def _with_border(heat: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return heat
    factor = heat.shape[0] // mask.shape[0]
    pixels = mask.repeat_interleave(factor, 0).repeat_interleave(factor, 1)
    drawn = heat.clone()
    drawn[(border_distance(pixels, 1) == 1) & pixels] = torch.tensor([0, 255, 255], dtype=torch.uint8)
    return drawn
