"""Generated masks: the same for the same sample, of the stated proportions, never of nearly nothing or everything."""

from __future__ import annotations

import random

import numpy as np
import pytest

from library.data.masks import MASK_KINDS, Mask, MaskKind, draw_mask, generated_mask

SIZES = [(256, 256), (192, 80), (16, 16), (64, 16)]


def drawn(kind: MaskKind, width: int, height: int, count: int = 60) -> list[Mask]:
    rng = random.Random(f"{kind} {width} {height}")
    return [draw_mask(kind, width, height, rng) for _ in range(count)]


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_masks_fill_5_to_90_percent_of_any_size(kind: MaskKind, width: int, height: int) -> None:
    for mask in drawn(kind, width, height):
        assert (mask.shape, mask.dtype) == ((height, width), np.uint8)
        assert set(np.unique(mask)) == {0, 1}
        assert 0.05 <= mask.mean() <= 0.9


@pytest.mark.parametrize(("width", "height"), [(1472, 64), (64, 1472), (4096, 256)])
def test_ribbons_that_no_three_rectangles_fill_get_a_half(width: int, height: int) -> None:
    """Three of 150/256 of the shorter side, squared, are 4.5 % of 1472 x 64."""
    mask = draw_mask("rectangles", width, height, random.Random(0))
    assert mask.all(axis=0).any() or mask.all(axis=1).any()  # whole rows or columns: no rectangle touches the edge
    assert 0.3 <= mask.mean() <= 0.7  # 35 to 65 % and the rounding of 64 rows


def test_a_mask_is_a_function_of_seed_sample_and_variant() -> None:
    first = generated_mask(MASK_KINDS, 64, 48, 1, "a", 0)
    assert np.array_equal(first, generated_mask(MASK_KINDS, 64, 48, 1, "a", 0))
    others = [(2, "a", 0), (1, "b", 0), (1, "a", 1)]
    assert all(not np.array_equal(first, generated_mask(MASK_KINDS, 64, 48, *key)) for key in others)


def test_only_the_kinds_asked_for_are_drawn() -> None:
    halves = [generated_mask(("halves",), 64, 64, 0, "a", variant) for variant in range(50)]
    for mask in halves:
        rows, columns = mask.all(axis=1), mask.all(axis=0)
        assert rows.any() != columns.any()  # whole rows or whole columns
        assert mask.sum() == 64 * max(rows.sum(), columns.sum())
    # 50 draws of one of four sides: that one stays away has a probability of 4 * 0.75^50 = 2e-6
    corners = {tuple(bool(mask[y, x]) for y, x in ((0, 0), (0, -1), (-1, 0), (-1, -1))) for mask in halves}
    assert len(corners) == 4


def test_rectangles_keep_lamas_margin_and_sides() -> None:
    """LaMa: at least 10 pixels of 256 from the edge, sides of 30 to 150; one rectangle alone shows its sides."""
    alone = 0
    for mask in drawn("rectangles", 256, 256, 200):
        inner = mask.copy()
        inner[10:-10, 10:-10] = 0
        assert not inner.any()
        high, wide = np.ptp(np.nonzero(mask), axis=1) + 1
        if mask.sum() == high * wide:
            alone += 1
            assert min(high, wide) >= 30
            assert max(high, wide) <= 150 or high * wide > 150 * 30  # two that make one rectangle
    assert alone > 30  # of 200, a third


def test_borders_leave_one_rectangle_and_touch_the_edge() -> None:
    sides = set()
    for mask in drawn("borders", 160, 80, 100):
        known = 1 - mask
        rows, columns = np.nonzero(known)
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        assert known.sum() == (bottom - top) * (right - left)
        for depth, side in ((top, 80), (80 - bottom, 80), (left, 160), (160 - right, 160)):
            assert depth == 0 or side / 8 - 1 <= depth <= side * 3 / 8 + 1  # rounded to whole pixels
        sides.add(sum(depth > 0 for depth in (top, 80 - bottom, left, 160 - right)))
    assert sides == {1, 2, 3, 4}


def test_strokes_fill_about_a_third_of_the_image_and_vary() -> None:
    """LaMa calls such masks wide; simulated shares were 11 to 61 % between the first and the last tenth."""
    shares = [mask.mean() for mask in drawn("strokes", 256, 256, 200)]
    assert 0.2 < np.mean(shares) < 0.5
    assert np.std(shares) > 0.1
