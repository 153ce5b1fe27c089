"""The report as one HTML file with its pictures inside, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

import tools.report.figures as figures
from library.files import atomic_path, write_text
from tools.report.causes import CAUSES
from tools.report.differences import Differences
from tools.report.layers import LayerRow
from tools.report.result import Report

if TYPE_CHECKING:
    from tools.report.result import Fix


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
    """Write ``report.html``, ``report.json`` and, where pictures were decoded, ``pictures.png``; return their paths.

    Args:
        report: what was measured.
        folder: made if needed.
        fixes: that were tried.
        best: the one whose pictures are shown beside the deployment's.
    """
    paths = [folder / "report.html", folder / "report.json"]
    columns = {"as deployed": report.deployed} | ({f"with {best.name}": best.outcome} if best else {})
    pictures = figures.picture_rows(report.reference, columns, report.probe)
    if pictures is not None:
        paths.append(folder / "pictures.png")
        with atomic_path(paths[-1]) as temporary:
            pictures.save(temporary, format="PNG")
    write_text(paths[0], _page(report, fixes, pictures))
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
    sizes += f", decoded picture {full.picture:.2%}" if math.isfinite(full.picture) else ""
    return [*lines, f"Off by: {sizes}."]


def _page(report: Report, fixes: Sequence[Fix], pictures: Image | None) -> str:
    named = {"deployment": report.full}
    named |= {each.cause: each.alone for each in report.attributions if len(report.attributions) > 1}
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        f'<div class="verdict">{"".join(f"<p>{escape(line)}</p>" for line in verdict_lines(report))}</div>',
    ]
    if fixes:
        parts += ["<h2>Fixes</h2>", _fix_table(fixes, report.full)]
    if pictures is not None:
        parts += ["<h2>Pictures</h2>", _image(pictures)]
    if report.attributions:
        parts += ["<h2>Causes, one at a time</h2>", _image(figures.attribution_bars(report.full, report.attributions))]
    if report.full.seam:
        parts += ["<h2>Along the seam</h2>", _image(figures.rings(_with_seam(named))), _seam_table(report.full)]
    else:
        text = f"no masks; error on the pictures' own edges over that on flat parts: {report.full.edges:.2f}"
        parts.append(f"<h2>Edges</h2><p>{text}</p>")
    parts += ["<h2>By noise level</h2>", _image(figures.error_by_sigma(dict(list(named.items())[:3])))]
    if report.full.latents_by_step:
        parts += ["<h2>Over a sampling run</h2>", _image(figures.error_over_steps(named))]
        spectra = {name: each for name, each in named.items() if each.spectrum[0]}
        parts += ["<h2>Spectrum of the error</h2>", _image(figures.error_spectrum(spectra))] if spectra else []
    parts += ["<h2>Layers</h2>", _image(figures.layer_errors(report.layers)), _layer_table(report.layers)]
    settings = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in report.settings.items())
    parts.append(f"<h2>Settings</h2><dl>{settings}</dl>")
    head = f'<meta charset="utf-8"><title>{escape(report.title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>"


def _image(picture: Any) -> str:
    return f'<img alt="" src="{figures.as_data_uri(picture)}">'


def _with_seam(named: Mapping[str, Differences]) -> dict[str, Differences]:
    """Those with an error to put in relation."""
    return {name: each for name, each in named.items() if each.seam and each.latents > 0}


def _seam_table(full: Differences) -> str:
    header = ["", "ring 2 / interior", "high-pass", "signed", "step of error", "jump ref.", "jump depl."]
    header += ["bend ref.", "bend depl."]
    rows = []
    for title, seam in (("latents", full.seam), ("picture", full.picture_seam)):
        if seam:
            cells = [seam["inside"][2], seam["high_pass"][2], seam["signed"][2], seam["step"]]
            cells += [seam[key] for key in ("jump_reference", "jump_deployed", "bend_reference", "bend_deployed")]
            rows.append([title, *(f"{cell:.3f}" for cell in cells)])
    return _table(header, rows)


def _fix_table(fixes: Sequence[Fix], before: Differences) -> str:
    header = ["", "velocity", "latents", "picture", "of before", "ring / interior", "step of error", "cost", "s"]
    rows = []
    for name, each, cost, seconds in [("as deployed", before, "", ""), *(
        (fix.name, fix.figures, fix.cost, f"{fix.seconds:.0f}") for fix in fixes
    )]:  # fmt: skip
        seam = ["" if math.isnan(value) else f"{value:.2f}" for value in each.ring_and_step]
        share = f"{each.latents / before.latents:.2f}" if before.latents else ""
        cells = [f"{each.velocity:.2%}", f"{each.latents:.2%}", f"{each.picture:.2%}", share, *seam]
        rows.append([name, *cells, cost, seconds])
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
