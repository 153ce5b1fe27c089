"""Are the FLOPs, bytes and launches of a step counted right? On the fake device, without a GPU."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import roofline
from bench.card_step import StepCase
from bench.families import FAMILIES
from bench.gpu import FLUX, FP8
from bench.roofline import ACHIEVED, PUBLISHED, Card, Cost, Counted, Operation, count, fused, walk
from library.training.memory.trace import tracing
from tests.cuda.device import FakeDevice


def linear_flops(family: str) -> float:
    """Forward of everything but attention: 2 x weights x tokens that meet them, and 2 x 16 x (in + out) x tokens."""
    width, text, image, rank = 3072, 512, 4096, 16

    def layers(tokens: int, *shapes: tuple[int, int]) -> float:
        return sum(2.0 * tokens * (w * width * h * width + rank * (w + h) * width) for w, h in shapes)

    attention, mlp = [(1, 1)] * 4, [(1, 4), (4, 1)]
    if family == "qwen_image":
        return 60 * (layers(image, *attention, *mlp) + layers(text, *attention, *mlp))
    double = layers(image, *attention, *mlp) + layers(text, *attention, *mlp)
    single = layers(image + text, *[(1, 1)] * 3, (1, 4), (5, 1))
    return 19 * double + 38 * single


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_flops_of_a_step_are_those_of_the_architecture(device: FakeDevice, family: str) -> None:
    counted = device.submit(count, replace(FLUX, family=family)).result()
    linear, attention = linear_flops(family), 4.0 * 4608**2 * 3072 * sum(FAMILIES[family].blocks)
    done = Counter[str]()
    for cost, n in counted.costs.items():
        done[f"{cost.kind} {cost.phase}"] += n * cost.flops  # type: ignore[assignment]
    assert done["products forward"] == pytest.approx(linear, rel=0.02)
    assert done["products recomputed"] == pytest.approx(linear, rel=0.02)
    assert done["products backward"] == pytest.approx(linear, rel=0.02)
    assert done["attention forward"] == done["attention recomputed"] == attention
    assert done["attention backward"] == 2.5 * attention  # the scores once more, and four gradients
    if family == "flux":  # the published 164 TFLOP and the recomputed ones; flash attention computes the scores again
        scores = 0.5 * attention
        assert (sum(done.values()) - scores) / 1e12 == pytest.approx(238, rel=0.02)


def small_operations() -> list[Operation]:
    trace = roofline._process_trace()
    trace.operations = []
    with tracing(trace):
        a = torch.zeros(512, 1024, dtype=torch.bfloat16, device="cuda")
        b = torch.zeros(1024, 256, dtype=torch.bfloat16, device="cuda")
        row = torch.zeros(1024, device="cuda")
        host = torch.zeros(512, 1024, dtype=torch.bfloat16)
        trained = torch.zeros(1024, device="cuda", requires_grad=True)
        trained.grad = torch.zeros_like(trained)
        optimizer = torch.optim.AdamW([trained], fused=True)
        optimizer.step()  # the first makes its moments
        trace.on = True
        a.view(1024, 512).t()[3:].reshape(-1)[:7]  # the last one copies: it has gaps
        a @ b
        a + row.expand(512, 1024)
        a.mul_(2)
        a[:128].copy_(a[128:256])
        torch.empty_like(a)
        a.copy_(host, non_blocking=True)
        torch.nn.functional.rms_norm(a, (1024,))
        optimizer.step()
        trace.on = False
    return trace.operations


def test_bytes_are_what_an_operation_must_touch(device: FakeDevice) -> None:
    found = [op.cost for op in device.submit(small_operations).result()]
    a, b, out = 512 * 1024 * 2, 1024 * 256 * 2, 512 * 256 * 2
    part = 2 * (512 - 3) * 1024
    assert [(cost.name, cost.kind, cost.flops, cost.bytes) for cost in found] == [
        ("clone", "traffic", 0, 2 * part),  # views cost nothing, allocations neither
        ("mm", "products", 2 * 512 * 1024 * 256, a + b + out),
        ("add", "traffic", 0, a + 1024 * 4 + 2 * a),  # broadcast: its own 4 KiB; the sum is fp32
        ("mul_", "traffic", 0, 2 * a),
        ("copy_", "traffic", 0, a // 4 * 2),  # a quarter, read and written; what was there is not read
        ("copy_", "link", 0, a),  # once
        ("rms_norm forward", "traffic", 0, 2 * a),
        ("_foreach_add_", "traffic", 0, 2 * 4),  # the number of the step
        ("_fused_adamw_", "traffic", 0, 7 * 1024 * 4 + 4),  # weights and two moments change, the gradient does not
    ]
    assert found[1].dtype == "bf16"


def product(flops: float = 0.0, moved: float = 0.0, dtype: str = "bf16", **others: Any) -> Cost:
    return Cost("mm", "products", "forward", dtype, flops, moved)._replace(**others)


def test_an_operation_takes_the_longer_of_computing_and_moving() -> None:
    card = Card("made up", {"bf16": 100, "fp8": 200}, memory=1000, link=10)
    assert card.seconds(product(flops=1e14, moved=1e9)) == 1.0
    assert card.seconds(product(flops=1e14, moved=4e12)) == 4.0
    assert card.seconds(product(flops=1e14, dtype="fp8")) == 0.5
    assert card.seconds(product(flops=1e14), {**PUBLISHED, "products": 0.8}) == 1.25
    assert card.seconds(product(moved=2e12), {**PUBLISHED, "products": 0.8}) == 2.0
    assert card.seconds(product(moved=2e12, kind="traffic"), {**PUBLISHED, "traffic": 0.5}) == 4.0
    assert card.seconds(product(flops=1.0, dtype="int8")) == float("inf")  # it has no such product
    assert replace(card, rates={"bf16": 200}).seconds(product(flops=1e14)) == 0.5


def test_copies_hide_behind_their_own_pass() -> None:
    card = Card("made up", {"bf16": 1}, memory=1, link=1)
    computing = {product(moved=2e9, kind="traffic"): 1, product(moved=5e9, kind="traffic", phase="backward"): 1}
    copies = {product(moved=3e9, kind="link"): 1, product(moved=3e9, kind="link", phase="recomputed"): 1}
    assert card.step(Counter(computing | copies)) == {"products": 0, "attention": 0, "traffic": 7.0, "link": 1.0}


def chain(*parts: tuple[str, list[int], list[int]]) -> list[Operation]:
    """Operations (name, storages read, storages written) of 8 bytes each."""
    return [
        Operation(
            Cost(name, "products" if name == "mm" else "traffic", "forward", "bf16", 0.0, 8.0 * len(reads + writes)),
            {(s, 0, 4): 8 for s in reads},
            {(s, 0, 4): 8 for s in writes},
        )
        for name, reads, writes in parts
    ]


def moved(costs: Counter[Cost]) -> dict[str, tuple[int, float]]:
    return {cost.name: (n, cost.bytes) for cost, n in costs.items()}


def test_a_fused_kernel_keeps_what_none_else_reads() -> None:
    two = chain(("mul", [0, 1], [2]), ("add", [2, 3], [4]), ("mm", [4, 5], [6]))
    assert moved(fused(two, {6})) == {"fused": (1, 32.0), "mm": (1, 24.0)}  # reads 0, 1, 3, writes 4
    assert moved(fused(two, {2, 6}))["fused"] == (1, 40.0)  # 2 lives on
    read_later = [*two, *chain(("mm", [2, 5], [7]))]
    assert moved(fused(read_later, {6}))["fused"] == (1, 40.0)


def test_an_operation_between_parts_two_kernels() -> None:
    parted = chain(("mul", [0], [1]), ("mm", [1, 5], [2]), ("add", [1, 2], [3]))
    assert moved(fused(parted, {3})) == {"mul": (1, 16.0), "mm": (1, 24.0), "add": (1, 24.0)}
    # what does not depend on the other is another kernel
    assert moved(fused(chain(("mul", [0], [1]), ("mul", [2], [3])), {1, 3})) == {"mul": (2, 16.0)}


@pytest.mark.slow
def test_few_blocks_stand_for_all(device: FakeDevice) -> None:
    counted = device.submit(count, FLUX).result().costs
    every = Counter(op.cost for op in device.submit(walk, FLUX, FAMILIES["flux"].blocks).result()[0])
    for costs in (counted, every):
        costs.subtract({cost: n for cost, n in costs.items() if cost.phase == "update"})
    assert +counted == +every


def made_up(case: StepCase) -> Counted:
    costs = {product(4e12, 1e9): 60, product(0, 2e9, kind="traffic", name="mul"): 10 if case.compiled else 30}
    costs |= {product(1e12, 0, dtype="fp8"): 9} if case.base == "row" else {}
    return Counted(Counter(costs), 20 if case.graph else sum(costs.values()))


class HerePool:
    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    @contextmanager
    def here(_processes: int) -> Iterator[HerePool]:
        yield HerePool()

    monkeypatch.setattr(roofline, "device_processes", here)
    monkeypatch.setattr(roofline, "count", made_up)

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["roofline.py", *arguments])
        roofline.main()

    return run


def test_a_table_has_a_row_for_each_case(command: Callable[..., None], tmp_path: Path) -> None:
    command("--only", "flux, ", f"--json={tmp_path / 'rows.json'}")
    rows = {row["case"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert len(rows) == 6
    own, compiled, graph = (rows[name] for name in ("flux, row", "flux, row, compiled", "flux, row, compiled, graph"))
    assert own["A100"] is None  # which has no products in fp8
    assert own["H100"] == pytest.approx(60 * 4e12 / 989.4e12 + 30 * 2e9 / 3350e9 + 9 * 1e12 / 1978.9e12)
    assert own["products"] + own["attention"] + own["traffic"] == pytest.approx(1)
    reached = {kind: 1 / share for kind, share in ACHIEVED.items()}
    products = 60 * 4e12 / 989.4e12 + 9 * 1e12 / 1978.9e12
    kernels = {n: products * reached["products"] + n * 2e9 / 3350e9 * reached["traffic"] for n in (30, 10)}
    assert own["kernels_s"] == pytest.approx(kernels[30])
    assert (own["launches"], compiled["launches"], graph["launches"]) == (99, 79, 20)
    for row, n in ((own, 30), (compiled, 10), (graph, 10)):  # the host launches in less time than the kernels take
        assert row["predicted_s"] == pytest.approx(max(kernels[n], row["host_s"])) == pytest.approx(kernels[n])


@pytest.mark.slow
def test_a_compiled_step_launches_less_and_a_captured_one_next_to_nothing(device: FakeDevice) -> None:
    calls = {case: device.submit(count, case).result().launches for case in (FLUX, replace(FLUX, compiled=True))}
    assert calls[FLUX] > 15_000
    assert calls[replace(FLUX, compiled=True)] <= 11_000
    assert device.submit(count, replace(FP8, compiled=True, graph=True)).result().launches <= 60


def test_a_case_that_is_not_there_is_one_line(command: Callable[..., None], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        command("--only", "int3")
    assert capsys.readouterr().err.strip().endswith("holds 'int3'; leave it out to see the names")


def test_without_a_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing compiled yet
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["roofline.py"])
    with pytest.raises(SystemExit):
        roofline.main()
    text = capsys.readouterr().err.strip()
    assert "no C++ compiler" in text
    assert "\n" not in text
