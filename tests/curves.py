"""Runs without their curves: drawing lr.png takes longer than a tiny training, and few tests look at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def without_curves() -> Iterator[None]:
    """Let runs in the block draw neither lr.png nor noise_levels.png."""
    with mock.patch.multiple("library.training.run", plot_runs=mock.DEFAULT, plot_noise_levels=lambda *_: []):
        yield
