"""The report as one HTML file (``page.html`` filled) with its figures inside, and as JSON.

The browser's Precision screen shows the same file. It must work where it was copied to, years later: no file beside it,
no network, plain JavaScript. What was not measured is left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from library.fidelity.distilled import Distilled
from library.fidelity.figures import as_data_uri, image_rows, picture_rows, server_pictures
from library.fidelity.findings import CAUSES, REMEDIES, as_sentence
from library.fidelity.fixes import FIX_COLUMNS, fix_rows
from library.fidelity.remedies import Remedy
from library.fidelity.report import Report
from library.files import read_toml, write_text

Columns = Mapping[str, Mapping[str, str]]  # heading -> what it means, value of a row, format: see page_tables.toml

_TABLES: Mapping[str, Columns] = read_toml(Path(__file__).with_name("page_tables.toml"))[0]
_FIX_COLUMNS: Columns = {name or "fix": {"means": "", "value": str(place)} for place, name in enumerate(FIX_COLUMNS)}


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write ``report.html`` and ``report.json``; return their paths."""
    best, served = report.best, {"served": report.deployed.images}
    served |= {f"after “{best.name}”": best.outcome.images} if best else {}
    pictures = picture_rows(report.reference.images, served, report.eval_set.border_mask)
    return _write(folder, report.title, _measured(report), report=report, **_shown(report, pictures))


def write_distilled(distilled: Distilled, title: str, folder: Path, remedies: Sequence[Remedy]) -> list[Path]:
    """Write ``report.html`` and ``report.json`` of base and distilled model; return their paths."""
    sentence = distilled.sentence()
    shown = {
        "sentence": sentence,
        "pictures": image_rows(distilled.images) if distilled.images else None,
        "strengths": _table(_TABLES["distilled"], distilled.rows),
        "remedies": [each.words for each in remedies],
    }
    listed = [asdict(each) | {"text": each.words} for each in remedies]
    measured = {"title": title, "distilled": distilled.as_json(), "remedies": listed}
    return _write(folder, title, measured, headline=sentence, alarm=distilled.alarm, distilled=shown)


def _write(folder: Path, title: str, measured: Mapping[str, Any], **shown: Any) -> list[Path]:
    """Write the page with what is ``shown`` and the JSON of what was ``measured``; return their paths."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals["data_uri"] = as_data_uri
    environment.filters["commands_apart"] = _commands_apart
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    absent: dict[str, Any] = {"report": None, "distilled": None, "in_short": "", "words": {}, "tables": {}}
    write_text(folder / "report.html", template.render(absent, title=title, **shown))
    write_text(folder / "report.json", json.dumps(_plain(measured), indent=1))
    return [folder / "report.html", folder / "report.json"]


def _commands_apart(sentence: str) -> Markup:
    """Return a sentence whose commands and flags, in brackets, are not shown in the browser's Precision screen."""
    return Markup(re.sub(r" \((?:tools/|--)[^)]*\)", r"<span class=command>\g<0></span>", str(escape(sentence))))


def _shown(report: Report, pictures: Figure | None) -> dict[str, Any]:
    """Return what the page shows of a report."""
    full, server = report.full, report.server
    layers, tensors = report.comparison.layers, report.comparison.tensors
    tables = {
        "fixes": _table(_FIX_COLUMNS, fix_rows(report.fixes, full)) if report.fixes else None,
        "border": full.border and _table(_TABLES["border"], full.border.figures),
        "layers": _table(_TABLES["layer"], layers, "output error", lambda row: row.conspicuous),
        "server": server and _table(_TABLES["server"], [*server.descriptions, server.reference]),
        "merges": _table(_TABLES["merge"], report.merges) if len(report.merges) > 1 else None,
        "tensors": _table(_TABLES["tensor"], tensors, "error", lambda row: bool(row.fault)),
    }
    return {
        "alarm": report.alarm,
        "verdict": report.verdict,
        "findings": [*report.painted, *report.verdict.findings],
        "headline": report.headline,
        "in_short": report.in_short,
        "words": report.sections(),
        "painted": server and server_pictures(server),
        "pictures": pictures,
        "tables": tables,
        "titles": CAUSES,
        "remedies": REMEDIES,
        "sentence": as_sentence,
    }


def _measured(report: Report) -> dict[str, Any]:
    """Return what ``report.json`` holds."""
    verdict, named = report.verdict, [*report.painted, *report.verdict.findings]
    return {
        "title": report.title,
        "settings": report.settings,
        "verdict": {
            "cause": (*report.painted, verdict.main)[0].cause,
            "alarm": report.alarm,
            "border": verdict.border and asdict(verdict.border) | {"state": verdict.border.state},
            "border_cause": verdict.border_cause and verdict.border_cause.as_json(),
            "explained": verdict.explained,
            "findings": [finding.as_json() for finding in named],
            "words": report.lines(),
        },
        "merges": [
            {"when": row.merging.when, "how": row.merging.how, "judged": row.judged, "differences": row.differences}
            for row in report.merges
        ],
        "remedies": [asdict(each) | {"text": each.words} for each in report.remedies],
        "deployment": report.full,
        "causes": {each.cause: {"alone": each.alone, "without": each.without} for each in report.attributions},
        "layers": list(report.comparison.layers),
        "tensors": list(report.comparison.tensors),
        "fixes": [
            {key: getattr(fix, key) for key in ("name", "cost", "seconds", "files", "differences", "beside")}
            for fix in report.fixes
        ],
        "server": report.server and report.server.as_json(),
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
    found = {name: [_value(row, column["value"]) for row in rows] for name, column in columns.items()}
    if by:
        first, *others = found
        columns = {**columns, "#": {"means": "place in the model"}}
        found = {first: found[first], "#": [*range(1, len(rows) + 1)]} | {name: found[name] for name in others}
    shown = {name: values for name, values in found.items() if any(map(_is_shown, values))}
    order = sorted(range(len(rows)), key=lambda row: -(found[by][row] or 0.0)) if by else range(len(rows))
    cells = [
        [
            (columns[name].get("format", "{}").format(values[row]), values[row]) if _is_shown(values[row]) else ("", "")
            for name, values in shown.items()
        ]
        for row in order
    ]
    words = {name: any(isinstance(value, str) for value in values) for name, values in shown.items()}
    return {
        "headings": [(name, columns[name]["means"], words[name]) for name in shown],
        "rows": [(line, flagged(rows[row])) for line, row in zip(cells, order, strict=True)],
        "by": by,
    }


def _value(row: Any, path: str) -> Any:
    """Return what stands in a row under ``path``: names of attributes, or places of a tuple; None where one is None."""
    for part in path.split("."):
        if row is not None:
            row = row[int(part)] if part.isdigit() else getattr(row, part)
    return ("no", "yes")[row] if isinstance(row, bool) else row


def _is_shown(value: Any) -> bool:
    return value not in (None, "") and not (isinstance(value, float) and math.isnan(value))
