"""A fault on one of two processes, in every layout and part of a run: both end, or go on, and the cause is said once.

The processes run without a launcher, which would end the second one when the first has ended. The faults are planted
by ``tests/faults/one_rank.py``.
"""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.forked import Script
from tests.processes import launcher
from tests.runs import ROOT, arguments, largest_difference, lora, losses_of, run, write_dataset

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
    running = start_two(fault, flags, folder)
    ended = [process.wait(3 * LIMIT) for process in running]
    return time.time() - (folder / "failed").stat().st_mtime, ended


def start_two(fault: Fault, flags: list[str], folder: Path) -> list[Script]:
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": launcher()[-1], "FAULT": json.dumps(asdict(fault))}
    group |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    script = ROOT / "tests/faults/one_rank.py"
    return [Script(script, flags, folder, group | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]


def assert_all_end(fault: Fault, flags: list[str], folder: Path) -> None:
    """The process that fails says why, with the exit code of its error; the other one fails too and says no cause."""
    seconds, ended = run_two(fault, flags, folder)
    assert seconds < LIMIT
    failed, other = ended[fault.rank], ended[1 - fault.rank]
    said = failed.stderr + other.stderr
    if fault.error == "memory":
        assert failed.stderr.count("error: out of memory in step 1") == said.count("error: out of memory") == 1
    else:
        last = [line for line in failed.stderr.splitlines() if SAYS[fault.error] in line]
        assert len(last) == said.count(SAYS[fault.error]) == 1, said
    assert failed.returncode == (1 if fault.error == "bug" else 2)
    assert ("Traceback" in failed.stderr) == (fault.error == "bug")
    assert other.returncode in (1, 2)
    assert "Traceback" not in other.stderr


@pytest.mark.parametrize(
    ("layout", "part"),
    [pytest.param(layout, part, marks=is_slow(layout, part)) for layout in LAYOUTS for part in ENDS],
)
def test_a_fault_on_one_process_ends_all(layout: str, part: str, base: Path, cached: Path, tmp_path: Path) -> None:
    images = cached / "dataset.toml"
    if part.startswith("caching"):
        images = write_dataset(tmp_path / "images", text="batch_size = 1")
    flags = arguments(base, images, tmp_path / "out", **settings(cached), **LAYOUTS[layout])
    assert_all_end(ENDS[part], flags, tmp_path)


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
    running = start_two(Fault(1, None, STEP, 2, "stuck"), flags, tmp_path)
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
