"""Rounded activations against torch._scaled_mm and the formats' definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from library.precision.fake_quantize import FakeQuantLinear, fake_quantize_inputs, round_activations, round_timesteps
from library.precision.linear import QuantizedLinear
from tests.precision.layers import quantize


def activations() -> torch.Tensor:
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 40  # an outlier channel
    return x


def test_rounded_rows_times_a_weight_are_the_fp8_product() -> None:
    weight = quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) * 0.05, "row")
    x = activations().bfloat16()
    served = FakeQuantLinear(QuantizedLinear(weight, compute="dequant"), "row")(x)
    in_fp8 = weight.product(x)
    # Both are sums of the same products; bf16 rounds each result once, by 2^-9 at most, twice where sums differ.
    torch.testing.assert_close(served, in_fp8, rtol=2**-7, atol=2**-8)


def test_comfyui_without_scales_clamps_and_rounds() -> None:
    x = torch.tensor([[1000.0, -1000.0, 447.0, 0.3, 2**-9, 2**-11, 17.0]])
    # e4m3fn steps: 32 up to 448, 1/32 in [1/4, 1/2), 2^-9 below 2^-6, 2 in [16, 32) where 17 is a tie and goes to 16
    expected = torch.tensor([[448.0, -448.0, 448.0, round(0.3 * 32) / 32, 2**-9, 0.0, 16.0]])
    assert torch.equal(round_activations(x, "unit"), expected)


@pytest.mark.parametrize("how", ["row", "tensor"])
def test_rounding_errs_by_at_most_half_a_step_of_its_scale(how: str) -> None:
    x = activations()
    largest = x.abs().amax(-1, keepdim=True) if how == "row" else x.abs().amax()
    error = (round_activations(x, how) - x).abs()  # type: ignore[arg-type]
    # normal numbers: 2^-4 of themselves; below 2^-6 of the format, half of 2^-9
    assert torch.all(error <= torch.maximum(x.abs() * 2**-4, largest / 448 * 2**-10) * 1.0001)
    assert error.max() > 0


def test_a_static_scale_that_is_too_small_clips() -> None:
    x = torch.tensor([[1.0, 10.0, 100.0]])
    assert torch.equal(round_activations(x, "static", torch.tensor(0.125)), torch.tensor([[1.0, 10.0, 56.0]]))


def test_the_gradient_passes_straight_through() -> None:
    base = nn.Linear(64, 8)
    served = FakeQuantLinear(base, "row")
    x = activations().requires_grad_()
    served(x).square().sum().backward()
    rounded = round_activations(x.detach(), "row")
    expected = (2 * base(rounded)) @ base.weight
    torch.testing.assert_close(x.grad, expected)


def test_only_the_named_layers_are_served_and_static_ones_need_a_scale() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fake_quantize_inputs(model, {"0": None, "1": torch.tensor(0.5)}, "static")
    assert [type(layer) for layer in model] == [nn.Linear, FakeQuantLinear, nn.Linear]


def test_bf16_timesteps_are_rounded_twice() -> None:
    sigmas = torch.tensor([0.7109, 1.0])
    assert round_timesteps(sigmas, torch.bfloat16).tolist() == pytest.approx([0.712, 1.0])  # 711 -> 712: steps of 4
    assert round_timesteps(sigmas, torch.float32) is sigmas
    assert math.isclose(float(round_timesteps(sigmas, torch.float16)[0]), 0.711, abs_tol=5e-4)
