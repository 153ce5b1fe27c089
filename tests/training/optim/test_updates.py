"""Stochastic rounding: unbiased, progresses where nearest rounding does not, follows from (seed, step)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import library.training.optim.stochastic_rounding as stochastic_rounding
from library.training.optim.after_update import WeightNormLimit, product_norm
from library.training.optim.stochastic_rounding import STEP_KEY, round_stochastically, update_stochastically
from networks.adapters.lora import LoRALinear, join


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("value", [1.001, -1.001, 3.14159, 1e-3, -7.7e-12, 1e-39, 123456.7])
def test_the_mean_of_rounded_values_is_the_exact_value(value: float) -> None:
    exact = torch.tensor(value)
    count = 400_000
    rounded = round_stochastically(exact.expand(count).contiguous(), generator()).double()
    lower, upper = rounded.min().item(), rounded.max().item()
    assert lower <= exact.item() <= upper
    # one unit in the last place apart: 2^-7 of the power of two below (the denormal spacing is 2^-133)
    spacing = 2.0 ** max(-133, math.floor(math.log2(abs(exact.item()))) - 7)
    assert upper - lower == spacing
    share = (exact.item() - lower) / spacing
    # five standard errors of the mean of a coin with this share: a false alarm in 2 million
    assert abs(rounded.mean().item() - exact.item()) < 5 * spacing * math.sqrt(share * (1 - share) / count)


def test_infinities_and_nan_are_kept() -> None:
    values = torch.tensor([math.inf, -math.inf, math.nan])
    nan_with_full_mantissa = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    rounded = round_stochastically(torch.cat([values, nan_with_full_mantissa]), generator())
    assert rounded[0] == math.inf
    assert rounded[1] == -math.inf
    assert rounded[2:].isnan().all()


def steps_of_sgd(weight: nn.Parameter, count: int, stochastic: bool) -> Tensor:
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    if stochastic:
        update_stochastically(optimizer, seed=0)
    for _ in range(count):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.detach().double()


def test_updates_that_nearest_rounding_loses_add_up() -> None:
    nearest = steps_of_sgd(nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)), 1000, stochastic=False)
    stochastic = steps_of_sgd(nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)), 1000, stochastic=True)
    assert (nearest == 1.0).all()  # 1e-4 is less than half of 2^-8
    # Exact: 1 - 1000 * 1e-4. A step moves by 2^-8 with probability 1e-4 * 2^8 = 0.026: a weight ends within
    # sqrt(1000 * 0.026) * 2^-8 = 0.02 of it and the mean of 4096 within 3e-4; five times that.
    assert stochastic.mean().item() == pytest.approx(0.9, abs=1.5e-3)


def test_the_random_bits_differ_between_steps_and_weights() -> None:
    size, lr = 10_000, 1e-3
    weights = [nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=lr)
    update_stochastically(optimizer, seed=0)
    moved: list[Tensor] = []
    for _ in range(2):
        for weight in weights:
            weight.data.fill_(1.0)
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        moved += [weight.detach() != 1 for weight in weights]
    for i in range(4):
        for j in range(i):
            both = (moved[i] & moved[j]).float().mean().item()
            share = lr * 2**8
            # independent: the share of coincidences is the square; five standard errors
            assert both == pytest.approx(share**2, abs=5 * math.sqrt(share**2 / size))


def test_weights_keep_their_storage_dtype_and_gradient() -> None:
    weight, idle = (nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2))
    wide = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([weight, idle, wide], lr=0.1)
    update_stochastically(optimizer, seed=0)
    weight.grad, wide.grad = torch.ones_like(weight), torch.ones_like(wide)
    storage, gradient = weight.data_ptr(), weight.grad
    optimizer.step()
    assert weight.data_ptr() == storage
    assert weight.dtype == torch.bfloat16
    assert weight.grad is gradient
    assert (weight != 1).all()
    assert torch.equal(idle, torch.ones(8, dtype=torch.bfloat16))
    assert idle.grad is None
    assert optimizer.state[weight]["exp_avg_sq"].dtype == torch.float32
    torch.testing.assert_close(wide.detach(), torch.full((8,), 1 - 0.1 * 0.01 - 0.1))  # fp32 weights as ever


def test_the_step_number_is_saved_with_the_optimizer() -> None:
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    update_stochastically(optimizer, seed=0)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert optimizer.state_dict()["param_groups"][0][STEP_KEY] == 3


@pytest.mark.parametrize("where", ["in the step", "while its copies are made", "while they are rounded"])
def test_a_step_that_fails_leaves_weights_and_gradients_where_they_were(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [nn.Parameter(torch.randn(20, 30, generator=generator(i)).bfloat16()) for i in range(2)]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    update_stochastically(optimizer, seed=0)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    before = [(weight.data_ptr(), weight.grad, weight.detach().clone()) for weight in weights]
    calls = list[int]()

    def fail(*arguments: object, **more: object) -> list[Tensor]:
        calls.append(1)
        if where == "while its copies are made" and len(calls) == 1:  # of the weights; those of gradients fail
            return [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
        raise torch.OutOfMemoryError("CUDA out of memory")

    owner, name = {
        "in the step": (optimizer, "_init_group"),
        "while its copies are made": (stochastic_rounding, "_widen"),
        "while they are rounded": (stochastic_rounding, "_round_into"),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    for weight, (place, gradient, value) in zip(weights, before, strict=True):
        assert (weight.dtype, weight.data_ptr()) == (torch.bfloat16, place)
        assert weight.grad is gradient
        assert torch.equal(weight, value)
    optimizer.step()
    assert all(not torch.equal(weight, value) for weight, (_, _, value) in zip(weights, before, strict=True))


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
