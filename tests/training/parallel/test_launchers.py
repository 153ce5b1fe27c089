"""Several processes, and every way of starting them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import launcher
from tests.runs import arguments, largest_difference, launch, lora, metrics, run, start, write_dataset

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
