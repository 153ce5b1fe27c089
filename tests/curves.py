"""Runs without their curves: drawing lr.png takes longer than a tiny training, and few tests look at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def without_curves() -> Iterator[None]:
    """Let runs in the block draw no lr.png."""
    with mock.patch("library.training.run.plot_runs"):
        yield
