"""Pretraining: exact resume, exact accumulation, what is decayed and clipped, what a run leaves behind."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from library.config.load import load_for
from library.config.scripts import LLM
from library.errors import UserError
from library.llm.token_batches import TokenBatches, TokenShards
from library.models.llm.files import load_lm
from library.models.llm.model import TransformerLM
from library.models.llm.spec import PRESETS
from library.training.optim.factory import MuonWithAdamW
from library.training.tasks.pretraining import Pretraining, flops_per_token, parameter_groups
from tests.pretraining_runs import flags, run, weights
from tests.processes import launcher, run_command
from tests.runs import metrics, same

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer_type": "Muon", "mixed_precision": "bf16"},
        {"full_bf16": True, "gradient_checkpointing": True, "tokens_per_batch": 256},
    ],
    ids=["adamw", "muon, autocast", "full bf16, checkpointing, accumulation"],
)
def test_a_resumed_run_ends_with_the_same_bits(settings: dict, corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "whole", save_every_n_steps=4, save_state=True, **settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "rest")
    run(corpus, tmp_path / "rest", resume=tmp_path / "whole/model-step00000004-state", **settings)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "rest"))
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "whole", "model-step00000004"))
    whole, rest = metrics(tmp_path / "whole"), metrics(tmp_path / "rest")
    for key in ("step", "loss", "loss_ema", "grad_norm", "tokens", "lr/vectors", "val_loss"):
        assert [line.get(key) for line in whole] == [line.get(key) for line in rest], key


def test_a_resumed_run_of_another_batch_size_goes_on_in_the_data_where_the_first_ended(
    corpus: Path, tmp_path: Path
) -> None:
    run(corpus, tmp_path, save_every_n_steps=4, save_state=True, lr_scheduler="constant", lr_warmup_steps=None)
    constant = {"lr_scheduler": "constant", "lr_warmup_steps": None, "resume": tmp_path / "model-step00000004-state"}
    run(corpus, tmp_path, train_batch_size=8, max_train_steps=5, **constant)
    line = next(line for line in metrics(tmp_path) if line["step"] == 5)
    assert line["tokens"] == (4 * 4 + 8) * 32
    # windows 16 to 24 of the order
    model = load_lm(tmp_path / "model-step00000004", torch.float32)
    tokens = TokenBatches(TokenShards(corpus, "train"), 32, 8, seed=5).read(0, range(16, 24))
    with torch.no_grad():
        assert line["loss"] == pytest.approx(model(tokens[:, :-1], tokens[:, 1:]).item(), rel=1e-5)


def test_the_first_step_is_adamws_on_the_mean_of_all_windows(corpus: Path, tmp_path: Path) -> None:
    settings = {"max_train_steps": 1, "lr_scheduler": "constant", "lr_warmup_steps": None, "max_grad_norm": 0.1}
    run(corpus, tmp_path / "two", tokens_per_batch=256, **settings)  # 2 x 4 windows of 32
    config = load_for(LLM, flags(corpus, tmp_path, **settings))
    shards = TokenShards(corpus, "train")
    from library.training.tasks.pretraining import build_model

    model = build_model(config, shards.vocab_size, torch.device("cpu"))
    batches = TokenBatches(shards, 32, 4, seed=5)
    tokens = batches.read(0, range(8))
    logits = model(tokens[:, :-1])[..., : shards.vocab_size]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95)).step()
    (line, _) = metrics(tmp_path / "two")
    # fp32 sums in another order
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    written = load_lm(tmp_path / "two/model", torch.float32)
    for (name, ours), expected in zip(written.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected[: len(ours)], rtol=1e-4, atol=2e-5, msg=name)


def test_gradients_are_clipped_only_after_the_warm_up_unless_asked(corpus: Path, tmp_path: Path) -> None:
    for name, settings in {
        "none": {"max_grad_norm": 0.0},
        "late": {"max_grad_norm": 1e-3},
        "early": {"max_grad_norm": 1e-3, "clip_during_warmup": True},
    }.items():
        run(corpus, tmp_path / name, optimizer_type="SGD", save_every_n_steps=1, max_train_steps=3, **settings)
    free, late, early = (
        [weights(tmp_path / name, f"model-step{step:08d}") for step in (1, 2, 3)] for name in ("none", "late", "early")
    )
    assert same(late[0], free[0])
    assert same(late[1], free[1])  # two steps of warm-up
    assert not same(late[2], free[2])
    assert not same(early[0], free[0])


def test_training_learns_what_there_is_to_learn(corpus: Path, tmp_path: Path) -> None:
    prompts = {"sample_prompts": ["the cat", "a dog"], "sample_every_n_steps": 60, "sample_tokens": 8}
    settings = {"max_train_steps": 60, "validate_every_n_steps": 30, "train_batch_size": 8}
    events = run(corpus, tmp_path, curves=True, **settings, **prompts)
    before, _, after = events.val_losses
    vocabulary = TokenShards(corpus, "train").vocab_size
    assert before == pytest.approx(math.log(vocabulary), rel=0.02)  # fresh weights know nothing
    # sixteen equally likely words; a token each, mostly: the best is ln 16, nothing can go below
    assert math.log(16) * 0.8 < after < math.log(16) * 1.25
    held_out = [line for line in metrics(tmp_path) if "val_loss" in line]
    assert [line["step"] for line in held_out] == [0, 30, 60]
    assert held_out[-1]["val_perplexity"] == pytest.approx(math.exp(after))
    trained = [line for line in metrics(tmp_path) if "loss" in line]
    assert trained[-1]["tokens"] == (3 * 142 + 6 * 8) * 32  # of 142 windows the last step of an epoch has six
    assert trained[-1]["lr/matrices"] == pytest.approx(3e-4, rel=0.05)  # the floor, a tenth
    assert trained[0]["lr/matrices"] == pytest.approx(3e-3 / 2)
    samples = (tmp_path / "samples/00000060.txt").read_text()
    assert samples.startswith("the cat")
    assert "a dog" in samples
    assert (tmp_path / "lr.png").stat().st_size > 10000
    # what it wrote is a model for transformers
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.eos_token_id == tokenizer.eos_token_id == 0
    ids = torch.tensor([tokenizer.encode("the cat sat on the mat")])
    with torch.no_grad():
        theirs, ours = model(ids).logits, load_lm(tmp_path / "model", torch.float32)(ids)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_published_model_is_gone_on_from(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "first")
    settings = {"preset": None, "width": None, "layers": None, "heads": None, "init_from": tmp_path / "first/model"}
    events = run(corpus, tmp_path / "second", max_train_steps=3, learning_rate=0.0, **settings)
    assert same(weights(tmp_path / "first"), weights(tmp_path / "second"))
    assert events.val_losses[-1] == pytest.approx(metrics(tmp_path / "first")[-1]["val_loss"], rel=1e-6)


@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_batch(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "one", train_batch_size=8, max_train_steps=3)
    done = run_command(
        [sys.executable, *launcher(), str(ROOT / "train_llm.py"), *flags(corpus, tmp_path / "two", max_train_steps=3)],
        tmp_path,
        {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for key in ("step", "tokens"):
        assert [line.get(key) for line in one] == [line.get(key) for line in two]
    for ours, theirs in zip(one, two, strict=True):  # sums in another order
        assert ours.get("loss", 0) == pytest.approx(theirs.get("loss", 0), rel=1e-4)
        assert ours.get("val_loss", 0) == pytest.approx(theirs.get("val_loss", 0), rel=1e-4)


def test_only_matrices_decay_and_tied_ones_are_there_once() -> None:
    with torch.device("meta"):
        model = TransformerLM(PRESETS["gpt2-tiny"])
    matrices, vectors = parameter_groups(model, 0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim == 2 for p in matrices["params"])
    assert all(p.ndim == 1 for p in vectors["params"])
    assert sum(p.numel() for group in (matrices, vectors) for p in group["params"]) == 13_891_584


def test_muon_steps_hidden_matrices_as_torchs_and_the_rest_as_adamws() -> None:
    torch.manual_seed(0)
    hidden, table, bias = (torch.nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (8, 4), (4,)))
    copies = [torch.nn.Parameter(p.detach().clone()) for p in (hidden, table, bias)]
    named = {"hidden": (hidden, 0.1), "matrices": (table, 0.1), "vectors": (bias, 0.0)}
    groups = [{"params": [p], "weight_decay": decay, "name": name} for name, (p, decay) in named.items()]
    joined = MuonWithAdamW(groups, lr=0.01)
    muon = torch.optim.Muon([copies[0]], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    rest = [{"params": [copies[1]], "weight_decay": 0.1}, {"params": [copies[2]], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95))
    for _ in range(3):
        for p, copy in zip((hidden, table, bias), copies, strict=True):
            p.grad = torch.randn_like(p)
            copy.grad = p.grad.clone()
        for optimizer in (joined, muon, adamw):
            optimizer.step()
    assert torch.equal(hidden, copies[0])
    for p, copy in zip((table, bias), copies[1:], strict=True):
        torch.testing.assert_close(p, copy, rtol=1e-6, atol=1e-6)  # fused against not


def test_mfu_counts_what_the_palm_paper_counts() -> None:
    with torch.device("meta"):
        model = TransformerLM(PRESETS["gpt2-124m"])
    # nanoGPT's estimate_mfu: 6 N + 12 L H Q T with N all parameters but positions; norms and biases are 0.1 %
    expected = 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert flops_per_token(model, 1024) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens_per_batch": 200}, "200 is no multiple of 128 .* set 256"),
        ({"context": 100000}, "fewer than two windows of 100000"),
        ({"init_from": "x"}, "give either preset"),
        ({"full_bf16": True, "mixed_precision": "bf16"}, "weights are bf16 already"),
        ({"sample_every_n_steps": 3}, "sample_every_n_steps: has no effect without sample_prompts"),
        (
            {"sample_tokens": 8, "sample_top_p": 0.5},
            "sample_tokens: .* without sample_prompts; .*\nsample_top_p: .* with",
        ),
        ({"resume": "nowhere"}, "nowhere is not a training state"),
        ({"learning_rte": 1}, "unknown flag; did you mean 'learning_rate'"),
        ({"data_dir": "nowhere"}, "run tools/prepare_text.py first"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_work_ends_with_one_line(settings: dict, message: str, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        run(corpus, tmp_path, **settings)


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
    text = capsys.readouterr().out
    assert "perplexity" in text
    assert "metrics.jsonl" in text


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
