"""Rounding to fp8 against a float64 reference that knows only the formats' definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from library.errors import UserError
from library.precision.fp8_numbers import (
    E4M3FN,
    E5M2,
    FORMATS,
    Fp8Format,
    format_named,
    holds_nan_or_inf,
    round_stochastically,
    round_to_nearest,
)


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
