"""Do the benchmarks measure the same work for everyone, and does each case run? Tiny models, on the CPU."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bench.gpu as gpu
import bench.train_step as train_step
from bench.families import FAMILIES, Sizes, build_transformer, call_transformer
from bench.gpu import GpuCase, Job, cases
from bench.measure import finish, measure, measure_memory, measure_time, reason
from bench.served_formats import as_q4_1
from library.precision.linear import QuantizedLinear
from tests.forked import fork_server
from tests.precision.files.gguf_files import blocks_of

TINY_QWEN = Sizes(width=256, head_dim=64, blocks=(2,), image_sides=(4, 4), text_tokens=8)
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


def test_steps_are_timed_in_a_process_of_their_own() -> None:
    case = (train_step.build_step, ("tandem", "qwen_image", TINY_QWEN, "bf16", False, 4))
    row = measure({"tandem": case}, rounds=3, memory_processes=0)["tandem"]
    assert row["step_s"] >= row["step_min_s"] > 0


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


def test_step_flops_are_those_of_the_published_count() -> None:
    # 11.3 billion weights of FLUX.1's blocks see 4608 tokens; doubles count twice but see a part of the tokens each
    linear, attention = FAMILIES["flux"].forward_flops()
    assert linear == 2 * 12 * 3072**2 * 4608 * 57
    assert attention == 4 * 4608**2 * 3072 * 57
    # Qwen-Image's 60 blocks have the same layers for each token, once for text and once for images
    assert FAMILIES["qwen_image"].forward_flops()[0] == 2 * 12 * 3072**2 * 4608 * 60
    assert FAMILIES["flux"].step_flops() / 1e12 == pytest.approx(164, abs=0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_flops_are_those_that_torch_counts(family: str) -> None:
    sizes = Sizes(width=512, blocks=(3,) * len(FAMILIES[family].blocks), image_sides=(16, 16), text_tokens=64)
    inputs = train_step.example_inputs(family, sizes, torch.device("cpu"))
    transformer = build_transformer(family, sizes, torch.float32)
    # attention as plain products, which torch counts on a CPU
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call_transformer(transformer, inputs)
    counts = counter.get_flop_counts()
    blocks = [name for name in counts if name.count(".") == 2 and name.rpartition(".")[2].isdigit()]
    # modulations, which torch counts too, see one vector a sample instead of its 320 tokens
    assert sum(sum(counts[name].values()) for name in blocks) == pytest.approx(sum(sizes.forward_flops()), rel=0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_case_is_what_its_steps_add() -> None:
    found = measure_memory({"tandem": (train_step.build_step, ("tandem", "flux", TINY, "bf16", False))})["tandem"]
    assert 0 < found["added_mib"] < found["peak_mib"]
    assert found["weights_mib"] == pytest.approx(_base_mib(TINY), rel=0.01)


def _base_mib(sizes: Sizes) -> float:
    transformer = build_transformer("flux", sizes, torch.bfloat16)
    return sum(p.numel() for p in transformer.parameters()) * 2 / 2**20


def test_a_case_that_dies_is_named() -> None:
    with pytest.raises(RuntimeError, match="case 'broken' ended with exit code 1; its error is above"):
        measure_time({"broken": (train_step.build_step, ("tandem", "no such family", TINY, "bf16", False))}, rounds=1)


RUN_HERE = [case for case in cases(["flux"]) if case.batch == 1 and not (case.compiled and case.base != "bf16")]
RUN_HERE += cases(["qwen_image"])[:7]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name(), marks=pytest.mark.slow if case.compiled or case.family != "flux" else ())
        for case in RUN_HERE
    ],
)
def test_every_case_of_the_gpu_benchmark_runs(case: GpuCase) -> None:
    row = gpu.measure(case, torch.device("cpu"), tiny=True)
    assert row["step_s"] > 0
    assert row["peak_gib"] > row["weights_gib"] > 0


@pytest.mark.slow
def test_the_gpu_benchmark_reports_failures_as_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"family": "flux"}
    jobs = [Job(GpuCase("flux").name(), good), Job("broken", good | {"family": "x"})]
    rows = gpu.run(jobs, gpu.Children("cpu", True, minutes=4))
    assert rows[0]["step_s"] > 0
    assert rows[0]["mfu"] > 0
    assert rows[1]["error"] == "KeyError: 'x'"
    assert "flux, b1, tandem, bf16" in capsys.readouterr().out
    late = gpu.Children("cpu", True, minutes=0)
    assert gpu.run(jobs[:1], late)[0]["error"] == "left out: the time was up"
    alone = gpu.Children("cpu", True, minutes=4)
    alone.method = "spawn"
    assert alone.rows(jobs[0])[0]["step_s"] > 0
    assert alone.rows(jobs[1]) == [{"error": "KeyError: 'x'"}]
    finish(rows, gpu.ratios(rows), tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()).keys() == {"machine", "commit", "rows", "ratios"}


def test_a_case_that_takes_too_long_is_stopped() -> None:
    children = gpu.Children("cpu", True, minutes=2)
    rows = children.rows(Job("slow", {"ladder": "gpt2-124m"}, seconds=1))
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
