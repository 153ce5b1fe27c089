"""Frozen layers with updates as one step of autograd, against the same written plainly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from library.nn.frozen_linear import has_input_gradient, project_recomputed
from library.precision.linear import QuantizedLinear
from networks.adapters.lora import LoRALinear
from tests.precision.layers import quantize


def _norm_and_modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


def _layers(dtype: torch.dtype, fp8: bool = False) -> list[LoRALinear]:
    torch.manual_seed(0)
    layers = []
    for out, rank, alpha in ((24, 4, 2.0), (16, 3, 5.0), (40, 8, 8.0)):
        base: nn.Module = nn.Linear(32, out).requires_grad_(False).to(dtype)
        if fp8:
            base = QuantizedLinear(quantize(base.weight, "row"), base.bias)  # type: ignore[arg-type]
        layer = LoRALinear(base, rank, alpha)
        nn.init.normal_(layer.lora_A.weight)
        nn.init.normal_(layer.lora_B.weight)
        layers.append(layer)
    return layers


def _plain(layers: list[LoRALinear], x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    x = x.to(dtype)
    return [
        F.linear(F.linear(x, layer.lora_A.weight.to(dtype)), layer.lora_B.weight.to(dtype)) * layer.scale
        + layer.base(x)
        for layer in layers
    ]


def _gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    random = torch.Generator().manual_seed(3)
    loss = sum((out.float() * torch.randn(out.shape, generator=random)).sum() for out in outputs)
    return [*(out.detach().float() for out in outputs), *torch.autograd.grad(loss, leaves)]  # type: ignore[arg-type]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_outputs_and_all_gradients_are_those_of_the_plain_form(autocast: bool, fp8: bool) -> None:
    layers = _layers(torch.bfloat16 if autocast and not fp8 else torch.float32, fp8)
    inputs = [torch.randn(2, 5, 32), torch.randn(2, 1, 32), torch.randn(2, 1, 32)]
    for tensor in inputs:
        tensor.requires_grad_()
    weights = [p for layer in layers for p in (layer.lora_A.weight, layer.lora_B.weight)]
    dtype = torch.bfloat16 if autocast else torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = project_recomputed(layers, _norm_and_modulate, *inputs)
        plain = _plain(layers, _norm_and_modulate(*inputs), dtype)
    assert all(out.dtype == dtype for out in ours)
    for a, b in zip(_gradients(ours, [*inputs, *weights]), _gradients(plain, [*inputs, *weights]), strict=True):
        # bf16: a handful of roundings of 2^-9 each, in another order; fp32: sums in another order
        assert (a - b).norm() <= (2e-2 if autocast else 2e-6) * b.norm()


def test_only_the_inputs_of_make_and_low_rank_products_are_kept() -> None:
    layers = _layers(torch.float32)
    inputs = [torch.randn(2, 500, 32, requires_grad=True), torch.randn(2, 1, 32), torch.randn(2, 1, 32)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        project_recomputed(layers, _norm_and_modulate, *inputs)
    known = {t.data_ptr() for t in (*inputs, *(p for layer in layers for p in layer.parameters()))}
    assert [tuple(t.shape) for t in kept if t.data_ptr() not in known] == [(1000, 4 + 3 + 8)]


def test_inputs_that_need_no_gradient_get_none_and_the_update_still_learns() -> None:
    (layer, *_) = _layers(torch.float32)
    layer(torch.randn(3, 32)).sum().backward()
    assert layer.lora_A.weight.grad is not None
    assert layer.lora_B.weight.grad is not None


def test_what_cannot_be_fused_takes_the_plain_way() -> None:
    class Strange(nn.Module):
        in_features = out_features = 8

        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    assert not has_input_gradient(Strange())
    layer = LoRALinear(Strange(), 2, 2)
    layer.initialise(torch.Generator().manual_seed(0))
    x = torch.randn(3, 8)
    assert torch.equal(project_recomputed([layer], torch.relu, x)[0], 2 * x.relu())
    assert torch.equal(project_recomputed([nn.Identity()], torch.relu, x)[0], x.relu())
