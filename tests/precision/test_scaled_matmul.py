"""Products in fp8 against the dequantising path, on the CPU's (slow) version of the op."""

from __future__ import annotations

import pytest
import torch

from library.precision.files.fp8 import device_has_fp8_matmul
from library.precision.linear import QuantizedLinear
from library.precision.names import Granularity
from tests.precision.layers import quantize

OUT, IN = 48, 64


def layers(granularity: Granularity) -> tuple[QuantizedLinear, QuantizedLinear, torch.Tensor]:
    torch.manual_seed(0)
    quantized, bias = quantize(torch.randn(OUT, IN) * 0.05, granularity), torch.randn(OUT)
    exact = QuantizedLinear(quantized, bias, compute="dequant")
    rounded = QuantizedLinear(quantized, bias, compute="quantised")
    return exact, rounded, torch.randn(3, 8, IN, dtype=torch.bfloat16)


def relative(error: torch.Tensor, reference: torch.Tensor) -> float:
    return float(error.float().norm() / reference.float().norm())


@pytest.mark.parametrize("granularity", ["cast", "tensor", "row"])
def test_fp8_products_differ_from_dequantised_ones_by_the_rounding_of_activations(granularity: Granularity) -> None:
    exact, rounded, x = layers(granularity)
    results = []
    for layer in (exact, rounded):
        own = x.clone().requires_grad_()
        y = layer(own)
        y.backward(torch.ones_like(y) + y.detach())
        assert y.dtype == torch.bfloat16
        results.append((y.detach(), own.grad))
    # e4m3 has 3 mantissa bits: an rms rounding error of 2.6 %; another 0.3 % from bf16
    assert 0.005 < relative(results[1][0] - results[0][0], results[0][0]) < 0.035
    # the gradient differs since y does
    assert relative(results[1][1] - results[0][1], results[0][1]) < 0.05


@pytest.mark.parametrize("granularity", ["cast", "tensor", "row"])
def test_with_activations_that_fp8_can_hold_the_product_is_exact(granularity: Granularity) -> None:
    """Rows whose largest value is 448 have scale 1, so integers up to 16 pass through unrounded."""
    exact, rounded, _ = layers(granularity)
    x = torch.randint(-16, 17, (8, IN), generator=torch.Generator().manual_seed(1)).float()
    x[:, 0] = 448
    expected = exact(x)
    torch.testing.assert_close(rounded(x), expected, rtol=1e-5, atol=1e-4)  # fp32 sums in two orders


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 2e-2)])
def test_the_product_is_as_exact_as_the_activations_dtype(dtype: torch.dtype, digits: float) -> None:
    """fp32 activations (mixed_precision "no") are not cut down to bf16 on the way out; 1 + 2^-9 has more bits."""
    weight = quantize(torch.ones(16, 16), "cast")
    x = torch.zeros(16, 16, dtype=dtype)
    x[:, 0], x[:, 1] = 1.0, 2.0**-9  # fp8 has both, once the row is scaled by 448
    out = weight.product(x)
    assert out.dtype == dtype
    assert float((out.double() - 1 - 2.0**-9).abs().max()) <= digits


def test_auto_takes_the_dequantising_path_on_a_cpu() -> None:
    assert not device_has_fp8_matmul(torch.device("cpu"))
    exact, rounded, x = layers("row")
    rounded.set_compute("auto")
    assert torch.equal(rounded(x), exact(x))
