"""LoRAs that are split with their base: two processes that have rows of both, against one that has all."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from torch.distributed.tensor import DTensor

from library.config import load_config
from library.config.rules import find_conflicts
from tests.chat_runs import adapter, write_place
from tests.chat_runs import flags as chat_flags
from tests.chat_runs import run as chat_run
from tests.layouts import GRADIENTS, SETTINGS, assert_goes_on_either_way, assert_same_runs, chat_one, train_one
from tests.runs import arguments, largest_difference, lora, run, write_dataset
from tests.training.guard.test_nonfinite import clean, spoilt  # noqa: F401  # the fixture
from tests.training.parallel.test_sharded_lora import CHAT
from tests.training.parallel.test_zero_lora import config
from tests.worker_group import run_in_group
from train_lora import train

SAME_IN_FP32 = 2e-4  # gradients of halves are averaged instead of one mean over the batches, as under DDP
SPLIT: dict[str, object] = {"shard": 2, "shard_lora": True}
FP8: dict[str, object] = {"max_train_steps": 2, "fp8_scaled": True, "mixed_precision": "bf16"}


def train_and_weigh(flags: list[str], said: Path) -> None:
    """Train, and write down how many numbers of the LoRA and of the optimizer's state lie here, and in all."""
    done = train(load_config(flags)).task
    trained = done.network.parameters()
    assert all(isinstance(parameter, DTensor) for parameter in trained)
    state = [v for own in done.optimizer.state.values() for v in own.values() if isinstance(v, DTensor)]
    here = [sum(tensor.to_local().numel() for tensor in tensors) for tensors in (trained, state)]
    said.write_text(json.dumps([here, sum(parameter.numel() for parameter in trained)]))


@pytest.fixture(scope="module")
def runs(base: Path, clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The same runs on one process and on two that split base and LoRA; what a run that is to fail said."""
    folder = tmp_path_factory.mktemp("split")
    images = write_dataset(folder / "images", text="batch_size = 1\nvalidation_split = 0.25\nvalidation_seed = 1")
    prompts, place = folder / "prompts.txt", folder / "llm"
    place.mkdir()
    write_place(place)
    prompts.write_text("a red disc --w 64 --h 64 --s 2 --d 1\n")
    # a state's position counts batches over all processes: a step has four of them either way
    one = SETTINGS | {"sample_prompts": prompts, "gradient_accumulation_steps": 4}
    two = one | {"gradient_accumulation_steps": 2} | SPLIT
    state = "lora-step00000002-state"
    run(base, images, folder / "one", **one)
    run(base, images, folder / "gradients_one", **GRADIENTS, gradient_accumulation_steps=2)
    run(base, images, folder / "fp8_one", **FP8, gradient_accumulation_steps=2)
    chat_run(place, folder / "chat_one", gradient_accumulation_steps=2, **CHAT)
    flags = {
        "there": two | {"resume": folder / "one" / state},
        "gradients": GRADIENTS | SPLIT,
        "fp8": FP8 | SPLIT,
    }
    jobs = [(name, train_one, (arguments(base, images, folder / name, **keys),)) for name, keys in flags.items()]
    jobs.append(("two", train_and_weigh, (arguments(base, images, folder / "two", **two), folder / "two.json")))
    talk = chat_flags(place, folder / "chat", **CHAT | {"gradient_accumulation_steps": 1} | SPLIT)
    jobs.append(("chat", chat_one, (talk,)))
    bad = spoilt(clean, folder / "spoilt", math.nan)
    stopped = arguments(base, bad, folder / "stopped", max_train_steps=5, **SPLIT)
    said = run_in_group([*jobs, ("stopped", train_one, (stopped,))], folder)
    (folder / "stopped.txt").write_text(said.pop("stopped"))
    assert said == dict.fromkeys([name for name, *_ in jobs], "")
    run(base, images, folder / "back", **one, resume=folder / "two" / state)
    return folder


def test_two_processes_equal_one(runs: Path) -> None:
    assert_same_runs(runs, rel=1e-4, within=SAME_IN_FP32)


def test_a_process_has_half_of_the_lora_and_of_its_optimizer(runs: Path) -> None:
    (weights, state), whole = json.loads((runs / "two.json").read_text())
    assert weights == pytest.approx(whole / 2, rel=0.02)  # rows that two do not divide
    assert state == 2 * weights


def test_gradients_of_the_first_step_are_one_processs(runs: Path) -> None:
    one, two = lora(runs / "gradients_one"), lora(runs / "gradients")
    for name in (name for name in one if "lora_B" in name):
        assert one[name].abs().max() > 0
        assert (two[name] - one[name]).norm() < 1e-5 * one[name].norm(), name


def test_a_run_goes_on_under_another_layout(runs: Path) -> None:
    assert_goes_on_either_way(runs, SAME_IN_FP32)


def test_an_fp8_base_and_a_language_model_too(runs: Path) -> None:
    assert largest_difference(lora(runs / "fp8"), lora(runs / "fp8_one")) < SAME_IN_FP32
    assert largest_difference(adapter(runs / "chat/lora"), adapter(runs / "chat_one/lora")) < SAME_IN_FP32
    answer = "samples/step000003.txt"
    assert (runs / "chat" / answer).read_text() == (runs / "chat_one" / answer).read_text()


def test_a_step_that_is_not_finite_ends_the_run_and_names_the_image(runs: Path) -> None:
    said = (runs / "stopped.txt").read_text()
    assert "is not finite" in said
    assert "5.png" in said
    assert all(
        bool(t.isfinite().all()) for f in runs.glob("stopped/*.safetensors") for t in lora(f.parent, f.stem).values()
    )


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"parallel__shard": 1}, "shard_lora"),
        ({"parallel__shard": 2, "parallel__tp": 2}, "shard_lora"),
        ({"optimizer__optimizer_type": "Adafactor"}, "optimizer_type"),
        ({"optimizer__optimizer_type": "Prodigy"}, "optimizer_type"),
        ({"optimizer__optimizer_type": "AdamW8bit"}, "optimizer_type"),
        ({"network__network_type": "dora"}, "network_type"),
        ({"saving__ema_decay": 0.9}, "ema_decay"),
        ({"training__on_nan": "skip"}, "on_nan"),
    ],
)
def test_what_is_not_made_for_a_split_lora_is_refused(settings: dict[str, object], key: str) -> None:
    split = {"parallel__shard": 2, "parallel__shard_lora": True}
    found = list(find_conflicts(config(**split | settings)))
    assert [conflict.keys[0] for conflict in found] == [key]
    assert "shard_lora = false" in found[0].message or key == "shard_lora"
    assert not list(find_conflicts(config(**settings)))
