"""Saving on a disk that is full, read-only or somebody else's; the disks are real (tmpfs)."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import library.training.checkpoint.saving as keeping
from library.errors import UserError, WriteError
from library.safetensors_io import write_safetensors
from library.training.checkpoint.saving import CheckpointWriter
from library.training.checkpoint.state import Position, find_damage
from library.training.report.metrics import MetricsStream
from library.training.signals import SignalHandler, StopRequest
from library.training.tasks.image_lora import ImageLora
from tests.faults.suite import broken_files
from tests.runs import lora, run

KIB = 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def _keeper(folder: Path, said: list[str], retries: int = 0) -> CheckpointWriter:
    return CheckpointWriter(folder, folder.parent / "fallback", retries, said.append)


def _write(megabytes: float) -> keeping.Write:
    def write(folder: Path) -> list[Path]:
        write_safetensors(folder / "x.safetensors", {"a": torch.zeros(int(megabytes * KIB * KIB / 4))})
        return [folder / "x.safetensors"]

    return write


def _metrics(path: Path) -> MetricsStream:
    class Main:
        is_main_process = True

        def log(self, values: dict[str, float], step: int) -> None: ...

        def end_training(self) -> None: ...

    class Nothing:
        log_with = None

    return MetricsStream(path, Main(), Nothing(), 0)  # type: ignore[arg-type]


def test_a_run_on_a_full_disk_keeps_what_it_saved_and_ends_elsewhere(
    disk: Path, base: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"save_every_n_steps": 1, "save_state": True, "max_train_steps": 6, "save_retries": 0}
    run(base, dataset, tmp_path / "whole", max_train_steps=6)
    with pytest.raises(UserError) as caught:
        run(base, dataset, disk, **settings, save_fallback_dir=tmp_path / "elsewhere")
    assert str(caught.value) == (
        f"output_dir: {disk} could not be written to; what was trained is in {tmp_path / 'elsewhere/lora.safetensors'}"
    )
    saved = lora(tmp_path / "elsewhere")
    assert all(torch.equal(saved[name], tensor) for name, tensor in lora(tmp_path / "whole").items())
    assert find_damage(tmp_path / "elsewhere" / "lora-state") is None
    shown = capsys.readouterr().out
    assert "No space left on device" in shown
    assert "training goes on, trying again in 1 min" in shown
    assert (disk / "lora-step00000001-state").is_dir()
    assert broken_files(disk) == []
    assert not [path for path in disk.rglob("*") if path.name.startswith(".")]
    # and once there is room again, the run goes on from what is there
    subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)
    run(base, dataset, disk, **settings, resume="auto")
    assert all(torch.equal(saved[name], tensor) for name, tensor in lora(disk).items())
    lines = [json.loads(line)["step"] for line in (disk / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1] == 6
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("cause", ["full", "read-only"])
def test_the_file_before_stays_and_saving_is_tried_again(cause: str, disk: Path) -> None:
    said: list[str] = []
    writer = _keeper(disk, said)
    assert writer.write_or_retry_later(_write(0.25), False) == [disk / "x.safetensors"]
    before = (disk / "x.safetensors").read_bytes()
    if cause == "full":
        (disk / "filler").write_bytes(bytes(700 * KIB))
    else:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert writer.write_or_retry_later(_write(0.125), False) is None
    reason = {"full": "No space left on device", "read-only": "Read-only file system"}[cause]
    assert said == [
        f"warning: {disk / 'x.safetensors'}: cannot be written ({reason}); free space or choose another folder; "
        "training goes on, trying again in 1 min"
    ]
    assert not writer.retry_is_due
    assert (disk / "x.safetensors").read_bytes() == before
    assert {path.name for path in disk.iterdir()} <= {"x.safetensors", "filler"}
    if cause == "full":
        (disk / "filler").unlink()
    else:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    writer.retry_at = time.monotonic()
    assert writer.retry_is_due
    assert writer.write_or_retry_later(_write(0.125), False) is not None
    assert (writer.failures, writer.retry_at) == (0, None)
    assert said[-1].startswith("saved again")


def test_a_save_without_a_state_does_not_make_up_for_one_with_it(tmp_path: Path) -> None:
    lines: list[str] = []
    writer, is_full = _keeper(tmp_path, lines), True

    def write(folder: Path) -> list[Path]:
        if is_full:
            raise WriteError(folder, "cannot be written (full)")
        return [folder / "x"]

    assert writer.write_or_leave_out(write) is None  # the best weights: later there are others
    assert writer.retry_at is None
    assert lines.pop().endswith("; left out")
    assert writer.write_or_retry_later(write, with_state=True) is None
    is_full = False
    assert writer.write_or_retry_later(write, with_state=False)
    assert (writer.retry_at is not None, writer.lacks_state) == (True, True)
    assert writer.write_or_retry_later(write, with_state=True)
    assert (writer.retry_at, writer.lacks_state) == (None, False)


def test_a_stopped_run_names_the_state_in_the_fallback_folder(
    base: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save, out = ImageLora.save, tmp_path / "out"

    def fail_in_out(task: ImageLora, path: Path, position: Position) -> None:
        if path.parent == out:
            raise WriteError(path, "cannot be written (full)")
        save(task, path, position)

    monkeypatch.setattr(ImageLora, "save", fail_in_out)
    monkeypatch.setattr(SignalHandler, "poll", lambda handler: StopRequest(stop="STOP"))
    elsewhere = tmp_path / "elsewhere"
    with pytest.raises(UserError, match="could not be written to"):
        run(base, dataset, out, save_retries=0, save_fallback_dir=elsewhere)
    (state,) = elsewhere.glob("*-state")
    assert f"go on with --resume {state}, or" in " ".join(capsys.readouterr().out.split())
    assert find_damage(state) is None


def test_the_end_waits_for_room_before_it_goes_elsewhere(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_FIRST_WAIT", 0.2)
    said: list[str] = []
    (disk / "filler").write_bytes(bytes(900 * KIB))
    making_room = threading.Timer(0.5, (disk / "filler").unlink)
    making_room.start()
    writer = _keeper(disk, said, retries=10)
    assert writer.write_with_retries(_write(0.5)) == [disk / "x.safetensors"]
    assert said
    assert all("trying again in" in line for line in said)
    writer.report()
    assert writer.write_with_retries(_write(2), in_a_hurry=lambda: True) == [disk.parent / "fallback" / "x.safetensors"]
    with pytest.raises(UserError, match=r"what was trained is in .*fallback/x\.safetensors"):
        writer.report()


def test_metrics_hold_whole_lines_and_catch_up(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = _metrics(disk / "metrics.jsonl")
    for step in range(1, 21):
        if step == 5:
            free = os.statvfs(disk)
            (disk / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize))  # what is left is in the last page
        if step == 15:
            (disk / "filler").unlink()
        metrics.write({"step": step, "a name as long as four lines in a page of memory " * 20: 0.5})
        lines = (disk / "metrics.jsonl").read_text()
        assert not lines or lines.endswith("\n")
    steps = [json.loads(line)["step"] for line in (disk / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 21))
    assert capsys.readouterr().err.count("warning:") == 1


def test_a_save_that_failed_is_made_up_for_between_two_that_are_due(
    disk: Path, base: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "_FIRST_RETRY", 0.0)
    original = CheckpointWriter.write_or_retry_later

    def make_room_after_a_failure(
        writer: CheckpointWriter, write: keeping.Write, with_state: bool
    ) -> list[Path] | None:
        if not writer.failures and not list(disk.glob("*.safetensors")):
            (disk / "filler").write_bytes(bytes(980 * KIB))
        written = original(writer, write, with_state)
        if written is None:
            (disk / "filler").unlink()
        return written

    monkeypatch.setattr(CheckpointWriter, "write_or_retry_later", make_room_after_a_failure)
    run(base, dataset, disk, max_train_steps=6, save_every_n_steps=4)
    run(base, dataset, tmp_path / "whole", max_train_steps=6, save_every_n_steps=1)
    assert sorted(path.name for path in disk.glob("*.safetensors")) == [
        "lora-step00000005.safetensors",
        "lora.safetensors",
    ]
    fifth = lora(tmp_path / "whole", "lora-step00000005")
    assert all(torch.equal(fifth[name], tensor) for name, tensor in lora(disk, "lora-step00000005").items())
