"""The numbers behind the figures of docs/precision.md against arithmetic in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dev.precision_numbers as numbers
from dev.precision_numbers import heavy_tailed_weight, update_without_direction


def e4m3fn_grid() -> np.ndarray:
    """Return the numbers of e4m3fn that are not negative: (1 + m / 8) 2^(e - 7), and m / 8 2^-6 with e = 0."""
    grid = [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)]
    return np.array(grid[:-1])  # the last code is NaN


def nearest(values: np.ndarray) -> np.ndarray:
    """Return the number of the grid that is nearest to each value, by search; ties are too rare to matter."""
    grid = e4m3fn_grid()
    above = np.searchsorted(grid, np.abs(values)).clip(1, len(grid) - 1)
    lower, upper = grid[above - 1], grid[above]
    return np.sign(values) * np.where(np.abs(values) - lower < upper - np.abs(values), lower, upper)


@pytest.mark.parametrize(("std", "found_before"), [(0.08, 2.7), (0.01, 5.8), (0.005, 11.3)])
def test_the_error_of_a_plain_cast_is_that_of_a_search_in_the_grid(std: float, found_before: float) -> None:
    (error,) = numbers.weight_errors([std], ["cast"])["cast"]
    weight = heavy_tailed_weight(std).double().numpy()
    assert error == pytest.approx(np.linalg.norm(nearest(weight) - weight) / np.linalg.norm(weight), rel=1e-4)
    assert 100 * error == pytest.approx(found_before, abs=0.3)  # measured when the work on fp8 was planned


@pytest.mark.parametrize(
    ("std", "found_before", "within"), [(0.08, 0.47, 0.02), (0.04, 0.19, 0.06), (0.02, 0.0, 0.001)]
)
def test_retention_is_that_of_a_search_in_the_grid(std: float, found_before: float, within: float) -> None:
    """The earlier layers' tails are not recorded and move the second one (``test_layer_errors.py``): .11 to .19."""
    (share,) = numbers.merges([std])["anywhere"]["plain cast, nearest"]
    base = nearest(heavy_tailed_weight(std).double().numpy())
    update = update_without_direction(torch.from_numpy(base).float()).double().numpy()
    change = nearest(base + update) - base
    assert share == pytest.approx((change * update).sum() / (update * update).sum(), abs=0.002)  # sums in fp32
    assert share == pytest.approx(found_before, abs=within)


def test_zeros_and_subnormals_are_counted_by_their_limits() -> None:
    shares = numbers.cast_shares([0.01])
    sizes = heavy_tailed_weight(0.01).abs().numpy()
    zero = (sizes <= 2.0**-10).mean()  # half of the smallest number; the tie goes to the even code, zero
    below = (sizes < 2.0**-6).mean()
    assert shares["zero"][0] == pytest.approx(zero, abs=1e-6)
    assert shares["zero"][0] + shares["subnormal"][0] == pytest.approx(below, abs=0.02)  # a step's width around 2^-6


def test_stochastic_rounding_keeps_the_update_and_errs_more_where_compensated_keeps_it_and_errs_less() -> None:
    found = numbers.merges([0.04])
    assert found["anywhere"]["plain cast, stochastic"][0] == pytest.approx(1, abs=0.05)  # noise over 2^18 entries: 0.01
    assert found["along_inputs"]["plain cast, compensated"][0] == pytest.approx(1, abs=0.01)
    errors = [found["error"][f"plain cast, {how}"][0] for how in ("compensated", "nearest", "stochastic")]
    assert errors == sorted(errors)


def test_old_scales_clamp_large_updates_and_fresh_ones_do_not() -> None:
    found = numbers.saturation([0.01, 0.3])
    assert found["clamped"][1] > found["clamped"][0]
    assert found["old_scale"][1] > 3 * found["new_scale"][1]


def test_an_outlier_costs_others_only_beyond_the_range_of_the_format() -> None:
    """448 over 2^-6 is 28672: a scale for an outlier of that many times the usual leaves the usual at the last step."""
    own, others = numbers.activation_errors([1e3, 1e6], "row")
    tensor_others = numbers.activation_errors([1e3, 1e6], "tensor")[1]
    assert others[0] == others[1]
    assert tensor_others[0] == pytest.approx(others[0], rel=0.05)
    step = 1e6 / 448 * 2**-9  # 4.4 times the usual activation: nearly all become zero
    assert own[1] > 0.9
    assert tensor_others[1] > 0.9
    assert step > 4
    lost = numbers.unscaled_errors([2.0**-14, 1.0])
    assert lost["unit"][0] == pytest.approx(1, abs=1e-3)
    assert lost["unit"][1] == pytest.approx(lost["row"][1], rel=0.1)
