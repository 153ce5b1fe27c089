"""Rounded activations against torch._scaled_mm, comfy-kitchen's products and the formats' definition."""

from __future__ import annotations

import math

import comfy_kitchen.tensor as ck
import pytest
import torch
from torch import nn

from library.precision.activations import (
    FakeQuantLinear,
    InputRounding,
    round_activations,
    round_inputs,
    round_timesteps,
    roundings,
)
from library.precision.checkpoint import ServedInput
from library.precision.files.fp8 import Fp8Scheme
from library.precision.files.int8 import Int8Scheme
from library.precision.fp8_numbers import FORMATS, Fp8Format
from library.precision.linear import QuantizedLinear
from tests.precision.layers import quantize


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def activations() -> torch.Tensor:
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 40  # an outlier channel
    return x


def test_rounded_rows_times_a_weight_are_the_fp8_product() -> None:
    weight = quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) * 0.05, "row")
    x = activations().bfloat16()
    served = FakeQuantLinear(QuantizedLinear(weight, compute="dequant"), InputRounding("row"))(x)
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
    served = FakeQuantLinear(base, InputRounding("row"))
    x = activations().requires_grad_()
    served(x).square().sum().backward()
    rounded = round_activations(x.detach(), "row")
    expected = (2 * base(rounded)) @ base.weight
    torch.testing.assert_close(x.grad, expected)


def test_static_scales_round_only_layers_that_have_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    served = {"0": ServedInput(None, None, "comfy_quant"), "1": ServedInput(None, torch.tensor(0.5), "comfy_quant")}
    round_inputs(model, roundings(["0", "1", "2"], served, "static"))
    assert [type(layer) for layer in model] == [nn.Linear, FakeQuantLinear, nn.Linear]


def test_auto_rounds_each_layer_as_its_file_says_where_the_server_heeds_it() -> None:
    served = {
        "a": ServedInput("unit", None, "comfy_scaled"),
        "b": ServedInput("static", torch.tensor(2.0), "comfy_quant"),
        "c": ServedInput(None, torch.tensor(2.0), "comfy_quant"),
        "d": ServedInput("row", None, "rows"),
    }
    found = roundings("abcde", served, "auto", ("comfy_scaled", "comfy_quant"))
    assert {name: rounding.how for name, rounding in found.items()} == {"a": "unit", "b": "static"}
    assert found["b"].scale == 2
    assert roundings("abcde", served, "auto")["d"].how == "row"


@pytest.mark.parametrize("fp8", FORMATS, ids=lambda fp8: fp8.name)
@pytest.mark.parametrize("scale", [None, 0.37])
def test_fp8_products_are_comfy_kitchens(scale: float | None, fp8: Fp8Format) -> None:
    """ComfyUI's mixed_precision_ops: the input with its scale, or 1, times the weight, both of the file's format."""
    x, scheme = activations(), Fp8Scheme("tensor", fp8)
    weight = scheme.quantize(torch.randn(32, 64, generator=seeded(1)) * 0.05)
    given = torch.tensor(1.0 if scale is None else scale)
    layout, own = "TensorCoreFP8Layout", ck.TensorCoreFP8Layout
    right = ck.QuantizedTensor(weight.values, layout, own.Params(weight.scale.reshape(()), torch.float32, (32, 64)))
    left = ck.QuantizedTensor.from_float(x, layout, scale=given, dtype=fp8.dtype)
    wanted = torch.nn.functional.linear(left.dequantize(), right.dequantize())
    rounding = InputRounding("unit") if scale is None else InputRounding("static", given)
    found = FakeQuantLinear(QuantizedLinear(weight, compute="dequant"), rounding)(x)
    # both sum the same products in fp32; x * (1 / s) and x / s may fall on two sides of a tie, one number in 2^20
    assert relative(found, wanted) < 1e-4
    assert relative(found, x @ weight.dequantize(torch.float32).t()) > 1e-2  # what rounding costs


@pytest.mark.parametrize("group", [0, 16, 64])
def test_int8_products_are_comfy_kitchens(group: int) -> None:
    x = activations()
    weight = Int8Scheme(rows=True, group=group).quantize(torch.randn(32, 64, generator=seeded(1)) * 0.05)
    layer = FakeQuantLinear(QuantizedLinear(weight, compute="dequant"), InputRounding("int8"))
    wanted = torch.ops.comfy_kitchen.int8_linear(x, weight.values, weight.scale, None, 0, bool(group), group or 256)
    assert relative(layer(x), wanted) < 1e-5  # sums are whole numbers there, fp32 here
    assert relative(QuantizedLinear(weight, compute="dequant")(x), wanted) > 3e-3  # what rounding costs


def test_the_gradient_passes_a_rotation_on_its_way() -> None:
    weight = Int8Scheme(rows=True, group=16).quantize(torch.randn(32, 64, generator=seeded(1)) * 0.05)
    layer = FakeQuantLinear(QuantizedLinear(weight, compute="dequant"), InputRounding("int8"))
    x = activations().requires_grad_()
    layer(x).square().sum().backward()
    expected = (2 * layer(x.detach())) @ weight.dequantize(torch.float32)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("how", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("width", [64, 72])
def test_blocks_are_rounded_as_comfy_kitchen_rounds_activations(how: str, width: int) -> None:
    x = torch.randn(32, width, generator=seeded(2))
    x[:, 5] *= 40
    x[3] = 0
    layout = {"nvfp4": "TensorCoreNVFP4Layout", "mxfp8": "TensorCoreMXFP8Layout"}[how]
    wanted = ck.QuantizedTensor.from_float(x, layout).dequantize()[:32, :width]
    torch.testing.assert_close(round_activations(x, how), wanted, rtol=1e-6, atol=1e-7)  # type: ignore[arg-type]


def test_a_calibrated_scale_of_nvfp4_is_used() -> None:
    x, scale = torch.randn(32, 64, generator=seeded(2)), torch.tensor(0.01)
    wanted = ck.QuantizedTensor.from_float(x, "TensorCoreNVFP4Layout", scale=scale).dequantize()
    torch.testing.assert_close(round_activations(x, "nvfp4", scale), wanted, rtol=1e-6, atol=1e-7)


def test_bf16_timesteps_are_rounded_twice() -> None:
    sigmas = torch.tensor([0.7109, 1.0])
    assert round_timesteps(sigmas, torch.bfloat16).tolist() == pytest.approx([0.712, 1.0])  # 711 -> 712: steps of 4
    assert round_timesteps(sigmas, torch.float32) is sigmas
    assert math.isclose(float(round_timesteps(sigmas, torch.float16)[0]), 0.711, abs_tol=5e-4)
