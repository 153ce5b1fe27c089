"""Steps that are not finite: NaN in a cached latent, latents that overflow in the model, weights that leave the range.

Eight images in batches of four, so an epoch is two steps. What a bad step must not change is compared with runs that
never met it; that the answer does not depend on when the host asks is compared bit for bit between log intervals.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from library.checksums import MANIFEST, write_manifest
from library.config.load import read_keys
from library.errors import UserError
from library.safetensors_io import write_safetensors
from library.training.checkpoint.state import find_damage
from library.training.engine import Engine
from library.training.run import Run
from library.training.signals import NOTHING, SignalHandler, StopRequest
from tests.runs import arguments as flags
from tests.runs import lora, run, same, train_flags, write_dataset
from tests.worker_group import run_in_group

BAD = "5.png"
# seed 3 puts the bad image into the first step, when optimizers have no state yet; 0 and 1 into the third and fourth
OPTIMIZERS = {
    "adamw": {"ema_decay": 0.9, "lr_scheduler": "cosine", "max_grad_norm": 0.5, "seed": 1},
    "prodigy": {"optimizer_type": "Prodigy", "learning_rate": 1.0, "gradient_accumulation_steps": 2, "seed": 1},
    "schedule-free": {"optimizer_type": "AdamWScheduleFree", "optimizer_args": ["warmup_steps=3"]},
    "lion, bf16": {"optimizer_type": "Lion", "full_bf16": True, "mixed_precision": "bf16", "seed": 0},
}


@pytest.fixture(scope="module")
def clean(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose caches are whole."""
    toml = write_dataset(tmp_path_factory.mktemp("clean"), text="batch_size = 2")
    run(base, toml, toml.parent / "out", max_train_steps=1)
    return toml


def spoilt(clean: Path, folder: Path, value: float) -> Path:
    """Copy the dataset with one number of one image's latents set to ``value``."""
    shutil.copytree(clean.parent, folder, ignore=shutil.ignore_patterns("out"))
    for file in folder.rglob("latents/*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        if metadata["image"] == BAD:
            tensors = load_file(file)
            tensors["latents"][3, 2, 1] = value
            write_safetensors(file, tensors, metadata, checked=True)
    return folder / clean.name


def finite(weights: dict[str, torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in weights.values())


def test_stop_names_the_image_and_keeps_what_was_learnt_before(base: Path, clean: Path, tmp_path: Path) -> None:
    data = spoilt(clean, tmp_path / "data", math.nan)
    with pytest.raises(UserError) as caught:
        run(base, data, tmp_path / "out", max_train_steps=8, log_every_n_steps=8, seed=1)
    message = str(caught.value)
    assert "\n" not in message
    assert BAD in message
    (saved,) = (tmp_path / "out").glob("lora-step*.safetensors")
    steps = int(saved.stem[-8:])
    assert f"step {steps + 1} is not finite" in message
    assert str(saved) in message
    assert not (tmp_path / "out" / "lora.safetensors").exists()
    assert steps == 3
    run(base, clean, tmp_path / "clean", max_train_steps=steps, seed=1)
    assert same(load_file(saved), lora(tmp_path / "clean"))  # bit for bit: the bad step left no trace
    assert (tmp_path / "out" / f"{saved.stem}-state" / "position.json").exists()


@pytest.mark.parametrize("settings", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_when_the_host_asks_changes_nothing(
    base: Path, clean: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    data = spoilt(clean, tmp_path / "data", math.nan)
    settings = {"max_train_steps": 7, "on_nan": "skip", **settings}
    each = run(base, data, tmp_path / "each", log_every_n_steps=1, **settings)
    once = run(base, data, tmp_path / "once", log_every_n_steps=100, **settings)
    assert same(lora(tmp_path / "each"), lora(tmp_path / "once"))
    assert finite(lora(tmp_path / "each"))
    metrics = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("each", "once")]
    assert all('"updates_dropped": 1' in text for text in metrics)
    assert not [word for text in metrics for word in ("NaN", "Infinity") if word in text]
    assert (
        each.task.engine.schedule.last_epoch == once.task.engine.schedule.last_epoch == 7
    )  # dropped updates do not count


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_an_answer_that_comes_during_the_next_step_changes_nothing(
    base: Path, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """As on a GPU, where the host has sent the next step before it hears of this one."""
    data = spoilt(clean, tmp_path / "data", math.nan)
    settings = {"max_train_steps": 7, "log_every_n_steps": 100, "on_nan": policy, **OPTIMIZERS["adamw"]}
    update = Engine.update

    def send(self: Engine, grad_norm: torch.Tensor) -> None:
        update(self, grad_norm)
        self.is_answer_pending = True

    for name in ("at once", "late"):
        with contextlib.ExitStack() as stack:
            if policy == "stop":
                stack.enter_context(pytest.raises(UserError, match=f"step 4 is not finite: .*{BAD}"))
            run(base, data, tmp_path / name, **settings)
        monkeypatch.setattr(Engine, "update", send)
    stem = "lora" if policy == "skip" else "lora-step00000003"
    assert same(lora(tmp_path / "at once", stem), lora(tmp_path / "late", stem))


def test_states_and_configurations_of_earlier_versions_are_read(base: Path, clean: Path, tmp_path: Path) -> None:
    """Version 5327b3c8 had ``on_nan = "rollback"``, which left images out and no batches."""
    run(base, clean, tmp_path / "out", max_train_steps=3, save_state=True)
    state = tmp_path / "out/lora-state"
    position = json.loads((state / "position.json").read_text())
    old = position | {"skipped_samples": ["images/5.png"], "updates_dropped": 1}
    (state / "position.json").write_text(json.dumps(old))
    (state / MANIFEST).unlink()
    write_manifest(state)
    run(base, clean, tmp_path / "rest", max_train_steps=6, resume=state, on_nan="skip")
    run(base, clean, tmp_path / "whole", max_train_steps=6)
    assert same(lora(tmp_path / "rest"), lora(tmp_path / "whole"))
    given = read_keys('on_nan = "rollback"', "config.toml")
    assert given.values["on_nan"] == "skip"
    assert [note.line() for note in given.notes] == [
        'config.toml:1: on_nan: "rollback" is no longer there; read as "skip"'
    ]


def test_an_update_that_overflows_does_not_reach_the_weights(base: Path, clean: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not finite"):
        run(base, clean, tmp_path / "out", learning_rate=1000, optimizer_args=["weight_decay=1e38"], max_grad_norm=0)
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert finite(load_file(file))


def test_a_weight_made_infinite_from_outside_ends_the_run_without_a_save(
    base: Path, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_step = Run.after_step

    def poke(self: Run) -> None:
        after_step(self)
        with torch.no_grad():
            self.task.network.parameters()[3].view(-1)[0] = math.inf

    monkeypatch.setattr(Run, "after_step", poke)
    with pytest.raises(UserError, match="the LoRA's weights are not finite after step"):
        run(base, clean, tmp_path / "out", on_nan="skip")
    assert list((tmp_path / "out").glob("*.safetensors")) == []


def test_a_run_in_which_nothing_is_finite_stops_after_the_limit(base: Path, clean: Path, tmp_path: Path) -> None:
    data = tmp_path / "data" / clean.name
    shutil.copytree(clean.parent, data.parent, ignore=shutil.ignore_patterns("out"))
    for file in data.parent.rglob("text/*.safetensors"):
        broken = {name: tensor * math.nan for name, tensor in load_file(file).items()}
        write_safetensors(file, broken, checked=True)
    with pytest.raises(UserError, match="4 steps in a row are not finite, "):
        run(base, data, tmp_path / "out", on_nan="skip", on_nan_limit=3, max_train_steps=50)
    assert list((tmp_path / "out").glob("*.safetensors")) == []


def test_a_run_in_which_nothing_is_finite_can_be_stopped(
    base: Path, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = iter([NOTHING, NOTHING, StopRequest(stop="SIGTERM")])
    monkeypatch.setattr(SignalHandler, "poll", lambda handler: next(requests))
    monkeypatch.setattr(Engine, "nan_if_not_finite", lambda engine, loss: loss * math.nan)
    ended = run(base, clean, tmp_path / "out", on_nan="skip", max_train_steps=50)
    assert (ended.stop_request.stop, ended.position.step, ended.position.updates_dropped) == ("SIGTERM", 0, 3)
    assert find_damage(tmp_path / "out/lora-step00000000-state") is None


def test_two_processes_agree_though_one_alone_meets_the_image(base: Path, clean: Path, tmp_path: Path) -> None:
    data = spoilt(clean, tmp_path / "data", math.nan)
    settings = {"max_train_steps": 5, "on_nan": "skip", "log_every_n_steps": 3}
    job = ("two", train_flags, (flags(base, data, tmp_path / "out", **settings),))
    assert run_in_group([job], tmp_path) == {"two": ""}
    assert "updates_dropped" in (tmp_path / "out" / "metrics.jsonl").read_text()
    assert finite(lora(tmp_path / "out"))
