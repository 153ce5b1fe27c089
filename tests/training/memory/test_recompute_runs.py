"""Whole runs with each way of computing blocks again: the same LoRA, bit for bit; what cannot work is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from library.config import load_config
from library.errors import UserError
from tests.runs import arguments, lora, run, write_dataset

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
    found, expected = lora(tmp_path / "out"), plain["fp8_scaled" in settings]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"activation_budget_mb": 100}, "activation_budget_mb: has no effect without gradient_checkpointing"),
        (
            {"cpu_offload_checkpointing": True},
            "cpu_offload_checkpointing: has no effect without gradient_checkpointing",
        ),
        (
            {"gradient_checkpointing": True, "activation_budget_mb": 100, "torch_compile": True},
            "activation_budget_mb: a compiled block",
        ),
    ],
)
def test_what_would_do_nothing_is_refused(settings: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        load_config(arguments(tmp_path, tmp_path / "data.toml", tmp_path / "out", **settings))
