"""Draw the image of ``docs/design.md``: the layers of the code, from the scripts down to the errors.

    python dev/draw_structure.py

A band is a layer of the import contract in ``pyproject.toml``: what is in it imports only from bands below. Names
and purposes are read from the code (a package's first docstring line), so the drawing is as true as the code.
"""

from __future__ import annotations

import argparse
import ast
import sys
import textwrap
from collections.abc import Iterable
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from library.files import read_toml, write_text

DRAWING = ROOT / "docs" / "images" / "structure.svg"
COLOURS = ("#eef3fa", "#fdf3e7", "#edf6ec", "#f6eff5", "#f4f4f4", "#eaf5f5")
_WIDTH, _MARGIN, _LINE, _PAD = 980, 14, 17, 10


def layers() -> list[list[str]]:
    """Return the contract's layers from the top, each as its modules, the scripts in their place."""
    contracts = read_toml(ROOT / "pyproject.toml")[0]["tool"]["importlinter"]["contracts"]
    found = [line.split(" | ") for line in contracts[0]["layers"]]
    return [found[0], ["train_lora", "train_llm"], *found[1:]]


def purpose(module: str) -> str:
    """Return the first sentence of a module's or package's docstring."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    documentation = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(documentation.split("\n\n")[0].split()).replace("``", "")


def contents(module: str) -> list[tuple[str, list[str]]]:
    """Return the package's own modules under the name "", then each of its sub-packages with its modules."""
    folder = ROOT / module.replace(".", "/")
    if not folder.is_dir():
        return []
    groups = [
        ("", folder),
        *((str(p.parent.relative_to(folder)), p.parent) for p in sorted(folder.rglob("*/__init__.py"))),
    ]
    names = [(name, sorted(p.stem for p in path.glob("*.py") if p.stem != "__init__")) for name, path in groups]
    return [(name, modules) for name, modules in names if modules]


def module_box(x: float, y: float, width: float, module: str, colour: str) -> tuple[list[str], float]:
    """Return the shapes of one module or package at (x, y), and its height."""
    shapes, line = [text(x + _PAD, y + 20, module.replace(".", "/"), 15, "bold")], y + 20
    columns = int((width - 2 * _PAD) / 6.3)  # characters of 12 pixels' height
    for words in textwrap.wrap(purpose(module), columns):
        line += _LINE
        shapes.append(text(x + _PAD, line, words, fill="#444444"))
    for name, modules in contents(module):
        label = f"{name}/  " if name else ""
        for number, words in enumerate(textwrap.wrap(label + " · ".join(modules), columns - 2)):
            line += _LINE + (4 if number == 0 else 0)
            shapes.append(text(x + _PAD, line, words, fill="#1f4e79" if name else "#6b4a12"))
    height = line - y + _PAD
    return [box(x, y, width, height, colour, "#bbbbbb", 6), *shapes], height


def drawing() -> str:
    """Return the drawing as SVG."""
    shapes, y = [], float(_MARGIN)
    for number, modules in enumerate(layers()):
        width = (_WIDTH - 2 * _MARGIN - (len(modules) - 1) * _MARGIN) / len(modules)
        boxes = [
            module_box(_MARGIN + i * (width + _MARGIN), y, width, module, COLOURS[number % len(COLOURS)])
            for i, module in enumerate(modules)
        ]
        shapes += [shape for found, _ in boxes for shape in found]
        y += max(height for _, height in boxes) + _MARGIN
    return document(_WIDTH, y, shapes)


def text(x: float, y: float, words: str, size: int = 12, weight: str = "normal", fill: str = "#222222") -> str:
    """Return a line of text as SVG."""
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="start" fill="{fill}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str, radius: int) -> str:
    """Return a rectangle as SVG."""
    place = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}"/>'


def document(width: float, height: float, shapes: Iterable[str]) -> str:
    """Return an SVG of ``shapes`` on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *shapes, "</svg>"]) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    write_text(DRAWING, drawing())
