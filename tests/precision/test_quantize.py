"""Scales, codes and the way back, against plain float64 arithmetic."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from library.errors import UserError
from library.precision.files.fp8 import Fp8Scheme
from library.precision.fp8_numbers import (
    E4M3FN,
    E5M2,
    FORMATS,
    Fp8Format,
    dequantize,
    format_named,
    holds_nan_or_inf,
    round_stochastically,
    round_to_nearest,
)
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


def code_values(fp8: Fp8Format) -> dict[int, float]:
    """Return code -> value in float64 for every finite code, from sign, exponent and mantissa."""
    mantissa_bits, bias = {"e4m3fn": (3, 7), "e5m2": (2, 15)}[fp8.name]
    values = {}
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        if fp8 is E4M3FN and (code & 0x7F) == 0x7F:
            continue  # NaN
        if fp8 is E5M2 and exponent == 31:
            continue  # infinities and NaNs
        fraction = mantissa / 2**mantissa_bits
        scale = 2.0 ** (max(exponent, 1) - bias)
        values[code] = sign * scale * (fraction + (exponent > 0))
    return values


def nearest_code(value: float, positive: list[tuple[float, int]]) -> int:
    """Return the code of the non-negative ``value``: nearest, ties to the even code, saturating."""
    value = min(value, positive[-1][0])
    distances = [(abs(v - value), code & 1, code) for v, code in positive]
    return min(distances)[2]


@pytest.mark.parametrize("fp8", FORMATS, ids=lambda f: f.name)
def test_every_code_decodes_to_the_value_of_its_bits(fp8: Fp8Format) -> None:
    for code, value in code_values(fp8).items():
        assert torch.tensor([code], dtype=torch.uint8).view(fp8.dtype).double().item() == value
    positive = [v for v in code_values(fp8).values() if v > 0]
    assert max(positive) == fp8.max
    assert min(positive) == fp8.smallest


@pytest.mark.parametrize("fp8", FORMATS, ids=lambda f: f.name)
def test_nearest_rounding_is_right_at_all_codes_midpoints_and_their_neighbours(fp8: Fp8Format) -> None:
    positive = sorted((v, code) for code, v in code_values(fp8).items() if code < 0x80)
    points = [v for v, _ in positive]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(points)]  # exact in fp32: one bit more than the codes
    inputs = points + middles
    inputs += [float(np.nextafter(np.float32(p), np.float32(s))) for p in inputs for s in (math.inf, 0.0)]
    inputs += [fp8.max * 1.01, fp8.max * 3, 3e38]
    expected = [nearest_code(value, positive) for value in inputs]
    for sign in (1, -1):
        got = round_to_nearest(torch.tensor(inputs) * sign, fp8).view(torch.uint8)
        assert got.bitwise_and(0x7F).tolist() == expected
        zero = torch.tensor(inputs) == 0
        assert bool((got[~zero].ge(0x80) == (sign < 0)).all())


@pytest.mark.parametrize("fp8", FORMATS, ids=lambda f: f.name)
def test_stochastic_rounding_takes_a_neighbour_and_keeps_the_expected_value(fp8: Fp8Format) -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.tensor(sorted({v for v in code_values(fp8).values() if v >= 0}), dtype=torch.float64)
    for share in (0.1, 0.5, 0.83):
        between = (points[:-1] + share * (points[1:] - points[:-1])).float()
        draws = 4000
        rounded = round_stochastically(between.expand(draws, -1), fp8, generator).double()
        is_neighbour = (rounded == points[:-1]) | (rounded == points[1:])
        assert bool(is_neighbour.all())
        up = (rounded == points[1:]).double().mean(dim=0)
        # 5 standard errors of a mean of 4000 draws: 0.04; 126 means a case
        assert float((up - share).abs().max()) < 0.04


@pytest.mark.parametrize("fp8", FORMATS, ids=lambda f: f.name)
def test_stochastic_rounding_leaves_codes_alone_and_saturates(fp8: Fp8Format) -> None:
    values = torch.tensor(list(code_values(fp8).values()), dtype=torch.float32)
    assert torch.equal(round_stochastically(values, fp8).float(), values)
    beyond = round_stochastically(torch.tensor([1e30, -1e30, math.inf]), fp8).float()
    assert beyond.tolist() == [fp8.max, -fp8.max, fp8.max]


@pytest.mark.parametrize("round_", [round_to_nearest, round_stochastically])
def test_nan_is_refused(round_) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="NaN cannot be rounded"):
        round_(torch.tensor([1.0, math.nan]), E4M3FN)


def test_nan_and_infinite_codes_are_found() -> None:
    assert holds_nan_or_inf(torch.tensor([0, 0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn))
    assert not holds_nan_or_inf(torch.tensor([0x7E, 0xFE], dtype=torch.uint8).view(torch.float8_e4m3fn))
    assert holds_nan_or_inf(torch.tensor([0x7C], dtype=torch.uint8).view(torch.float8_e5m2))
    assert not holds_nan_or_inf(torch.tensor([0x7B], dtype=torch.uint8).view(torch.float8_e5m2))


def test_an_unknown_format_is_refused_with_the_nearest() -> None:
    assert format_named("float8_e4m3fn") is E4M3FN
    with pytest.raises(UserError, match="'fp8_e4m3' is none of e4m3fn, e5m2; did you mean 'e4m3fn'"):
        format_named("fp8_e4m3")
