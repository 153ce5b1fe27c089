"""Pipelines for language models that are trained whole: stages of some blocks each, against one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.layouts import assert_same_metrics
from tests.pretraining_runs import flags, lines, run, weights
from tests.training.parallel.test_sharded_pretraining import SAME_IN_FP32, SETTINGS, difference, train_one
from tests.worker_group import run_in_group

ROOT = Path(__file__).resolve().parents[3]
ONE: dict[str, object] = SETTINGS | {"train_batch_size": 8}  # gpt2: head and embedding are one weight of two stages
LLAMA: dict[str, object] = {"layers": 3, "max_train_steps": 3, "train_batch_size": 6}
LLAMA |= {"max_grad_norm": 0.5, "clip_during_warmup": True, "validation_tokens": 320}
LLAMA |= {"pad_vocabulary_to": 64}


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs on one process and on two stages; resumed in the other's layout."""
    folder = tmp_path_factory.mktemp("pipeline")
    run(corpus, folder / "one", **ONE)
    run(corpus, folder / "llama_one", **LLAMA)
    two, state = ONE | {"pp": 2}, folder / "one/model-step00000002-state"
    three: dict[str, object] = {"pp": 2, "microbatches": 3}
    jobs = [
        ("two", train_one, (flags(corpus, folder / "two", **two),)),
        ("there", train_one, (flags(corpus, folder / "there", **two, resume=state),)),
        ("llama_two", train_one, (flags(corpus, folder / "llama_two", **LLAMA, **three),)),
        ("five", train_one, (flags(corpus, folder / "five", **two | {"pp": 2, "layers": 1}),)),
    ]
    said = run_in_group(jobs, folder)
    assert said == {"two": "", "there": "", "llama_two": "", "five": said["five"]}
    assert said["five"] == "pp: 2 stages, but the model has 1 blocks; lower pp"
    run(corpus, folder / "back", **ONE, resume=folder / "two/model-step00000002-state")
    return folder


@pytest.mark.parametrize(("whole", "staged"), [("one", "two"), ("llama_one", "llama_two")])
def test_two_stages_equal_one_process(whole: str, staged: str, runs: Path) -> None:
    one, two = lines(runs / whole), lines(runs / staged)
    assert_same_metrics(one, two, ("loss", "grad_norm", "tokens", "val_loss"), rel=1e-4)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-6)  # the same weights still
    assert difference(weights(runs / whole), weights(runs / staged)) < SAME_IN_FP32


def test_stages_write_together(runs: Path) -> None:
    assert (runs / "two/samples/00000004.txt").read_text() == (runs / "one/samples/00000004.txt").read_text()


def test_states_are_those_of_one_process(runs: Path) -> None:
    states = [runs / name / "model-step00000002-state" for name in ("one", "two")]
    assert [p.name for p in sorted(states[0].iterdir())] == [p.name for p in sorted(states[1].iterdir())]
    assert len({(state / "optimizer.safetensors").stat().st_size for state in states}) == 1
    one, two = (json.loads((state / "optimizer.json").read_text()) for state in states)
    assert one == two


def test_a_run_goes_on_under_another_layout(runs: Path) -> None:
    expected = weights(runs / "one")
    assert difference(expected, weights(runs / "there")) < SAME_IN_FP32
    assert difference(expected, weights(runs / "back")) < SAME_IN_FP32
    assert difference(expected, weights(runs / "one", "model-step00000002")) > 10 * SAME_IN_FP32


# GPT-2's head is its embedding; of these two heads one is its own, and one model norms its heads of queries and keys
@pytest.mark.slow
def test_two_pipelines_share_the_batches(corpus: Path, runs: Path, tmp_path: Path) -> None:
    four = ONE | {"pp": 2, "dp": 2, "train_batch_size": 4}
    deep = ONE | {"layers": 4}
    run(corpus, tmp_path / "deep_one", **deep)
    jobs = [
        ("four", train_one, (flags(corpus, tmp_path / "four", **four),)),
        ("deep", train_one, (flags(corpus, tmp_path / "deep", **deep, pp=4),)),
    ]
    assert run_in_group(jobs, tmp_path, processes=4) == {"four": "", "deep": ""}
    assert difference(weights(tmp_path / "four"), weights(runs / "one")) < SAME_IN_FP32
    assert difference(weights(tmp_path / "deep"), weights(tmp_path / "deep_one")) < SAME_IN_FP32
    for expected, found in zip(lines(runs / "one"), lines(tmp_path / "four"), strict=True):
        for key in ("loss", "grad_norm", "val_loss"):
            assert found.get(key) == (pytest.approx(expected[key], rel=1e-5) if key in expected else None), key


@pytest.mark.parametrize("optimizer", ["Muon", "AdamWScheduleFree"])
def test_models_and_states_of_other_optimizers_are_those_of_one_process(
    optimizer: str, corpus: Path, tmp_path: Path
) -> None:
    if optimizer != "Muon":
        pytest.importorskip("schedulefree")
    settings = ONE | {"optimizer_type": optimizer, "lr_scheduler": "constant", "lr_warmup_steps": None}
    two = settings | {"pp": 2}
    run(corpus, tmp_path / "one", **settings)
    state = tmp_path / "one/model-step00000002-state"
    jobs = [
        ("two", train_one, (flags(corpus, tmp_path / "two", **two),)),
        ("there", train_one, (flags(corpus, tmp_path / "there", **two, resume=state),)),
    ]
    assert run_in_group(jobs, tmp_path) == {"two": "", "there": ""}
    run(corpus, tmp_path / "back", **settings, resume=tmp_path / "two/model-step00000002-state")
    limit = 1e-2 if optimizer == "Muon" else SAME_IN_FP32  # torch's Muon orthogonalises in bf16
    for name in ("two", "there", "back"):
        assert difference(weights(tmp_path / "one"), weights(tmp_path / name)) < limit
    states = [tmp_path / name / "model-step00000002-state" for name in ("one", "two")]
    one, other = (json.loads((state / "optimizer.json").read_text()) for state in states)
    assert one == other
    one, other = (load_file(state / "optimizer.safetensors") for state in states)
    assert difference(one, other) < limit
