"""Singular values against numpy's in float64, and the rank rules against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from networks.files.weights import LoraWeights
from networks.merging.low_rank import decompose, decompose_product, rank_by_rule


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def matrix_of(values: np.ndarray, rows: int, columns: int) -> torch.Tensor:
    """Return a matrix with these singular values, built with numpy in float64."""
    random = np.random.default_rng(0)
    left = np.linalg.qr(random.standard_normal((rows, len(values))))[0]
    right = np.linalg.qr(random.standard_normal((columns, len(values))))[0]
    return torch.from_numpy(left * values @ right.T)


@pytest.mark.parametrize("scale", [0.75, -0.75])
def test_a_product_is_decomposed_as_numpy_decomposes_the_whole_matrix(scale: float) -> None:
    rng = torch.Generator().manual_seed(0)
    down, up = torch.randn(6, 30, generator=rng), torch.randn(20, 6, generator=rng)
    spectrum = decompose_product(LoraWeights(down, up, 6 * scale))
    whole = scale * up.double().numpy() @ down.double().numpy()
    # float64 on both sides: 1e-16 an operation, 30 of them summed
    np.testing.assert_allclose(spectrum.values.numpy(), np.linalg.svd(whole)[1][:6], rtol=1e-12)
    again = (spectrum.left * spectrum.values) @ spectrum.right
    np.testing.assert_allclose(again.numpy(), whole, atol=1e-12)
    assert spectrum.energy == pytest.approx((whole**2).sum(), rel=1e-12)


@pytest.mark.parametrize(("rows", "columns"), [(700, 560), (560, 700)])
def test_the_randomised_way_keeps_as_much_as_the_best_answer(rows: int, columns: int) -> None:
    values = 1 / np.arange(1, 541) ** 0.5  # falls slowly: the hard case
    matrix = matrix_of(values, rows, columns)
    spectrum = decompose(matrix, 32, draws())
    best = (values[:32] ** 2).sum() / (values**2).sum()
    assert spectrum.values.shape == (32,)
    # measured 5e-5 below the best; the module promises 1e-3
    assert best - 1e-3 < spectrum.kept(32) <= best + 1e-12
    assert spectrum.energy == pytest.approx((values**2).sum(), rel=1e-12)


def test_rank_rules_mean_what_sd_scripts_means() -> None:
    values = torch.tensor([4.0, 2.0, 1.0, 1.0])  # squares 16, 4, 1, 1 of 22; sums 4, 6, 7, 8
    assert rank_by_rule(values, "sv_fro", (16 / 22) ** 0.5) == 1
    assert rank_by_rule(values, "sv_fro", (16.1 / 22) ** 0.5) == 2
    assert rank_by_rule(values, "sv_cumulative", 0.75) == 2
    assert rank_by_rule(values, "sv_cumulative", 0.76) == 3
    assert rank_by_rule(values, "sv_ratio", 2.5) == 2  # larger than 1.6
    assert rank_by_rule(values, "sv_ratio", 2.0) == 1  # 2 is not larger than 2
    assert [rank_by_rule(values, rule, 1.0) for rule in ("sv_fro", "sv_cumulative")] == [4, 4]
    assert rank_by_rule(torch.zeros(3), "sv_fro", 0.9) == 1
