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
from library.training.tasks.pretraining import Pretraining
from tests.pretraining_runs import run, weights
from tests.runs import metrics, same

CONSTANT: dict[str, object] = {"lr_scheduler": "constant", "lr_warmup_steps": None}


def break_step(monkeypatch: pytest.MonkeyPatch, number: int, how: Any) -> None:
    """Let ``how`` make the loss of the step ``number`` (from 1), each time it is taken."""
    loss = Pretraining.loss

    def broken(self: Pretraining, model: torch.nn.Module, batch: Tensor, step: int) -> tuple[Tensor, Tensor]:
        result, values = loss(self, model, batch, step)
        return (how(result), values) if step + 1 == number else (result, values)

    monkeypatch.setattr(Pretraining, "loss", broken)


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
    losses = [[line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("plain", "averaged")]
    assert losses[0] == losses[1]
    state = tmp_path / "averaged/model-step00000002-state"
    run(corpus, tmp_path / "rest", **settings, ema_decay=0.9, resume=state)
    assert same(weights(tmp_path / "rest"), weights(tmp_path / "averaged"))


def test_epochs_end_the_run_and_are_saved_validated_and_sampled(corpus: Path, tmp_path: Path) -> None:
    every = {f"{what}_every_n_epochs": 1 for what in ("save", "validate", "sample")}
    settings = {"sample_prompts": ["the cat"], "sample_tokens": 4, "sample_at_first": True, **CONSTANT, **every}
    run(corpus, tmp_path, train_batch_size=32, max_train_epochs=2, save_state=True, **settings)
    windows = TokenBatches(TokenShards(corpus, "train"), 32, 32, seed=5).windows
    first = -(-windows // 32)  # its last step is a smaller one
    steps = 2 * first
    assert [line["epoch"] for line in metrics(tmp_path) if "loss" in line] == [0] * first + [1] * (steps - first)
    assert [line["step"] for line in metrics(tmp_path) if "val_loss" in line] == [0, first, steps]
    assert sorted(path.stem for path in (tmp_path / "samples").glob("*.txt")) == [
        f"{step:08d}" for step in (0, first, steps)
    ]
    position = json.loads((tmp_path / "model-000001-state/position.json").read_text())
    assert (position["epoch"], position["batches"]) == (1, 0)
    run(corpus, tmp_path / "rest", train_batch_size=32, max_train_epochs=2, resume=tmp_path / "model-000001-state",
        **settings)  # fmt: skip
    assert same(weights(tmp_path / "rest"), weights(tmp_path))
