"""What a run under another layout is held to: the figures of the run on one process, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

Lines = Sequence[dict[str, Any]]


def assert_same_figures(one: Lines, other: Lines, keys: Sequence[str], rel: float) -> None:
    """Compare two runs' ``metrics.jsonl``: the same steps, and ``keys`` in the same of them, equal to ``rel``."""
    assert [line["step"] for line in one] == [line["step"] for line in other]
    for expected, found in zip(one, other, strict=True):
        for key in keys:
            assert found.get(key) == (pytest.approx(expected[key], rel=rel) if key in expected else None), key
