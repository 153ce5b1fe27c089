"""Frozen linear layers against nn.Linear, what they save, and layers that share one input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from library.nn.frozen_linear import FrozenLinear, has_input_gradient, input_gradient, project_together


def _layers(dtype: torch.dtype = torch.float32, size: int = 48) -> tuple[nn.Linear, FrozenLinear]:
    torch.manual_seed(0)
    linear = nn.Linear(size, size // 2, dtype=dtype).requires_grad_(False)
    return linear, FrozenLinear.adopt(linear)


def _both(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.float().square().sum(), x)
    return y.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_output_and_input_gradient_are_those_of_nn_linear(dtype: torch.dtype, autocast: bool) -> None:
    linear, frozen = _layers(dtype)
    x = torch.randn(2, 5, 48, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, mine = _both(linear, x), _both(frozen, x)
    for a, b in zip(mine, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)  # small: the same kernels


def test_backward_reads_the_weight_as_the_layer_holds_it_then() -> None:
    _, frozen = _layers()
    x = torch.randn(3, 48, requires_grad=True)
    y = frozen(x)
    moved = frozen.weight.data.clone()
    frozen.weight.data.fill_(float("nan"))  # the memory it lay in is used for something else
    frozen.weight.data = moved
    y.sum().backward()
    torch.testing.assert_close(x.grad, moved.sum(0).expand(3, -1))


def test_nothing_is_kept_for_backward() -> None:
    _, frozen = _layers(torch.float32)
    kept: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.autocast("cpu", torch.bfloat16),
    ):
        frozen(torch.randn(3, 48, requires_grad=True))
    assert not kept


def test_a_trained_layer_has_no_place_here() -> None:
    linear, frozen = _layers()
    assert has_input_gradient(linear)
    assert has_input_gradient(frozen)
    assert not has_input_gradient(nn.Linear(3, 3))
    assert torch.equal(input_gradient(linear, torch.ones(1, 24)), torch.ones(1, 24) @ linear.weight)


class Counting(nn.Linear):
    """A linear layer that notes how often a group of them was asked together."""

    calls: ClassVar[list[int]] = []

    @staticmethod
    def forward_together(layers: Sequence[Counting], x: Tensor) -> list[Tensor]:
        Counting.calls.append(len(layers))
        return [layer(x) for layer in layers]


def test_layers_that_offer_it_are_asked_once_and_the_order_is_kept() -> None:
    Counting.calls.clear()
    layers = [Counting(4, 2), nn.Linear(4, 3), Counting(4, 5)]
    x = torch.randn(2, 4)
    outputs = project_together(layers, x)
    assert Counting.calls == [2]
    for layer, output in zip(layers, outputs, strict=True):
        assert torch.equal(output, layer(x))


def test_plain_layers_are_called_one_by_one() -> None:
    layers = [nn.Linear(4, 2), nn.Linear(4, 3)]
    x = torch.randn(2, 4)
    assert [torch.equal(y, layer(x)) for layer, y in zip(layers, project_together(layers, x), strict=True)] == [
        True
    ] * 2
