"""Two machines with a launcher each, which meet by rendezvous: the result is that of one process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.runs import arguments, largest_difference, lora, run, write_dataset
from tests.two_nodes import run_on_nodes, two_nodes

pytestmark = pytest.mark.slow
SAME_IN_FP32 = 2e-4  # gradients of parts are averaged by all-reduce, as in test_launchers
SETTINGS: dict[str, object] = {"max_train_steps": 3, "gradient_checkpointing": True, "max_grad_norm": 0.01}


@pytest.mark.parametrize(
    ("processes", "layout"), [(1, {}), (2, {"dp": 2, "shard": 2})], ids=["DDP", "HSDP, split within a node"]
)
def test_two_nodes_equal_one_process(processes: int, layout: dict[str, object], base: Path, tmp_path: Path) -> None:
    images = write_dataset(tmp_path / "images", text="batch_size = 1")
    run(base, images, tmp_path / "one", **SETTINGS, gradient_accumulation_steps=2 * processes)
    flags = arguments(base, images, tmp_path / "two", **SETTINGS, **layout)
    with two_nodes(tmp_path) as nodes:
        first, second = run_on_nodes(nodes, "train_lora.py", flags, tmp_path, processes)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert largest_difference(lora(tmp_path / "two"), lora(tmp_path / "one")) < SAME_IN_FP32
    assert (first.stdout + second.stdout).count("LoRA on flux") == 1


def test_both_nodes_end_when_a_process_of_one_is_killed(base: Path, tmp_path: Path) -> None:
    images = write_dataset(tmp_path / "images", text="batch_size = 1")
    flags = arguments(base, images, tmp_path / "out", max_train_steps=4)
    with two_nodes(tmp_path) as nodes:
        environment = {"DIES": "3:kill"}
        done = run_on_nodes(nodes, "tests/faults/dying_rank.py", flags, tmp_path, environment=environment)
    errors = "".join(node.stderr for node in done)
    assert (tmp_path / "died").exists(), errors
    assert time.time() - (tmp_path / "died").stat().st_mtime < 30
    assert all(node.returncode not in (0, 2) for node in done), errors
    assert "process 0: lost another process" in errors
