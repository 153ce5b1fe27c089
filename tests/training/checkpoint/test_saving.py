"""What is kept, averaged, chosen and uploaded while a run goes on; disks that are full, read-only or others'."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import library.training.checkpoint.saving as keeping
import library.training.tasks.lora as export
from library.config.run_schema import SavingConfig
from library.errors import UserError, WriteError
from library.safetensors_io import write_safetensors
from library.training.checkpoint.saving import CheckpointWriter, remove_old
from library.training.checkpoint.state import Position, find_damage
from library.training.optim.after_update import WeightAverage
from library.training.report.metrics import MetricsStream
from library.training.report.metrics_file import parse_line
from library.training.signals import SignalHandler, StopRequest
from library.training.tasks.image_lora import ImageLora
from tests.faults.suite import broken_files
from tests.forked import run_code
from tests.runs import ROOT, arguments, largest_difference, lora, metrics, run, same, write_dataset

VALIDATED = "batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1"


def _saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("lora*"))


def test_only_the_last_steps_are_kept_and_states_may_be_kept_for_less_long(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    settings = {"save_every_n_steps": 1, "save_state": True, "max_train_steps": 5}
    run(base, dataset, tmp_path, **settings, save_last_n_steps=2, save_last_n_steps_state=1)
    assert _saved(tmp_path) == [
        "lora-state",
        "lora-step00000003.safetensors",
        "lora-step00000004-state",
        "lora-step00000004.safetensors",
        "lora-step00000005-state",
        "lora-step00000005.safetensors",
        "lora.safetensors",
    ]


@pytest.mark.parametrize(("how", "steps"), [({}, [0, 2, 4, 5]), ({"validate_every_n_steps": 3}, [0, 3, 5])])
def test_held_out_images_are_looked_at_with_each_save_unless_it_is_said_when(
    base: Path, tmp_path: Path, how: dict[str, int], steps: list[int]
) -> None:
    data = write_dataset(tmp_path / "data", text=VALIDATED)
    run(base, data, tmp_path / "run", save_every_n_steps=2, max_train_steps=5, **how)
    assert [line["step"] for line in metrics(tmp_path / "run") if "val_loss" in line] == steps


def test_only_the_last_epochs_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    for name in ("a-000002", "a-000004", "a-000006", "a-000008", "a", "a-best", "b-000002", "a-step00000001"):
        (tmp_path / f"{name}.safetensors").touch()
    remove_old(tmp_path, "a", SavingConfig(save_every_n_epochs=2, save_last_n_epochs=2), epoch=6)
    left = {path.stem for path in tmp_path.iterdir()}
    assert left == {"a-000004", "a-000006", "a-000008", "a", "a-best", "b-000002", "a-step00000001"}


def test_the_average_follows_its_formula_in_float64() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    average = WeightAverage([weight], decay=0.5)
    expected = torch.zeros(3, dtype=torch.float64)
    for t in range(20):
        weight.data = torch.full((3,), float(t)).bfloat16()
        average.update()
        decay = min(0.5, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * t
    before = weight.detach().clone()
    with average.shown():
        torch.testing.assert_close(weight.double(), expected, rtol=2**-8, atol=0)  # shown in bf16, kept in fp32
    torch.testing.assert_close(average.state_dict()["averages"][0].double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(weight, before)


def test_the_saved_lora_is_the_average_and_the_run_goes_on_from_the_weights(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    settings = {"max_train_steps": 3, "save_every_n_steps": 1}
    plain = run(base, dataset, tmp_path / "plain", **settings)
    averaged = run(base, dataset, tmp_path / "averaged", **settings, ema_decay=0.9)
    with pytest.raises(UserError, match="the learning rate is 0"):
        run(base, dataset, tmp_path / "initial", learning_rate=0.0, max_train_steps=1)
    expected = lora(tmp_path / "initial")
    for t in range(3):
        decay, weights = (1 + t) / (10 + t), lora(tmp_path / "plain", f"lora-step{t + 1:08d}")
        expected = {name: decay * value + (1 - decay) * weights[name] for name, value in expected.items()}
    assert largest_difference(lora(tmp_path / "averaged"), expected) < 1e-6
    for name, weight in plain.task.network.state_dict().items():
        assert torch.equal(weight, averaged.task.network.state_dict()[name])
    assert plain.task.engine.average is None


def test_the_best_lora_is_kept_and_a_run_without_gain_stops(base: Path, tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", text=VALIDATED)
    settings = {"save_best": True, "early_stop_patience": 2, "save_every_n_steps": 1}  # it validates with each save
    settings |= {"validation_sigmas": [0.5]}
    # a step far too long: the loss rises, and stays above its first value
    run(base, data, tmp_path / "out", **settings, max_train_steps=40, learning_rate=0.3)
    lines = metrics(tmp_path / "out")
    losses = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line and line["step"] > 0}
    best = min(losses, key=losses.__getitem__)
    assert max(losses) < 40
    assert max(losses) - best == 2
    assert same(lora(tmp_path / "out", "lora-best"), lora(tmp_path / "out", f"lora-step{best:08d}"))


def test_a_copy_that_was_kept_is_in_no_runs_way_and_is_never_replaced(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="the page's packages are not installed")
    from library.web.trash import copy_as

    data, out = write_dataset(tmp_path / "data", text=VALIDATED), tmp_path / "out"
    run(base, data, out, save_every_n_steps=1, save_state=True, max_train_steps=2)
    kept = out / "anna.safetensors"
    copy_as(out / "lora-step00000001.safetensors", kept)
    bytes_before = kept.read_bytes()
    run(base, data, out, save_every_n_steps=1, save_last_n_steps=1, max_train_steps=3, resume="auto")
    assert [line["step"] for line in metrics(out) if "loss" in line] == [1, 2, 3]
    for overwrite in (False, True):
        with pytest.raises(UserError, match="was kept from a run; rename it"):
            run(base, data, out, max_train_steps=4, overwrite=overwrite, output_name="anna")
    assert kept.read_bytes() == bytes_before


@pytest.mark.parametrize("every", [2, 3])
def test_the_last_step_is_looked_at_once_and_may_be_the_best(base: Path, tmp_path: Path, every: int) -> None:
    data = write_dataset(tmp_path / "data", text=VALIDATED)
    out = tmp_path / "out"
    events = run(base, data, out, validate_every_n_steps=every, save_best=True, learning_rate=1e-3)
    losses = [(line["step"], line["val_loss"]) for line in metrics(out) if "val_loss" in line]
    assert [step for step, _ in losses] == [0, *range(every, 4, every), 4]
    assert losses[-1][1] == min(loss for _, loss in losses) == events.val_loss  # it learns, so the last is the best
    assert same(lora(out, "lora-best"), lora(out))
    assert not events.stopped


def test_a_loss_that_is_not_a_number_is_never_the_best(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, validate = write_dataset(tmp_path / "data", text=VALIDATED), ImageLora.validate

    def broken(task: ImageLora, step: int) -> dict[str, float]:
        return validate(task, step) | ({"val_loss": math.nan} if step == 1 else {})

    monkeypatch.setattr(ImageLora, "validate", broken)
    ended = run(base, data, tmp_path / "out", validate_every_n_steps=1, save_best=True, learning_rate=1e-3)
    lines = metrics(tmp_path / "out")
    losses = [line["val_loss"] for line in lines if line.get("val_loss") is not None and line["step"] > 1]
    assert ended.position.best_val_loss == min(losses)


def test_best_weights_that_could_not_be_saved_are_no_bar_to_the_next(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, save, failed = write_dataset(tmp_path / "data", text=VALIDATED), ImageLora.save, list[Path]()

    def fail_once(task: ImageLora, path: Path, position: Position) -> None:
        if path.stem == "lora-best" and position.step == 2:
            failed.append(path)
            raise WriteError(path, "cannot be written (full)")
        save(task, path, position)

    monkeypatch.setattr(ImageLora, "save", fail_once)
    ended = run(base, data, tmp_path / "out", validate_every_n_steps=2, save_best=True, learning_rate=1e-3)
    assert len(failed) == 1
    assert _saved(tmp_path / "out") == ["lora-best.safetensors", "lora.safetensors"]
    assert ended.position.best_val_loss == ended.val_loss


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_file_has_the_precision_asked_for(base: Path, dataset: Path, tmp_path: Path, precision: str) -> None:
    run(base, dataset, tmp_path, save_precision=precision, save_format="kohya")
    weights = {name: tensor.dtype for name, tensor in lora(tmp_path).items() if not name.endswith("alpha")}
    assert set(weights.values()) == {{"fp16": torch.float16, "bf16": torch.bfloat16}[precision]}


@pytest.mark.parametrize(
    "settings",
    [
        {"save_precision": "bf16", "save_format": "kohya", "ema_decay": 0.9},
        {"text_encoder_lr": [1e-3], "save_format": "diffusers", "optimizer_type": "AdamWScheduleFree"},
        {"network_type": "lokr", "save_format": "comfy", "full_bf16": True, "mixed_precision": "bf16"},
    ],
    ids=["averaged, bf16", "text encoder, schedule-free", "lokr"],
)
def test_the_summary_says_that_the_file_is_what_was_trained(
    base: Path, dataset: Path, tmp_path: Path, settings: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    events = run(base, dataset, tmp_path, max_train_steps=2, **settings)
    text = " ".join(capsys.readouterr().out.split())
    assert f"LoRA file checked {len(events.task.network.modules)} layers, largest difference " in text
    assert ", read rightly by " in text
    assert "loads in layers read largest difference" in text


def test_a_file_that_is_not_what_was_trained_ends_the_run_with_an_error(
    base: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_file = export.check_file

    def after_a_flipped_bit(path: Path, *rest: object) -> object:
        content = bytearray(path.read_bytes())
        content[-2] ^= 0x20  # the exponent of the last tensor's last number
        path.write_bytes(content)
        return check_file(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(export, "check_file", after_a_flipped_bit)
    with pytest.raises(UserError, match="lora.safetensors"):
        run(base, dataset, tmp_path, max_train_steps=2)
    assert "loss" in capsys.readouterr().out  # the summary was printed all the same


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


def _metrics(path: Path, resume_step: int = 0) -> MetricsStream:
    class Main:
        is_main_process = True

        def log(self, values: dict[str, float], step: int) -> None: ...

        def end_training(self) -> None: ...

    class Nothing:
        log_with = None

    return MetricsStream(path, Main(), Nothing(), resume_step)  # type: ignore[arg-type]


def test_a_damaged_line_of_the_metrics_is_told_and_the_file_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of any damage: whole lines up to the step stay, and what else was there lies in a copy, unless a kill cut it."""
    draw, lines = random.Random(0), [json.dumps({"step": i, "loss": 1 / i}).encode() + b"\n" for i in range(1, 7)]
    for number in range(60):
        (folder := tmp_path / str(number)).mkdir()
        path, content = folder / "metrics.jsonl", bytearray(b"".join(lines))
        for at in draw.sample(range(len(content)), number % 4):
            content[at] = draw.choice(b"\0\n{}x\xff")
        if number % 5 == 0:
            del content[-draw.randrange(2, 20) :]
        path.write_bytes(content)
        _metrics(path, 3)
        remaining, said = path.read_bytes(), capsys.readouterr().err
        *found, last = bytes(content).split(b"\n")
        assert all(line in remaining for line in lines[:3] if line[:-1] in found)
        assert b"" not in remaining.split(b"\n")[:-1]
        copies = [file.read_bytes() for file in folder.glob("metrics.damaged-*.jsonl")]
        is_damaged = any(line and parse_line(line) is None for line in [*found, last * (last[:1] != b"{")])
        assert copies == [content] * is_damaged
        assert ("cannot be read and left out; the file as it was is kept as metrics.damaged-" in said) == is_damaged


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


FULL, CLOSED = "printed = os.open('/dev/full', os.O_WRONLY)", "reader, printed = os.pipe(); os.close(reader)"
UNHEARD = """
import io, os, runpy, sys
{where}
os.dup2(printed, 1)
os.dup2(printed, 2)
sys.stdout, sys.stderr = (
    io.TextIOWrapper(open(number, "wb", {buffering}), write_through={buffering} == 0) for number in (1, 2)
)
sys.argv[0] = {script!r}
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:  # as Python does at its end
    sys.stdout.flush()
    sys.stderr.flush()
"""


def run_unheard(where: str, unbuffered: bool, flags: list[str], cwd: Path) -> int:
    """Run train_lora.py with both of its streams at ``where``; return its exit code."""
    code = UNHEARD.format(where=where, buffering=0 if unbuffered else -1, script=str(ROOT / "train_lora.py"))
    return run_code(code, flags, cwd).returncode


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_log_on_the_full_disk_does_not_end_the_run(
    disk: Path, base: Path, dataset: Path, tmp_path: Path, unbuffered: bool
) -> None:
    settings = {"save_every_n_steps": 1, "save_state": True, "max_train_steps": 6, "save_retries": 0}
    flags = arguments(base, dataset, disk, save_fallback_dir=tmp_path / "elsewhere", **settings)
    assert run_unheard(FULL, unbuffered, flags, tmp_path) == 2
    assert lora(tmp_path / "elsewhere").keys()
    assert find_damage(tmp_path / "elsewhere" / "lora-state") is None


@pytest.mark.parametrize("where", [FULL, CLOSED], ids=["full", "closed"])
def test_a_run_that_nobody_can_hear_ends_as_any_other(base: Path, dataset: Path, tmp_path: Path, where: str) -> None:
    assert run_unheard(where, False, arguments(base, dataset, tmp_path / "out"), tmp_path) == 0
    assert lora(tmp_path / "out").keys()


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
