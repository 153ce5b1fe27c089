"""Differences of two runs, and what is recommended by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from library.fidelity.differences import compare
from library.fidelity.fixes import Fix, recommend, recommendation
from library.fidelity.runs import EvalSet, Outcome

NOTHING = EvalSet([], [], [], "none", (), 0, 1.0, 0)


def run_of(steps: int, finished: float) -> Outcome:
    """Return a run whose latents become ``finished`` in even steps."""
    return Outcome(path=[[torch.full((4, 2, 2), finished * (step + 1) / steps)] for step in range(steps)])


def test_where_the_latents_are_right_nothing_is_recommended() -> None:
    before = replace(compare(run_of(4, 1.0), run_of(4, 1.0), NOTHING), image=0.1)
    fix = Fix("refit", "", 1.0, (Path("a.safetensors"),), before, Outcome())
    assert "the finished latents are right" in recommendation(recommend([fix], before), before)
