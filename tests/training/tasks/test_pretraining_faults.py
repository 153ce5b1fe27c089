"""What pretraining does between steps and when a step fails: as a LoRA's training does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from library.errors import UserError
from library.llm.token_batches import TokenBatches, TokenShards
from library.models.llm.files import load_lm
from library.training.tasks.pretraining import Pretraining
from tests.pretraining_runs import lines, run, weights

CONSTANT: dict[str, object] = {"lr_scheduler": "constant", "lr_warmup_steps": None}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def break_step(monkeypatch: pytest.MonkeyPatch, number: int, how: Any) -> None:
    """Let ``how`` make the loss of the step ``number`` (from 1), each time it is taken."""
    loss = Pretraining.loss

    def broken(self: Pretraining, model: torch.nn.Module, batch: Tensor, step: int) -> tuple[Tensor, Tensor]:
        result, values = loss(self, model, batch, step)
        return (how(result), values) if step + 1 == number else (result, values)

    monkeypatch.setattr(Pretraining, "loss", broken)


def test_the_final_models_state_is_saved_and_the_run_goes_on_from_it(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "whole", max_train_steps=5, **CONSTANT)
    run(corpus, tmp_path / "part", max_train_steps=3, save_state=True, **CONSTANT)
    run(corpus, tmp_path / "end", max_train_steps=3, save_state_on_train_end=True, **CONSTANT)
    for name in ("part", "end"):
        state = tmp_path / name / "model-state"
        run(corpus, tmp_path / name, max_train_steps=5, resume=state, **CONSTANT)
        assert same(weights(tmp_path / name), weights(tmp_path / "whole"))


def test_another_batch_size_that_does_not_divide_what_was_seen_repeats_nothing(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path, save_every_n_steps=3, save_state=True, max_train_steps=3, **CONSTANT)
    state = tmp_path / "model-step00000003-state"
    run(corpus, tmp_path, train_batch_size=8, max_train_steps=4, resume=state, **CONSTANT)
    line = next(line for line in lines(tmp_path) if line["step"] == 4)
    assert line["tokens"] == (3 * 4 + 8) * 32
    model = load_lm(tmp_path / "model-step00000003", torch.float32)
    tokens = TokenBatches(TokenShards(corpus, "train"), 32, 8, seed=5).read(0, range(12, 20))  # 3 steps of 4 windows
    with torch.no_grad():
        assert line["loss"] == pytest.approx(model(tokens[:, :-1], tokens[:, 1:]).item(), rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{}, {"ema_decay": 0.9, "full_bf16": True}, {"optimizer_type": "Adam"}, {"optimizer_type": "Muon"}],
    ids=["AdamW", "average, bf16", "Adam", "Muon"],
)
def test_a_step_that_is_not_finite_stops_the_run_and_what_was_before_it_is_saved(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    """Of AdamW the device leaves out the step and those after it; of the others the host does at once."""
    run(corpus, tmp_path / "whole", save_every_n_steps=2, **settings)
    with monkeypatch.context() as patch:
        break_step(patch, 3, lambda loss: loss * math.nan)
        with pytest.raises(UserError, match=r"step 3 is not finite: 4 windows of 32 tokens; last checkpoint: ") as told:
            run(corpus, tmp_path / "broken", log_every_n_steps=1000, **settings)
    assert "model-step00000002" in str(told.value)
    assert same(weights(tmp_path / "broken", "model-step00000002"), weights(tmp_path / "whole", "model-step00000002"))
    run(
        corpus, tmp_path / "broken", resume="auto", **settings
    )  # the optimizer and the schedule have not taken the step either
    assert same(weights(tmp_path / "broken"), weights(tmp_path / "whole"))


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])  # left out by the device, and by the host
def test_a_step_that_is_skipped_changes_nothing_and_the_next_windows_follow(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    seen, loss = list[Tensor](), Pretraining.loss
    settings = {"optimizer_type": optimizer, "max_train_steps": 4, **CONSTANT}

    def broken(self: Pretraining, model: torch.nn.Module, batch: Tensor, step: int) -> tuple[Tensor, Tensor]:
        result, values = loss(self, model, batch, step)
        if torch.is_grad_enabled():  # not what is held out
            seen.append(batch)
        return (result * math.nan if len(seen) == 3 else result), values

    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "loss", broken)
        run(corpus, tmp_path / "skipped", on_nan="skip", **settings)
    plain = [*seen[:2], *seen[-2:]]  # the third is looked at once more
    batches = iter(plain)

    def given(self: Pretraining, model: torch.nn.Module, batch: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return loss(self, model, next(batches) if torch.is_grad_enabled() else batch, step)

    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "loss", given)
        run(corpus, tmp_path / "expected", **settings)
    assert not any(torch.equal(seen[2], batch) for batch in plain)
    assert same(weights(tmp_path / "skipped"), weights(tmp_path / "expected"))


def test_steps_that_are_all_skipped_end_at_the_limit(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = Pretraining.loss

    def broken(self: Pretraining, model: torch.nn.Module, batch: Tensor, step: int) -> tuple[Tensor, Tensor]:
        result, values = loss(self, model, batch, step)
        return result * math.nan, values

    monkeypatch.setattr(Pretraining, "loss", broken)
    with pytest.raises(UserError, match="4 steps in a row are not finite, the last: step 1"):
        run(corpus, tmp_path, on_nan="skip", on_nan_limit=3, max_train_steps=20)


def test_no_step_is_computed_after_one_that_is_not_finite(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is logged; a GPU works on the next one while the host hears of it."""
    steps, loss = list[int](), Pretraining.loss

    def broken(self: Pretraining, model: torch.nn.Module, batch: Tensor, step: int) -> tuple[Tensor, Tensor]:
        steps.append(step + 1)
        result, values = loss(self, model, batch, step)
        return (result * math.nan if step + 1 == 3 else result), values

    monkeypatch.setattr(Pretraining, "loss", broken)
    with pytest.raises(UserError, match="step 3 is not finite"):
        run(corpus, tmp_path, log_every_n_steps=1000, max_train_steps=20)
    assert max(steps) == 3


def test_a_step_that_does_not_fit_into_memory_is_told_in_one_line(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(loss: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    break_step(monkeypatch, 3, full)
    expected = r"out of memory in step 3: the batch \(4 windows of 32 tokens\) does not fit; last checkpoint: "
    with pytest.raises(UserError, match=rf"{expected}.*; set gradient_checkpointing = true, or lower train_batch_size"):
        run(corpus, tmp_path)
    assert (tmp_path / "model-step00000002-state/position.json").exists()


def test_memory_that_runs_out_within_the_optimizers_step_saves_nothing_half_done(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = torch.optim.AdamW.step

    def half(self: torch.optim.AdamW, closure: Any = None) -> Any:
        step(self, closure)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.optim.AdamW, "step", half)
    with pytest.raises(UserError, match="out of memory in step 1: .* nothing was saved"):
        run(corpus, tmp_path)
    assert not list(tmp_path.glob("model*"))


def test_a_run_that_diverges_finitely_still_ends_with_its_summary(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Pretraining, "validate", lambda *_: {"val_loss": 1000.0})  # e^1000 is no float
    run(corpus, tmp_path, max_train_steps=1, validate_every_n_steps=1, **CONSTANT)
    told = capsys.readouterr().out
    assert "perplexity" in told
    assert "metrics.jsonl" in told


def test_the_saved_model_is_the_average_and_training_goes_on_from_the_weights(corpus: Path, tmp_path: Path) -> None:
    settings = {"max_train_steps": 3, "save_every_n_steps": 1, **CONSTANT}
    run(corpus, tmp_path / "plain", **settings)
    run(corpus, tmp_path / "averaged", **settings, ema_decay=0.9, save_state=True)
    run(corpus, tmp_path / "first", max_train_steps=1, learning_rate=0.0, **CONSTANT)
    expected = weights(tmp_path / "first")
    for t in range(3):
        decay, now = (1 + t) / (10 + t), weights(tmp_path / "plain", f"model-step{t + 1:08d}")
        expected = {name: decay * value + (1 - decay) * now[name] for name, value in expected.items()}
    for name, tensor in weights(tmp_path / "averaged").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    losses = [[line["loss"] for line in lines(tmp_path / name) if "loss" in line] for name in ("plain", "averaged")]
    assert losses[0] == losses[1]
    state = tmp_path / "averaged/model-step00000002-state"
    run(corpus, tmp_path / "rest", **settings, ema_decay=0.9, resume=state)
    assert same(weights(tmp_path / "rest"), weights(tmp_path / "averaged"))


def test_the_best_is_saved_old_ones_go_and_too_long_without_a_better_one_ends_the_run(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([5.0, 4.0, 3.0, 3.5, 3.6, 3.7, 3.8])
    monkeypatch.setattr(Pretraining, "validate", lambda *_: {"val_loss": next(losses)})
    settings = {"save_every_n_steps": 1, "save_last_n_steps": 1, "save_best": True, "early_stop_patience": 2}
    events = run(corpus, tmp_path, max_train_steps=6, validate_every_n_steps=1, **settings, **CONSTANT)
    assert events.stopped
    names = sorted(path.name for path in tmp_path.glob("model*"))
    assert names == ["model", "model-best", "model-step00000003", "model-step00000004"]
    run(corpus, tmp_path / "two", max_train_steps=2, **CONSTANT)
    assert same(weights(tmp_path, "model-best"), weights(tmp_path / "two"))


def test_epochs_end_the_run_and_are_saved_validated_and_sampled(corpus: Path, tmp_path: Path) -> None:
    every = {f"{what}_every_n_epochs": 1 for what in ("save", "validate", "sample")}
    settings = {"sample_prompts": ["the cat"], "sample_tokens": 4, "sample_at_first": True, **CONSTANT, **every}
    run(corpus, tmp_path, train_batch_size=32, max_train_epochs=2, save_state=True, **settings)
    windows = TokenBatches(TokenShards(corpus, "train"), 32, 32, seed=5).windows
    first = -(-windows // 32)  # its last step is a smaller one
    steps = 2 * first
    assert [line["epoch"] for line in lines(tmp_path) if "loss" in line] == [0] * first + [1] * (steps - first)
    assert [line["step"] for line in lines(tmp_path) if "val_loss" in line] == [0, first, steps]
    assert sorted(path.stem for path in (tmp_path / "samples").glob("*.txt")) == [
        f"{step:08d}" for step in (0, first, steps)
    ]
    position = json.loads((tmp_path / "model-000001-state/position.json").read_text())
    assert (position["epoch"], position["batches"]) == (1, 0)
    run(corpus, tmp_path / "rest", train_batch_size=32, max_train_epochs=2, resume=tmp_path / "model-000001-state",
        **settings)  # fmt: skip
    assert same(weights(tmp_path / "rest"), weights(tmp_path))


def test_the_average_loss_goes_on_from_an_epoch_whose_last_step_was_not_logged(corpus: Path, tmp_path: Path) -> None:
    settings = {"train_batch_size": 32, "save_every_n_epochs": 1, "save_state": True, **CONSTANT}
    run(corpus, tmp_path, **settings, log_every_n_steps=100)
    state = tmp_path / "model-000001-state"
    assert json.loads((state / "position.json").read_text())["step"] < 6
    run(corpus, tmp_path / "rest", **settings, log_every_n_steps=100, resume=state)
    (whole,), (rest,) = ([e["loss_ema"] for e in lines(f) if "loss" in e] for f in (tmp_path, tmp_path / "rest"))
    assert rest == whole
