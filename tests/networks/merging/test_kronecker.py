"""Kronecker products: spectra, smaller ranks, the closest one, against numpy on the full matrices in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from networks.files.weights import LohaWeights, LokrWeights, LoraWeights
from networks.merging.low_rank import (
    decompose_kronecker,
    nearest_kronecker,
    rank_by_rule,
    resize_lora,
    smaller_lokr,
    update_norm,
)
from tests.networks.conftest import comfy_weight

SEEDS = range(12)


def drawn(seed: int, most: int = 9) -> LokrWeights:
    """Return a LoKr of random sizes; each factor is whole or of low rank, alpha may be negative."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, most, (4,), generator=random).tolist()
    tensors = {}
    for i, (rows, columns) in enumerate((sizes[:2], sizes[2:]), 1):
        if (seed >> i) % 2:
            tensors |= {f"lokr_w{i}_a": torch.randn(rows, i, generator=random)}
            tensors |= {f"lokr_w{i}_b": torch.randn(i, columns, generator=random)}
        else:
            tensors[f"lokr_w{i}"] = torch.randn(rows, columns, generator=random)
    return LokrWeights(tensors, 3.0 if seed % 3 else -2.0)


def full(lokr: LokrWeights) -> Tensor:
    """Return the update by ComfyUI's formula, in float64."""
    rows, columns = lokr.shape
    tensors = {name: tensor for name, tensor in lokr.tensors.items() if name != "rows"}
    zero = torch.zeros(rows, columns or 0, dtype=torch.float64)
    return comfy_weight(zero, {**tensors, "alpha": torch.tensor(lokr.alpha)})


@pytest.mark.parametrize("seed", SEEDS)
def test_the_spectrum_is_that_of_the_whole_matrix(seed: int) -> None:
    lokr = drawn(seed)
    whole = full(lokr).numpy()
    values = np.linalg.svd(whole)[1]
    rank = rank_by_rule(torch.from_numpy(values), "sv_fro", 0.9)
    found = decompose_kronecker(lokr, lambda values: rank_by_rule(values, "sv_fro", 0.9))
    assert len(found.values) == rank
    np.testing.assert_allclose(found.values, values[:rank], rtol=1e-9, atol=1e-12)
    u, s, vh = np.linalg.svd(whole, full_matrices=False)
    best = u[:, :rank] * s[:rank] @ vh[:rank]
    left = np.linalg.norm(whole - found.lora(rank).delta(torch.float64).numpy())
    assert left == pytest.approx(np.linalg.norm(whole - best), rel=1e-7, abs=1e-9)  # of equal values any may be kept
    assert found.kept(rank) == pytest.approx((values[:rank] ** 2).sum() / (values**2).sum(), rel=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_smaller_lokr_keeps_what_it_says_and_reads_the_same_everywhere(seed: int) -> None:
    lokr = drawn(seed, most=14)
    whole = full(lokr)
    resized, layer = smaller_lokr(lokr, lambda values: min(2, len(values)))
    left = float((whole - full(resized)).square().sum() / whole.square().sum())
    assert left == pytest.approx(1 - layer.kept, abs=1e-6)  # lokr_w1 is fp32 where it stayed
    rank = resized.rank
    if "lokr_w2_a" in resized.tensors and resized is not lokr:
        w2 = lokr.w2(torch.float64)
        values = np.linalg.svd(w2.numpy())[1]
        assert layer.kept == pytest.approx((values[:2] ** 2).sum() / (values**2).sum(), rel=1e-9)
        assert rank == layer.after < max(w2.shape) / 2  # peft and musubi-tuner build a product below half alone
        assert "lokr_w1" in resized.tensors  # one rank in the file: programs differ in whose alpha is divided by
    else:
        assert layer.kept == 1


def test_rows_of_a_joined_lokr_stay_rows_of_one() -> None:
    lokr = LokrWeights({"lokr_w1": torch.randn(4, 4), "lokr_w2": torch.randn(15, 8)}, 1.0)
    rows = torch.arange(60).split([20, 20, 20])
    parts = {name: lokr.of_rows(picked) for name, picked in zip("qkv", rows, strict=True)}
    smaller, _ = resize_lora(parts, 2)
    assert len({id(part.tensors["lokr_w2_a"]) for part in smaller.values()}) == 1
    best = full(smaller_lokr(lokr, lambda _: 2)[0])
    torch.testing.assert_close(torch.cat([smaller[name].delta(torch.float64) for name in "qkv"]), best)
    loras, layers = resize_lora(parts, 5, kind="lora")
    assert all(torch.equal(loras[name].tensors["down"], loras["q"].tensors["down"]) for name in "kv")
    u, s, vh = np.linalg.svd(full(lokr).numpy())
    joined = torch.cat([loras[name].delta(torch.float64) for name in "qkv"]).numpy()
    np.testing.assert_allclose(joined, u[:, :5] * s[:5] @ vh[:5], atol=1e-9)
    assert layers[0].kept == pytest.approx((s[:5] ** 2).sum() / (s**2).sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_norm_is_that_of_the_whole_matrix(seed: int) -> None:
    lokr = drawn(seed)
    assert update_norm(lokr) == pytest.approx(float(full(lokr).norm()), rel=1e-6)
    rows = torch.randperm(lokr.shape[0])[: max(1, lokr.shape[0] // 3)]
    assert update_norm(lokr.of_rows(rows)) == pytest.approx(float(full(lokr)[rows].norm()), rel=1e-6)


def test_a_loha_is_a_lora_of_the_product_of_its_ranks() -> None:
    t = {f"hada_w{i}_a": torch.randn(20, 2 + i) for i in (1, 2)}
    t |= {f"hada_w{i}_b": torch.randn(2 + i, 14) for i in (1, 2)}
    loha = LohaWeights(t, 2.0)
    expected = (t["hada_w1_a"].double() @ t["hada_w1_b"].double()) * (t["hada_w2_a"].double() @ t["hada_w2_b"].double())
    expected = expected * 2 / 3
    assert loha.as_lora().rank == 12
    torch.testing.assert_close(loha.as_lora().delta(torch.float64), expected)
    assert update_norm(loha) == pytest.approx(float(expected.norm()))
    (lora,) = resize_lora({"a": loha}, 4, kind="lora")[0].values()
    assert isinstance(lora, LoraWeights)
    u, s, vh = np.linalg.svd(expected.numpy(), full_matrices=False)
    np.testing.assert_allclose(lora.delta(torch.float64), u[:, :4] * s[:4] @ vh[:4], atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_closest_kronecker_product_is_found(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    a, b, c, d = torch.randint(1, 8, (4,), generator=random).tolist()
    matrix = torch.randn(a * c, b * d, generator=random, dtype=torch.float64)
    w1, w2 = nearest_kronecker(matrix, a, b, random)
    assert (w1.shape, w2.shape) == ((a, b), (c, d))
    left = float((matrix - torch.kron(w1, w2)).norm())
    blocks = np.array(
        [matrix[i * c : (i + 1) * c, j * d : (j + 1) * d].numpy().ravel() for i in range(a) for j in range(b)]
    )
    values = np.linalg.svd(blocks)[1]  # the theorem of Van Loan and Pitsianis
    assert left == pytest.approx(float(np.sqrt((values[1:] ** 2).sum())), abs=1e-9)
    product = torch.kron(torch.randn(a, b, dtype=torch.float64), torch.randn(c, d, dtype=torch.float64))
    torch.testing.assert_close(torch.kron(*nearest_kronecker(product, a, b, random)), product)
