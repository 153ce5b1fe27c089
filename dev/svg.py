"""The few shapes of SVG that our drawings are made of."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def text(x: float, y: float, words: str, size: int = 12, weight: str = "normal", anchor: str = "start",
         fill: str = "#222222") -> str:  # fmt: skip
    """Return a line of text."""
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str, radius: int = 0) -> str:
    """Return a rectangle."""
    place = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}"/>'


def document(width: float, height: float, shapes: Iterable[str]) -> str:
    """Return ``shapes`` on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *shapes, "</svg>"]) + "\n"
