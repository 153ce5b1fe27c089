"""Fusing q, k, v and splitting again: the same update, seen as matrices."""

from __future__ import annotations

import pytest
import torch

from library.models.layer_names import KeyRow
from networks.files.joined import fuse_parts, split_fused
from networks.files.weights import LoraWeights

QKV = KeyRow("qkv", ("q", "k", "v"), rows=(1, 1, 1))
LINEAR1 = KeyRow("linear1", ("q", "k", "v", "mlp"), rows=(1, 1, 1, 4))
WIDTH = 6


def part(rank: int, alpha: float, seed: int, out: int = WIDTH) -> LoraWeights:
    rng = torch.Generator().manual_seed(seed)
    return LoraWeights(torch.randn(rank, WIDTH, generator=rng), torch.randn(out, rank, generator=rng), alpha)


def stacked(row: KeyRow, parts: dict[int, LoraWeights]) -> torch.Tensor:
    """The original module's update: the parts' updates under each other, zeros where there is none."""
    heights = [multiple * WIDTH for multiple in row.rows]
    return torch.cat([parts[i].delta() if i in parts else torch.zeros(h, WIDTH) for i, h in enumerate(heights)])


CASES = {
    "equal": (QKV, {i: part(3, 1.5, i) for i in range(3)}),
    "with mlp": (LINEAR1, {i: part(3, 5.0, i, WIDTH * (4 if i == 3 else 1)) for i in range(4)}),
    "q missing": (QKV, {1: part(3, 1.5, 1), 2: part(3, 1.5, 2)}),
    "mlp missing": (LINEAR1, {0: part(2, 1.0, 1)}),
    "mixed ranks, one scale": (QKV, {0: part(2, 1.0, 0), 1: part(4, 2.0, 1), 2: part(4, 2.0, 2)}),
    "mixed ranks, one alpha": (QKV, {0: part(2, 3.0, 0), 1: part(4, 3.0, 1), 2: part(1, 3.0, 2)}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_fused_update_is_the_parts_updates_and_splits_into_them_again(case) -> None:
    row, parts = case
    fused = fuse_parts(row, parts)
    expected = stacked(row, parts)
    torch.testing.assert_close(fused.delta(), expected)
    again = split_fused(row, fused)
    assert {i: p.rank for i, p in again.items()} == {i: p.rank for i, p in parts.items()}
    torch.testing.assert_close(stacked(row, again), expected)


@pytest.mark.parametrize("name", ["equal", "with mlp"])
def test_equal_parts_keep_their_bits_and_their_alpha(name: str) -> None:
    row, parts = CASES[name]
    again = split_fused(row, fuse_parts(row, parts))
    for i, before in parts.items():
        assert torch.equal(again[i].down, before.down)
        assert torch.equal(again[i].up, before.up)
        assert again[i].alpha == before.alpha


def test_a_dense_fused_lora_splits_with_one_down_and_fuses_back_to_itself() -> None:
    fused = part(6, 2.0, 0, 3 * WIDTH)  # rank 6: a multiple of 3, but not block-diagonal
    parts = split_fused(QKV, fused)
    torch.testing.assert_close(stacked(QKV, parts), fused.delta())
    back = fuse_parts(QKV, parts)
    assert (back.rank, back.alpha) == (6, 2.0)
    assert torch.equal(back.up, fused.up)


def test_halves_are_swapped_for_modulations_in_the_other_order() -> None:
    row = KeyRow("adaLN", ("norm_out",), halves_swapped=True)
    fused = part(2, 1.0, 0, 4)
    (split,) = split_fused(row, fused).values()
    assert torch.equal(split.up, fused.up[[2, 3, 0, 1]])
    assert torch.equal(fuse_parts(row, {0: split}).up, fused.up)


def test_rows_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="20 output rows, 18 expected for 6 input columns"):
        split_fused(QKV, part(3, 1.0, 0, 20))
