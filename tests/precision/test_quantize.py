"""Scales, codes and the way back, against plain float64 arithmetic."""

from __future__ import annotations

import pytest
import torch

from library.precision.files.fp8 import Fp8Scheme
from library.precision.fp8_numbers import FORMATS, Fp8Format, dequantize
from library.precision.names import GRANULARITIES, Granularity
from tests.precision.layers import quantize

GROUPS = {"tensor": (1, 1), "row": (192, 1), "block64": (192, 4), "block128": (192, 2)}


def weight(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """192 x 256 with outlier columns and a row of zeros."""
    values = torch.randn(192, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    values[:, 7] *= 30
    values[5] = 0
    return values.to(dtype)


@pytest.mark.parametrize("granularity", GROUPS)
def test_a_scale_is_the_largest_magnitude_of_its_group_over_the_formats_largest(granularity: Granularity) -> None:
    values = weight()
    for fp8 in FORMATS:
        scheme = Fp8Scheme(granularity, fp8)
        scale = scheme.steps(scheme.magnitudes(values))
        assert scale is not None
        assert scale.shape == GROUPS[granularity]
        rows, blocks = scale.shape
        groups = values.reshape(rows, -1, blocks, 256 // blocks).abs().amax(dim=(1, 3))
        expected = torch.where(groups > 0, groups / fp8.max, torch.ones(()))
        assert torch.equal(scale, expected)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fp8", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantised_weights_are_the_float64_product_rounded_once(
    granularity: Granularity, fp8: Fp8Format, dtype: torch.dtype
) -> None:
    quantized = quantize(weight(), granularity, fp8)
    exact = quantized.values.double()
    if quantized.scale is not None:
        blocks = quantized.scale.shape[1]
        exact = (exact.view(192, blocks, -1) * quantized.scale.double().unsqueeze(-1)).view(192, 256)
    # float64 -> fp32 -> dtype: the product of an 8-bit and a 24-bit number, rounded as fp32 hardware does
    assert torch.equal(quantized.dequantize(dtype), exact.float().to(dtype))


@pytest.mark.parametrize("fp8", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_finite_codes_are_decoded_exactly_even_where_denormals_are_flushed(
    fp8: Fp8Format, dtype: torch.dtype
) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(fp8.dtype).view(2, 128)
    expected = codes.float()
    finite = expected.isfinite()
    torch.set_flush_denormal(True)
    try:
        decoded = dequantize(codes, None, dtype)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(decoded[finite], expected.to(dtype)[finite])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_error_exceeds_half_a_step(granularity: Granularity) -> None:
    values = weight()
    for fp8 in FORMATS:
        quantized = quantize(values, granularity, fp8)
        scale = torch.ones(1, 1) if quantized.scale is None else quantized.scale
        per_weight = scale.repeat_interleave(256 // scale.shape[1], dim=1).expand(192, 256)
        half_step = (values.abs() * 2.0 ** -(fp8.mantissa_bits + 1)).clamp_min(fp8.smallest / 2 * per_weight)
        error = (quantized.dequantize(torch.float32) - values).abs()
        # 1e-6: fp32 rounding of the division by the scale
        assert bool((error <= half_step * (1 + 1e-5) + 1e-9).all())


def test_codes_fit_the_scale_as_it_will_be_stored() -> None:
    quantized = quantize(weight(), "row", scale_dtype=torch.bfloat16)
    assert quantized.scale is not None
    assert torch.equal(quantized.scale, quantized.scale.bfloat16().float())
    error = (quantized.dequantize(torch.float32) - weight()).abs()
    # against an unrounded scale the error would reach 1/16 + 1/256 of a weight; 3 % is e4m3's half step at worst 6.25 %
    assert bool((error <= weight().abs() / 16 + 2e-5).all())


def test_stochastic_rounding_is_unbiased_over_a_matrix() -> None:
    values = torch.full((64, 256), 0.0103)
    values[0, 0] = 1.0
    quantized = quantize(values, "tensor", stochastic=True, generator=torch.Generator().manual_seed(0))
    back = quantized.dequantize(torch.float32)
    assert len(back[1:].unique()) == 2
    # step 2^-10, so the mean of 16,128 draws has a standard error under 4e-6
    assert float(back[1:].mean()) == pytest.approx(0.0103, abs=2e-5)


def test_blocks_that_do_not_divide_become_rows_or_are_refused() -> None:
    assert Fp8Scheme("block64").fitting((4, 192)).granularity == "block64"
    assert Fp8Scheme("block64").fitting((4, 100)).granularity == "row"
    assert Fp8Scheme("block128").fitting((4, 192)).granularity == "row"
    with pytest.raises(ValueError, match="100 inputs cannot be cut into blocks of 64"):
        quantize(torch.ones(4, 100), "block64")


def test_slices_of_codes_are_dequantised_as_the_whole_is() -> None:
    quantized = quantize(weight(), "block64")
    assert quantized.scale is not None
    whole = quantized.dequantize(torch.bfloat16)
    columns = dequantize(quantized.values[:, 64:192], quantized.scale[:, 1:3], torch.bfloat16)
    rows = dequantize(quantized.values[10:20], quantized.scale[10:20], torch.bfloat16)
    assert torch.equal(columns, whole[:, 64:192])
    assert torch.equal(rows, whole[10:20])
