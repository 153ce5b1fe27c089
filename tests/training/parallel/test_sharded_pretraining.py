"""FSDP2 for language models: two processes that split the weights, against one that holds them all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import library.accelerator
from library.config.load import load_for
from library.config.schema import ParallelConfig
from library.config.scripts import LLM
from library.errors import UserError
from library.nn.rope import RopeTables
from library.training.parallel.parallelize import check_sharding
from tests.layouts import assert_same_metrics
from tests.pretraining_runs import flags, lines, run, weights
from tests.worker_group import run_in_group
from train_llm import train

ROOT = Path(__file__).resolve().parents[3]

# Gradients are sums of two halves' in fp32, and AdamW's first steps divide by numbers as small as rounding:
# 2.5e-5 was measured after three steps of another tiny model, here 4e-5 of a tensor's norm at most.
SAME_IN_FP32 = 2e-4
SETTINGS: dict[str, object] = {
    "preset": "gpt2-tiny",  # tied head, LayerNorm, biases
    "max_train_steps": 4,
    "tokens_per_batch": 512,  # 2 passes of 8 windows of 32
    "gradient_checkpointing": True,
    "save_every_n_steps": 2,
    "save_state": True,
    "clip_during_warmup": True,
    "max_grad_norm": 0.5,
    "sample_prompts": ["the cat", "a"],
    "sample_every_n_steps": 4,
    "sample_temperature": 0.0,
    "sample_tokens": 4,
    "validation_tokens": 320,  # one process has two batches, the other one
}


def train_one(arguments: list[str]) -> None:
    train(load_for(LLM, arguments))


def train_without_shim(arguments: list[str]) -> None:
    """Train as accelerate would on a CPU if it were left to itself."""
    library.accelerator._let_accelerate_shard_on_a_cpu = lambda timeout: None
    train_one(arguments)


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The same run on one process and on two that split the weights; both resumed in the other's layout."""
    folder = tmp_path_factory.mktemp("sharded")
    one = SETTINGS | {"train_batch_size": 8}
    two = SETTINGS | {"train_batch_size": 4, "shard": 2}
    run(corpus, folder / "one", **one)
    there = two | {"resume": folder / "one/model-step00000002-state"}
    jobs = [
        ("two", train_one, (flags(corpus, folder / "two", **two),)),
        ("there", train_one, (flags(corpus, folder / "there", **there),)),
        ("silent", train_without_shim, (flags(corpus, folder / "silent", **two),)),
        ("four", train_one, (flags(corpus, folder / "four", **two | {"shard": 4}),)),
    ]
    said = run_in_group(jobs, folder)
    run(corpus, folder / "back", **one, resume=folder / "two/model-step00000002-state")
    return folder, said


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two tensors of a name, of the tensor's norm."""
    assert one.keys() == other.keys()
    return max(((one[key] - other[key]).norm() / one[key].norm().clamp_min(1e-3)).item() for key in one)


def test_two_processes_that_split_the_weights_equal_one(runs: tuple[Path, dict[str, str]]) -> None:
    folder, said = runs
    assert said["two"] == ""
    one, two = lines(folder / "one"), lines(folder / "two")
    assert_same_metrics(one, two, ("loss", "grad_norm", "tokens", "val_loss"), rel=1e-4)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-6)  # the same weights still
    assert difference(weights(folder / "one"), weights(folder / "two")) < SAME_IN_FP32
    assert (folder / "two/samples/00000004.txt").read_text() == (folder / "one/samples/00000004.txt").read_text()


def test_a_run_goes_on_under_another_layout(runs: tuple[Path, dict[str, str]]) -> None:
    folder, said = runs
    assert said["there"] == ""
    expected = weights(folder / "one")
    assert difference(expected, weights(folder / "there")) < SAME_IN_FP32
    assert difference(expected, weights(folder / "back")) < SAME_IN_FP32
    assert difference(expected, weights(folder / "one", "model-step00000002")) > 10 * SAME_IN_FP32
    states = [folder / name / "model-step00000002-state" for name in ("one", "two")]
    assert [p.name for p in sorted(states[0].iterdir())] == [p.name for p in sorted(states[1].iterdir())]
    sizes = [(state / "optimizer.safetensors").stat().st_size for state in states]
    assert sizes[0] == sizes[1]


def test_another_layout_than_asked_is_refused(runs: tuple[Path, dict[str, str]]) -> None:
    _, said = runs
    assert said["silent"].startswith("accelerate set up DistributedType.MULTI_CPU, shard = 2 asks for FSDP2")
    assert said["four"] == "shard = 4 needs 4 processes, this run has 2; start with torchrun --nproc-per-node 4"


@pytest.mark.parametrize(
    ("shard", "dp", "processes", "needed"), [(4, None, 2, 4), (2, None, 5, 4), (2, 2, 2, 4), (1, 2, 1, 2), (2, 1, 4, 2)]
)
def test_products_are_checked_against_the_number_of_processes(
    shard: int, dp: int | None, processes: int, needed: int
) -> None:
    with pytest.raises(UserError, match=f"needs {needed} processes, this run has {processes}; start with torchrun"):
        ParallelConfig(shard=shard, dp=dp).replicas(processes)
    assert ParallelConfig(shard=shard, dp=dp).replicas(needed) * shard == needed


def test_a_model_that_was_not_split_is_noticed() -> None:
    class Sharded:
        """An accelerator that says it shards, and did not."""

        distributed_type = library.accelerator.DistributedType.FSDP
        state = type("State", (), {"fsdp_plugin": type("Plugin", (), {"ignored_modules": []})})

    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UserError, match="left 0.weight in another layout than asked"):
        check_sharding(Sharded(), model, ["Linear"])  # type: ignore[arg-type]


def test_tables_that_were_made_for_a_sample_can_be_trained_with() -> None:
    tables = RopeTables(8, 10000.0, None)
    with torch.inference_mode():
        tables.table(4, torch.device("cpu"))
    cos, _ = tables.table(4, torch.device("cpu"))
    x = torch.ones(4, 4, requires_grad=True)
    (x * cos[:4]).sum().backward()
    assert torch.equal(x.grad, cos[:4])
