"""Language models that are trained whole, under each layout of two processes, against the same run on one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import library.accelerator
from library.config.run_schema import ParallelConfig
from library.errors import UserError
from library.nn.rope import RopeTables
from library.training.parallel.parallelize import check_sharding
from tests.pretraining_runs import flags, run, train_flags, weights
from tests.runs import assert_same_metrics, metrics
from tests.worker_group import Job, run_in_group

Settings = dict[str, object]

# Gradients are sums of two halves' in fp32, and AdamW's first steps divide by numbers as small as rounding:
# 2.5e-5 was measured after three steps of another tiny model, here 4e-5 of a tensor's norm at most.
SAME_IN_FP32 = 2e-4
STATE = "model-step00000002-state"
KEYS = ("loss", "grad_norm", "tokens", "val_loss")
ONE: Settings = {
    "preset": "gpt2-tiny",  # LayerNorm, biases, and one weight for embedding and head, in both stages of a pipeline
    "max_train_steps": 4,
    "train_batch_size": 8,
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
LAYOUTS: dict[str, Settings] = {"shard": {"shard": 2, "train_batch_size": 4}, "tp": {"tp": 2}, "pp": {"pp": 2}}
GROUPED: Settings = {"kv_heads": 2, "max_train_steps": 3, "tokens_per_batch": 256, "train_batch_size": 8}
UNEVEN: Settings = {"layers": 3, "max_train_steps": 3, "train_batch_size": 6, "max_grad_norm": 0.5}
UNEVEN |= {"clip_during_warmup": True, "validation_tokens": 320, "pad_vocabulary_to": 64}
# a Llama: on one process, and what changes on two
LLAMAS: dict[str, tuple[Settings, Settings]] = {
    "tp": (GROUPED, {"tp": 2}),
    "pp": (UNEVEN, {"pp": 2, "microbatches": 3}),
}
REFUSED: dict[str, tuple[Settings, str]] = {
    "shard": (
        ONE | {"shard": 4},
        "shard = 4 needs 4 processes, this run has 2; start with torchrun --nproc-per-node 4",
    ),
    "tp": (GROUPED | {"kv_heads": 1, "tp": 2}, "tp: kv_heads = 1 cannot be split among 2 processes; set a divisor"),
    "pp": (ONE | {"layers": 1, "pp": 2}, "pp: 2 stages, but the model has 1 blocks; lower pp"),
}


class Runs(NamedTuple):
    layout: str
    folder: Path
    messages: dict[str, str]


def train_without_shim(arguments: list[str]) -> None:
    """Train as accelerate would on a CPU if it were left to itself."""
    library.accelerator._let_accelerate_shard_on_a_cpu = lambda timeout: None
    train_flags(arguments)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two tensors of a name, of the tensor's norm."""
    assert one.keys() == other.keys()
    return max(((one[key] - other[key]).norm() / one[key].norm().clamp_min(1e-3)).item() for key in one)


@pytest.fixture(scope="module")
def one(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one process."""
    folder = tmp_path_factory.mktemp("one")
    run(corpus, folder, **ONE)
    return folder


@pytest.fixture(scope="module", params=LAYOUTS)
def runs(request: pytest.FixtureRequest, corpus: Path, one: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The run on two processes; ``there`` and ``back``, which change between the layouts at step 2; and a Llama."""
    layout, folder = request.param, tmp_path_factory.mktemp(request.param)
    two = ONE | LAYOUTS[layout]
    several: dict[str, Settings] = {"two": two, "there": two | {"resume": one / STATE}, "refused": REFUSED[layout][0]}
    if layout in LLAMAS:
        settings, more = LLAMAS[layout]
        run(corpus, folder / "llama_one", **settings)
        several["llama"] = settings | more
    jobs: list[Job] = [(name, train_flags, (flags(corpus, folder / name, **keys),)) for name, keys in several.items()]
    if layout == "shard":
        jobs.append(("silent", train_without_shim, (flags(corpus, folder / "silent", **two),)))
    messages = run_in_group(jobs, folder)
    run(corpus, folder / "back", **ONE, resume=folder / "two" / STATE)
    return Runs(layout, folder, messages)


def test_two_processes_equal_one(runs: Runs, one: Path) -> None:
    two = runs.folder / "two"
    assert runs.messages["two"] == ""
    assert_same_metrics(metrics(one), metrics(two), KEYS, rel=1e-4)
    assert metrics(two)[0]["grad_norm"] == pytest.approx(metrics(one)[0]["grad_norm"], rel=1e-6)  # the same weights
    assert difference(weights(one), weights(two)) < SAME_IN_FP32
    assert (two / "samples/00000004.txt").read_text() == (one / "samples/00000004.txt").read_text()
    if runs.layout in LLAMAS:
        assert runs.messages["llama"] == ""
        pair = runs.folder / "llama_one", runs.folder / "llama"
        assert_same_metrics(*map(metrics, pair), KEYS, rel=1e-4)
        assert difference(*map(weights, pair)) < SAME_IN_FP32


def test_a_run_goes_on_under_another_layout(runs: Runs, one: Path) -> None:
    assert runs.messages["there"] == ""
    expected = weights(one)
    for name in ("there", "back"):
        assert difference(expected, weights(runs.folder / name)) < SAME_IN_FP32, name
    assert difference(expected, weights(one, "model-step00000002")) > 10 * SAME_IN_FP32
    states = [folder / STATE for folder in (one, runs.folder / "two")]
    assert [p.name for p in sorted(states[0].iterdir())] == [p.name for p in sorted(states[1].iterdir())]
    for file in ("optimizer.safetensors", "weights.safetensors"):
        assert len({(state / file).stat().st_size for state in states}) == 1, file
    if runs.layout == "pp":
        first, second = (json.loads((state / "optimizer.json").read_text()) for state in states)
        assert first == second


def test_another_layout_than_asked_is_refused(runs: Runs) -> None:
    assert runs.messages["refused"] == REFUSED[runs.layout][1]
    if runs.layout == "shard":
        expected = "accelerate set up DistributedType.MULTI_CPU, shard = 2 asks for FSDP2"
        assert runs.messages["silent"].startswith(expected)


@pytest.mark.slow
def test_replicas_of_split_models_equal_one_process(corpus: Path, one: Path, tmp_path: Path) -> None:
    deep = ONE | {"layers": 4}
    run(corpus, tmp_path / "deep_one", **deep)
    half: Settings = {"dp": 2, "train_batch_size": 4}
    several: dict[str, Settings] = {
        "pp": ONE | half | {"pp": 2},
        "deep": deep | {"pp": 4},
        "tp": ONE | half | {"tp": 2},
        "there": ONE | half | {"tp": 2, "resume": one / STATE},
    }
    jobs: list[Job] = [(name, train_flags, (flags(corpus, tmp_path / name, **keys),)) for name, keys in several.items()]
    assert run_in_group(jobs, tmp_path, processes=4) == dict.fromkeys(several, "")
    run(corpus, tmp_path / "back", **ONE, resume=tmp_path / "tp" / STATE)
    for name in ("pp", "tp"):
        assert_same_metrics(metrics(one), metrics(tmp_path / name), KEYS, rel=1e-4)
    for name in ("pp", "tp", "there", "back"):
        assert difference(weights(one), weights(tmp_path / name)) < SAME_IN_FP32, name
    assert difference(weights(tmp_path / "deep"), weights(tmp_path / "deep_one")) < SAME_IN_FP32
    assert (tmp_path / "tp/samples/00000004.txt").read_text() == (one / "samples/00000004.txt").read_text()


@pytest.mark.parametrize("optimizer", ["Muon", "AdamWScheduleFree"])
def test_models_and_states_of_other_optimizers_in_a_pipeline_are_those_of_one_process(
    optimizer: str, corpus: Path, tmp_path: Path
) -> None:
    if optimizer != "Muon":
        pytest.importorskip("schedulefree")
    settings = ONE | {"optimizer_type": optimizer, "lr_scheduler": "constant", "lr_warmup_steps": None}
    two = settings | {"pp": 2}
    run(corpus, tmp_path / "one", **settings)
    jobs: list[Job] = [
        ("two", train_flags, (flags(corpus, tmp_path / "two", **two),)),
        ("there", train_flags, (flags(corpus, tmp_path / "there", **two, resume=tmp_path / "one" / STATE),)),
    ]
    assert run_in_group(jobs, tmp_path) == {"two": "", "there": ""}
    run(corpus, tmp_path / "back", **settings, resume=tmp_path / "two" / STATE)
    limit = 1e-2 if optimizer == "Muon" else SAME_IN_FP32  # torch's Muon orthogonalises in bf16
    for name in ("two", "there", "back"):
        assert difference(weights(tmp_path / "one"), weights(tmp_path / name)) < limit
    states = [tmp_path / name / STATE for name in ("one", "two")]
    first, second = (json.loads((state / "optimizer.json").read_text()) for state in states)
    assert first == second
    assert difference(*(load_file(state / "optimizer.safetensors") for state in states)) < limit


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
