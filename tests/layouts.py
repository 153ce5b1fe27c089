"""Runs under another layout, and what they are held to: the metrics of the run on one process, step by step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from library.config import load_config
from library.config.load import load_for
from library.config.scripts import LANGUAGE_LORA
from tests.runs import largest_difference, lora
from train_lora import train

# A LoRA's run that clips, saves a state in the middle and samples there.
SETTINGS: dict[str, object] = {
    "max_train_steps": 3,
    "gradient_checkpointing": True,
    "max_grad_norm": 0.01,
    "save_every_n_steps": 2,
    "save_state": True,
    "sample_every_n_steps": 2,
}
# From B = 0 a plain step of length one leaves the gradient of the first step in the file as B, but for its sign.
GRADIENTS: dict[str, object] = {
    "max_train_steps": 1,
    "optimizer_type": "SGD",
    "learning_rate": 1.0,
    "max_grad_norm": 0.0,
}

Lines = Sequence[dict[str, Any]]


def assert_same_metrics(one: Lines, other: Lines, keys: Sequence[str], rel: float) -> None:
    """Compare two runs' ``metrics.jsonl``: the same steps, and ``keys`` in the same of them, equal to ``rel``."""
    assert [line["step"] for line in one] == [line["step"] for line in other]
    for expected, found in zip(one, other, strict=True):
        for key in keys:
            assert found.get(key) == (pytest.approx(expected[key], rel=rel) if key in expected else None), key


def train_one(flags: list[str]) -> None:
    train(load_config(flags))


def chat_one(flags: list[str]) -> None:
    train(load_for(LANGUAGE_LORA, flags))


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_runs(runs: Path, rel: float, within: float) -> None:
    """Compare the runs ``one`` and ``two`` in a folder: metrics to ``rel``, LoRAs to ``within``, which samples."""
    assert_same_metrics(lines(runs / "one"), lines(runs / "two"), ("loss", "val_loss", "grad_norm"), rel)
    assert largest_difference(lora(runs / "two"), lora(runs / "one")) < within
    one, two = (sorted(path.name for path in (runs / name / "samples").iterdir()) for name in ("one", "two"))
    assert one == two


def assert_goes_on_either_way(runs: Path, within: float) -> None:
    """Compare runs that went ``there`` and ``back`` between layouts at step 2 with the one that did not."""
    expected = lora(runs / "one")
    assert largest_difference(lora(runs / "there"), expected) < within
    assert largest_difference(lora(runs / "back"), expected) < within
    assert largest_difference(lora(runs / "one", "lora-step00000002"), expected) > 10 * within
