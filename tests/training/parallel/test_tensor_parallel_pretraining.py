"""Tensor parallelism for language models: two processes that have the layers together, against one with them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts import assert_same_metrics
from tests.pretraining_runs import flags, lines, run, weights
from tests.training.parallel.test_sharded_pretraining import SETTINGS, difference, train_one
from tests.worker_group import run_in_group

SAME_IN_FP32 = 2e-4  # as of the same run under FSDP2
LLAMA: dict[str, object] = {"preset": "llama-tiny", "kv_heads": 2, "max_train_steps": 3, "tokens_per_batch": 256}
LLAMA |= {"train_batch_size": 8}


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The same run on one process and on two that have the layers together; both resumed in the other's layout."""
    folder = tmp_path_factory.mktemp("tensor")
    one = SETTINGS | {"train_batch_size": 8}
    two = one | {"tp": 2}
    run(corpus, folder / "one", **one)
    run(corpus, folder / "llama_one", **LLAMA)
    there = two | {"resume": folder / "one/model-step00000002-state"}
    jobs = [
        ("two", train_one, (flags(corpus, folder / "two", **two),)),
        ("there", train_one, (flags(corpus, folder / "there", **there),)),
        ("llama_two", train_one, (flags(corpus, folder / "llama_two", **LLAMA, tp=2),)),
        ("odd", train_one, (flags(corpus, folder / "odd", **LLAMA | {"kv_heads": 1}, tp=2),)),
    ]
    said = run_in_group(jobs, folder)
    run(corpus, folder / "back", **one, resume=folder / "two/model-step00000002-state")
    return folder, said


def test_two_processes_that_have_the_layers_together_equal_one(runs: tuple[Path, dict[str, str]]) -> None:
    folder, said = runs
    assert said["two"] == ""
    one, two = lines(folder / "one"), lines(folder / "two")
    assert_same_metrics(one, two, ("loss", "grad_norm", "tokens", "val_loss"), rel=1e-4)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-6)  # the same weights still
    assert difference(weights(folder / "one"), weights(folder / "two")) < SAME_IN_FP32
    assert (folder / "two/samples/00000004.txt").read_text() == (folder / "one/samples/00000004.txt").read_text()


def test_grouped_heads_are_split_with_their_keys(runs: tuple[Path, dict[str, str]]) -> None:
    folder, said = runs
    assert said["llama_two"] == ""
    assert difference(weights(folder / "llama_one"), weights(folder / "llama_two")) < SAME_IN_FP32
    assert said["odd"] == "tp: kv_heads = 1 cannot be split among 2 processes; set a divisor"


def test_a_run_goes_on_under_another_layout(runs: tuple[Path, dict[str, str]]) -> None:
    folder, said = runs
    assert said["there"] == ""
    expected = weights(folder / "one")
    assert difference(expected, weights(folder / "there")) < SAME_IN_FP32
    assert difference(expected, weights(folder / "back")) < SAME_IN_FP32
    states = [folder / name / "model-step00000002-state" for name in ("one", "two")]
    for file in ("optimizer.safetensors", "weights.safetensors"):
        assert len({(state / file).stat().st_size for state in states}) == 1


@pytest.mark.slow
def test_replicas_of_split_layers_equal_one_process(corpus: Path, tmp_path: Path) -> None:
    many = SETTINGS | {"tp": 2, "dp": 2, "train_batch_size": 4}
    run(corpus, tmp_path / "one", **SETTINGS, train_batch_size=8)
    there = many | {"resume": tmp_path / "one/model-step00000002-state"}
    jobs = [
        ("many", train_one, (flags(corpus, tmp_path / "many", **many),)),
        ("there", train_one, (flags(corpus, tmp_path / "there", **there),)),
    ]
    assert run_in_group(jobs, tmp_path, processes=4) == {"many": "", "there": ""}
    run(corpus, tmp_path / "back", **SETTINGS, train_batch_size=8, resume=tmp_path / "many/model-step00000002-state")
    one, found = lines(tmp_path / "one"), lines(tmp_path / "many")
    assert [line["step"] for line in found] == [line["step"] for line in one]
    for expected, line in zip(one, found, strict=True):
        for key in ("loss", "grad_norm", "tokens", "val_loss"):
            assert line.get(key) == (pytest.approx(expected[key], rel=1e-4) if key in expected else None)
    for name in ("many", "there", "back"):
        assert difference(weights(tmp_path / "one"), weights(tmp_path / name)) < SAME_IN_FP32
    assert (tmp_path / "many/samples/00000004.txt").read_text() == (tmp_path / "one/samples/00000004.txt").read_text()
