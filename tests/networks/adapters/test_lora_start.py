"""PiSSA against peft's layers, which take the start off the weight itself."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig
from torch import nn

from library.precision.linear import QuantizedLinear
from networks.adapters.lora import LoRALinear, init_pissa
from tests.networks.adapters.test_adapter_layers import peft_layer
from tests.precision.layers import quantize


def linear(out_features: int = 40, in_features: int = 24) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(in_features, out_features).requires_grad_(False)


def begun(base: nn.Module, rslora: bool = False) -> LoRALinear:
    layer = LoRALinear(base, 4, 3.0, rank_stabilised=rslora)
    init_pissa(layer, "inner", torch.Generator().manual_seed(0))
    return layer


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_it_begins_and_learns_as_pefts(shape: tuple[int, int], rslora: bool) -> None:
    base = linear(*shape)
    ours = begun(base, rslora)
    config = LoraConfig(r=4, lora_alpha=3.0, init_lora_weights="pissa", use_rslora=rslora, target_modules=["inner"])
    theirs = peft_layer(config, base)
    parameters = theirs.lora_A["default"].weight, theirs.lora_B["default"].weight
    own = ours.lora_A.weight, ours.lora_B.weight
    # singular vectors have a sign of their own: the products have none
    start_product = parameters[1] @ parameters[0]
    torch.testing.assert_close(own[1] @ own[0], start_product, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own[0].abs(), parameters[0].abs(), rtol=1e-3, atol=1e-4)
    for mine, other in zip(own, parameters, strict=True):  # the same signs, then a step of training
        mine.data.copy_(other)
    ours.start.A.copy_(parameters[0].data)
    ours.start.B.copy_(parameters[1].data)
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        outputs = ours(x), theirs(x)
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)  # fp32, W - c B A against W and - c B A
        for out in outputs:
            out.square().sum().backward()
        for mine, other in zip(own, parameters, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-3)  # gradients of size 10
            for parameter in (mine, other):
                parameter.data -= 1e-3 * parameter.grad
                parameter.grad = None


def test_a_layer_begins_as_its_base_and_its_file_is_a_plain_lora() -> None:
    base = linear()
    layer = begun(base)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layer(x), base(x), rtol=1e-5, atol=1e-5)  # B A - B_0 A_0 cancels in fp32
    with torch.no_grad():
        layer.lora_B.weight += 0.1
    weights = layer.weights()
    assert (weights.rank, weights.alpha) == (8, 6.0)
    expected = x @ (base.weight + weights.delta()).t() + base.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_an_fp8_base_is_decomposed_as_the_weight_it_stands_for() -> None:
    base = linear()
    fp8 = QuantizedLinear(quantize(base.weight, "row"), base.bias.data)
    high = copy.deepcopy(base)
    high.weight.data = fp8.dequantized(torch.float32)
    assert torch.equal(begun(fp8).lora_A.weight, begun(high).lora_A.weight)
