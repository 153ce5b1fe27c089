"""Do the benchmarks measure the same work for everyone, and does each case run? Tiny models, on the CPU."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize

import bench.gpu as gpu
import bench.train_step as train_step
from bench.card_step import _NAMES, StepCase, measured, relative_error
from bench.families import FAMILIES, Sizes, build_transformer
from bench.measure import KEEPING, WAITING, Case, Children, Job, both_ways, finish, measure_memory, measure_time, reason
from bench.preservation import at_equal_learning
from bench.served_formats import as_q4_1
from library.models.family_by_name import family_class
from library.precision.linear import QuantizedLinear
from tests.bench.light_cases import BUSY, HELD, KEPT, PASSING, WAITS, Step, no_step, process_of
from tests.forked import fork_server
from tests.precision.files.gguf_files import blocks_of

TINY = Sizes(width=256, head_dim=64, blocks=(1, 2), image_sides=(4, 4), text_tokens=8)


@pytest.fixture(scope="module", autouse=True)
def _every_tests_fork_server() -> None:
    """A process has one: what a benchmark would start has too little imported for the tests after these."""
    fork_server()


@pytest.mark.parametrize("family", FAMILIES)
def test_tandem_and_peft_take_the_same_step(family: str) -> None:
    # random base, lora_B zero, the same seeds: the first loss is that of the base in both
    losses = [train_step.build_step(trainer, family, TINY, "fp32", False).step() for trainer in ("tandem", "peft")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    trained = [
        sum(p.numel() for p in train_step.build_step(trainer, family, TINY, "bf16", True).trained)
        for trainer in ("tandem", "peft")
    ]
    assert trained[0] == trained[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_fp8_base_is_one_with_both_and_changes_the_loss_little(family: str) -> None:
    exact = train_step.build_step("tandem", family, TINY, "fp32", False).step()
    for trainer in ("tandem", "peft"):
        step = train_step.build_step(trainer, family, TINY, "fp8", False)
        layers = [m.base_layer for m in step.model.modules() if hasattr(m, "base_layer")] or fp8_layers(step.model)
        assert layers
        assert all(layer.weight.dtype == torch.float8_e4m3fn for layer in layers)
        # three mantissa bits in weights whose signs cancel; the target's variance of 1 is most of this loss
        assert step.step() == pytest.approx(exact, rel=0.03)


def fp8_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if isinstance(m, QuantizedLinear)]


def test_every_program_is_alone_in_a_process_and_others_have_tandems_settings_in_one_more() -> None:
    """And what counts is the time that a step computes, not the time that it waits."""
    ours = {name: WAITING.get(name, KEEPING.get(name)) for name in (*WAITING, *KEEPING)}
    before = dict(os.environ)
    cases = both_ways({"tandem": Case(Step, ()), "peft": Case(Step, ())}, WAITING | KEEPING)
    found = measure_time(cases, rounds=2, take=process_of)
    assert dict(os.environ) == before
    assert len({process for turns in found.values() for process, *_ in turns} | {os.getpid()}) == 4
    settings = {name: {**turns[0][1]} for name, turns in found.items()}
    assert settings["tandem"] == settings["peft, same settings"] == ours
    assert {settings["peft"][name] for name in KEEPING} == {None}
    seconds = [taken for turns in found.values() for *_, taken in turns]
    assert len(seconds) == 6
    assert all(BUSY <= taken < BUSY + WAITS for taken in seconds)


def test_ratios_are_the_worst_and_keep_quantised_bases_apart() -> None:
    taken = {  # seconds and MiB: Tandem's, peft's
        "bf16": ((1.0, 6.0), (2.0, 8.0)),
        "fp32": ((3.0, 1.0), (4.0, 2.0)),
        "fp8": ((1.0, 1.0), (4.0, 10.0)),
        "int8_row": ((3.0, 9.0), None),
    }
    rows = []
    for dtype, pair in taken.items():
        for trainer, values in zip(train_step.TRAINERS, pair, strict=True):
            if values is None:
                continue
            row: dict = {"dtype": dtype, "trainer": trainer, "step_s": values[0], "added_mib": values[1]}
            if pair[1] is not None:
                row |= train_step.over("peft", row, dict(zip(("step_s", "added_mib"), pair[1], strict=True)))
            if dtype not in ("bf16", "fp32"):
                row |= train_step.over("bf16", row, {"step_s": 1.0, "added_mib": 6.0})
            rows.append(row)
    assert train_step.ratios(rows) == {
        "time_over_peft": 0.75,
        "memory_over_peft": 0.75,
        "time_over_peft_fp8": 0.25,
        "memory_over_peft_fp8": 0.1,
        "time_over_bf16_fp8": 1.0,
        "memory_over_bf16_fp8": pytest.approx(1 / 6),
        "time_over_bf16_int8_row": 3.0,
        "memory_over_bf16_int8_row": 1.5,
    }


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_case_is_what_its_steps_add() -> None:
    found = measure_memory({"tandem": Case(Step, ())})["tandem"]
    assert found["added_mib"] == pytest.approx(KEPT + PASSING, abs=2)  # and what the allocator rounds up
    assert found["peak_mib"] > HELD + KEPT + PASSING
    assert found["weights_mib"] == HELD


@pytest.mark.parametrize("trainer", train_step.TRAINERS)
def test_the_base_is_as_large_as_its_weights(trainer: str) -> None:
    transformer = build_transformer("flux", TINY, torch.bfloat16)
    weights = sum(parameter.numel() for parameter in transformer.parameters()) * 2
    assert train_step.build_step(trainer, "flux", TINY, "bf16", False).base_bytes == pytest.approx(weights, rel=0.01)


def test_a_case_that_dies_is_named() -> None:
    with pytest.raises(RuntimeError, match="case 'broken' ended with exit code 1; its error is above"):
        measure_time({"broken": Case(no_step, ())}, rounds=1)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "family", [pytest.param("flux"), *(pytest.param(o, marks=pytest.mark.slow) for o in gpu.OTHERS)]
)
def test_a_step_of_every_family_is_taken_twice_alike(family: str) -> None:
    case = StepCase(family, compiled=family == "flux", graph=True)
    plain, graphed = measured(case, 2, 1, True, (), CPU)
    assert (plain["graphed"], graphed.get("graphed", True)) == (False, True)
    assert plain["step_s"] > 0
    assert plain["peak_gib"] > plain["weights_gib"] > 0
    assert graphed["graph_error"] == 0.0  # there is no graph on a CPU: it is the same step once more
    (again,) = measured(StepCase(family), 2, 0, True, (), CPU)
    assert again["losses"] == pytest.approx(plain["losses"], rel=1e-3)  # compiled, bf16 is rounded in other places
    assert abs(plain["gradients"]).max() > 0


def test_products_in_eight_bits_are_near_those_in_bf16() -> None:
    rows = {base: next(measured(StepCase("flux", base), 1, 0, True, (), CPU)) for base in ("bf16", "row", "int8_row")}
    for base, limit in (("row", 0.2), ("int8_row", 0.1)):  # three bits of mantissa, and seven, in a dozen layers
        found, wanted = (torch.from_numpy(rows[name]["gradients"]) for name in (base, "bf16"))
        assert 1e-3 < relative_error(found, wanted) < limit
        assert rows[base]["weights_gib"] < 0.7 * rows["bf16"]["weights_gib"]


def published_depths(family_name: str) -> tuple[int, ...]:
    """Return how many blocks of each kind the published model has, in the order of ``Family.depths``."""
    family = family_class(family_name)
    published, _ = family.published_like(_NAMES.get(family_name, ""))
    defaults = inspect.signature(family.transformer_class.__init__).parameters
    return tuple(published.get(name, defaults[name].default) for name in family.depths)


def test_models_have_their_published_depths() -> None:
    depths = {family: published_depths(family) for family in ("flux", *gpu.OTHERS)}
    assert depths == {
        "flux": (19, 38),
        "qwen_image": (60,),
        "z_image": (30,),
        "krea2": (28, 2, 2),
        "flux2_klein": (8, 24),
    }
    for family, sizes in FAMILIES.items():
        assert depths[family] == sizes.blocks


def test_every_job_has_a_name_and_every_check_a_reference() -> None:
    for tiny in (True, False):
        names = [job.name for part in gpu.parts(tiny) for job in part.jobs]
        assert len(names) == len(set(names))
        for check in gpu.checks():
            assert names.index(f"{check.reference} on a CPU") < names.index(check.job_name())


def test_a_check_is_right_within_its_limit() -> None:
    check, steps = gpu.checks()[0], {}
    one, other = np.ones(4, np.float32), np.array([1, 1, 1, 1 + check.limit * 4], np.float32)
    step = {"losses": [1.0, 2.0], "gradients": other}
    assert gpu.compared(check.job_name(), step | {"gradients": one}, steps)["verdict"] == "?"
    gpu.compared(f"{check.reference} on a CPU", {**step}, steps)
    found = gpu.compared(check.job_name(), step | {"gradients": one}, steps)
    assert found["gradient_error"] == pytest.approx(np.linalg.norm(other - one) / np.linalg.norm(other))
    assert (found["loss_error"], found["verdict"]) == (0, "WRONG")
    rows = [gpu.compared(check.job_name(), step | {"graph_error": check.limit * by}, steps) for by in (0.5, 2)]
    rows.append(gpu.compared(gpu.checks()[1].job_name(), {"error": "out of memory"}, steps))
    assert [row["verdict"] for row in rows] == ["right", "WRONG", "failed"]
    assert gpu.ratios(rows)["checks_not_right"] == 2


def test_steps_are_set_beside_bf16_and_peft() -> None:
    steps, found = {}, list[dict]()
    first = {"step_s": 1.0, "losses": [1.0], "gradients": np.ones(1)}
    found.append({"case": gpu.FLUX.name()} | gpu.compared(gpu.FLUX.name(), first, steps))
    second = {"step_s": 0.9, "losses": [1.1], "gradients": np.ones(1)}
    found.append({"case": "flux, row"} | gpu.compared("flux, row", second, steps))
    assert found[1]["loss_error"] == pytest.approx(0.1)
    found.append({"case": gpu.PEFT, "step_s": 2.0})
    assert gpu.ratios(found) == {"fp8_over_bf16_eager": 0.9, "bf16_over_peft_eager": 0.5}


@pytest.mark.slow
def test_a_step_of_peft_runs() -> None:
    (found,) = [each for part in gpu.parts(tiny=True) for each in part.jobs if each.name == gpu.PEFT]
    for row in found.rows(*found.arguments, CPU):
        assert min(value for value in row.values() if isinstance(value, float)) > 0


@pytest.mark.slow
def test_the_gpu_benchmark_reports_failures_as_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = gpu.step_job(gpu.FLUX, tiny=True)
    jobs = [good, Job("broken", measured, (StepCase("x"), 1, 1, True, ()), 60)]
    part = gpu.Part("flux", jobs, {"case": "<20", "step_s": "8.3f"}, 240)
    rows = gpu.run([part], Children("cpu", minutes=4), tiny=True)
    assert rows[0]["step_s"] > 0
    assert rows[1]["error"] == "KeyError: 'x'"
    assert "flux, bf16" in capsys.readouterr().out
    late = gpu.run([part._replace(jobs=[good])], Children("cpu", minutes=0), tiny=True)
    assert late[0]["error"] == "left out: the time was up"
    finish(rows, gpu.ratios(rows), tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()).keys() == {"machine", "commit", "rows", "ratios"}


def test_a_case_that_takes_too_long_is_stopped() -> None:
    children = Children("cpu", minutes=2)
    rows = children.rows(Job("slow", measured, (gpu.FLUX, 1000, 1, True, ()), seconds=1))
    assert rows[-1] == {"error": "stopped after 1 s"}
    assert not multiprocessing.active_children()


def test_what_is_not_installed_is_left_out_by_name() -> None:
    error = ModuleNotFoundError("No module named 'bitsandbytes'", name="bitsandbytes")
    assert reason(error) == "left out: needs bitsandbytes, which is not installed"
    assert reason(torch.OutOfMemoryError("CUDA out of memory. Tried ...")) == "out of memory"


def test_without_a_gpu_the_benchmark_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit):
        gpu.main()


def test_blocks_of_q4_k_written_as_q4_1_stand_for_the_same_numbers() -> None:
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    blocks = blocks_of(weight, "Q4_K")
    wanted = dequantize(blocks, GGMLQuantizationType.Q4_K)  # the gguf package's answer for both
    found = dequantize(as_q4_1(blocks).reshape(40, -1), GGMLQuantizationType.Q4_1)
    # a scale and a minimum, each rounded to fp16: half a unit in the last of 11 bits of up to 4 in size
    assert abs(found - wanted).max() < 2 * 2**-11 * abs(wanted).max() + 4 * 2**-11
    assert abs(wanted - weight.numpy()).max() > 0.1


def test_ways_are_compared_where_all_of_a_case_have_learnt_as_much() -> None:
    # of each validation: seconds, held-out loss, change elsewhere; the slow way reaches 0.6 in one case, 0.9 in another
    quick = np.array([[0.0, 10.0, 20.0], [1.0, 0.5, 0.4], [0.0, 0.2, 0.4]])
    slow = [np.array([[0.0, 10.0, 20.0], [1.0, low + 0.1, low], [0.0, 0.1, 0.3]]) for low in (0.6, 0.9)]
    cases = [("zorbo", 1), ("zorbo", 2)]
    found = at_equal_learning({"quick": dict.fromkeys(cases, quick), "slow": dict(zip(cases, slow, strict=True))})
    np.testing.assert_allclose(found["quick"], [[8, 0.6, 0.16], [2, 0.9, 0.04]])
    np.testing.assert_allclose(found["slow"], [[20, 0.6, 0.3], [20, 0.9, 0.3]])
