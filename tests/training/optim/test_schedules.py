"""Schedules: against transformers' of the same names at every step, and against published formulas."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import optimization as reference

from library.config.schema import OptimizerConfig
from library.errors import UserError
from library.training.optim.factory import build_optimizer
from library.training.optim.schedules import build_schedule, lr_multiplier, resolve_steps

LR, TOTAL, WARMUP = 3e-4, 60, 7


def multipliers(total: int = TOTAL, **settings: Any) -> list[float]:
    config = OptimizerConfig(**settings)
    return [lr_multiplier(config, step, total) for step in range(total)]


def rates_of(schedule: Callable[[torch.optim.Optimizer], LambdaLR], steps: int = TOTAL) -> list[float]:
    """Learning rates over LR, as an optimizer under this schedule sees them at each step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)
    lr_schedule, seen = schedule(optimizer), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"] / LR)
        optimizer.step()
        lr_schedule.step()
    return seen


CASES: list[tuple[dict[str, Any], Callable[[torch.optim.Optimizer], LambdaLR]]] = [
    (
        {"lr_scheduler": "constant_with_warmup"},
        lambda o: reference.get_constant_schedule_with_warmup(o, WARMUP),
    ),
    ({"lr_scheduler": "linear"}, lambda o: reference.get_linear_schedule_with_warmup(o, WARMUP, TOTAL)),
    ({"lr_scheduler": "cosine"}, lambda o: reference.get_cosine_schedule_with_warmup(o, WARMUP, TOTAL)),
    (
        {"lr_scheduler": "cosine", "lr_scheduler_min_lr_ratio": 0.1},
        lambda o: reference.get_cosine_with_min_lr_schedule_with_warmup(o, WARMUP, TOTAL, min_lr_rate=0.1),
    ),
    (
        {"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": 3},
        lambda o: reference.get_cosine_with_hard_restarts_schedule_with_warmup(o, WARMUP, TOTAL, num_cycles=3),
    ),
    (
        {"lr_scheduler": "polynomial", "lr_scheduler_power": 2.5, "lr_scheduler_min_lr_ratio": 0.2},
        lambda o: reference.get_polynomial_decay_schedule_with_warmup(o, WARMUP, TOTAL, lr_end=0.2 * LR, power=2.5),
    ),
    (
        {"lr_scheduler": "warmup_stable_decay", "lr_decay_steps": 20, "lr_scheduler_min_lr_ratio": 0.3},
        lambda o: reference.get_wsd_schedule(o, WARMUP, 20, num_training_steps=TOTAL, min_lr_ratio=0.3),
    ),
]


@pytest.mark.parametrize(
    ("settings", "theirs"), CASES, ids=lambda case: str(case)[:60] if isinstance(case, dict) else "transformers"
)
def test_schedules_equal_transformers_after_the_warmup_and_lead_it_by_a_step_before(
    settings: dict[str, Any], theirs: Callable[[torch.optim.Optimizer], LambdaLR]
) -> None:
    expected = rates_of(theirs)
    config = OptimizerConfig(lr_warmup_steps=WARMUP, **settings)
    ours = rates_of(lambda optimizer: build_schedule(config, optimizer, TOTAL))
    assert ours[WARMUP:] == pytest.approx(expected[WARMUP:], abs=1e-12)  # the same formula in float64
    if "stable" not in config.lr_scheduler:  # there the floor also lifts transformers' warm-up
        assert ours[: WARMUP - 1] == pytest.approx(expected[1:WARMUP], abs=1e-12)


def test_rex_follows_its_paper() -> None:
    # Chen et al. 2021, arXiv 2107.04197, equation 1 with beta = 1/2
    expected = [(1 - t / TOTAL) / (1 / 2 + 1 / 2 * (1 - t / TOTAL)) for t in range(TOTAL)]
    assert multipliers(lr_scheduler="rex") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "polynomial", "rex", "warmup_stable_decay"])
def test_decaying_schedules_rise_then_fall_from_one_to_their_floor(scheduler: str) -> None:
    rates = multipliers(
        total=1000,
        lr_scheduler=scheduler,
        lr_warmup_steps=100,
        lr_decay_steps=300,
        lr_scheduler_min_lr_ratio=0.25,
    )
    assert rates[99] == rates[100] == 1.0
    assert all(later > earlier for earlier, later in pairwise(rates[:100]))
    assert all(later <= earlier for earlier, later in pairwise(rates[100:]))
    assert 0.25 < rates[-1] < 0.26  # the last step is one short of the floor
    config = OptimizerConfig(lr_scheduler=scheduler, lr_scheduler_min_lr_ratio=0.25, lr_decay_steps=300)
    assert lr_multiplier(config, 1000, 1000) == lr_multiplier(config, 5000, 1000) == 0.25


def test_steps_may_be_a_fraction_of_all() -> None:
    assert resolve_steps(0.29, 100) == 29  # 0.29 * 100 is 28.999999999999996
    assert resolve_steps(0.001, 100) == 1
    assert resolve_steps(25, 100) == 25
    assert resolve_steps(0, 100) == 0


def test_a_resumed_schedule_goes_on_where_it_was() -> None:
    config = OptimizerConfig(lr_scheduler="cosine", lr_warmup_steps=3)

    def start() -> tuple[torch.optim.Optimizer, LambdaLR]:
        optimizer = build_optimizer(config, [{"params": [nn.Parameter(torch.zeros(1))]}], full_bf16=False)
        return optimizer, build_schedule(config, optimizer, 20)

    def advance(optimizer: torch.optim.Optimizer, schedule: LambdaLR, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return seen

    whole = advance(*start(), 20)
    optimizer, schedule = start()
    head = advance(optimizer, schedule, 8)
    other_optimizer, other_schedule = start()
    other_optimizer.load_state_dict(optimizer.state_dict())
    other_schedule.load_state_dict(schedule.state_dict())
    assert head + advance(other_optimizer, other_schedule, 12) == whole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lr_scheduler": "cosine", "lr_warmup_steps": 60},
            "60 warm-up steps do not end within the run's 60; lower",
        ),
        (
            {"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": 40, "lr_decay_steps": 0.5},
            "40 warm-up and 30 decay steps exceed the run's 60; lower one of them or train longer",
        ),
    ],
)
def test_phases_that_do_not_fit_into_the_run_are_refused(settings: dict[str, Any], message: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)
    with pytest.raises(UserError, match=message):
        build_schedule(OptimizerConfig(**settings), optimizer, TOTAL)


def test_a_schedule_over_a_schedule_free_optimizer_is_refused() -> None:
    config = OptimizerConfig(optimizer_type="schedulefree.AdamWScheduleFree", lr_scheduler="cosine")
    groups = [{"params": [nn.Parameter(torch.zeros(1))]}]
    optimizer = build_optimizer(config, groups, full_bf16=False)
    with pytest.raises(UserError, match=r"'cosine' would fight the schedule-free .*; set lr_scheduler = \"constant\""):
        build_schedule(config, optimizer, TOTAL)


def test_prodigy_plus_without_its_averaging_takes_a_schedule() -> None:
    config = OptimizerConfig(
        optimizer_type="ProdigyPlusScheduleFree",
        optimizer_args=["use_schedulefree=False"],
        lr_scheduler="cosine",
    )
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    optimizer = build_optimizer(config, [{"params": [weight]}], full_bf16=False)
    reference_optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    expected = reference.get_cosine_schedule_with_warmup(reference_optimizer, 0, TOTAL)
    lr_schedule = build_schedule(config, optimizer, TOTAL)
    for _ in range(TOTAL):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(reference_optimizer.param_groups[0]["lr"], abs=1e-12)
        for stepped in (optimizer, lr_schedule, reference_optimizer, expected):
            stepped.step()
