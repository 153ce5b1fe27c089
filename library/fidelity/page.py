"""The report as one HTML file (``page.html`` filled) with its figures inside, and as JSON.

The browser's Precision screen shows the same file. It must work where it was copied to, years later: no file beside it,
no network, plain JavaScript. What was not
measured is left out, whole: a figure is made of data, or not at all. All maps of differences share one scale, which
never ends below ``LEAST_RANGE`` 8-bit steps, so that what nobody can see does not look like a fire.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jinja2 import Environment, StrictUndefined, Template
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from torch import Tensor

from library.fidelity.border import RING, STEP_8BIT, WORDS, Border
from library.fidelity.causes import CAUSES, REMEDIES
from library.fidelity.differences import Differences
from library.fidelity.distilled import Distilled
from library.fidelity.fixes import FIX_COLUMNS, Fix, fix_rows
from library.fidelity.layers import LayerRow
from library.fidelity.report import Report, merge_sentences
from library.fidelity.runs import EvalSet, Outcome
from library.fidelity.server_image import ServerResult
from library.fidelity.serving import REFERENCE
from library.fidelity.verdict import Attribution
from library.files import atomic_path, write_text
from library.precision.parity.seam import border_distance

LEAST_RANGE = 16  # 8-bit steps of the whole scale of differences
ZOOM = 64  # pixels of the picture in a view of the border
_IMAGES_SHOWN = 4
_FINE = 0.01  # share of an image's size that is lost without anybody seeing it
_SMALL = 0.05  # share of the error below which a cause counts as ruled out

Columns = dict[str, tuple[str, str, Callable[[Any], Any]]]  # heading -> (meaning, format, value of a row)
_LAYER_COLUMNS: Columns = {
    "layer": ("module, as diffusers names it", "{}", lambda row: row.name),
    "format": ("how its weights are stored", "{}", lambda row: row.kind),
    "benefit / MB": (
        "share of the output's squared error that comes back with the layer in high precision, a megabyte of it",
        "{:.2e}",
        lambda row: None if row.benefit is None else row.benefit_per_megabyte,
    ),
    "output error": ("of the layer's output on these images", "{:.2%}", lambda row: row.output_error),
    "of rounding": ("what rounding to nearest would cost", "{:.2%}", lambda row: row.expected_output_error),
    "weight error": ("of the layer's weights", "{:.2%}", lambda row: row.weight_error),
    "of format": ("what rounding to nearest in this format would cost", "{:.2%}", lambda row: row.expected_error),
    "SQNR dB": ("weights over their error", "{:.1f}", lambda row: row.sqnr_db),
    "gain": ("weights over the reference's; 1 is right", "{:.3f}", lambda row: row.gain),
    "zeros": ("share of weights that became zero", "{:.1%}", lambda row: row.zeros),
    "subnormal": ("share of weights below the format's normal numbers", "{:.1%}", lambda row: row.subnormals),
    "saturated": ("share of weights cut off at the format's largest number", "{:.1%}", lambda row: row.saturated),
    "LoRA effect": ("size of the LoRA's share of the output", "{:.3f}", lambda row: row.lora_effect),
    "retention": ("share of the LoRA's update that the merge kept", "{:.3f}", lambda row: row.retention),
    "input rms": ("size of what the layer is given", "{:.3g}", lambda row: row.activations.rms),
    "max / rms": (
        "its largest value over that",
        "{:.0f}",
        lambda row: row.activations.largest / row.activations.rms if row.activations.rms else None,
    ),
    "outliers": ("channels over ten times the median", "{}", lambda row: len(row.activations.outlier_channels)),
    "in filled": ("input rms in the filled region", "{:.3g}", lambda row: row.activations.by_region.get("filled")),
    "in known": ("input rms in the known region", "{:.3g}", lambda row: row.activations.by_region.get("known")),
    "at border": ("input rms along the border", "{:.3g}", lambda row: row.activations.by_region.get("border")),
}
_TENSOR_COLUMNS: Columns = {
    "tensor": ("parameter or buffer, as diffusers names it", "{}", lambda row: row.name),
    "role": ("what it is", "{}", lambda row: row.role),
    "stored as": ("how its numbers are stored", "{}", lambda row: row.kind),
    "numbers": ("how many it holds", "{:,}", lambda row: row.size),
    "error": ("difference from the reference, over the reference", "{:.2%}", lambda row: row.error),
    "expected": ("what rounding to nearest in most layers' format would cost", "{:.2%}", lambda row: row.expected),
    "of format": ("what rounding to nearest in its own format would cost", "{:.2%}", lambda row: row.own_expected),
    "gain": ("the tensor over the reference's; 1 is right", "{:.3f}", lambda row: row.gain),
    "LoRA share": ("of the LoRA's update that is in it", "{:.2f}", lambda row: row.lora_share),
    "diagnosis": ("what was done to it", "{}", lambda row: row.diagnosis),
}
_GROUP_COLUMNS: Columns = {
    "put back": ("tensors that were replaced by the reference's", "{}", itemgetter(0)),
    "explains": ("share of the weights' squared velocity error that goes away", "{:.1%}", itemgetter(1)),
}
_TRIED_COLUMNS: Columns = {
    "what a server may do": ("done to the reference, nothing else changed", "{}", itemgetter(0)),
    "image": ("how far it puts the decoded image off", "{:.2%}", lambda row: row[1].image),
    "worst figure": ("of the border", "{}", lambda row: row[1].border and WORDS[row[1].border.worst.name]),
    "times": ("over white noise of the same size", "{:.2f}", lambda row: row[1].border and row[1].border.worst.times),
    "limit": ("what honest rounding stays below", "{:g}", lambda row: row[1].border and row[1].border.worst.limit),
    "the border is": ("", "{}", lambda row: row[1].border and row[1].border.state),
}
_MERGE_COLUMNS: Columns = {
    "what a step runs on": ("which of them a layer gets depends on free memory", "{}", lambda row: row.merging.when),
    "the LoRA is": ("how it is added to the weights of the deployment", "{}", lambda row: row.merging.how),
    "velocity": ("how far it puts one step off", "{:.2%}", lambda row: row.differences.velocity),
    "latents": ("with all steps so", "{:.2%}", lambda row: None if row.merging.one_step else row.differences.latents),
    "image": ("with all steps so", "{:.2%}", lambda row: None if row.merging.one_step else row.differences.image),
    "judged": ("the report is about it", "{}", lambda row: "yes" if row.judged else "no"),
}
_SERVER_COLUMNS: Columns = {
    "what the server may do": ("done to the reference, nothing else changed", "{}", lambda row: row.words),
    "distance": ("from the server's pictures, rms in 8-bit steps", "{:.2f}", lambda row: row.distance),
    "explains": ("share of the squared difference that is gone with it", "{:.1%}", lambda row: row.explained),
}
_BORDER_COLUMNS: Columns = {
    "figure": (f"within {RING} pixels of the border, over the rest of that side", "{}", lambda row: WORDS[row.name]),
    "of the error": ("geometric mean over images", "{:.2f}", lambda row: row.error),
    "of white noise": ("the control: noise of the same size on the same images", "{:.2f}", lambda row: row.noise),
    "times": ("the one over the other; 1 knows nothing of the border", "{:.2f}", lambda row: row.times),
    "from": ("95 % interval over images", "{:.2f}", lambda row: row.low),
    "to": ("95 % interval over images", "{:.2f}", lambda row: row.high),
    "limit": ("what honest rounding stays below", "{:g}", lambda row: row.limit),
    "decides": ("the whole interval is above the limit", "{}", lambda row: "yes" if row.decides else "no"),
}
_DISTILLED_COLUMNS: Columns = {
    "strength": ("of the LoRA on the distilled model", "{:.2f}", lambda row: row.strength),
    "size": ("of its effect on the velocity, over the effect at 1 on the base", "{:.2f}", lambda row: row.size),
    "direction": ("cosine of the two effects; 1: the same change", "{:.2f}", lambda row: row.direction),
    "error": ("what is missing or wrong of the effect, over the effect", "{:.2f}", lambda row: row.error),
    "in pictures": ("size of the change in finished latents, over that on the base", "{:.2f}", lambda row: row.picture),
    "its direction": ("cosine of these changes", "{:.2f}", lambda row: row.picture_direction),
}
_LEVEL_COLUMNS: Columns = {
    "noise level": ("of the distilled schedule", "{:.3f}", itemgetter(0)),
    "size": ("of the LoRA's effect at strength 1, over that on the base", "{:.2f}", lambda row: row[1][0]),
    "direction": ("cosine of the two effects", "{:.2f}", lambda row: row[1][1]),
}
_FIX_COLUMNS: Columns = {name or "fix": ("", "{}", itemgetter(place)) for place, name in enumerate(FIX_COLUMNS)}


def write_report(
    report: Report,
    folder: Path,
    fixes: Sequence[Fix] = (),
    best: Fix | None = None,
    server: ServerResult | None = None,
    distilled: Distilled | None = None,
) -> list[Path]:
    """Write ``report.html``, ``report.json`` and, where images were decoded, ``images.png``; return their paths.

    Args:
        report: what was measured.
        folder: made if needed.
        fixes: that were tried.
        best: the one whose images are shown beside the deployment's.
        server: what a server really painted.
        distilled: what the LoRA does on a distilled model.
    """
    paths = [folder / "report.html", folder / "report.json"]
    served = {"served": report.deployed} | ({f"after “{best.name}”": best.outcome} if best else {})
    pictures = picture_rows(report.reference, served, report.eval_set)
    if pictures is not None:
        paths.append(folder / "images.png")
        with atomic_path(paths[-1]) as temporary:
            pictures.savefig(temporary, format="png", dpi=110)
    write_text(paths[0], _page(report, fixes, pictures, server, distilled))
    measured = _measured(report, fixes) | {"server": server and server.as_json()}
    measured |= {"distilled": distilled and distilled.as_json()}
    write_text(paths[1], json.dumps(_plain(measured), indent=1))
    return paths


def write_distilled(distilled: Distilled, title: str, folder: Path) -> list[Path]:
    """Write ``report.html`` and ``report.json`` of base and distilled model alone; return their paths."""
    paths = [folder / "report.html", folder / "report.json"]
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "title": title,
        "headline": distilled.sentence(),
        "in_short": "",
        "alarm": distilled.equal != 1.0,
        "words": {},
    }
    page = _template().render(values | {"report": None, "tables": {}, "distilled": _distilled_values(distilled)})
    write_text(paths[0], page)
    write_text(paths[1], json.dumps(_plain({"title": title, "distilled": distilled.as_json()}), indent=1))
    return paths


def _page(
    report: Report,
    fixes: Sequence[Fix],
    pictures: Figure | None,
    server: ServerResult | None,
    distilled: Distilled | None,
) -> str:
    full = report.full
    named = {"deployment": full}
    named |= {f"{each.cause} alone": each.alone for each in report.attributions if len(report.attributions) > 1}
    figures: list[tuple[str, str, Figure]] = []  # heading, what there is to see, figure
    if len(report.attributions) > 1:
        text = "Each cause alone, and the deployment without it."
        figures.append(("Causes, one at a time", text, attribution_bars(full, report.attributions)))
    if len(full.velocity_by_sigma) > 1:
        text = "Error of one step of the model, by how much noise there is in its input (1: nothing else)."
        figures.append(("By noise level", text, error_by_sigma(dict(list(named.items())[:3]))))
    if len(full.latents_by_step) > 1:
        text = "How the error grows while an image is sampled."
        figures.append(("Over a sampling run", text, error_over_steps(named)))
    layers, tensors = report.comparison.layers, report.comparison.tensors
    tables = {
        "fixes": _table(_FIX_COLUMNS, fix_rows(fixes, full)) if fixes else None,
        "border": full.border and _table(_BORDER_COLUMNS, full.border.figures),
        "groups": _table(_GROUP_COLUMNS, [*report.comparison.groups.items()], "explains"),
        # the layers whose return to bf16 buys most per megabyte, or those that err most where that was not measured
        "layers": _table(
            _LAYER_COLUMNS,
            layers,
            "output error" if all(row.benefit is None for row in layers) else "benefit / MB",
            lambda row: row.conspicuous,
        ),
        "server": server and _table(_SERVER_COLUMNS, [*server.descriptions, server.reference]),
        "tried": _table(_TRIED_COLUMNS, report.tried, "times"),
        "merges": _table(_MERGE_COLUMNS, report.merges) if len(report.merges) > 1 else None,
        "tensors": _table(_TENSOR_COLUMNS, tensors, "error", lambda row: bool(row.fault)),
    }
    return _template().render(
        report=report,
        title=report.title,
        alarm=report.verdict.alarm,
        distilled=distilled and _distilled_values(distilled),
        verdict=report.verdict,
        headline=report.verdict.lines(full)[0],
        in_short=_in_short(report),
        words=_verdict(report, server),
        painted=server and server_pictures(server),
        pictures=pictures,
        picture_words=_picture_words(report, pictures),
        border=full.border and border_intervals(full.border),
        figures=figures,
        layer_errors=layer_errors(layers) if any(row.output_error for row in layers) else None,
        tables=tables,
        titles=CAUSES,
        remedies=REMEDIES,
        sentence=_sentence,
    )


def _template() -> Template:
    source = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals["data_uri"] = as_data_uri
    return environment.from_string(source)


def _distilled_values(distilled: Distilled) -> dict[str, Any]:
    """Return what the page says of a distilled model."""
    return {
        "sentence": distilled.sentence(),
        "pictures": image_rows(distilled.images) if distilled.images else None,
        "strengths": _table(_DISTILLED_COLUMNS, distilled.rows),
        "levels": _table(_LEVEL_COLUMNS, [*distilled.by_sigma.items()]),
    }


def _verdict(report: Report, server: ServerResult | None) -> dict[str, list[str]]:
    """Return the verdict for someone who has lost a month over it: heading -> sentences."""
    verdict, full = report.verdict, report.full
    main = next(each for each in (verdict.border_cause, *verdict.findings) if each and each.cause == verdict.cause)
    others = [each for each in verdict.findings if each.cause != main.cause]
    small = [each for each in others if each.share < _SMALL]
    changed = {each.cause for each in report.attributions}
    nothing = "" if verdict.alarm else "Nothing has to be mended. To come nearer still: "
    same = [CAUSES[name] for name in vars(REFERENCE) if name not in changed and name in CAUSES]
    found = {
        "How we know": [_sentence(f"{CAUSES[main.cause]}: {main.evidence}")],
        "What to do first": [nothing + REMEDIES[main.cause]],
        "What costs nothing": report.free,
        "How the error splits": [verdict.parts()],
        "How the server merges": merge_sentences(report.merges),
        "What the server painted": [server.sentence()] if server else [],
        "The border": verdict.on_the_border(),
        "What else was found": [
            f"{each.share:.1%} of the error: {each.sentence()}" for each in others if each not in small
        ],
        "Unexplained": [verdict.unexplained()],
        "What it could be": [verdict.suspected()],
        "Ruled out as the main cause": [
            f"{CAUSES[each.cause]} ({each.share:.1%} of the error): {each.evidence}" for each in small
        ],
        "Not looked at": [
            f"No flag said that the server does otherwise than the reference in these: {', '.join(same)}."
        ],
        "How far off": [verdict.sizes(full)],
    }
    return {heading: [*map(_sentence, filter(None, lines))] for heading, lines in found.items() if any(lines)}


def _in_short(report: Report) -> str:
    """Return whether anything has to be done, and how far off what is served is."""
    full = report.full
    what, off = ("Pictures", full.image) if report.deployed.images else ("Single steps", full.velocity)
    said = "Nothing is broken: this is what the format loses."
    if report.verdict.alarm:
        said = "Act on this: more is lost than the format has to lose."
    elif off < _FINE:
        said = "This is fine: nothing has to be done."
    return f"{said} {what} are {off:.2%} off what the original model makes with this LoRA."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].removesuffix('.')}."


def _picture_words(report: Report, pictures: Figure | None) -> str:
    """Return what the pictures show and how to read their scale; empty without pictures."""
    if pictures is None:
        return ""
    top = difference_range(report.reference.cut_like(report.deployed), report.deployed)
    why = "no smaller, so that what cannot be seen does not look large" if top == LEAST_RANGE else "99.5 % are below"
    zoomed = report.full.border is not None
    text = f"All differences have one scale, 0 to {top:.0f} of 255 steps ({why})."
    return text + f" The dotted line is the mask's border; below each image {ZOOM} pixels of it." * zoomed


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
            "split": verdict.split,
            "words": report.lines(),
        },
        "merges": [
            {"when": row.merging.when, "how": row.merging.how, "judged": row.judged, "differences": row.differences}
            for row in report.merges
        ],
        "remedies": list(report.remedies),
        "deployment": report.full,
        "causes": {each.cause: {"alone": each.alone, "without": each.without} for each in report.attributions},
        "layers": [
            asdict(row) | {"benefit_per_megabyte": row.benefit_per_megabyte} for row in report.comparison.layers
        ],
        "tensors": list(report.comparison.tensors),
        "explained_by": report.comparison.groups,
        "fixes": [
            {key: getattr(fix, key) for key in ("name", "cost", "seconds", "files", "differences", "beside")}
            for fix in fixes
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


def _table(
    columns: Columns, rows: Sequence[Any], by: str = "", flagged: Callable[[Any], bool] = lambda _: False
) -> dict[str, Any]:
    """Return a table for ``page.html``: what no row has is no column; a cell is its text and what it is sorted by.

    One that is sorted ``by`` a column, largest first, can be sorted by any; its second column is the order of ``rows``.
    """
    found = {name: [value(row) for row in rows] for name, (_, _, value) in columns.items()}
    if by:
        first, *others = found
        columns = {"#": ("place in the model", "{}", itemgetter(0))} | columns
        found = {first: found[first], "#": [*range(1, len(rows) + 1)]} | {name: found[name] for name in others}
    shown = {name: values for name, values in found.items() if any(map(_there, values))}
    order = sorted(range(len(rows)), key=lambda row: -(found[by][row] or 0.0)) if by else range(len(rows))
    cells = [
        [
            (columns[name][1].format(values[row]), values[row]) if _there(values[row]) else ("", "")
            for name, values in shown.items()
        ]
        for row in order
    ]
    words = {name: any(isinstance(value, str) for value in values) for name, values in shown.items()}
    return {
        "headings": [(name, columns[name][0], words[name]) for name in shown],
        "rows": [(line, flagged(rows[row])) for line, row in zip(cells, order, strict=True)],
        "by": by,
    }


def _there(value: Any) -> bool:
    return value not in (None, "") and not (isinstance(value, float) and math.isnan(value))


_REGIONS = {"all": "#222222", "filled": "#1f77b4", "known": "#7f7f7f", "ring": "#d62728"}


def error_by_sigma(named: Mapping[str, Differences]) -> Figure:
    """Relative velocity error against the noise level, a panel for each of ``named``, a line for each region."""
    figure = Figure(figsize=(1.2 + 3.4 * len(named), 3.2), layout="constrained")
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
    _legend(figure, axes[0])
    return figure


def error_over_steps(named: Mapping[str, Differences]) -> Figure:
    """Relative error of the latents after every step of a sampling run."""
    figure, axis = _plot(6.4, 3.2, "sampling step", "latents' error, % of their size")
    for title, differences in named.items():
        values = [100 * value for value in differences.latents_by_step]
        axis.plot(range(1, len(values) + 1), values, marker=".", label=title)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylim(bottom=0)
    _legend(figure, axis)
    return figure


def border_intervals(border: Border) -> Figure:
    """Each figure of the border over white noise's: mean and interval over images, every image, and the limit."""
    names = [WORDS[each.name] for each in border.figures]
    figure, axis = _plot(8, 2.9, "times what white noise of the same size gives", "")
    for place, each in enumerate(border.figures):
        colour = "#d62728" if each.decides else "#1f77b4"
        axis.plot(each.by_image, [place] * len(each.by_image), ".", color="#aaaaaa", label="" if place else "an image")
        axis.plot(
            [each.low, each.high], [place, place], color=colour, linewidth=2.5, label="" if place else "95 % interval"
        )
        axis.plot(each.times, place, "o", color=colour, label="" if place else "mean")
        axis.plot(each.limit, place, "|", color="#222222", markersize=20, label="" if place else "limit")
    axis.axvline(1, color="#999999", linewidth=0.8)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xscale("log")
    _plain_ticks(axis.xaxis)
    _legend(figure, axis)
    return figure


def attribution_bars(full: Differences, attributions: Sequence[Attribution]) -> Figure:
    """Each cause alone, and the deployment without it, by the error people see and by the border."""
    figure = Figure(figsize=(9, 1.3 + 0.45 * (len(attributions) + 1)), layout="constrained")
    labels = ["all together", *(CAUSES[each.cause] for each in attributions)]
    alone = [full, *(each.alone for each in attributions)]
    without = [None, *(each.without for each in attributions)]
    bars: list[tuple[str, float, str, Sequence[Differences | None]]] = [("alone", -0.18, "#1f77b4", alone)]
    bars += [("all without it", 0.18, "#bbbbbb", without)] if any(without) else []
    measures: dict[str, Callable[[Differences], float]] = {"error, %": lambda each: 100 * each.error}
    if full.border:
        label = "worst border figure, times white noise"
        measures[label] = lambda each: each.border.worst.times if each.border else math.nan
    axes = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for axis, (label, measure) in zip(axes, measures.items(), strict=True):
        for name, shift, colour, of in bars:
            widths = [math.nan if each is None else measure(each) for each in of]
            axis.barh([place + shift for place in range(len(labels))], widths, 0.34, color=colour, label=name)
        axis.set_xlabel(label)
    if full.border:
        axes[1].axvline(1, color="#222222", linewidth=0.8)
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].invert_yaxis()
    _legend(figure, axes[0])
    return figure


def layer_errors(rows: Sequence[LayerRow]) -> Figure:
    """Output error of every layer in the model's order, beside what its format must cost and the LoRA's effect."""
    figure, axis = _plot(10, 3.4, "layer, in the model's order", "% of the layer's output")
    places = range(1, len(rows) + 1)
    errors = [100 * row.output_error or math.nan for row in rows]
    axis.plot(places, errors, "o", color="#1f77b4", markersize=4, label="deployed")
    expected = [100 * row.expected_output_error or math.nan for row in rows]
    axis.plot(places, expected, "_", color="#222222", label="rounding to nearest")
    effects = [100 * row.lora_effect if row.lora_effect else math.nan for row in rows]
    if not all(map(math.isnan, effects)):
        axis.plot(places, effects, "v", color="#ff7f0e", markersize=4, label="the LoRA's effect")
    axis.set_yscale("log")
    _plain_ticks(axis.yaxis)
    axis.set_xlim(0, len(rows) + 1)
    _legend(figure, axis)
    return figure


def _plot(width: float, height: float, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axis


def _legend(figure: Figure, axis: Axes) -> None:
    """Put the legend of ``axis`` below the plots, where it covers nothing; one line needs none."""
    handles, labels = axis.get_legend_handles_labels()
    if len(handles) > 1:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=int(figure.get_figwidth() // 1.8), frameon=False
        )


def _plain_ticks(axis: Axis) -> None:
    """Write a logarithmic axis's numbers out: 0.5, 1, 2; not 5 x 10^-1."""
    low, high = axis.get_data_interval()
    subs = (1.0, 1.5, 2.0, 3.0, 5.0) if high < 8 * low else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def server_pictures(server: ServerResult) -> Figure | None:
    """Return what a server painted beside the reference, and beside the description that comes nearest."""
    others = {"the server": server.painted, f"nearest: {server.nearest.words}": server.nearest.images}
    outcomes = {title: Outcome(images=list(images)) for title, images in others.items()}
    return picture_rows(Outcome(images=list(server.reference.images)), outcomes, None)


def picture_rows(reference: Outcome, others: Mapping[str, Outcome], eval_set: EvalSet | None) -> Figure | None:
    """Return images side by side: the reference, then each of ``others`` with its difference; None without images.

    A sample is a row, and where it has a mask a second: the ``ZOOM`` pixels along the border with the largest
    difference of the first of ``others``. All differences share one scale; the border is the line in them.
    """
    count = min(_IMAGES_SHOWN, len(reference.images), *(len(other.images) for other in others.values()))
    if not count:
        return None
    served = next(iter(others.values()))
    reference = reference.cut_like(served)
    others = {name: other if other.windows else other.cut_like(served) for name, other in others.items()}
    masks = [eval_set.border_mask(number, served) if eval_set else None for number in range(count)]
    largest = difference_range(reference, served)
    rows: list[tuple[str, int, tuple[slice, slice]]] = []
    for number in range(count):
        rows.append((f"image {number + 1}", number, (slice(None), slice(None))))
        if (mask := masks[number]) is not None:
            steps = _steps(reference.images[number], served.images[number])
            rows.append(("its border", number, _border_view(steps, mask)))
    ratios = [height / width for height, width in (reference.images[n][0][view].shape for _, n, view in rows)]
    titles = ["reference", *(title for name in others for title in (name, "difference"))]
    figure = Figure(figsize=(2.2 * len(titles), 1.1 + 2.2 * sum(ratios)), layout="compressed")
    axes = figure.subplots(len(rows), len(titles), squeeze=False, height_ratios=ratios)
    for line, (label, number, view) in zip(axes, rows, strict=True):
        ours, mask = reference.images[number], masks[number]
        line[0].set_ylabel(label)
        line[0].imshow(_pixels(ours)[view])
        for own, other, beside in zip(line[1::2], others.values(), line[2::2], strict=True):
            image = other.images[number]
            own.imshow(_pixels(image)[view])
            drawn = beside.imshow(_steps(ours, image)[view], cmap="magma", vmin=0, vmax=largest)
            if mask is not None:
                beside.contour(mask[view].float(), levels=[0.5], colors="#00d5ff", linewidths=0.7, linestyles="dotted")
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, loc="left", fontsize=10)
    label = "difference, mean over red, green and blue, in 8-bit steps (255: black for white)"
    figure.colorbar(drawn, ax=axes[0], location="top", aspect=60, extend="max", label=label)
    return figure


def image_rows(images: Mapping[str, Sequence[Tensor]]) -> Figure:
    """Return pictures side by side, a column a title, a row a sample."""
    count = min(_IMAGES_SHOWN, *map(len, images.values()))
    ratios = [next(iter(images.values()))[n].shape[1] / next(iter(images.values()))[n].shape[2] for n in range(count)]
    figure = Figure(figsize=(2.2 * len(images), 0.4 + 2.2 * sum(ratios)), layout="compressed")
    axes = figure.subplots(count, len(images), squeeze=False, height_ratios=ratios)
    for column, (title, pictures) in zip(axes.T, images.items(), strict=True):
        column[0].set_title(title, loc="left", fontsize=10)
        for axis, picture in zip(column, pictures, strict=False):
            axis.imshow(_pixels(picture))
            axis.set(xticks=[], yticks=[])
    return figure


def difference_range(reference: Outcome, served: Outcome) -> float:
    """Return where the one scale of all differences ends, in 8-bit steps: at ``LEAST_RANGE``, or at 99.5 % of them."""
    pairs = zip(reference.images[:_IMAGES_SHOWN], served.images, strict=False)
    steps = torch.cat([_steps(ours, theirs).flatten() for ours, theirs in pairs]).sort().values
    return max(LEAST_RANGE, float(steps[round(0.995 * (len(steps) - 1))]))


def _pixels(image: Tensor) -> Tensor:
    """Return ``image`` [3, H, W] in about [-1, 1] as [H, W, 3] in [0, 1]."""
    return ((image.clamp(-1, 1) + 1) / 2).permute(1, 2, 0)


def _steps(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the difference [H, W] of two images [3, H, W] in about [-1, 1], in 8-bit steps."""
    return (theirs - ours).abs().mean(0) / STEP_8BIT


def _border_view(steps: Tensor, filled: Tensor) -> tuple[slice, slice]:
    """Return the square of at most ``ZOOM`` pixels around the border pixel about which ``steps`` [H, W] are largest."""
    near = border_distance(filled, 1) <= 1
    around = F.avg_pool2d(steps[None, None], RING + 1, stride=1, padding=RING // 2)[0, 0]
    middle = int(torch.where(near, around, -1.0).argmax())
    size = min(ZOOM, *(side // 2 for side in steps.shape))
    places = (middle // steps.shape[1], middle % steps.shape[1])
    starts = [min(max(place - size // 2, 0), side - size) for place, side in zip(places, steps.shape, strict=True)]
    return slice(starts[0], starts[0] + size), slice(starts[1], starts[1] + size)


def as_data_uri(figure: Figure) -> str:
    """Return a PNG as a data URI, for a page without files beside it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
