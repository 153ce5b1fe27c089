"""Whole runs with each way of computing blocks again: the same LoRA, bit for bit; what cannot work is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs import lora, run, same, write_dataset

WAYS = {
    "kept": {"activation_budget_mb": 1},
    "on the host": {"cpu_offload_checkpointing": True},
    "together": {"activation_budget_mb": 1, "cpu_offload_checkpointing": True},
    "over fp8": {"activation_budget_mb": 1, "cpu_offload_checkpointing": True, "fp8_scaled": True},
}


@pytest.fixture(scope="module")
def plain(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, torch.Tensor]]:
    """What is trained without recomputation; and that on an fp8 base."""
    folder = tmp_path_factory.mktemp("plain")
    found = {}
    for fp8 in (False, True):
        run(base, write_dataset(folder), folder / str(fp8), max_train_steps=3, network_dropout=0.2, fp8_scaled=fp8)
        found[fp8] = lora(folder / str(fp8))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_the_lora_is_the_same(way: str, base: Path, plain: dict[bool, dict], tmp_path: Path) -> None:
    settings = {"gradient_checkpointing": True, "max_train_steps": 3, "network_dropout": 0.2, **WAYS[way]}
    run(base, write_dataset(tmp_path), tmp_path / "out", **settings)
    assert same(lora(tmp_path / "out"), plain["fp8_scaled" in settings])
