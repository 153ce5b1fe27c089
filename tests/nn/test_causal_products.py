"""Causal attention by blocks of products against float64 and PyTorch's kernel: values, gradients, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import lookup_backend

import library.nn.causal_products as causal_products
from library.nn.attention import attend
from library.nn.causal_products import attend_causally, is_faster

SHAPES = [(2, 256, 6, 2, 64), (3, 77, 4, 4, 32), (1, 700, 6, 1, 40), (1, 513, 3, 3, 16)]


def tensors(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], Tensor]:
    """Return query, key and value, parts of one tensor as a projection gives them, and a gradient."""
    torch.manual_seed(0)
    batch, length, heads, kv_heads, dim = shape
    joined = torch.randn(batch, length, heads + 2 * kv_heads, dim, dtype=dtype)
    parts = joined.split((heads, kv_heads, kv_heads), dim=2)
    return [part.detach().requires_grad_() for part in parts], torch.randn(batch, length, heads, dim, dtype=dtype)


def kernel(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)


def error(mine: Tensor, exact: Tensor) -> float:
    return float((mine.detach().double() - exact.detach()).norm() / exact.norm())


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_are_those_of_float64_within_roundings_to_bf16(
    shape: tuple[int, ...], scale: float | None
) -> None:
    inputs, gradient = tensors(shape)
    output = attend_causally(*inputs, scale)
    assert output.dtype == torch.bfloat16
    assert output.shape == gradient.shape
    found = [output, *torch.autograd.grad(output, inputs, gradient)]
    exact_inputs = [each.detach().double().requires_grad_() for each in inputs]
    exact_output = kernel(*exact_inputs, scale)
    exact = [exact_output, *torch.autograd.grad(exact_output, exact_inputs, gradient.double())]
    theirs_output = kernel(*inputs, scale)
    theirs = [theirs_output, *torch.autograd.grad(theirs_output, inputs, gradient)]
    for mine, other, true in zip(found, theirs, exact, strict=True):
        # Roundings to bf16, of 2^-9 at most: of the kernel shares, their gradients and results; here scores, too.
        assert error(mine, true) < max(2 * error(other, true), 3 * 2**-9)


@pytest.mark.parametrize("shape", [(2, 150, 6, 2, 16), (3, 2, 2, 2, 8), (1, 640, 3, 1, 8)], ids=str)
def test_in_float64_it_is_the_formula_itself(shape: tuple[int, ...]) -> None:
    inputs, gradient = tensors(shape, torch.float64)
    output, expected = attend_causally(*inputs), kernel(*inputs, None)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(each, inputs, gradient) for each in (output, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_large_scores_are_not_rounded_to_bf16() -> None:
    """One key far above the others: of scores near 100 a rounding to bf16 is up to 0.25, a factor of 1.3."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 200, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    query, key = query + 3.5, key + 3.5
    inputs = [each.requires_grad_() for each in (query, key, value)]
    exact = kernel(*(each.detach().double() for each in inputs), None)
    assert (query.detach().float() * key.detach().float()).sum(-1).max() * 64**-0.5 > 90
    assert error(attend_causally(*inputs), exact) < 2 * error(kernel(*inputs, None), exact)


def test_a_later_token_changes_nothing() -> None:
    (query, key, value), _ = tensors((1, 100, 2, 2, 16))
    before = attend_causally(query, key, value)
    with torch.no_grad():
        key[:, 60:] += 1
        value[:, 60:] -= 1
    after = attend_causally(query, key, value)
    assert torch.equal(before[:, :60], after[:, :60])
    assert not torch.equal(before[:, 60:], after[:, 60:])


def test_it_is_taken_for_training_in_bf16_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_products, "_MULTIPLIES_BF16", True)
    inputs, _ = tensors((1, 64, 2, 2, 16))
    assert is_faster(*inputs)
    with torch.no_grad():
        assert not is_faster(*inputs)
    assert not is_faster(*(each.detach() for each in inputs))
    assert not is_faster(*(each.float() for each in inputs))
    assert not is_faster(*(each[:, :1] for each in inputs))
    assert torch.equal(attend(*inputs, causal=True), attend_causally(*inputs))
    monkeypatch.setattr(causal_products, "_MULTIPLIES_BF16", False)
    assert not is_faster(*inputs)


def test_no_scores_are_kept() -> None:
    inputs, _ = tensors((2, 300, 4, 2, 32))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        attend_causally(*inputs)
    given = {tensor.data_ptr() for tensor in inputs}
    assert given <= {tensor.data_ptr() for tensor in kept}
    others = [tensor for tensor in kept if tensor.data_ptr() not in given]
    assert sum(tensor.numel() for tensor in others) == 2 * 300 * 4 * (32 + 2)  # the output, and two numbers a query


def test_compiled_it_computes_the_same_and_is_not_compiled_anew_for_another_length() -> None:
    graphs = list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(attend_causally, fullgraph=True, dynamic=True, backend=backend)
    for length in (30, 64, 150, 700):
        inputs, gradient = tensors((2, length, 4, 2, 16))
        plain, other = attend_causally(*inputs), compiled(*inputs)
        assert torch.equal(plain, other)
        ours, theirs = (torch.autograd.grad(each, inputs, gradient) for each in (other, plain))
        assert all(map(torch.equal, ours, theirs))
        assert [each.stride() for each in ours] == [each.stride() for each in theirs]
    assert len(graphs) == 1


def test_the_compiler_knows_shapes_and_strides() -> None:
    for shape in SHAPES[:2]:
        inputs, gradient = tensors(shape)
        given = [each.detach() for each in inputs]
        torch.library.opcheck(causal_products.causal_attention, (*given, 0.3))
        results = causal_products._forward(*given, 0.3)
        torch.library.opcheck(causal_products._gradients, (gradient, *given, *results, 0.3))
