"""Kernels of attention chosen by timing: the CPU's own kernels and wrong ones, by a clock whose times are given."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention as torch_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, _registry, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from library.errors import UserError
from library.nn.attention import attend
from library.nn.attention_timing import AttentionShape, FastestKernel, Kernel, activate_fastest_flash, choose_kernel

CPU = torch.device("cpu")
RIGHT: dict[str, Kernel] = {"math": partial(attend, backend="math"), "flash": partial(attend, backend="flash")}


def spoilt(spoil: Callable[[Tensor], Tensor], gradient_of: int | None = None) -> Kernel:
    """Return a kernel that is right but for its output, or one gradient, of which ``spoil`` makes another."""

    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return spoil(gradients[0])

    def kernel(*tensors: Tensor, **options: Any) -> Tensor:
        if gradient_of is None:
            output = attend(*tensors, **options)
            return output + (spoil(output) - output).detach()
        return attend(*(Spoilt.apply(x) if i == gradient_of else x for i, x in enumerate(tensors)), **options)

    return kernel


def a_row_off(x: Tensor) -> Tensor:
    x = x.clone()
    x[-1, 3, -1] *= 1.2
    return x


def raising(*_: Tensor, **__: Any) -> Tensor:
    raise RuntimeError("no such card\nand more")


class Times:
    """A clock that runs the work once and gives these milliseconds, one after the other."""

    def __init__(self, *milliseconds: float) -> None:
        self.left = list(milliseconds)

    def __call__(self, work: Callable[[], object]) -> float:
        work()
        return self.left.pop(0)


def qkv(batch: int = 2, queries: int = 40, keys: int = 40, heads: int = 4, kv_heads: int = 4) -> list[Tensor]:
    sizes = [(queries, heads), (keys, kv_heads), (keys, kv_heads)]
    return [torch.randn(batch, *size, 16, dtype=torch.bfloat16, requires_grad=True) for size in sizes]


def chooser(
    folder: Path, kernels: Mapping[str, Kernel], *milliseconds: float
) -> tuple[FastestKernel, list[str], Times]:
    lines, clock = list[str](), Times(*milliseconds)
    return FastestKernel("cpu", folder, lines.append, kernels=kernels, clock=clock), lines, clock


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"causal": True}),
    "causal with a cache": ({"queries": 24}, {"causal": True}),
    "grouped": ({"kv_heads": 2}, {}),
    "padding": ({"keys": 64}, {"mask": torch.ones(2, 64, dtype=torch.bool)}),
    "added": ({}, {"mask": torch.zeros(1, 4, 40, 40, dtype=torch.bfloat16)}),
    "many queries": ({"queries": 1100, "heads": 1, "kv_heads": 1}, {}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_fastest_kernel_is_taken_and_said(tmp_path: Path, shape: str) -> None:
    tensors, options = qkv(**SHAPES[shape][0]), SHAPES[shape][1]
    choose, lines, _ = chooser(tmp_path, RIGHT, 3.23, 1.75)
    out = attend(*tensors, **options, backend=choose)
    assert torch.equal(out, attend(*tensors, **options, backend="flash"))
    (line,) = lines
    assert line.startswith("attention: flash, 1.75 ms forward and backward at 2 x ")
    assert line.endswith(" (math 3.23)")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (spoilt(lambda x: x * 1.1), "is wrong: the output is off by 0.1"),
        (spoilt(lambda x: x * float("nan")), "is wrong: the output is off by nan"),
        (spoilt(a_row_off), "is wrong: the output is off by 0."),
        (spoilt(lambda x: x * 0, 0), "is wrong: the gradient of the query is off by 1"),
        (spoilt(a_row_off, 1), "is wrong: the gradient of the key is off by 0."),
        (spoilt(lambda x: x.flip(1), 2), "is wrong: the gradient of the value is off by"),
        (raising, "fails: no such card"),
        (partial(attend, backend="cudnn"), "cannot run it"),
    ],
)
def test_a_kernel_that_is_wrong_or_raises_is_left_out_with_the_reason(
    tmp_path: Path, kernel: Kernel, reason: str
) -> None:
    choose, lines, _ = chooser(tmp_path, {"efficient": kernel, **RIGHT}, 2.0, 3.0)
    attend(*qkv(), backend=choose)
    assert lines[0].startswith("attention: math, 2.00 ms")
    assert f"efficient {reason}" in lines[0]


def test_without_a_right_kernel_pytorch_chooses(tmp_path: Path) -> None:
    choose, lines, _ = chooser(tmp_path, {"flash": raising})
    tensors = qkv()
    assert torch.equal(attend(*tensors, backend=choose), attend(*tensors))
    assert lines == ["attention: as PyTorch chooses at 2 x 40 tokens (flash fails: no such card)"]
    assert not list(tmp_path.iterdir())  # a card that has failed once is asked again


def test_a_second_run_times_nothing_and_says_the_same(tmp_path: Path) -> None:
    first, said, _ = chooser(tmp_path, {"efficient": spoilt(lambda x: x * 1.1), **RIGHT}, 2.0, 1.0)
    second, again, _ = chooser(tmp_path, {"efficient": spoilt(lambda x: x * 1.1), **RIGHT})  # its clock has no times
    for choose in (first, first, second):
        attend(*qkv(), backend=choose)
    assert said == again
    assert len(said) == 1
    other, lines, _ = chooser(tmp_path, RIGHT, 1.0, 2.0)
    attend(*qkv(queries=41), backend=other)
    assert "math, 1.00 ms" in lines[0]


DAMAGES: list[Callable[[str], str]] = [
    lambda text: text[: len(text) // 2],
    lambda text: "[1]",
    lambda text: text.replace("1.0", "NaN"),
    lambda text: text.replace("1.0", "-1"),
    lambda text: text.replace('"math":2.0', '"mth":2.0'),
    lambda text: text.replace("1.0", "null"),
    lambda text: text.replace("2.0", "0.5"),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_timed_again_and_rewritten(tmp_path: Path, damage: Callable[[str], str]) -> None:
    attend(*qkv(), backend=chooser(tmp_path, RIGHT, 2.0, 1.0)[0])
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    file.write_text(damage(whole))
    choose, _, clock = chooser(tmp_path, RIGHT, 2.0, 1.0)
    attend(*qkv(), backend=choose)
    assert not clock.left
    assert json.loads(file.read_text()) == json.loads(whole)


def test_two_processes_that_write_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    def run(_: int) -> None:
        attend(*qkv(), backend=chooser(tmp_path, RIGHT, 2.0, 1.0)[0])

    # threads that name kernels at once would leave one of their choices to the process
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]), ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(24)))
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["content"]["ms"] == {"math": 2.0, "flash": 1.0}


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    choose, lines, _ = chooser(tmp_path / "file" / "folder", RIGHT, 2.0, 1.0)
    attend(*qkv(), backend=choose)
    assert len(lines) == 1


def test_timing_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    """Random numbers, gradients, and what checkpointing counts and saves; also under autocast and without gradients."""
    tensors, seen = qkv(), list[bool]()

    def watched(*inputs: Tensor, **options: Any) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled())
        return attend(*inputs, **options)

    def gradients(backend: Any) -> list[Tensor]:
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = checkpoint(lambda *x: attend(*x, backend=backend), *tensors, use_reentrant=False)
        return [*torch.autograd.grad(out.sum(), tensors), torch.rand(3)]

    timed, saved = gradients(chooser(tmp_path, {"flash": watched}, 1.0)[0]), gradients("flash")
    assert all(torch.equal(*pair) for pair in zip(timed, saved, strict=True))
    with torch.inference_mode():
        attend(*qkv(batch=1), backend=chooser(tmp_path, {"flash": watched}, 1.0)[0])
    assert len(seen) == 4
    assert not any(seen)


def test_within_backward_nothing_is_timed(tmp_path: Path) -> None:
    choose, lines, _ = chooser(tmp_path, RIGHT, 2.0, 1.0)
    tensors, x = qkv(), torch.zeros(3, requires_grad=True)
    x.register_hook(lambda _: attend(*tensors, backend=choose).detach().mean().float() * torch.ones(3))
    x.sum().backward()
    assert not lines
    attend(*tensors, backend=choose)  # nor is that remembered
    assert len(lines) == 1


def test_cudnn_is_not_asked_where_its_backward_is_wrong(tmp_path: Path) -> None:
    kernels = {"cudnn": RIGHT["flash"], **RIGHT}
    choose, lines, _ = chooser(tmp_path, kernels, 1.0, 2.0)
    attend(*qkv(keys=192), mask=torch.ones(2, 192, dtype=torch.bool), backend=choose)
    assert lines[0].startswith("attention: math, 1.00")
    assert "cudnn" not in lines[0]


def test_compiled_attention_has_the_choice_as_a_constant(tmp_path: Path) -> None:
    choose, lines, _ = chooser(tmp_path, RIGHT, 2.0, 1.0)
    calls = list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.append(graph)
        return graph

    compiled = torch.compile(lambda *x: attend(*x, backend=choose) * 2, backend=backend, fullgraph=True)
    for _ in range(2):
        tensors = qkv()
        assert torch.equal(compiled(*tensors), attend(*tensors, backend="flash") * 2)
    assert len(lines) == len(calls) == 1


def test_attention_compiled_for_any_size_is_timed_at_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("library.nn.attention_timing.TOKENS", 260)
    choose, lines, _ = chooser(tmp_path, {"flash": RIGHT["flash"]}, 1.0)
    compiled = torch.compile(lambda *x: attend(*x, backend=choose) * 2, backend="eager", fullgraph=True, dynamic=True)
    for size in (40, 56, 72):
        tensors = qkv(queries=size, keys=size, heads=1, kv_heads=1)
        torch.testing.assert_close(compiled(*tensors), attend(*tensors) * 2)
    assert lines == ["attention: flash, 1.00 ms forward and backward at 260 tokens"]


def shape(masked: bool = False, dtype: torch.dtype = torch.bfloat16) -> AttentionShape:
    return AttentionShape((1, 2, 64, 16), (1, 2, 64, 16), dtype, (1, 1, 1, 64) if masked else None)


@pytest.mark.parametrize("masked", [False, True])
def test_a_kernel_that_is_named_is_tried_before_anything_is_made_for_it(tmp_path: Path, masked: bool) -> None:
    for named in ("auto", "math", "flash"):
        assert choose_kernel(named, CPU, shape(masked), tmp_path, print) == named
    with pytest.raises(UserError, match="'cudnn' cannot run it .heads of 16 in bfloat16 on cpu.*; choose 'auto'"):
        choose_kernel("cudnn", CPU, shape(masked), tmp_path, print)


def test_a_version_of_flash_attention_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'flash4' is not installed for this PyTorch .*; choose 'auto'"):
        choose_kernel("flash4", CPU, shape(), tmp_path, print)


@pytest.mark.parametrize(
    ("installed", "milliseconds", "fastest"),
    [
        ([], [], "flash"),
        (["FA3"], [2.0, 3.0], "flash3"),
        (["FA4"], [4.0, 3.0], "flash"),
        (["FA3", "FA4"], [2.0, 1.0, 3.0], "flash4"),
        (["FA3", "FA4"], [1.0, 2.0, 3.0], "flash3"),
    ],
)
def test_the_fastest_version_of_flash_attention_that_is_installed_is_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: list[str], milliseconds: list[float], fastest: str
) -> None:
    class Handle:
        def remove(self) -> None:
            pass

    for version in installed:  # as a package would, but that the kernel stays the CPU's
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, version, lambda: Handle())
    monkeypatch.setattr("library.nn.attention_timing.TOKENS", 260)
    choose, _, clock = chooser(tmp_path, {}, *milliseconds)
    try:
        assert activate_fastest_flash(choose, CPU, shape()) == fastest
        active = torch_attention.current_flash_attention_impl()
    finally:
        torch_attention.restore_flash_attention_impl(_raise_warn=False)
    assert active == {"flash3": "FA3", "flash4": "FA4"}.get(fastest)
    assert not clock.left
