"""DPO: a batch beside transformers, peft and the formula in float64; runs on pairs, resumed and held out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor

from library.data.batches import DataParallelRank
from library.errors import UserError
from library.llm.chat_batches import PairSampler
from library.training.tasks.chat_lora import PreferenceLora
from library.training.tasks.dpo import REWARDS
from tests.chat_runs import adapter, preferring, run
from tests.models.llm.lms import write_reference
from tests.runs import metrics, same
from tests.training.tasks.test_chat_lora import examples, gradients, model_with_lora


def log_probabilities(model: Any, batch: Any) -> Tensor:
    """Return the sum of the log-probabilities of each row's targets, from the whole logits, in float64."""
    targets = batch.targets.flatten(0, 1)
    scores = model(batch.tokens.flatten(0, 1)).logits.double().log_softmax(dim=-1)
    return (scores.gather(2, targets.clamp_min(0)[..., None])[..., 0] * (targets >= 0)).sum(dim=1)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", ["gpt2", "llama3.2"])
def test_a_batch_has_the_loss_and_the_gradients_of_the_formula(
    tmp_path: Path, name: str, smoothing: float, checkpointing: bool
) -> None:
    theirs = write_reference(tmp_path, name)
    model, network = model_with_lora(tmp_path)
    if checkpointing:
        model.enable_gradient_checkpointing()
    four = examples()
    batch = PairSampler.collate([(four[0], four[1]), (four[3], four[2])])
    chat = SimpleNamespace(dpo_beta=0.3, dpo_label_smoothing=smoothing)
    task = SimpleNamespace(network=network, plan=SimpleNamespace(config=SimpleNamespace(chat=chat)))
    losses, rewards = PreferenceLora._losses(task, model, batch)  # type: ignore[arg-type]
    losses.mean().backward()

    config = LoraConfig(
        r=4, lora_alpha=3, target_modules=list(network.modules), fan_in_fan_out=name == "gpt2", task_type="CAUSAL_LM"
    )
    peft = get_peft_model(theirs, config)
    named = dict(peft.named_parameters())
    for key, tensor in network.state_dict().items():
        named[f"base_model.model.{key.replace('.weight', '.default.weight')}"].data.copy_(tensor)
    with torch.no_grad(), peft.disable_adapter():
        base = log_probabilities(peft, batch)
    ratios = log_probabilities(peft, batch) - base
    chosen, rejected = ratios[0::2], ratios[1::2]
    delta = 0.3 * (chosen - rejected)
    expected = -(1 - smoothing) * F.logsigmoid(delta) - smoothing * F.logsigmoid(-delta)
    expected.mean().backward()

    # fp32 sums of log-probabilities of about 20, times beta
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=1e-5)
    columns = torch.stack([0.3 * chosen, 0.3 * rejected, delta, (delta > 0).double()], dim=1)
    torch.testing.assert_close(rewards.double(), columns.detach(), rtol=1e-4, atol=1e-5)
    for key, gradient in gradients(network).items():
        other = named[f"base_model.model.{key.replace('.weight', '.default.weight')}"].grad
        assert other is not None
        assert (gradient - other).abs().max() <= 1e-4 * other.abs().max(), key


def test_every_pair_of_a_step_counts_the_same() -> None:
    pairs = [(one, one) for one in examples((9, 30, 5, 12, 3))]
    sampler = PairSampler(pairs, 2, seed=0, dp_rank=DataParallelRank(accumulation=3))
    batches, steps = list(sampler), list(sampler.micro_steps())
    for batch, step in zip(batches, steps, strict=True):
        assert step.weight / 3 == pytest.approx(len(batch) / 5)  # of the mean over the three batches


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "gpt2"},
        {"network_type": "dora", "gradient_checkpointing": True, "mixed_precision": "bf16"},
        {"fp8_scaled": True, "init_lora_weights": "pissa", "network_dropout": 0.0},
    ],
    ids=["gpt2", "dora", "pissa"],
)
def test_a_run_learns_what_is_preferred_and_says_so(place: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    more = {
        "max_train_steps": 20,
        "validate_every_n_steps": 20,
        "save_best": True,
        "validation_data": [place / "pairs.jsonl"],
    }
    run(place, tmp_path, **preferring(place), **more, **settings)
    first, *lines = metrics(tmp_path)
    # nothing is learnt: both answers are as the base has them; 16 bits round projections that are summed otherwise
    assert first["val_loss"] == pytest.approx(0.6931, abs=2e-3)
    assert abs(first["val_rewards/margins"]) < 5e-3
    last = next(line for line in reversed(lines) if "val_loss" in line)
    assert last["val_loss"] < 0.4
    assert last["val_rewards/accuracies"] >= 0.75
    assert last["val_rewards/margins"] == pytest.approx(last["val_rewards/chosen"] - last["val_rewards/rejected"])
    assert all(key in line for line in lines if "loss" in line for key in REWARDS)


def test_a_resumed_run_gives_the_same_adapter(place: Path, tmp_path: Path) -> None:
    saved = preferring(place) | {"save_every_n_steps": 3, "save_state": True}
    run(place, tmp_path / "whole", **saved)  # type: ignore[arg-type]
    run(place, tmp_path / "again", **saved | {"resume": tmp_path / "whole/lora-step00000003-state"})  # type: ignore[arg-type]
    assert same(adapter(tmp_path / "whole/lora"), adapter(tmp_path / "again/lora"))
    with pytest.raises(UserError, match="was trained with dpo_beta"):
        run(
            place, tmp_path / "third", **saved | {"resume": tmp_path / "whole/lora-step00000003-state", "dpo_beta": 0.2}
        )  # type: ignore[arg-type]


def test_the_base_is_what_a_lora_that_goes_on_is_compared_with(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(place, tmp_path / "first", max_train_steps=10)
    more = {
        "network_weights": tmp_path / "first/lora",
        "validation_data": [place / "pairs.jsonl"],
        "max_train_steps": 1,
    }
    run(place, tmp_path / "second", **preferring(place) | more)  # type: ignore[arg-type]
    assert "note: answers are compared with the base's, without network_weights" in capsys.readouterr().out
    assert abs(metrics(tmp_path / "second")[0]["val_rewards/chosen"]) > 0.1  # it has moved away from the base


def test_the_rate_is_that_of_preferences_where_nobody_sets_one(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path, **preferring(place), learning_rate=None, max_train_steps=1)
    assert metrics(tmp_path)[-1]["lr/lora"] == 5e-6


REFUSED = {
    "chats": ({"train_data": ["data.jsonl"]}, 'data.jsonl:1: has no "chosen" and "rejected" answer, which train_on'),
    "pairs": ({"train_on": "assistant"}, 'pairs.jsonl:1: has a chosen and a rejected answer; set train_on = "prefer'),
    "packing": ({"packing": True}, 'packing: has no effect with train_on = "preferences"'),
    "beta": ({"train_on": "all", "dpo_beta": 0.2}, 'dpo_beta: has no effect with train_on = "all"'),
    "pp": ({"pp": 2}, "train_on: asks the model twice in a step"),
    "length": ({"max_length": 4}, "max_length: no answer begins within 4 tokens; raise it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(place: Path, tmp_path: Path, case: str) -> None:
    settings, said = REFUSED[case]
    if names := settings.get("train_data"):
        settings = settings | {"train_data": [place / name for name in names]}  # type: ignore[attr-defined]
    with pytest.raises(UserError) as caught:
        run(place, tmp_path, **preferring(place) | settings)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
