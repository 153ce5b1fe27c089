"""Several processes, and every way of starting them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.processes import launcher
from tests.runs import arguments, largest_difference, launch, lora, metrics, run, start, write_dataset
from tests.two_nodes import run_on_nodes, two_nodes

# Gradients of two halves are averaged by all-reduce instead of one mean over the batch: fp32 rounding, as in the
# accumulation test.
SAME_IN_FP32 = 2e-4


def test_two_processes_equal_one(base: Path, tmp_path: Path) -> None:
    halves = write_dataset(
        tmp_path / "halves", text="batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1", num_repeats=2
    )
    whole = write_dataset(
        tmp_path / "whole", text="batch_size = 4\nvalidation_split = 0.25\nvalidation_seed = 1", num_repeats=2
    )
    settings = {"max_train_steps": 3, "gradient_checkpointing": True, "ddp_static_graph": True}
    one = run(base, whole, tmp_path / "one", **settings)
    two = launch(launcher(), arguments(base, halves, tmp_path / "two", **settings), tmp_path)
    assert two.returncode == 0, two.stderr
    assert largest_difference(lora(tmp_path / "two"), lora(tmp_path / "one")) < SAME_IN_FP32
    lines = metrics(tmp_path / "two")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3]  # written by one process, validation before and after
    assert lines[-1]["val_loss"] == pytest.approx(one.val_loss, rel=1e-5)
    assert two.stdout.count("validation loss") == 1


@pytest.mark.slow
def test_accelerate_launch_and_a_foreign_configuration_change_nothing(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    run(base, dataset, tmp_path / "plain", max_train_steps=2)
    home = tmp_path / "home" / "accelerate"
    home.mkdir(parents=True)
    (home / "default_config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: bf16\nuse_cpu: true\n"
        "num_processes: 1\nnum_machines: 1\nmachine_rank: 0\n"
    )
    flags = arguments(base, dataset, tmp_path / "launched", max_train_steps=2)
    environment = {"HF_HOME": str(tmp_path / "home"), "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7"}
    launched = launch(["-m", "accelerate.commands.launch"], flags, tmp_path, environment)
    assert launched.returncode == 0, launched.stderr
    assert largest_difference(lora(tmp_path / "launched"), lora(tmp_path / "plain")) < SAME_IN_FP32


def test_an_engine_asked_for_outside_the_training_file_is_refused(base: Path, dataset: Path, tmp_path: Path) -> None:
    flags = arguments(base, dataset, tmp_path / "out")
    refused = start(flags, tmp_path, {"ACCELERATE_USE_FSDP": "true"})
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ACCELERATE_USE_FSDP: accelerate's configuration asks for an engine")
    assert len(refused.stderr.splitlines()) == 1


def test_a_user_error_is_one_line_and_exit_code_2(base: Path, dataset: Path, tmp_path: Path) -> None:
    flags = [flag.replace("network_dim", "netwrk_dim") for flag in arguments(base, dataset, tmp_path / "out")]
    refused = start(flags, tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == "error: command line: --netwrk_dim: unknown flag; did you mean 'network_dim'?\n"


ON_NODES: dict[str, object] = {"max_train_steps": 3, "gradient_checkpointing": True, "max_grad_norm": 0.01}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "layout"), [(1, {}), (2, {"dp": 2, "shard": 2})], ids=["DDP", "HSDP, split within a node"]
)
def test_two_nodes_equal_one_process(processes: int, layout: dict[str, object], base: Path, tmp_path: Path) -> None:
    images = write_dataset(tmp_path / "images", text="batch_size = 1")
    run(base, images, tmp_path / "one", **ON_NODES, gradient_accumulation_steps=2 * processes)
    flags = arguments(base, images, tmp_path / "two", **ON_NODES, **layout)
    with two_nodes(tmp_path) as nodes:
        first, second = run_on_nodes(nodes, "train_lora.py", flags, tmp_path, processes)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert largest_difference(lora(tmp_path / "two"), lora(tmp_path / "one")) < SAME_IN_FP32
    assert (first.stdout + second.stdout).count("LoRA on flux") == 1


@pytest.mark.slow
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
