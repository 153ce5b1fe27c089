"""Whatever ends a run amid its steps, what it has learnt is there, and the run goes on to the same bits."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from library.config.schema import TrainingConfig
from library.data.batches import DataParallelRank
from library.errors import UserError
from library.training.checkpoint.state import Position, find_damage
from library.training.engine import Engine
from library.training.report.metrics import StepMetrics
from library.training.sampling.images import Sampler
from library.training.tasks.image_lora import ImageLora
from library.training.tasks.task import describe_steps, run_length
from tests.runs import lora, metrics, run, same, write_dataset

Patch = pytest.MonkeyPatch


def fail_at(count: int, original: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """Return ``original``, whose call number ``count`` (from 1) raises ``error``."""
    calls = 0

    def failing(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            raise error
        return original(*arguments, **more)

    return failing


def by_step(output: Path, name: str = "loss_ema") -> dict[int, float]:
    """Return the average loss, or another one, by step."""
    return {line["step"]: line[name] for line in metrics(output) if name in line}


def fail_in_backward(patch: Patch) -> None:
    patch.setattr(Accelerator, "backward", fail_at(3, Accelerator.backward, RuntimeError("a kernel failed")))


def fail_before_the_answer(patch: Patch) -> None:
    """As on a GPU, where the host has begun the next step before it hears whether the last one was finite."""
    update = Engine.update

    def send(engine: Engine, grad_norm: torch.Tensor) -> None:
        update(engine, grad_norm)
        engine.is_answer_pending = True

    patch.setattr(Engine, "update", send)
    fail_in_backward(patch)


# what raises, and how many steps are whole then
FAULTS: dict[str, tuple[Callable[[Patch], None], int]] = {
    "in backward": (fail_in_backward, 2),
    "in the optimizer's step, before it writes": (
        lambda patch: patch.setattr(AdamW, "step", fail_at(3, AdamW.step, RuntimeError("a kernel failed"))),
        2,
    ),
    "in backward, while the device works on the step before": (fail_before_the_answer, 2),
    "before a step that is taken is counted": (
        lambda patch: patch.setattr(StepMetrics, "add", fail_at(3, StepMetrics.add, KeyboardInterrupt("x"))),
        2,
    ),
    "while validating": (
        lambda patch: patch.setattr(ImageLora, "validate", fail_at(2, ImageLora.validate, OSError("Stale handle"))),
        3,
    ),
    "by leaving": (
        lambda patch: patch.setattr(Accelerator, "backward", fail_at(3, Accelerator.backward, SystemExit(7))),
        2,
    ),
}  # fmt: skip

EACH_EPOCH = (("steps", 3), ("epochs", 1))  # of six images in batches of two


def fail_after(count: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original``, whose call number ``count`` raises an error when it has written."""

    def answer(*arguments: Any) -> Any:
        original(*arguments)
        return failing()

    failing = fail_at(count, lambda: None, ZeroDivisionError("in a plug-in"))
    return answer


# what raises while step 4 is taken: its update cannot be undone
FAULTS_AMID_AN_UPDATE: dict[str, tuple[type, Callable[..., Any]]] = {
    "an optimizer's own error": (AdamW, fail_after(4, AdamW.step)),
    "after the optimizer's step": (LambdaLR, fail_after(5, LambdaLR.step)),  # the first call is made when it is built
}


AVERAGED: dict[str, object] = {"max_train_steps": 5, "validate_every_n_steps": 3, "ema_decay": 0.9}
AVERAGED |= {"lr_scheduler": "cosine", "log_every_n_steps": 4}


@pytest.fixture(scope="module")
def averaged(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to the end, ``whole``, and its dataset."""
    folder = tmp_path_factory.mktemp("averaged")
    data = write_dataset(folder / "data", text="batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1")
    run(base, data, folder / "whole", **AVERAGED, save_every_n_steps=1)
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_amid_the_steps_leaves_lora_and_state_of_the_last_good_one(
    fault: str, base: Path, averaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, whole = averaged / "data/dataset.toml", averaged / "whole"
    break_it, steps = FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        with pytest.raises(BaseException, match=r"plug-in|kernel|x|Stale|7"):
            run(base, data, tmp_path / "out", **AVERAGED)
    saved = tmp_path / f"out/lora-step{steps:08d}.safetensors"
    assert f"what was learnt up to step {steps} is in {saved}: go on with --resume auto" in capsys.readouterr().out
    assert same(lora(tmp_path / "out", saved.stem), lora(whole, saved.stem))
    assert find_damage(tmp_path / f"out/lora-step{steps:08d}-state") is None
    run(base, data, tmp_path / "out", **AVERAGED, resume="auto")
    assert same(lora(tmp_path / "out"), lora(whole))
    assert by_step(tmp_path / "out") == by_step(whole)


def test_a_step_that_does_not_fit_after_an_epoch_names_the_checkpoint_of_the_epoch(
    base: Path, dataset: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(Accelerator, "backward", fail_at(3, Accelerator.backward, error))
    with pytest.raises(UserError, match="out of memory in step 3") as caught:
        run(base, dataset, tmp_path / "out", max_train_steps=4, save_every_n_epochs=1, save_state=True)
    (saved,) = (tmp_path / "out").glob("*.safetensors")
    assert saved.stem == "lora-000001"
    assert f"last checkpoint: {saved}; " in str(caught.value)


def test_what_was_due_after_an_epoch_whose_validation_failed_is_done_when_the_run_goes_on(
    base: Path, tmp_path: Path
) -> None:
    data = write_dataset(tmp_path / "data", text="batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1")
    settings = {"max_train_steps": 5, "validate_every_n_epochs": 1, "save_every_n_epochs": 1}
    run(base, data, tmp_path / "whole", **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageLora, "validate", fail_at(2, ImageLora.validate, OSError("Stale handle")))
        with pytest.raises(OSError, match="Stale"):
            run(base, data, tmp_path / "out", **settings)
    run(base, data, tmp_path / "out", **settings, resume="auto")
    validated = by_step(tmp_path / "out", "val_loss")
    assert list(validated) == [0, 3, 5]
    assert same(lora(tmp_path / "out", "lora-000001"), lora(tmp_path / "whole", "lora-000001"))
    assert validated == by_step(tmp_path / "whole", "val_loss")


def test_what_is_due_after_a_step_and_after_its_epoch_is_done_once(
    base: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    data = write_dataset(tmp_path / "data", text="batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1")
    (tmp_path / "prompts.txt").write_text("a disc --w 64 --h 64 --s 1\n")
    sampled, sample = list[int](), Sampler.sample

    def count(sampler: Sampler, transformer: Any, step: int, *more: Any) -> list[Path]:
        sampled.append(step)
        return sample(sampler, transformer, step, *more)

    monkeypatch.setattr(Sampler, "sample", count)
    often: dict[str, object] = {
        f"{what}_every_n_{unit}": n for what in ("validate", "sample") for unit, n in EACH_EPOCH
    }
    run(base, data, tmp_path / "out", **often, max_train_steps=6, sample_prompts=tmp_path / "prompts.txt")
    assert list(by_step(tmp_path / "out", "val_loss")) == [0, 3, 6]
    assert sampled == [3, 6]


@pytest.mark.parametrize("fault", FAULTS_AMID_AN_UPDATE)
def test_an_error_amid_an_update_saves_nothing_half_taken_and_loses_nothing_saved(
    fault: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset(tmp_path / "data", text="batch_size = 2")
    settings = {"max_train_steps": 5, "ema_decay": 0.9, "lr_scheduler": "cosine", "save_state": True}
    run(base, data, tmp_path / "whole", **settings, save_every_n_steps=2)
    owner, step = FAULTS_AMID_AN_UPDATE[fault]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "step", step)
        with pytest.raises(ZeroDivisionError):
            run(base, data, tmp_path / "out", **settings, save_every_n_steps=2)
    said = " ".join(capsys.readouterr().out.split())
    assert "what was learnt up to step" not in said
    assert "what was learnt after step 2 could not be saved (a change of the weights failed half-way); go on" in said
    assert [path.stem for path in (tmp_path / "out").glob("*.safetensors")] == ["lora-step00000002"]
    run(base, data, tmp_path / "out", **settings, save_every_n_steps=2, resume="auto")
    assert same(lora(tmp_path / "out"), lora(tmp_path / "whole"))


def test_a_killed_worker_is_told_in_a_line_and_costs_nothing(base: Path, dataset: Path, tmp_path: Path) -> None:
    settings = {"max_train_steps": 6, "max_data_loader_n_workers": 1}
    run(base, dataset, tmp_path / "whole", **settings)
    step = torch.optim.AdamW.step

    def killing(*arguments: Any, **more: Any) -> Any:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid or 0, signal.SIGKILL)
            time.sleep(0.2)
        return step(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", killing)
        with pytest.raises(UserError, match=r"ended from outside .*; lower max_data_loader_n_workers$"):
            run(base, dataset, tmp_path / "out", **settings)
    run(base, dataset, tmp_path / "out", **settings, resume="auto")
    assert same(lora(tmp_path / "out"), lora(tmp_path / "whole"))


def test_samples_and_trackers_that_fail_end_no_run(
    base: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    (tmp_path / "prompts.txt").write_text("a disc --w 64 --h 64 --s 2\n")
    run(base, dataset, tmp_path / "whole")
    monkeypatch.setattr(Sampler, "sample", fail_at(2, Sampler.sample, torch.OutOfMemoryError("CUDA out of memory")))
    monkeypatch.setattr(Accelerator, "log", fail_at(2, Accelerator.log, ConnectionError("no route to host")))
    run(base, dataset, tmp_path / "out", sample_prompts=tmp_path / "prompts.txt", sample_every_n_steps=1)
    shown = capsys.readouterr()
    assert "warning: sampling failed (OutOfMemoryError: CUDA out of memory); left out, the run goes on" in shown.out
    assert shown.err.count("warning: log_with: a tracker failed (ConnectionError: no route to host)") == 1
    assert same(lora(tmp_path / "out"), lora(tmp_path / "whole"))
    assert len(list((tmp_path / "out/samples").glob("step*.png"))) == 3  # of four


def test_an_update_in_bf16_that_fails_at_its_end_is_not_saved(base: Path, dataset: Path, tmp_path: Path) -> None:
    settings = {"full_bf16": True, "mixed_precision": "bf16", "save_every_n_steps": 3, "learning_rate": 0.01}
    run(base, dataset, tmp_path / "whole", **settings)
    step = torch.optim.AdamW.step

    def spoil(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        step(optimizer, *arguments)
        if optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", spoil)
        with pytest.raises(UserError, match="out of memory in step 4.*; nothing more was saved"):
            run(base, dataset, tmp_path / "out", **settings)
    (saved,) = (tmp_path / "out").glob("lora*.safetensors")
    assert same(lora(tmp_path / "out", saved.stem), lora(tmp_path / "whole", saved.stem))


@pytest.mark.parametrize(("vanishes", "workers"), [(False, 1), (True, 0)])
def test_caches_that_vanish_or_are_cut_off_amid_the_steps_are_made_again_at_the_next_start(
    base: Path, tmp_path: Path, vanishes: bool, workers: int
) -> None:
    data = write_dataset(tmp_path / "data", text="batch_size = 2", flip_aug=True)
    settings = {"max_train_steps": 12, "save_every_n_steps": 1, "save_last_n_steps": 1}
    settings |= {"max_data_loader_n_workers": workers}
    run(base, data, tmp_path / "whole", **settings)
    cache, save, is_damaged = tmp_path / "data/images/.tandem_cache", ImageLora.save, list[bool]()

    def damage_and_save(task: ImageLora, *arguments: Any) -> None:
        save(task, *arguments)
        for path in cache.rglob("*.safetensors") if not is_damaged else ():
            path.write_bytes(path.read_bytes()[:-1])
        is_damaged.append(True)
        if vanishes:
            shutil.rmtree(cache, ignore_errors=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageLora, "save", damage_and_save)
        with pytest.raises(UserError, match="start again with --resume auto: it is made anew"):
            run(base, data, tmp_path / "out", **settings)
    run(base, data, tmp_path / "out", **settings, resume="auto")
    assert same(lora(tmp_path / "out"), lora(tmp_path / "whole"))


def test_caches_that_are_damaged_between_runs_are_made_again_at_once(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset(tmp_path / "data")
    run(base, data, tmp_path / "whole")
    for kind in ("latents", "text"):
        path = sorted((tmp_path / "data/images/.tandem_cache" / kind).glob("*.safetensors"))[0]
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    run(base, data, tmp_path / "out")
    assert same(lora(tmp_path / "out"), lora(tmp_path / "whole"))
    assert " ".join(capsys.readouterr().out.split()).count("2 damaged files made again: ") == 1


def test_a_run_takes_the_steps_that_its_epochs_have_left(subtests: pytest.Subtests) -> None:
    """Counted by taking them: from ``seen`` batches into the second of three epochs, which took seven steps so far."""
    for seen in [0, 1, 3]:
        for per_step in [1, 2, 4, 20]:
            for per_epoch in [1, 5, 13, 14]:
                with subtests.test(f"{seen}, {per_step}, {per_epoch}"):
                    training = TrainingConfig(max_train_epochs=3)
                    begun = Position(step=7, epoch=1, batches=min(seen, per_epoch))
                    steps = 7
                    for epoch in (1, 2):
                        left = per_epoch - (begun.batches if epoch == 1 else 0)
                        while left > 0:
                            left, steps = left - per_step, steps + 1
                    assert run_length(training, per_epoch, per_step, begun) == (steps, 3)
                    by_steps = TrainingConfig(max_train_steps=steps)
                    assert run_length(by_steps, per_epoch, per_step, begun) == (steps, 3)
                    assert run_length(TrainingConfig(max_train_steps=steps + 1), per_epoch, per_step, begun) == (
                        steps + 1,
                        4,
                    )


def test_steps_that_were_passed_over_are_not_taken_in_the_end_instead_of_others() -> None:
    begun = Position(step=3, epoch=1, updates_dropped=2)  # of five batches
    assert run_length(TrainingConfig(max_train_epochs=2), 5, 1, begun) == (10, 3)
    assert run_length(TrainingConfig(max_train_steps=8), 5, 1, begun) == (8, 2)
    assert run_length(TrainingConfig(max_train_steps=9), 5, 1, begun) == (9, 3)  # eleven batches


def test_a_line_says_how_batches_become_steps() -> None:
    two = DataParallelRank(processes=2)
    assert describe_steps(9, two, 2) == (
        "9 batches an epoch, 2 in a step (2 processes): 5 steps an epoch, the last of 1 batch"
    )
    assert describe_steps(8, two, 2) == "8 batches an epoch, 2 in a step (2 processes): 4 steps an epoch"
    assert describe_steps(3, DataParallelRank(2, 0, 2), 4) == (
        "3 batches an epoch, 4 in a step (2 processes x 2 accumulated): 1 step an epoch, of 3 batches"
    )
    assert describe_steps(1420, DataParallelRank(), 8, "window") == (
        "1,420 windows an epoch, 8 in a step: 178 steps an epoch, the last of 4 windows"
    )
