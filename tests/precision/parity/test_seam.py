"""Rings, ratios and steps against brute force and against errors whose place is known."""

from __future__ import annotations

import math

import pytest
import torch

from library.precision.parity.seam import border_distance, edge_regions, regions, seam_metrics, spectrum


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


def test_rings_lie_on_both_sides_and_the_interior_beyond_them() -> None:
    where = regions(box())
    assert where.inside[1].sum() == 30 * 40 - 28 * 38  # the rim of the box
    assert where.outside[2].sum() == 34 * 44 - 30 * 40
    assert where.interior.sum() == (30 - 16) * (40 - 16)
    assert not (where.interior & where.inside[8]).any()


def test_a_small_hole_has_its_middle_for_an_interior() -> None:
    mask = torch.zeros(20, 20, dtype=torch.bool)
    mask[7:12, 7:12] = True
    interior = regions(mask).interior
    assert interior[9, 9]
    assert not interior[7, 7]


@pytest.mark.parametrize("mask", [torch.zeros(8, 8), torch.ones(8, 8)])
def test_a_mask_without_a_border_is_refused(mask: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="without a border"):
        regions(mask)


def noise(seed: int) -> torch.Tensor:
    return torch.randn(16, 48, 64, generator=torch.Generator().manual_seed(seed))


def test_white_noise_lies_nowhere_in_particular() -> None:
    reference = noise(0)
    found = seam_metrics(reference, reference + 0.01 * noise(1), box())
    # 16 x 136 numbers in the narrowest ring: 1/sqrt(2 x 2176) = 1.5 % deviation of an rms; four of them
    for ratio in (*found["inside"].values(), *found["outside"].values(), *found["high_pass"].values()):
        assert ratio == pytest.approx(1, abs=0.06)
    assert found["step"] == pytest.approx(1, abs=0.06)
    assert all(abs(value) < 1e-3 for value in found["signed"].values())
    assert found["error_filled"] == pytest.approx(0.01, rel=0.05)
    frequencies, power = spectrum(0.01 * noise(1))
    assert frequencies[-1] < 0.5
    assert max(power[2:]) < 1.2
    assert min(power[2:]) > 0.8


def test_an_error_along_the_border_is_found_with_its_size_and_sign() -> None:
    reference = noise(0)
    error = 0.01 * noise(1)
    rim = regions(box()).inside[2]
    error[:, rim] -= 0.03
    found = seam_metrics(reference, reference + error, box())
    assert found["inside"][2] == pytest.approx(math.sqrt(1 + 9), rel=0.06)
    assert found["signed"][2] == pytest.approx(-0.03, rel=0.05)
    assert found["outside"][8] == pytest.approx(1, abs=0.06)


def test_pasted_known_pixels_leave_a_step_and_no_error_outside() -> None:
    reference = torch.zeros(3, 48, 64)
    smooth = torch.ones(3, 48, 64) * 0.1 + 0.001 * noise(2)[:3]
    error = torch.where(box(), smooth, torch.zeros(()))
    found = seam_metrics(reference + noise(3)[:3], reference + noise(3)[:3] + error, box())
    # neighbours of the interior differ by the noise: mean |difference| = 0.001 * 2 / sqrt(pi); the step is 0.1
    assert found["step"] == pytest.approx(0.1 / (0.001 * 2 / math.sqrt(math.pi)), rel=0.1)
    assert found["outside"][1] == 0
    assert found["error_known"] == 0


def test_jumps_and_bends_of_a_ramp_that_breaks_at_the_border() -> None:
    ramp = torch.arange(64.0).expand(1, 48, 64).clone()
    broken = ramp.clone()
    broken[:, box()] += 5
    found = seam_metrics(ramp, broken, box())
    # The ramp changes by 1 a column and 0 a row. Across the border: 60 pairs of columns (1 each), 80 of rows (0), so
    # 60/140 on average; in the interior (14 x 24): 14 x 23 pairs of columns, 13 x 24 of rows. The break adds 5 to one
    # side: |1 + 5| and |1 - 5| for columns, 5 for rows.
    inner = 14 * 23 / (14 * 23 + 13 * 24)
    assert found["jump_reference"] == pytest.approx((60 / 140) / inner)
    assert found["jump_deployed"] == pytest.approx(((30 * 6 + 30 * 4 + 80 * 5) / 140) / inner)
    assert found["bend_deployed"] == math.inf  # a ramp has no second difference inside


def test_edges_of_a_picture_are_where_it_changes() -> None:
    picture = torch.zeros(3, 40, 40)
    picture[:, :, 20:] = 1
    edges, flat = edge_regions(picture + 1e-3 * noise(4)[:3, :40, :40], share=0.05)
    assert edges[:, 19:21].all()
    assert not flat[:, 19:21].any()
