"""Make the drawing of ``docs/distributed.md``: what each process holds under each layout.

    python dev/draw_distributed.py

A column is a process. Its weights, gradients and optimizer state are boxes of four pieces each; coloured pieces are
those it keeps between steps. Under them one step of a pipeline, as a row for each stage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dev.svg import box, document, text
from library.files import write_text

DRAWING = Path(__file__).resolve().parent.parent / "docs" / "images" / "distributed.svg"
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")  # of the four pieces
ROWS = ("weights", "gradients", "optimizer")
_PIECE, _HEIGHT, _GAP, _ROW = 16, 22, 18, 34
_LEFT, _PANEL, _COLUMN = 100, 150, 4 * 16 + 18

_ALL = {0, 1, 2, 3}
# title, processes (GPUs of a device map), pieces that each keeps (of rows apart, where they differ), what travels
PANELS: tuple[tuple[str, int, Callable[[int], set[int] | tuple[set[int], ...]], str], ...] = (
    ("one process", 1, lambda i: _ALL, "nothing"),
    ("DDP: dp = 4", 4, lambda i: _ALL, "all gradients, once a step, among all"),
    ("ZeRO: zero = 2 (1: gradients whole; 3: as FSDP2)", 4, lambda i: (_ALL, {i}, {i}),
     "gradients to their owner, after every backward pass; then the updated LoRA to all"),
    ("FSDP2: shard = 4", 4, lambda i: {i}, "weights, a block at a time, twice a pass; gradients to their owner"),
    ("HSDP: dp = 2, shard = 2", 4, lambda i: {0, 1} if i % 2 == 0 else {2, 3},
     "within 0-1 and 2-3 as FSDP2; between the pairs gradients, as DDP"),
    ("TP: tp = 4", 4, lambda i: {i}, "what layers give, summed behind every attention and MLP; weights never"),
    ("device map: one process with four GPUs", 4, lambda i: {i}, "the tokens' streams from GPU to GPU, one at a time"),
    ("pipeline: pp = 4", 4, lambda i: {i}, "the tokens' streams from stage to stage, in backward their gradients"),
)  # fmt: skip
STAGES, MICROBATCHES = 4, 8
_TIMES = {"F": 1, "B": 2}  # a backward pass takes twice a forward's time
_UNIT, _LINE = 10, 24  # of the pipeline's step: a forward pass's width, a stage's height


def column(left: float, top: float, held: set[int] | tuple[set[int], ...]) -> list[str]:
    """Return what one process holds: three rows of four pieces."""
    shapes = []
    for row, own in enumerate(held if isinstance(held, tuple) else [held] * len(ROWS)):
        for piece, colour in enumerate(COLOURS):
            fill = colour if piece in own else "none"
            x, y = left + piece * _PIECE, top + row * _ROW
            shapes.append(box(x, y, _PIECE, _HEIGHT, fill, "#999999"))
    return shapes


def one_forward_one_backward(stages: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    """Return for each stage what it does: "F" or "B", the microbatch, when."""
    doing: list[list[tuple[str, int, int]]] = [[] for _ in range(stages)]
    ends: dict[tuple[str, int, int], int] = {}
    free = [0] * stages

    def after(stage: int, kind: str, number: int) -> int | None:
        """When the other stage is done that this one waits for; None if that is not known yet."""
        if kind == "F":
            return 0 if stage == 0 else ends.get(("F", stage - 1, number))
        return ends.get(("B", stage + 1, number) if stage < stages - 1 else ("F", stage, number))

    plans = []
    for stage in range(stages):
        ahead = min(microbatches, stages - stage)
        plan = [("F", i) for i in range(ahead)]
        for i in range(microbatches):
            plan += [("B", i)] + ([("F", ahead + i)] if ahead + i < microbatches else [])
        plans.append(plan)
    while any(plans):
        for stage, plan in enumerate(plans):
            while plan and (ready := after(stage, *plan[0])) is not None:
                kind, number = plan.pop(0)
                begin = max(free[stage], ready)
                doing[stage].append((kind, number, begin))
                free[stage] = ends[kind, stage, number] = begin + _TIMES[kind]
    return doing


def pipeline_step(top: float) -> list[str]:
    """Return a step of a pipeline: forward passes in the stage's colour, backward passes outlined in it."""
    shapes = [text(10, top, "a step of a pipeline: microbatches = 8", 15, weight="bold")]
    for stage, doing in enumerate(one_forward_one_backward(STAGES, MICROBATCHES)):
        y = top + 14 + stage * _LINE
        shapes.append(text(_LEFT - 10, y + 13, f"process {stage}", anchor="end"))
        for kind, number, begin in doing:
            x, width = _LEFT + begin * _UNIT, _TIMES[kind] * _UNIT
            fill = COLOURS[stage] if kind == "F" else "none"
            shapes.append(box(x, y, width, 18, fill, COLOURS[stage]))
            shapes.append(text(x + width / 2, y + 13, str(number + 1), 9, anchor="middle"))
    words = "filled: forward of the microbatch with this number; outlined: its backward; between them a stage waits"
    return [*shapes, text(_LEFT, top + 14 + STAGES * _LINE + 14, words, 11)]


def drawing() -> str:
    """Return the drawing as SVG."""
    parts = []
    for number, (title, processes, held, travels) in enumerate(PANELS):
        top = 30 + number * (_PANEL + _GAP)
        parts.append(text(10, top, title, 15, weight="bold"))
        for row, name in enumerate(ROWS):
            parts.append(text(_LEFT - 10, top + 46 + row * _ROW, name, anchor="end"))
        for i in range(processes):
            left, unit = _LEFT + i * _COLUMN, "GPU" if title.startswith("device map") else "process"
            parts += [
                text(left + 2 * _PIECE, top + 22, f"{unit} {i}", 11, anchor="middle"),
                *column(left, top + 30, held(i)),
            ]
        parts.append(text(_LEFT, top + _PANEL - 8, f"travels: {travels}"))
    top = 30 + len(PANELS) * (_PANEL + _GAP)
    parts += pipeline_step(top)
    height = top + 14 + STAGES * _LINE + 30
    return document(600, height, parts)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    write_text(DRAWING, drawing())
