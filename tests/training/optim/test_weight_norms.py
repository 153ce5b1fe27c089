"""scale_weight_norms against sd-scripts' rule (apply_max_norm_regularization), with the full product in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from library.training.optim.after_update import WeightNormLimit, product_norm
from networks.adapters.lora import LoRALinear, join

SIZES = [(48, 64, 8, 4.0), (32, 16, 4, 4.0), (16, 16, 2, 1.0)]  # out, in, rank, alpha


def layers(dtype: torch.dtype = torch.float32, grow: float = 1.0) -> list[LoRALinear]:
    random, made = torch.Generator().manual_seed(0), []
    for out, inside, rank, alpha in SIZES:
        layer = LoRALinear(nn.Linear(inside, out), rank, alpha, dtype=dtype)
        with torch.no_grad():
            layer.lora_A.weight.copy_(torch.randn(rank, inside, generator=random) * 0.1 * grow)
            layer.lora_B.weight.copy_(torch.randn(out, rank, generator=random) * 0.1 * grow)
        made.append(layer)
    return made


def update(layer: LoRALinear) -> Tensor:
    return layer.scale * layer.lora_B.weight.detach().double() @ layer.lora_A.weight.detach().double()


@pytest.mark.parametrize("limit", [0.2, 0.6, 100.0])
def test_updates_are_those_of_sd_scripts(limit: float) -> None:
    ours, before = layers(), [update(layer) for layer in layers()]
    bound = WeightNormLimit(limit, ours)
    assert bound.metrics() == {}, "nothing was measured yet"
    bound.apply(torch.tensor(True))
    norms = []
    for layer, old in zip(ours, before, strict=True):
        norm = old.norm().clamp(min=limit / 2)
        ratio = norm.clamp(max=limit) / norm
        torch.testing.assert_close(update(layer), old * ratio, rtol=1e-5, atol=1e-8)
        norms.append((old.norm() * ratio).item())
    scaled = sum(old.norm() > limit for old in before)
    assert bound.metrics() == pytest.approx(
        {
            "max_norm/keys_scaled": float(scaled),
            "max_norm/max_key_norm": max(norms),
            "norm/avg_key_norm": sum(norms) / len(norms),
        },
        rel=1e-5,
    )


def test_a_layer_within_the_limit_keeps_its_bits_and_one_of_zeros_stays_finite() -> None:
    ours = layers(torch.bfloat16)
    with torch.no_grad():
        ours[0].lora_B.weight.zero_()
    before = [parameter.detach().clone() for layer in ours for parameter in layer.trained().values()]
    WeightNormLimit(50.0, ours).apply(torch.tensor(True))
    WeightNormLimit(0.1, ours).apply(torch.tensor(False))  # after a step that was skipped, as it was not finite
    after = [parameter for layer in ours for parameter in layer.trained().values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_the_norm_of_a_product_needs_no_product() -> None:
    random = torch.Generator().manual_seed(1)
    up, down = torch.randn(300, 16, generator=random), torch.randn(16, 500, generator=random)
    assert product_norm(up, down).item() == pytest.approx((up.double() @ down.double()).norm().item(), rel=1e-6)


def test_layers_with_one_lora_are_held_to_the_norm_of_the_joined_update() -> None:
    parts = [LoRALinear(nn.Linear(16, out), 4, 2.0) for out in (8, 8, 24)]
    join(parts)
    for parameter in parts[0].trained().values():
        nn.init.normal_(parameter)
    WeightNormLimit(0.5, [layer for layer in parts if layer.trained()]).apply(torch.tensor(True))
    down, up = (parameter.detach().double() for parameter in parts[0].trained().values())
    assert float((0.5 * up @ down).norm()) == pytest.approx(0.5, rel=1e-5)
