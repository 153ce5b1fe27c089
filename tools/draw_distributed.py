"""Draw the picture of ``docs/distributed.md``: what each process holds under each layout.

    python tools/draw_distributed.py

A column is a process. Its weights, gradients and optimizer state are boxes of four pieces each; coloured pieces are
those it keeps between steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.files import write_text

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "distributed.svg"
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")  # of the four pieces
ROWS = ("weights", "gradients", "optimizer")
_PIECE, _HEIGHT, _GAP, _ROW = 16, 22, 18, 34
_LEFT, _PANEL, _COLUMN = 100, 150, 4 * 16 + 18

# title, processes, pieces that process i keeps, what travels
PANELS = (
    ("one process", 1, lambda i: {0, 1, 2, 3}, "nothing"),
    ("DDP: dp = 4", 4, lambda i: {0, 1, 2, 3}, "all gradients, once a step, among all"),
    ("FSDP2: shard = 4", 4, lambda i: {i}, "weights, a block at a time, twice a pass; gradients to their owner"),
    ("HSDP: dp = 2, shard = 2", 4, lambda i: {0, 1} if i % 2 == 0 else {2, 3},
     "within 0-1 and 2-3 as FSDP2; between the pairs gradients, as DDP"),
    ("TP: tp = 4", 4, lambda i: {i}, "what layers give, summed behind every attention and MLP; weights never"),
)  # fmt: skip


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start", weight: str = "normal") -> str:
    """Return a line of text."""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def column(left: float, top: float, kept: set[int]) -> list[str]:
    """Return what one process holds: three rows of four pieces."""
    shapes = []
    for row in range(len(ROWS)):
        for piece, colour in enumerate(COLOURS):
            fill = colour if piece in kept else "none"
            x, y = left + piece * _PIECE, top + row * _ROW
            shapes.append(f'<rect x="{x}" y="{y}" width="{_PIECE}" height="{_HEIGHT}" fill="{fill}" stroke="#999999"/>')
    return shapes


def picture() -> str:
    """Return the drawing as SVG."""
    parts = []
    for number, (title, processes, kept, travels) in enumerate(PANELS):
        top = 30 + number * (_PANEL + _GAP)
        parts.append(text(10, top, title, 15, weight="bold"))
        for row, name in enumerate(ROWS):
            parts.append(text(_LEFT - 10, top + 46 + row * _ROW, name, anchor="end"))
        for i in range(processes):
            left = _LEFT + i * _COLUMN
            parts += [text(left + 2 * _PIECE, top + 22, f"process {i}", 11, "middle"), *column(left, top + 30, kept(i))]
        parts.append(text(_LEFT, top + _PANEL - 8, f"travels: {travels}"))
    height = 30 + len(PANELS) * (_PANEL + _GAP)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="600" height="{height}" fill="white"/>', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    write_text(PICTURE, picture())
