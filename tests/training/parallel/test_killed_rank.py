"""A process of several that dies takes the job down with its own error, and the job goes on from its last state."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from library.errors import UserError
from library.processes import one_of_several
from library.training.checkpoint.state import find_damage
from tests.forked import Script
from tests.processes import launcher, run_command
from tests.runs import ROOT, arguments, largest_difference, launch, lora, run, write_dataset
from tests.worker_group import run_in_group

SAME_IN_FP32 = 2e-4  # gradients of halves are averaged by all-reduce, as in test_launchers
SETTINGS: dict[str, object] = {"max_train_steps": 4, "save_every_n_steps": 2, "save_state": True}
LIMIT = 30  # seconds from the death of a process to the end of the job
SAYS = {"error": "RuntimeError: the step breaks here", "kill": "SIGKILL"}


def die(how: str, flags: list[str], folder: Path) -> tuple[float, str, str]:
    """Start a job whose second process dies in its fourth step; return when the job ended and what was printed."""
    command = [sys.executable, *launcher(), str(ROOT / "tests/faults/dying_rank.py"), *flags]
    done = run_command(command, folder, {"PYTHONPATH": str(ROOT), "DIES": f"4:{how}"})
    assert done.returncode not in (0, 2), done.stdout + done.stderr
    return time.time(), done.stdout, done.stderr


@pytest.mark.parametrize("how", ["kill", pytest.param("error", marks=pytest.mark.slow)])
def test_a_process_that_dies_ends_the_job_which_goes_on_from_its_state(how: str, base: Path, tmp_path: Path) -> None:
    images = write_dataset(tmp_path / "images", text="batch_size = 1")
    out = tmp_path / "out"
    ended, output, errors = die(how, arguments(base, images, out, **SETTINGS), tmp_path)
    assert ended - (tmp_path / "died").stat().st_mtime < LIMIT
    root_cause = errors.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 ", root_cause)
    assert SAYS[how] in root_cause
    tracebacks = re.findall(r"^\[rank(\d)\]: Traceback", errors, re.MULTILINE)
    assert tracebacks == (["1"] if how == "error" else [])  # the other says in a line that it lost one
    assert ("the step breaks here" in errors) == (how == "error")
    assert output.count("LoRA on flux") == 1
    # the state counts batches over all processes: one process goes on with two a step
    alone = SETTINGS | {"gradient_accumulation_steps": 2}
    run(base, images, out, **alone, resume="auto")
    run(base, images, tmp_path / "whole", **alone)
    assert largest_difference(lora(out), lora(tmp_path / "whole")) < SAME_IN_FP32
    assert largest_difference(lora(out, "lora-step00000002"), lora(tmp_path / "whole")) > 10 * SAME_IN_FP32


@pytest.mark.parametrize("how", ["error", "memory"])
def test_an_error_in_one_process_is_shown_by_it_and_spoils_nothing(how: str, base: Path, tmp_path: Path) -> None:
    """As above without torchrun, whose start takes longer than the rest."""
    images, out = write_dataset(tmp_path / "images", text="batch_size = 1"), tmp_path / "out"
    flags = arguments(base, images, out, **SETTINGS)
    script, group = ROOT / "tests/faults/dying_rank.py", {"DIES": f"4:{how}", "MASTER_ADDR": "127.0.0.1"}
    group |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": launcher()[-1]}
    running = [Script(script, flags, tmp_path, group | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    other, failed = [process.wait(4 * LIMIT) for process in running]
    assert time.time() - (tmp_path / "died").stat().st_mtime < LIMIT
    if how == "memory":
        assert failed.returncode == 2
        said = failed.stderr.strip().splitlines()[-1]
        assert re.match(
            r"error: out of memory in step 4: the batch of 1 at 64x64 .*; last checkpoint: .*step00000003", said
        )
    else:
        assert failed.returncode == 1
        assert "RuntimeError: the step breaks here" in failed.stderr
    assert ("Traceback" in failed.stderr) == (how == "error")
    assert other.returncode not in (0, 2)
    assert "Traceback" not in other.stderr
    assert find_damage(out / "lora-step00000003-state") is None  # each has all of it, and saves it
    assert sorted(path.name for path in out.glob("lora*")) == [
        "lora-step00000002-state",
        "lora-step00000002.safetensors",
        "lora-step00000003-state",
        "lora-step00000003.safetensors",
    ]
    alone = SETTINGS | {"gradient_accumulation_steps": 2}
    run(base, images, out, **alone, resume="auto")
    run(base, images, tmp_path / "whole", **alone)
    assert largest_difference(lora(out), lora(tmp_path / "whole")) < SAME_IN_FP32


@pytest.mark.slow
def test_two_processes_go_on_to_the_same_bits(base: Path, tmp_path: Path) -> None:
    images = write_dataset(tmp_path / "images", text="batch_size = 1")
    die("kill", arguments(base, images, tmp_path / "out", **SETTINGS), tmp_path)
    for folder, resume in (("out", "auto"), ("whole", None)):
        done = launch(launcher(), arguments(base, images, tmp_path / folder, **SETTINGS, resume=resume), tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
    assert largest_difference(lora(tmp_path / "out"), lora(tmp_path / "whole")) == 0


@pytest.mark.slow
def test_what_all_processes_find_wrong_is_said_once(base: Path, dataset: Path, tmp_path: Path) -> None:
    flags = [flag.replace("network_dim", "netwrk_dim") for flag in arguments(base, dataset, tmp_path / "out")]
    refused = launch(launcher(), flags, tmp_path)
    assert refused.returncode == 1  # torchrun's own
    assert refused.stderr.count("error: command line: --netwrk_dim: unknown flag; did you mean 'network_dim'?") == 1


def test_an_error_of_all_is_shown_by_one_and_that_of_one_by_itself(tmp_path: Path) -> None:
    assert run_in_group([("errors", fail, (tmp_path,))], tmp_path) == {"errors": ""}
    said = sorted(path.name for path in tmp_path.glob("said*"))
    assert said in (["said common 0", "said own 1"], ["said common 1", "said own 1"])
    assert [path.name for path in tmp_path.glob("silent*")] == ["silent common 2"]


def fail(folder: Path) -> None:
    """Join a group, and raise what both processes raise, then what one does."""
    from accelerate import PartialState

    state = PartialState(cpu=True)

    @one_of_several
    def main() -> None:
        raise UserError(message)

    for message in ["common", *(["own"] if state.process_index == 1 else [])]:
        try:
            main()
        except UserError:
            (folder / f"said {message} {state.process_index}").touch()
        except SystemExit as left:
            (folder / f"silent {message} {left.code}").touch()
    state.wait_for_everyone()
