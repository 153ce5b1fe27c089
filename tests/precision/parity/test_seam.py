"""Rings, ratios and steps against brute force and against errors whose place is known."""

from __future__ import annotations

import math

import pytest
import torch

from library.precision.parity.seam import border_distance, border_errors, regions


def box(height: int = 48, width: int = 64) -> torch.Tensor:
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[10:40, 12:52] = True
    return mask


def test_border_distance_is_the_chebyshev_distance_to_the_other_kind() -> None:
    mask = torch.rand(9, 11, generator=torch.Generator().manual_seed(3)) > 0.7
    for row in range(9):
        for column in range(11):
            nearest = min(
                max(abs(row - r), abs(column - c))
                for r in range(9)
                for c in range(11)
                if mask[r, c] != mask[row, column]
            )
            assert border_distance(mask, 4)[row, column] == min(nearest, 5)


def test_rings_lie_on_both_sides_and_the_rest_beyond_them() -> None:
    where = regions(box(), 8)
    assert where.inside.sum() == 30 * 40 - 14 * 24
    assert where.interior.sum() == 14 * 24
    assert where.outside.sum() == 46 * 56 - 30 * 40  # rows 2 to 47, columns 4 to 59
    assert not (where.exterior & where.outside).any()
    assert torch.equal(where.exterior | where.outside, ~box())


def test_a_small_hole_has_its_middle_for_an_interior() -> None:
    mask = torch.zeros(20, 20, dtype=torch.bool)
    mask[7:12, 7:12] = True
    interior = regions(mask, 8).interior
    assert interior[9, 9]
    assert not interior[7, 7]


@pytest.mark.parametrize("mask", [torch.zeros(8, 8), torch.ones(8, 8)])
def test_a_mask_without_a_border_is_refused(mask: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="without a border"):
        regions(mask, 2)


def noise(seed: int) -> torch.Tensor:
    return torch.randn(16, 48, 64, generator=torch.Generator().manual_seed(seed))


def test_white_noise_lies_nowhere_in_particular() -> None:
    found = border_errors(0.01 * noise(1), box(), 2)
    for name, near in found.near.items():
        # 16 x 264 numbers in the narrower ring: 1/sqrt(2 x 4224) = 1.1 % deviation of an rms; four of them
        assert near / found.far[name] == pytest.approx(1, abs=0.045), name
    assert found.far["ring inside"] == pytest.approx(0.01, rel=0.045)


def test_an_error_along_the_border_is_found_with_its_side_and_size() -> None:
    error = 0.01 * noise(1)
    error[:, regions(box(), 2).inside] -= 0.03
    found = border_errors(error, box(), 2)
    assert found.near["ring inside"] == pytest.approx(0.01 * math.sqrt(1 + 9), rel=0.05)
    assert found.near["ring outside"] == pytest.approx(0.01, rel=0.05)


def test_pasted_known_pixels_leave_a_step_and_no_error_outside() -> None:
    smooth = torch.ones(3, 48, 64) * 0.1 + 0.001 * noise(2)[:3]
    found = border_errors(torch.where(box(), smooth, torch.zeros(())), box(), 8)
    # neighbours of the interior differ by the noise: mean |difference| = 0.001 * 2 / sqrt(pi); the step is 0.1
    assert found.near["step"] == pytest.approx(0.1, rel=0.01)
    assert found.far["step"] == pytest.approx(0.001 * 2 / math.sqrt(math.pi), rel=0.1)
    assert found.near["ring outside"] == found.far["ring outside"] == 0
