"""DeepSpeed's ZeRO for LoRAs: two processes under each stage, against one that holds everything."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from library.accelerator import require_deepspeed
from library.config import load_config
from library.config.schema import ParallelConfig
from library.errors import UserError
from library.training.memory.formula import StepOptions, model_numbers, shape_of, step_parts
from tests.layouts import GRADIENTS, assert_same_metrics, chat_one, lines, train_one
from tests.layouts import SETTINGS as LAYOUT_SETTINGS
from tests.runs import arguments, largest_difference, lora, run, write_dataset
from tests.tiny_qwen import tiny_qwen_pipeline
from tests.training.parallel.test_pipeline_lora import QWEN, write_images
from tests.training.parallel.test_sharded_lora import CHAT
from tests.training.tasks.test_chat_lora_runs import adapter, place  # noqa: F401  # the fixture
from tests.training.tasks.test_chat_lora_runs import flags as chat_flags
from tests.training.tasks.test_chat_lora_runs import run as chat_run
from tests.training.test_nonfinite import clean, finite, spoilt  # noqa: F401  # the fixture
from tests.worker_group import run_in_group
from train_lora import train

INSTALLED = importlib.util.find_spec("deepspeed") is not None
STAGES = (1, 2, 3)
SAME_IN_FP32 = 2e-4  # gradients of halves are averaged instead of one mean over the batches, as under DDP
# smaller than every matrix of the base, so that stage 3 splits them all
SETTINGS: dict[str, object] = LAYOUT_SETTINGS | {"network_dim": 1, "ema_decay": 0.9}
OTHERS: dict[str, dict[str, object]] = {
    "fp8": {"zero": 2, "fp8_scaled": True},
    "bf16": {"zero": 1, "mixed_precision": "bf16"},
    "dora": {"zero": 3, "network_type": "dora", "gradient_checkpointing": True},
    "qwen": {"zero": 3} | QWEN,
    "groups": {"zero": 3, "network_args": ["loraplus_lr_ratio=4"]},
}
SHORT: dict[str, object] = {"network_dim": 1, "max_train_steps": 2}


def on_two_processes(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs the runs: they take a minute, and DeepSpeed."""
    skipped = pytest.mark.skipif(not INSTALLED, reason="DeepSpeed is not installed (make test-zero)")
    return pytest.mark.slow(pytest.mark.timeout(900)(skipped(test)))


def train_and_weigh(flags: list[str], said: Path) -> None:
    """Train, and write down how many bytes of frozen weights and of what the optimizer has lie here afterwards."""
    done = train(load_config(flags)).task
    frozen = [p for p in done.transformer.parameters() if not p.requires_grad]
    weights = sum((p.numel() + getattr(p, "ds_tensor", torch.empty(0)).numel()) * p.element_size() for p in frozen)
    held = [
        *done.engine.optimizer.shards,
        *(v for own in done.engine.optimizer.optimizer.state.values() for v in own.values()),
    ]
    said.write_text(json.dumps([weights, sum(tensor.numel() * 4 for tensor in held)]))


@pytest.fixture(scope="module")
def runs(base: Path, place: Path, clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The same runs on one process and on two."""
    folder = tmp_path_factory.mktemp("zero")
    images = write_dataset(folder / "images", text="batch_size = 1\nvalidation_split = 0.25\nvalidation_seed = 1")
    prompts = folder / "prompts.txt"
    prompts.write_text("a red disc --w 64 --h 64 --s 2 --d 1\n")
    # a state's position counts batches over all processes: a step has four of them either way
    one = SETTINGS | {"sample_prompts": prompts, "gradient_accumulation_steps": 4}
    two = one | {"gradient_accumulation_steps": 2}
    run(base, images, folder / "one", **one)
    state = "lora-step00000002-state"
    flags = {f"zero{n}": two | {"zero": n} for n in STAGES}
    flags |= {f"there{n}": two | {"zero": n, "resume": folder / "one" / state} for n in STAGES}
    flags["across"] = two | {"zero": 3, "resume": folder / "zero2" / state}
    run(base, images, folder / "gradients_one", **GRADIENTS, gradient_accumulation_steps=2)
    flags |= {f"gradients{n}": GRADIENTS | {"zero": n} for n in STAGES}
    jobs = [(name, train_one, (arguments(base, images, folder / name, **keys),)) for name, keys in flags.items()]
    for n in STAGES:
        keys = arguments(base, images, folder / f"weighed{n}", max_train_steps=1, mixed_precision="bf16", zero=n)
        jobs.append((f"weighed{n}", train_and_weigh, (keys, folder / f"weighed{n}.json")))
    sizes, qwen = write_images(folder / "sizes"), tiny_qwen_pipeline(folder / "qwen", blocks=3)
    for name, keys in OTHERS.items():
        model = qwen if name == "qwen" else base
        plain = {key: value for key, value in keys.items() if key != "zero"}
        run(model, sizes, folder / f"{name}_one", **SHORT | plain, gradient_accumulation_steps=2)
        jobs.append((name, train_one, (arguments(model, sizes, folder / name, **SHORT | keys),)))

    bad, skipping = spoilt(clean, folder / "spoilt", math.nan), {"max_train_steps": 5, "on_nan": "skip"}
    skipping |= {"log_every_n_steps": 3, "network_dim": 1}  # the host asks after more steps than the bad one
    run(base, bad, folder / "skipped_one", **skipping, gradient_accumulation_steps=2)
    for n in STAGES:
        keys = arguments(base, bad, folder / f"skipped{n}", **skipping, zero=n)
        jobs.append((f"skipped{n}", train_one, (keys,)))
    chat_run(place, folder / "chat_one", gradient_accumulation_steps=2, **CHAT)
    for n in (1, 3):
        keys = chat_flags(place, folder / f"chat{n}", **CHAT | {"gradient_accumulation_steps": 1, "zero": n})
        jobs.append((f"chat{n}", chat_one, (keys,)))
    assert run_in_group(jobs, folder) == dict.fromkeys([name for name, *_ in jobs], "")
    for n in STAGES:
        run(base, images, folder / f"back{n}", **one, resume=folder / f"zero{n}" / state)
    return folder


@on_two_processes
@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_equal_one(runs: Path, stage: int) -> None:
    one, two = lines(runs / "one"), lines(runs / f"zero{stage}")
    assert_same_metrics(one, two, ("loss", "val_loss", "grad_norm"), rel=1e-4)
    assert largest_difference(lora(runs / f"zero{stage}"), lora(runs / "one")) < SAME_IN_FP32
    names = sorted(path.name for path in (runs / "one/samples").iterdir())
    assert sorted(path.name for path in (runs / f"zero{stage}/samples").iterdir()) == names


@on_two_processes
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_the_first_step_are_one_processs(runs: Path, stage: int) -> None:
    one, two = lora(runs / "gradients_one"), lora(runs / f"gradients{stage}")
    gradients = [name for name in one if "lora_B" in name]
    assert all(one[name].abs().max() > 0 for name in gradients)
    for name in gradients:  # 1e-6 of the norm was found for the other layouts, on the same model
        assert (two[name] - one[name]).norm() < 1e-5 * one[name].norm(), name


@on_two_processes
@pytest.mark.parametrize("stage", STAGES)
def test_each_process_holds_what_was_estimated(runs: Path, base: Path, stage: int) -> None:
    weights, optimizer = json.loads((runs / f"weighed{stage}.json").read_text())
    whole = model_numbers(shape_of(str(base)), 16, 24, 4)
    parts = step_parts(whole, StepOptions(), ParallelConfig(dp=2, zero=stage))
    assert optimizer == pytest.approx(parts["optimizer"], rel=2e-3)  # a step counter, and what makes the parts even
    if stage < 3:
        assert weights == parts["weights"]
    else:  # what is as small as a LoRA stays whole beside the part; most of this base's layers are not
        assert parts["weights"] < weights < 1.5 * parts["weights"]


@on_two_processes
@pytest.mark.parametrize("name", ["there1", "there2", "there3", "back1", "back2", "back3", "across"])
def test_a_run_goes_on_under_another_layout(runs: Path, name: str) -> None:
    expected = lora(runs / "one")
    assert largest_difference(lora(runs / name), expected) < SAME_IN_FP32
    assert largest_difference(lora(runs / "one", "lora-step00000002"), expected) > 10 * SAME_IN_FP32


@on_two_processes
@pytest.mark.parametrize("name", list(OTHERS))
def test_what_goes_with_zero(runs: Path, name: str) -> None:
    assert largest_difference(lora(runs / name), lora(runs / f"{name}_one")) < SAME_IN_FP32


@on_two_processes
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_is_not_finite_is_passed_over(runs: Path, stage: int) -> None:
    one, two = lines(runs / "skipped_one"), lines(runs / f"skipped{stage}")
    assert [line.get("updates_dropped") for line in two] == [line.get("updates_dropped") for line in one]
    assert any(line.get("updates_dropped") for line in two)
    assert finite(lora(runs / f"skipped{stage}"))
    assert largest_difference(lora(runs / f"skipped{stage}"), lora(runs / "skipped_one")) < SAME_IN_FP32


@on_two_processes
@pytest.mark.parametrize("stage", [1, 3])
def test_a_language_models_lora_too(runs: Path, stage: int) -> None:
    one, two = adapter(runs / "chat_one/lora"), adapter(runs / f"chat{stage}/lora")
    assert largest_difference(two, one) < SAME_IN_FP32
    answer = "samples/step000003.txt"
    assert (runs / f"chat{stage}" / answer).read_text() == (runs / "chat_one" / answer).read_text()


@on_two_processes
def test_three_processes_have_parts_of_unequal_use(base: Path, tmp_path: Path) -> None:
    """Three divide few sizes: behind the last part there are zeros, which neither weights nor states may get."""
    images = write_dataset(tmp_path / "images", images=6, text="batch_size = 1")
    keys: dict[str, object] = {"network_dim": 1, "save_every_n_steps": 2, "save_state": True} | OTHERS["groups"]
    one = keys | {"zero": None, "gradient_accumulation_steps": 3}
    run(base, images, tmp_path / "one", **one)
    states = {name: tmp_path / name / "lora-step00000002-state" for name in ("one", "zero1", "zero3")}
    jobs = [
        (f"zero{n}", train_one, (arguments(base, images, tmp_path / f"zero{n}", **keys | {"zero": n}),)) for n in (1, 3)
    ]
    keys |= {"zero": 3, "resume": states["one"]}
    jobs.append(("there", train_one, (arguments(base, images, tmp_path / "there", **keys),)))
    assert run_in_group(jobs, tmp_path, 3) == dict.fromkeys(("zero1", "zero3", "there"), "")
    for n in (1, 3):
        run(base, images, tmp_path / f"back{n}", **one, resume=states[f"zero{n}"])
    for name in ("zero1", "zero3", "there", "back1", "back3"):
        assert largest_difference(lora(tmp_path / name), lora(tmp_path / "one")) < SAME_IN_FP32, name


@pytest.mark.skipif(INSTALLED, reason="DeepSpeed is installed")
def test_without_deepspeed_the_command_that_installs_it_is_named() -> None:
    with pytest.raises(UserError, match="pip install .* -r requirements/zero.txt") as caught:
        require_deepspeed()
    assert "\n" not in str(caught.value)


def test_one_process_is_refused(base: Path, tmp_path: Path) -> None:
    images = write_dataset(tmp_path / "images", images=2)
    with pytest.raises(UserError, match="zero = 2 .* several processes; start with torchrun"):
        run(base, images, tmp_path / "out", zero=2)
    assert torch.distributed.is_initialized() is False
