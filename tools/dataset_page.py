"""The findings of ``tools/check_dataset.py`` as one HTML page that needs nothing beside it: thumbnails are inside."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path

from PIL import Image, ImageOps

from library.data.lint import TITLES, Finding, Report

_SIDE = 128  # of a thumbnail, pixels
_MOST = 60  # findings of a kind that are shown with pictures ...
_PICTURES = 12  # ... and pictures of a finding
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2rem auto; max-width: 70rem;
  padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2.5rem; border-bottom: 1px solid #ddd }
.error h2 { color: #a40000 } .finding { margin: 1rem 0 } .pictures { display: flex; flex-wrap: wrap; gap: .5rem }
figure { margin: 0; width: 128px; font-size: .75rem; overflow-wrap: anywhere; color: #555 }
img { max-width: 128px; max-height: 128px; border: 1px solid #ccc }
.none { display: block; width: 126px; height: 60px; border: 1px dashed #a40000 }
table { border-collapse: collapse } td { padding: .1rem 1rem .1rem 0 }
"""


def page(report: Report, dataset: Path) -> str:
    """Return the page."""
    rows = "".join(
        f"<tr><td>{html.escape(TITLES[kind])}</td><td>{count}</td></tr>" for kind, count in report.counts().items()
    )
    parts = [_section(kind, [f for f in report.findings if f.kind == kind]) for kind in report.counts()]
    good = "" if report.findings else "<p>Nothing was found.</p>"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(dataset.name)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(str(dataset))}</h1>"
        f"<p>{report.images} images</p><table>{rows}</table>{good}{''.join(parts)}</html>\n"
    )


def _section(kind: str, findings: list[Finding]) -> str:
    shown = "".join(_finding(finding) for finding in findings[:_MOST])
    rest = "".join(f"<li>{html.escape(f.text)}</li>" for f in findings[_MOST:])
    more = f"<p>and without pictures:</p><ul>{rest}</ul>" if rest else ""
    mark = "error" if findings[0].is_error else "remark"
    return f'<section class="{mark}"><h2>{html.escape(TITLES[kind])} ({len(findings)})</h2>{shown}{more}</section>'


def _finding(finding: Finding) -> str:
    pictures = "".join(_figure(path) for path in finding.paths[:_PICTURES])
    return f'<div class="finding"><p>{html.escape(finding.text)}</p><div class="pictures">{pictures}</div></div>'


def _figure(path: str) -> str:
    caption = f"<figcaption>{html.escape(path)}</figcaption>"
    try:
        with Image.open(path) as image:
            image.draft("RGB", (_SIDE, _SIDE))
            small = ImageOps.exif_transpose(image).convert("RGB")
    except Exception:  # that it cannot be shown is what the finding says
        return f'<figure><span class="none"></span>{caption}</figure>'
    small.thumbnail((_SIDE, _SIDE))
    data = io.BytesIO()
    small.save(data, "JPEG", quality=80)
    source = base64.b64encode(data.getvalue()).decode()
    return f'<figure><img alt="" src="data:image/jpeg;base64,{source}">{caption}</figure>'
