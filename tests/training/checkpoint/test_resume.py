"""``resume = "auto"``: which state it finds, what it puts in order, and that the run is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import library.files as atomic
from library.errors import UserError
from library.files import atomic_folder, atomic_path, clear_leftovers, discard
from library.training.checkpoint.state import Position, find_damage, newest_state, save_training_state
from tests.runs import arguments, largest_difference, lora, losses_of, metrics, run, same, train_flags, write_dataset
from tests.training.checkpoint.test_state import _states
from tests.training.parallel.test_launchers import SAME_IN_FP32
from tests.worker_group import run_in_group

DEAD = f"{atomic.machine_name()}-{os.getpid()}-1"  # a process of this number that began at another time


def _state(folder: Path, name: str, step: int) -> Path:
    save_training_state(folder / name, {"a": torch.ones(1)}, _states(), Position(step=step), "base")
    return folder / name


def test_the_state_saved_last_is_found_and_a_damaged_one_passed_over(tmp_path: Path) -> None:
    assert newest_state(tmp_path, "cat") is None
    for name, step in (("cat-step00000900-state", 900), ("cat-000001-state", 10), ("cat-step00000020-state", 20)):
        _state(tmp_path, name, step)  # the first is of an earlier, longer run
        time.sleep(0.01)
    _state(tmp_path, "dog-step00000030-state", 30)
    assert newest_state(tmp_path, "cat") == tmp_path / "cat-step00000020-state"
    said: list[str] = []
    for name in ("cat-step00000020-state", "cat-step00000900-state"):  # the older one is not even read
        with open(tmp_path / name / "optimizer.safetensors", "r+b") as file:
            file.truncate(100)
    assert newest_state(tmp_path, "cat", said.append) == tmp_path / "cat-000001-state"
    assert "cat-step00000020-state/optimizer.safetensors" in said[0]
    assert len(said) == 1
    assert "passed over" in said[0]


def test_where_no_state_is_whole_nothing_begins_anew_over_them(tmp_path: Path) -> None:
    for name in ("cat-step00000020-state", "cat-state"):
        (_state(tmp_path, name, 20) / "schedule.json").unlink(missing_ok=True)
        (tmp_path / name / "optimizer.json").unlink()
    with pytest.raises(UserError) as refused:
        newest_state(tmp_path, "cat")
    assert str(refused.value).startswith(
        f"resume: {tmp_path / 'cat-state'} and 1 others are damaged and there is no ot"
    )
    assert newest_state(tmp_path, "dog") is None


def test_a_state_that_the_output_folder_did_not_take_is_found_by_its_run_alone(tmp_path: Path) -> None:
    mine, theirs, fallback = tmp_path / "mine", tmp_path / "theirs", tmp_path / "fallback"
    _state(mine, "cat-step00000010-state", 10)
    parts = _states()
    save_training_state(
        fallback / "cat-step00000020-state", {"a": torch.ones(1)}, parts, Position(step=20), "base", home=mine
    )
    assert newest_state(mine, "cat", fallback=fallback) == fallback / "cat-step00000020-state"
    assert newest_state(theirs, "cat", fallback=fallback) is None
    (fallback / "cat-step00000020-state" / "weights.safetensors").write_bytes(b"")
    said: list[str] = []
    assert newest_state(mine, "cat", said.append, fallback) == mine / "cat-step00000010-state"
    assert "weights.safetensors is damaged" in said[0]


@pytest.mark.parametrize("name", ["position.json", "optimizer.json", "optimizer.safetensors", "weights.safetensors"])
def test_a_state_cut_off_anywhere_is_no_whole_one(name: str, tmp_path: Path) -> None:
    state = _state(tmp_path, "cat-state", 1)
    assert find_damage(state) is None
    whole = (state / name).read_bytes()
    for length in {0, 5, 8, len(whole) // 2, len(whole) - 1}:
        (state / name).write_bytes(whole[:length])
        assert find_damage(state), f"{length} bytes of {name}"


def test_leftovers_of_dead_processes_go_and_what_they_were_replacing_comes_back(tmp_path: Path) -> None:
    (tmp_path / f".a.json.{DEAD}.tmp").write_text("{")
    for kind in ("tmp", "gone", "old"):
        _state(tmp_path, f".cat-state.{DEAD}.{kind}", 1)
    _state(tmp_path, "dog-state", 2)
    _state(tmp_path, f".dog-state.{DEAD}.old", 1)
    assert clear_leftovers(tmp_path) == [tmp_path / "cat-state"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat-state", "dog-state"]
    assert json.loads((tmp_path / "dog-state" / "position.json").read_text())["step"] == 2


def test_what_a_running_process_or_another_machine_is_writing_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        names = [f".a.{atomic._process_name(other.pid)}.tmp", ".b.01234567-1-1.tmp", ".tmpAbC123", ".hidden.tmp"]
        for name in names:
            (tmp_path / name).touch()
        clear_leftovers(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    finally:
        other.kill()
        other.wait()
    clear_leftovers(tmp_path)
    assert not (tmp_path / names[0]).exists()


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "in two renames"])
def test_a_folder_is_replaced_whole_or_stays(exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:  # as on file systems without renameat2's exchange
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    for text in ("one", "two"):
        with atomic_folder(tmp_path / "x") as inside:
            (inside / "file").write_text(text)
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "x") as inside:
        (inside / "file").write_text(str(1 / 0))
    assert (tmp_path / "x" / "file").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    discard(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        _state(tmp_path, "cat-state", 1)
        with atomic_path(tmp_path / "text") as temporary:
            temporary.write_text("")
    finally:
        os.umask(before)
    for path in (tmp_path / "text", tmp_path / "cat-state" / "weights.safetensors"):
        assert path.stat().st_mode & 0o777 == 0o644


def test_auto_begins_goes_on_and_ends(
    base: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"save_every_n_steps": 2, "save_state": True, "max_train_steps": 5, "resume": "auto"}
    run(base, dataset, tmp_path, **settings)
    assert f"resume: no state of lora in {tmp_path}; from scratch" in capsys.readouterr().out
    whole = lora(tmp_path)
    for path in ("weights.safetensors", "lora-state"):  # as if killed after step 4
        discard(tmp_path / path)
    run(base, dataset, tmp_path, **settings)
    assert f"resume: going on from {tmp_path / 'lora-step00000004-state'}" in capsys.readouterr().out
    assert same(whole, lora(tmp_path))
    discard(tmp_path / "weights.safetensors")  # as if killed between the last state and the last LoRA
    run(base, dataset, tmp_path, **settings)
    assert same(whole, lora(tmp_path))
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="was trained with network_alpha = 1.0, now it is 2.0; a state goes on with"):
        run(base, dataset, tmp_path, **settings, network_alpha=2)


def test_the_state_of_an_epoch_whose_last_step_is_smaller_is_gone_on_from(base: Path, tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", images=5, text="batch_size = 1")
    # two epochs of five batches and steps of two: the last step of an epoch has one
    settings = {"save_every_n_epochs": 1, "save_state": True, "max_train_epochs": 2, "gradient_accumulation_steps": 2}
    run(base, data, tmp_path / "out", **settings)
    whole = lora(tmp_path / "out")
    position = json.loads((tmp_path / "out/lora-000001-state/position.json").read_text())
    assert [position[key] for key in ("step", "epoch", "batches")] == [3, 1, 0]
    run(base, data, tmp_path / "out", **settings, resume=tmp_path / "out" / "lora-000001-state")
    assert same(whole, lora(tmp_path / "out"))


def test_a_run_whose_batches_have_changed_goes_on_at_the_same_share_of_its_epoch(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset(tmp_path / "data", text="batch_size = 1")
    settings = {"max_train_steps": None, "max_train_epochs": 2, "save_every_n_steps": 4, "save_state": True}
    run(base, data, tmp_path / "out", **settings)
    assert "note: an epoch" not in capsys.readouterr().out
    twos = write_dataset(tmp_path / "data", text="batch_size = 2")
    state = tmp_path / "out/lora-step00000004-state"
    events = run(base, twos, tmp_path / "rest", **settings, resume=state)
    said = "an epoch now has 4 batches, 8 before; the run goes on after 2 of its 4 batches: some samples may come twice"
    assert said in capsys.readouterr().out
    assert events.task.total_steps == 4 + 2 + 4


def test_two_processes_go_on_from_the_state_of_one(base: Path, tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", text="batch_size = 2")
    settings = {"max_train_steps": 6, "save_every_n_steps": 3, "save_state": True}
    one = {"gradient_accumulation_steps": 2}
    run(base, data, tmp_path / "one", **settings, **one)
    run(base, data, tmp_path / "two", **settings | {"max_train_steps": 3}, **one)
    for path in ("lora-state", "weights.safetensors"):
        discard(tmp_path / "two" / path)
    state = tmp_path / "two/lora-step00000003-state"
    written = state.stat().st_mtime_ns
    job = ("two", train_flags, (arguments(base, data, tmp_path / "two", **settings, resume="auto"),))
    assert run_in_group([job], tmp_path) == {"two": ""}
    assert state.stat().st_mtime_ns == written  # gone on from, not made again
    assert largest_difference(lora(tmp_path / "two"), lora(tmp_path / "one")) < SAME_IN_FP32
    assert losses_of(tmp_path / "one") == pytest.approx(losses_of(tmp_path / "two"), rel=1e-5)


BOTH: dict[str, object] = {"text_encoder_lr": [1e-2, 5e-3], "network_args": ["train_t5xxl=True", "single_dim=0"]}
BF16: dict[str, object] = {"mixed_precision": "bf16", "full_bf16": True, "network_dropout": 0.1}
RESUMED: dict[str, dict[str, object]] = {
    "AdamW": {"lr_scheduler": "cosine", "lr_warmup_steps": 2},
    "Prodigy, accumulated": {"optimizer_type": "Prodigy", "learning_rate": 1.0, "gradient_accumulation_steps": 2},
    "schedule-free": {"optimizer_type": "AdamWScheduleFree"},
    "bf16, dropout": BF16 | {"network_args": ["rank_dropout=0.2"]},
    "fp8": {"fp8_scaled": True, "fp8_granularity": "row", "fp8_rounding": "stochastic", "mixed_precision": "bf16"},
    "text encoders, averaged": BOTH | {"ema_decay": 0.9, "lr_scheduler": "cosine"},
    "CLIP, bf16": BF16 | {"text_encoder_lr": [1e-2], "gradient_checkpointing": True},
    **{kind: {"network_type": kind, "save_format": "comfy"} for kind in ("dora", "lokr")},
}


@pytest.mark.parametrize("settings", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_gives_the_same_lora(base: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    augmented = {"flip_aug": True, "shuffle_caption": True, "caption_dropout_rate": 0.2}
    data = write_dataset(tmp_path / "data", text="batch_size = 2", **augmented)
    settings = settings | {"max_train_steps": 5}
    run(base, data, tmp_path, **settings, save_every_n_steps=3, save_state=True)
    straight = lora(tmp_path)
    (tmp_path / "lora.safetensors").unlink()
    run(base, data, tmp_path, **settings, resume=tmp_path / "lora-step00000003-state")
    assert same(straight, lora(tmp_path))
    assert [line["step"] for line in metrics(tmp_path) if "loss" in line] == list(range(1, 6))
