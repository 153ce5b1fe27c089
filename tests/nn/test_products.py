"""The three products of a trained linear layer against float64 and nn.Linear, on either kind of CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import library.nn.products as products
from library.nn.cross_entropy import token_cross_entropy
from library.nn.products import TrainedLinear, add_input_gradient_of, add_weight_gradient, train_by_products


@pytest.fixture(params=[True, False], ids=["oneDNN", "BLAS"])
def _processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PREFERS_ONEDNN", request.param)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let oneDNN be used for everything, some rows at a time; the weights' shapes that it was given are returned."""
    seen: list[tuple[int, ...]] = []
    own = products.onednn_linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(tuple(weight.shape))
        return own(x, weight, bias)

    monkeypatch.setattr(products, "PREFERS_ONEDNN", True)
    monkeypatch.setattr(products, "_LARGE", 0)
    monkeypatch.setattr(products, "_CHUNK", 64 * 50)
    monkeypatch.setattr(products, "onednn_linear", linear)
    return seen


def error(mine: Tensor, exact: Tensor) -> float:
    return float((mine.double() - exact).norm() / exact.norm())


@pytest.mark.usefixtures("_processor")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(300, 256, 512), (77, 640, 1152)])
def test_output_and_gradients_are_as_exact_as_those_of_nn_linear(bias: bool, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    rows, inputs, outputs = shape
    theirs = nn.Linear(inputs, outputs, bias=bias)
    ours = copy.deepcopy(theirs)
    train_by_products(ours)
    assert type(ours) is TrainedLinear
    x, gradient = torch.randn(2, rows, inputs), torch.randn(2, rows, outputs)

    def run(layer: nn.Module) -> list[Tensor]:
        parameters = [*layer.parameters()]
        own = x.to(parameters[0].dtype, copy=True).requires_grad_()
        y = layer(own)
        return [y.detach(), *torch.autograd.grad(y, [own, *parameters], gradient.to(y.dtype))]

    found, plain, exact = run(ours), run(theirs), run(copy.deepcopy(theirs).double())
    for mine, other, true in zip(found, plain, exact, strict=True):
        assert mine.shape == true.shape
        assert error(mine, true) < 3 * error(other, true) + 1e-7  # both sum in fp32, in blocks of their own choice


def test_large_weights_are_given_by_rows(calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    x, gradient, weight = torch.randn(30, 50), torch.randn(30, 200), torch.randn(200, 50)
    d_x = add_input_gradient_of(weight, gradient, torch.ones(30, 50))
    d_weight = add_weight_gradient(x, gradient, torch.ones(200, 50))
    torch.testing.assert_close(d_x, 1 + gradient @ weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(d_weight, 1 + gradient.t() @ x, rtol=1e-4, atol=1e-4)
    assert calls == [(50, 64)] * 3 + [(50, 8)] + [(50, 30)] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_autocast_are_nn_linears(dtype: torch.dtype, calls: list[tuple[int, ...]]) -> None:
    layer = nn.Linear(64, 96)
    expected = copy.deepcopy(layer)
    train_by_products(layer)
    x = torch.randn(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), expected(x))
    assert torch.equal(layer.to(dtype)(x.to(dtype)), expected.to(dtype)(x.to(dtype)))
    assert not calls


def test_a_frozen_weight_or_an_input_without_gradient_costs_no_product(calls: list[tuple[int, ...]]) -> None:
    layer = nn.Linear(64, 96)
    train_by_products(layer)
    layer(torch.randn(5, 64)).sum().backward()
    assert len(calls) == 3  # forward; the weight's gradient, in two runs of rows
    assert layer.bias.grad is not None
    layer.requires_grad_(False)
    x = torch.randn(5, 64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(5, -1), rtol=1e-4, atol=1e-5)


def test_a_compiled_block_trains_by_the_same_products(calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    block: nn.Module = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64))
    plain = copy.deepcopy(block)
    train_by_products(block)
    x = torch.randn(7, 64)
    compiled = torch.compile(block, fullgraph=True)
    compiled(x).square().sum().backward()
    plain(x).square().sum().backward()
    for mine, other in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_the_loss_of_a_large_vocabulary_is_torchs(calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 40, 50, requires_grad=True), nn.Linear(50, 200, bias=False)
    targets = torch.randint(0, 190, (2, 40))
    loss = token_cross_entropy(hidden, head, targets, 190)
    mine = torch.autograd.grad(loss, [hidden, head.weight])
    logits = hidden.double() @ head.weight.double()[:190].t()
    exact = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
    for own, other in zip(mine, torch.autograd.grad(exact, [hidden, head.weight]), strict=True):
        assert (own.double() - other).abs().max() <= 1e-5 * other.abs().max()
    assert calls
