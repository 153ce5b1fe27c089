"""FSDP2 for LoRAs: two processes that split the frozen weights, against one that holds them all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.layouts import SETTINGS, assert_goes_on_either_way, assert_same_runs, chat_one, lines, train_one
from tests.runs import arguments, largest_difference, lora, run, write_dataset
from tests.training.tasks.test_chat_lora_runs import adapter, place  # noqa: F401  # the fixture
from tests.training.tasks.test_chat_lora_runs import flags as chat_flags
from tests.training.tasks.test_chat_lora_runs import run as chat_run
from tests.worker_group import run_in_group

SAME_IN_FP32 = 2e-4  # gradients of halves are averaged instead of one mean over the batches, as under DDP
# Adafactor keeps sums over whole rows and columns, which a split weight does not have: LoRA weights are not split.
FP8: dict[str, object] = {"max_train_steps": 2, "fp8_scaled": True, "optimizer_type": "Adafactor"}
CHAT: dict[str, object] = {
    "max_train_steps": 3,
    "network_dropout": 0.0,
    "train_batch_size": 1,
    "packing": True,
    "max_length": 20,
    "sample_prompts": ["say 1"],
    "sample_tokens": 6,
}


@pytest.fixture(scope="module")
def runs(base: Path, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The same runs on one process and on two that split the weights."""
    folder = tmp_path_factory.mktemp("sharded")
    images = write_dataset(folder / "images", text="batch_size = 1\nvalidation_split = 0.25\nvalidation_seed = 1")
    prompts = folder / "prompts.txt"
    prompts.write_text("a red disc --w 64 --h 64 --s 2 --d 1\n")
    # a state's position counts batches over all processes: a step has four of them either way
    one = SETTINGS | {"sample_prompts": prompts, "gradient_accumulation_steps": 4}
    two = one | {"gradient_accumulation_steps": 2, "shard": 2}
    run(base, images, folder / "one", **one)
    run(base, images, folder / "fp8_one", **FP8, gradient_accumulation_steps=2)
    chat_run(place, folder / "chat_one", gradient_accumulation_steps=2, **CHAT)
    chat_two = CHAT | {"gradient_accumulation_steps": 1, "shard": 2}
    state = folder / "one/lora-step00000002-state"
    jobs = [
        ("two", train_one, (arguments(base, images, folder / "two", **two),)),
        ("there", train_one, (arguments(base, images, folder / "there", **two, resume=state),)),
        ("fp8_two", train_one, (arguments(base, images, folder / "fp8_two", **FP8, shard=2),)),
        ("chat_two", chat_one, (chat_flags(place, folder / "chat_two", **chat_two),)),
    ]
    assert run_in_group(jobs, folder) == dict.fromkeys(("two", "there", "fp8_two", "chat_two"), "")
    run(base, images, folder / "back", **one, resume=folder / "two/lora-step00000002-state")
    return folder


def test_two_processes_that_split_the_base_equal_one(runs: Path) -> None:
    assert_same_runs(runs, rel=1e-4, within=SAME_IN_FP32)


def test_the_metrics_have_each_processs_own_speed_and_memory(runs: Path) -> None:
    kinds = ("samples_per_s", "s_per_it", "data_wait_s", "peak_mem_bytes")
    for folder, ranks in (("one", []), ("two", ["0", "1"])):
        trained = [line for line in lines(runs / folder) if "loss" in line]
        for line in trained:
            assert [key for key in line if "/" in key and key.split("/")[0] in kinds] == [
                f"{kind}/{rank}" for kind in kinds for rank in ranks
            ]
    # four batches of one image a step, of which each process has two; they wait for each other in every step
    line = trained[-1]
    assert line["samples_per_s"] * line["s_per_it"] == pytest.approx(4)
    assert all(line[f"samples_per_s/{r}"] * line[f"s_per_it/{r}"] == pytest.approx(2) for r in ranks)
    assert line["s_per_it/0"] == line["s_per_it"]
    assert line["s_per_it/1"] == pytest.approx(line["s_per_it/0"], rel=0.5)
    assert line["peak_mem_bytes/1"] > 2**20


def test_a_run_goes_on_under_another_layout(runs: Path) -> None:
    assert_goes_on_either_way(runs, SAME_IN_FP32)


def test_an_fp8_base_is_split_and_any_optimizer_trains(runs: Path) -> None:
    assert largest_difference(lora(runs / "fp8_two"), lora(runs / "fp8_one")) < SAME_IN_FP32


def test_a_language_models_lora_too(runs: Path) -> None:
    one, two = adapter(runs / "chat_one/lora"), adapter(runs / "chat_two/lora")
    assert largest_difference(two, one) < SAME_IN_FP32
    answer = "samples/step000003.txt"
    assert (runs / "chat_two" / answer).read_text() == (runs / "chat_one" / answer).read_text()


def test_gradients_of_split_runs_are_means_over_processes(tmp_path: Path) -> None:
    said = run_in_group([("shared", share, (tmp_path,))], tmp_path)
    assert said == {"shared": ""}
    first, second = (torch.load(tmp_path / f"gradients{rank}.pt") for rank in range(2))
    assert torch.equal(first[0], torch.tensor([1.5, 3.0]))  # the mean of (1, 2) and of (2, 4)
    assert torch.equal(first[1], torch.tensor([[0.5]]))  # of 1 and none
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def share(folder: Path) -> None:
    from library.accelerator import build_accelerator
    from library.config.schema import AccelerateConfig, LoggingConfig, ParallelConfig, SavingConfig, TrainingConfig
    from library.training.parallel.step import average_gradients

    saving = SavingConfig(output_dir=str(folder))
    accelerator = build_accelerator(
        AccelerateConfig(), TrainingConfig(), saving, LoggingConfig(), ParallelConfig(shard=2)
    )
    rank = accelerator.process_index
    trained = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1, 1))]
    trained[0].grad = torch.tensor([1.0, 2.0]) * (rank + 1)
    trained[1].grad = torch.ones(1, 1) if rank == 0 else None
    average_gradients(accelerator, trained)
    torch.save([parameter.grad for parameter in trained], folder / f"gradients{rank}.pt")
