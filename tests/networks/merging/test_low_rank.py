"""Low-rank arithmetic against the full matrices in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from networks.files.weights import LoraWeights
from networks.merging.low_rank import (
    combine,
    combine_loras,
    decompose,
    decompose_product,
    rank_by_rule,
    relative_difference,
    resize_lora,
    update_norm,
)


def weights(rank: int, alpha: float, seed: int, dtype: torch.dtype = torch.float64) -> LoraWeights:
    rng = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, 24, generator=rng, dtype=torch.float64).to(dtype)
    return LoraWeights(down, torch.randn(40, rank, generator=rng, dtype=torch.float64).to(dtype), alpha)


def full(module: LoraWeights) -> torch.Tensor:
    return module.alpha / module.rank * (module.up.double() @ module.down.double())


def test_a_combination_is_the_weighted_sum_of_the_updates() -> None:
    parts = [(weights(4, 2.0, 0), 0.8), (weights(7, 7.0, 1), -0.3), (weights(1, 5.0, 2), 1.5)]
    both = combine(parts)
    assert both.rank == 12
    expected = sum(strength * full(module) for module, strength in parts)
    # float64 throughout: 1e-16 per operation, 12 products summed
    torch.testing.assert_close(full(both), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_keep_their_bits_where_one_scale_serves_all(dtype: torch.dtype) -> None:
    one = weights(4, 2.0, 0, dtype)
    alone = combine([(one, 0.7)])
    assert torch.equal(alone.up, one.up)
    assert torch.equal(alone.down, one.down)
    assert alone.alpha == 0.7 * 2.0 / 4 * 4
    two = combine([(one, 1.0), (weights(4, 2.0, 1, dtype), 1.0)])
    assert two.up.dtype == dtype
    assert two.scale == 0.5


def test_unequal_scales_of_16_bit_factors_are_folded_in_fp32() -> None:
    parts = [(weights(4, 2.0, 0, torch.bfloat16), 1.0), (weights(4, 3.0, 1, torch.bfloat16), 1.0)]
    both = combine(parts)
    assert both.up.dtype == torch.float32
    # a bf16 number times a scale, rounded to fp32: 6e-8 each
    torch.testing.assert_close(full(both), full(parts[0][0]) + full(parts[1][0]), rtol=1e-6, atol=1e-6)


def test_loras_are_combined_layer_by_layer_and_strength_0_is_none() -> None:
    a, b = weights(2, 1.0, 0), weights(3, 1.0, 1)
    joined = combine_loras([({"x": a, "y": a}, 1.0), ({"y": b, "z": b}, 2.0), ({"w": b}, 0.0)])
    assert {name: module.rank for name, module in joined.items()} == {"x": 2, "y": 5, "z": 3}
    torch.testing.assert_close(full(joined["y"]), full(a) + 2 * full(b), rtol=1e-13, atol=1e-13)


def test_norm_and_difference_are_those_of_the_full_matrices() -> None:
    a, b = weights(4, -2.0, 0), weights(3, 1.0, 1)
    assert update_norm(a) == pytest.approx(full(a).norm().item(), rel=1e-12)
    expected = ((full(a) - full(b)).norm() / full(a).norm()).item()
    assert relative_difference(a, b) == pytest.approx(expected, rel=1e-9)
    assert relative_difference(a, combine([(a, 1.0)])) < 3e-8  # the root of float64's 1e-16, a few times
    zero = LoraWeights(torch.zeros(1, 24), torch.zeros(40, 1), 1.0)
    assert relative_difference(zero, zero) == 0
    assert relative_difference(zero, a) == float("inf")


def test_parts_of_a_joined_layer_are_resized_as_the_layer_they_were_trained_on() -> None:
    whole = weights(6, 3.0, 0)
    parts = {
        name: LoraWeights(whole.down, up, 3.0) for name, up in zip("qkv", whole.up.split([10, 10, 20]), strict=True)
    }
    resized, layers = resize_lora({**parts, "other": weights(6, 3.0, 1)}, 2)
    assert all(torch.equal(resized[name].down, resized["q"].down) for name in "kv")
    assert not torch.equal(resized["other"].down, resized["q"].down)
    u, values, vh = torch.linalg.svd(full(whole))  # Eckart and Young: the closest of rank 2 to the whole
    expected = u[:, :2] * values[:2] @ vh[:2]
    torch.testing.assert_close(torch.cat([full(resized[name]) for name in "qkv"]), expected, rtol=1e-10, atol=1e-12)
    assert layers[0].kept == pytest.approx(float(values[:2].square().sum() / values.square().sum()))


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
