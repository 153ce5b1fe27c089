"""A fault on one of two processes, in every layout and part of a run: both end, or go on, and the cause is said once.

The processes run without a launcher, which would end the second one when the first has ended. The faults are planted
by ``tests/faults/one_rank.py``.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from library.errors import UserError
from library.processes import one_of_several
from library.training.checkpoint.state import find_damage
from tests.forked import Script, start_two
from tests.processes import launcher, run_command
from tests.runs import ROOT, arguments, largest_difference, launch, lora, losses_of, run, write_dataset
from tests.worker_group import run_in_group

LIMIT = 60  # seconds from the fault to the end of both processes
SAME_IN_FP32 = 2e-4  # as in test_launchers
LAYOUTS: dict[str, dict[str, object]] = {"ddp": {}, "shard": {"shard": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}}
SHARES_BATCHES = ("ddp", "shard")  # a step has two batches, one on each process; in the other layouts one
STEP, MODULE = "library.training.tasks.image_step:FlowStep.loss", "torch.nn:Module.__call__"
VALIDATE = "library.training.tasks.image_lora:ImageLora.validate"
SAMPLE = "library.training.sampling.images:Sampler.sample"
SAYS = {
    "bug": "ValueError: the part breaks here",
    "memory": "Tried to allocate 20.00 GiB",
    "disk": "/full: cannot be written (No space left on device)",
}


@dataclass(frozen=True)
class Fault:
    """See ``tests/faults/one_rank.py``."""

    rank: int
    inside: str | None
    at: str
    call: int
    error: str
    disk_full: bool = False


# parts of which all processes end; MODULE is called between the exchanges of a split model
ENDS = {
    "caching latents": Fault(1, None, "library.data.dataset:encode_latents", 1, "disk"),
    "caching text": Fault(0, None, "library.data.dataset:encode_texts", 1, "bug"),
    "loading": Fault(1, None, "library.training.tasks.image_lora:ImageLora.load_networks", 1, "bug"),
    "validation": Fault(1, VALIDATE, MODULE, 9, "bug"),
    "the first step": Fault(1, STEP, MODULE, 9, "memory"),
    "a later step": Fault(0, None, STEP, 3, "bug"),
    "the optimizer": Fault(1, None, "torch.optim:AdamW.step", 2, "bug"),
    "saving": Fault(0, None, "library.training.tasks.lora:LoraTask.save", 1, "bug"),
}
FULL_DISK = Fault(0, SAMPLE, "library.training.sampling.images:save_image", 1, "disk")  # behind all exchanges
# in test, not only in test-all; elsewhere another part
FAST = [("ddp", "caching latents"), ("tp", "the first step"), ("pp", "validation")]


def is_slow(layout: str, part: str) -> list[pytest.MarkDecorator]:
    return [] if (layout, part) in FAST else [pytest.mark.slow]


@pytest.fixture(scope="module")
def cached(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that are cached, and the runs on one process, ``whole-1`` and ``whole-2`` batches a step."""
    folder = tmp_path_factory.mktemp("one_rank")
    images = write_dataset(folder, text="batch_size = 1\nvalidation_split = 0.25\nvalidation_seed = 1")
    (folder / "prompts.txt").write_text("a red disc --w 64 --h 64 --s 2 --d 1\n")
    for batches in (1, 2):
        whole = folder / f"whole-{batches}"
        run(base, images, whole, **settings(folder), gradient_accumulation_steps=batches)
    return folder


def settings(folder: Path) -> dict[str, object]:
    return {"sample_every_n_steps": 2, "sample_prompts": folder / "prompts.txt", "save_every_n_steps": 2}


def run_two(fault: Fault, flags: list[str], folder: Path) -> tuple[float, list[subprocess.CompletedProcess[str]]]:
    """Train on two processes; return how many seconds after the fault both had ended, and how."""
    running = start(fault, flags, folder)
    ended = [process.wait(3 * LIMIT) for process in running]
    return time.time() - (folder / "failed").stat().st_mtime, ended


def start(fault: Fault, flags: list[str], folder: Path) -> list[Script]:
    return start_two(ROOT / "tests/faults/one_rank.py", flags, folder, {"FAULT": json.dumps(asdict(fault))})


def assert_all_end(fault: Fault, flags: list[str], folder: Path) -> None:
    """The process that fails says why, with the exit code of its error; the other one fails too and says no cause."""
    seconds, ended = run_two(fault, flags, folder)
    assert seconds < LIMIT
    failed, other = ended[fault.rank], ended[1 - fault.rank]
    text = failed.stderr + other.stderr
    if fault.error == "memory":
        assert failed.stderr.count("error: out of memory in step 1") == text.count("error: out of memory") == 1
    else:
        last = [line for line in failed.stderr.splitlines() if SAYS[fault.error] in line]
        assert len(last) == text.count(SAYS[fault.error]) == 1, text
    assert failed.returncode == (1 if fault.error == "bug" else 2)
    assert ("Traceback" in failed.stderr) == (fault.error == "bug")
    assert other.returncode in (1, 2)
    assert "Traceback" not in other.stderr


@pytest.mark.parametrize(
    ("layout", "part"), [pytest.param(layout, part, marks=is_slow(layout, part)) for layout in LAYOUTS for part in ENDS]
)
def test_a_fault_on_one_process_ends_all(layout: str, part: str, base: Path, cached: Path, tmp_path: Path) -> None:
    images = cached / "dataset.toml"
    if part.startswith("caching"):
        images = write_dataset(tmp_path / "images", text="batch_size = 1")
    flags = arguments(base, images, tmp_path / "out", **settings(cached), **LAYOUTS[layout])
    assert_all_end(ENDS[part], flags, tmp_path)


def test_a_process_that_fails_on_a_full_disk_ends_all_at_once(base: Path, cached: Path, tmp_path: Path) -> None:
    """It says that it could not save, also if it is not the main process, and does not wait for the disk."""
    flags = arguments(base, cached / "dataset.toml", tmp_path / "out", **settings(cached))
    seconds, ended = run_two(Fault(1, None, STEP, 2, "bug", disk_full=True), flags, tmp_path)
    assert seconds < LIMIT
    assert [process.returncode for process in ended] == [1, 1]
    warning = f"warning: the last steps could not be saved ({SAYS['disk']};"
    assert [process.stdout.count(warning) for process in ended] == [0, 1]
    assert ended[1].stderr.count(SAYS["bug"]) == 1


AVERAGE = "library.training.optim.after_update:WeightAverage.update"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(0, None, "library.training.sampling.images:save_image", 1, "interrupt"),
        Fault(0, None, AVERAGE, 2, "bug"),
        Fault(1, None, AVERAGE, 2, "bug"),
    ],
    ids=["interrupt", "average of the main process", "average of the other"],
)
def test_the_others_of_a_process_that_ends_outside_a_vote_say_so_in_one_line(
    fault: Fault, base: Path, cached: Path, tmp_path: Path
) -> None:
    """No stack of the lost store; and no process says that all is lost, as another may have saved it."""
    flags = arguments(base, cached / "dataset.toml", tmp_path / "out", **settings(cached), ema_decay=0.9)
    seconds, ended = run_two(fault, flags, tmp_path)
    failed, other = ended[fault.rank], ended[1 - fault.rank]
    assert seconds < LIMIT
    assert (failed.returncode, other.returncode) == (130 if fault.error == "interrupt" else 1, 1)
    (line,) = other.stderr.splitlines()
    assert line.startswith(f"process {1 - fault.rank}: lost another process, whose error is the one to read (")
    assert "start again" not in failed.stdout + other.stdout
    assert failed.stdout.count("go on with --resume auto") == 1


@pytest.mark.slow
def test_a_fault_while_painting_ends_all(base: Path, cached: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a house\na tree\na cat\na boat\n")
    more = {"preserve": "prior", "preserve_prompts": tmp_path / "prompts.txt", "general_prompts": "none"}
    images = write_dataset(tmp_path / "images", text="batch_size = 1")
    fault = Fault(1, None, "library.training.sampling.painting:save_image", 2, "disk")
    assert_all_end(fault, arguments(base, images, tmp_path / "out", **settings(cached), **more), tmp_path)


@pytest.mark.slow
def test_a_fault_while_the_main_process_counts_memory_ends_all(base: Path, cached: Path, tmp_path: Path) -> None:
    flags = arguments(base, cached / "dataset.toml", tmp_path / "out", memory="auto")
    assert_all_end(Fault(0, None, "library.training.memory.dry_run:plan_memory", 1, "bug"), flags, tmp_path)


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[] if layout == "shard" else [pytest.mark.slow]) for layout in LAYOUTS]
)
def test_a_full_disk_while_sampling_costs_the_samples_alone(
    layout: str, base: Path, cached: Path, tmp_path: Path
) -> None:
    flags = arguments(base, cached / "dataset.toml", tmp_path / "out", **settings(cached), **LAYOUTS[layout])
    _, (main, other) = run_two(FULL_DISK, flags, tmp_path)
    assert (main.returncode, other.returncode) == (0, 0), main.stderr + other.stderr
    assert (main.stdout + other.stdout).count(f"warning: {SAYS['disk']}") == 1
    assert_trained(layout, cached, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_between_the_exchanges_of_sampling_ends_all_and_of_a_whole_model_none(
    layout: str, base: Path, cached: Path, tmp_path: Path
) -> None:
    """Of a split model: the other processes wait in an exchange, which cannot be taken back."""
    flags = arguments(base, cached / "dataset.toml", tmp_path / "out", **settings(cached), **LAYOUTS[layout])
    fault = Fault(0 if layout == "ddp" else 1, SAMPLE, MODULE, 9, "bug")
    if layout != "ddp":
        assert_all_end(fault, flags, tmp_path)
        return
    _, (main, other) = run_two(fault, flags, tmp_path)
    assert (main.returncode, other.returncode) == (0, 0), main.stderr + other.stderr
    assert main.stdout.count("warning: sampling failed (ValueError: the part breaks here); left out") == 1
    assert_trained(layout, cached, tmp_path / "out")


@pytest.mark.slow
def test_a_process_that_failed_and_cannot_end_holds_no_other(base: Path, cached: Path, tmp_path: Path) -> None:
    """Its connections stay open, as those of a process on another machine do under NCCL: the alarm alone tells."""
    flags = arguments(base, cached / "dataset.toml", tmp_path / "out", **settings(cached))
    running = start(Fault(1, None, STEP, 2, "stuck"), flags, tmp_path)
    other = running[0].wait(3 * LIMIT)
    seconds = time.time() - (tmp_path / "failed").stat().st_mtime
    assert not running[1].has_ended()
    assert seconds < LIMIT
    assert other.returncode == 2
    assert other.stderr.splitlines()[-1] == "error: another process has failed; its own error is the one to read"
    (tmp_path / "end").touch()
    assert running[1].wait().stderr.count(SAYS["disk"]) == 1


@pytest.mark.slow
def test_the_answers_of_the_base_are_kept_until_the_last_process_has_read_them(
    base: Path, cached: Path, tmp_path: Path
) -> None:
    teacher = {"distill_from": base, "network_weights": cached / "whole-1/lora.safetensors", "distill_effect": True}
    flags = arguments(base, cached / "dataset.toml", tmp_path / "out", **teacher)
    fault = Fault(1, None, "library.training.tasks.image_step:Teacher.blend", 1, "late")  # before the first step
    _, (main, other) = run_two(fault, flags, tmp_path)
    assert (main.returncode, other.returncode) == (0, 0), main.stderr + other.stderr
    assert not list((tmp_path / "out/teacher").glob("*-own"))


def assert_trained(layout: str, cached: Path, out: Path) -> None:
    """The run is that of one process, and sampled at the next step."""
    whole = cached / f"whole-{2 if layout in SHARES_BATCHES else 1}"
    assert losses_of(out) == pytest.approx(losses_of(whole), rel=1e-4)
    assert largest_difference(lora(out), lora(whole)) < SAME_IN_FP32
    assert [path.name for path in (out / "samples").glob("step*.png")] == ["step000004_00.png"]


SETTINGS: dict[str, object] = {"max_train_steps": 4, "save_every_n_steps": 2, "save_state": True}
KILLED_LIMIT = 30  # seconds from the death of a process to the end of the job
KILLED_SAYS = {"error": "RuntimeError: the step breaks here", "kill": "SIGKILL"}


def die(how: str, flags: list[str], folder: Path) -> tuple[float, str, str]:
    """Start a job whose second process dies in its fourth step; return when the job ended and what was printed."""
    command = [sys.executable, *launcher(), str(ROOT / "tests/faults/dying_rank.py"), *flags]
    done = run_command(command, folder, {"PYTHONPATH": str(ROOT), "DIES": f"4:{how}"})
    assert done.returncode not in (0, 2), done.stdout + done.stderr
    return time.time(), done.stdout, done.stderr


@pytest.mark.slow  # as below with torchrun, whose start takes longer than the rest
@pytest.mark.parametrize("how", ["kill", "error"])
def test_a_process_that_dies_ends_the_job_which_goes_on_from_its_state(how: str, base: Path, tmp_path: Path) -> None:
    images = write_dataset(tmp_path / "images", text="batch_size = 1")
    out = tmp_path / "out"
    ended, output, errors = die(how, arguments(base, images, out, **SETTINGS), tmp_path)
    assert ended - (tmp_path / "died").stat().st_mtime < KILLED_LIMIT
    root_cause = errors.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 ", root_cause)
    assert KILLED_SAYS[how] in root_cause
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


@pytest.mark.parametrize("how", ["error", "memory", "kill"])
def test_an_error_in_one_process_is_shown_by_it_and_spoils_nothing(how: str, base: Path, tmp_path: Path) -> None:
    images, out = write_dataset(tmp_path / "images", text="batch_size = 1"), tmp_path / "out"
    flags = arguments(base, images, out, **SETTINGS)
    running = start_two(ROOT / "tests/faults/dying_rank.py", flags, tmp_path, {"DIES": f"4:{how}"})
    other, failed = [process.wait(4 * KILLED_LIMIT) for process in running]
    assert time.time() - (tmp_path / "died").stat().st_mtime < KILLED_LIMIT
    if how == "memory":
        assert failed.returncode == 2
        text = failed.stderr.strip().splitlines()[-1]
        assert re.match(
            r"error: out of memory in step 4: the batch of 1 at 64x64 .*; last checkpoint: .*step00000003", text
        )
    elif how == "error":
        assert failed.returncode == 1
        assert "RuntimeError: the step breaks here" in failed.stderr
    else:
        assert failed.returncode == -signal.SIGKILL
    assert ("Traceback" in failed.stderr) == (how == "error")
    assert other.returncode not in (0, 2)
    assert "Traceback" not in other.stderr
    assert find_damage(out / "lora-step00000003-state") is None  # each has all of it, and saves it
    saved = [f"lora-step0000000{step}{end}" for step in (2, 3) for end in ("-state", ".safetensors")]
    assert sorted(path.name for path in out.glob("lora*")) == saved
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
