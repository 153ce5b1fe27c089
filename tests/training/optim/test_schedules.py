"""Learning rates: schedules against transformers' and published formulas, and the tracker's numbers against weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import optimization as reference

from library.config.schema import OptimizerConfig
from library.errors import UserError
from library.training.optim.factory import build_optimizer
from library.training.optim.lr_tracker import read_learning_rates
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
    ({"lr_scheduler": "constant_with_warmup"}, lambda o: reference.get_constant_schedule_with_warmup(o, WARMUP)),
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
    last = {"lr_decay_steps": 300} if scheduler == "warmup_stable_decay" else {}
    rates = multipliers(total=1000, lr_scheduler=scheduler, lr_warmup_steps=100, lr_scheduler_min_lr_ratio=0.25, **last)
    assert rates[99] == rates[100] == 1.0
    assert all(later > earlier for earlier, later in pairwise(rates[:100]))
    assert all(later <= earlier for earlier, later in pairwise(rates[100:]))
    assert 0.25 < rates[-1] < 0.26  # the last step is one short of the floor
    config = OptimizerConfig(lr_scheduler=scheduler, lr_scheduler_min_lr_ratio=0.25, **last)
    assert lr_multiplier(config, 1000, 1000) == lr_multiplier(config, 5000, 1000) == 0.25


@pytest.mark.parametrize(("warmup", "decay", "floor"), [(7, 20, 0.1), (0, 33, 0.0), (7, 53, 0.25), (1, 1, 0.5)])
def test_a_cosine_that_ends_before_the_run_equals_torchs_and_holds_its_floor(
    warmup: int, decay: int, floor: float
) -> None:
    def theirs(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, decay, eta_min=floor * LR)

    rates = multipliers(
        lr_scheduler="cosine", lr_warmup_steps=warmup, lr_decay_steps=decay, lr_scheduler_min_lr_ratio=floor
    )
    # torch goes from rate to rate, and upwards again behind the end
    assert rates[warmup : warmup + decay] == pytest.approx(rates_of(theirs, decay), abs=1e-9)
    assert rates[warmup + decay :] == pytest.approx([floor] * (TOTAL - warmup - decay), abs=1e-12)


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "cosine_with_restarts", "polynomial", "rex"])
def test_a_shorter_decay_is_that_of_a_shorter_run(scheduler: str) -> None:
    settings = {"lr_scheduler": scheduler, "lr_warmup_steps": 5, "lr_scheduler_min_lr_ratio": 0.2}
    rates = multipliers(lr_decay_steps=0.25, **settings)  # 15 of 60
    assert rates[:20] == multipliers(total=20, **settings)
    assert rates[20:] == pytest.approx([0.2] * 40, abs=1e-12)


@pytest.mark.parametrize("start", [0.0, 0.1, 1.0])
def test_a_warmup_rises_from_its_start_rate_as_torchs_does(start: float) -> None:
    def theirs(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, start or 1e-12, total_iters=WARMUP)

    rates = multipliers(lr_scheduler="constant_with_warmup", lr_warmup_steps=WARMUP, lr_warmup_start_ratio=start)
    assert rates[: TOTAL - 1] == pytest.approx(rates_of(theirs)[1:], abs=1e-9)  # ours leads by a step


def test_steps_may_be_a_fraction_of_all() -> None:
    assert resolve_steps(0.29, 100) == 29  # 0.29 * 100 is 28.999999999999996
    assert resolve_steps(0.001, 100) == 1
    assert resolve_steps(25, 100) == 25
    assert resolve_steps(0, 100) == 0


def test_a_resumed_schedule_goes_on_where_it_was() -> None:
    config = OptimizerConfig(lr_scheduler="cosine", lr_warmup_steps=3, lr_decay_steps=9, lr_warmup_start_ratio=0.2)

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
        ({"lr_scheduler": "cosine", "lr_warmup_steps": 60}, "60 warm-up steps do not end within the run's 60; lower"),
        (
            {"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": 40, "lr_decay_steps": 0.5},
            "40 warm-up and 30 decay steps exceed the run's 60; lower one of them or train longer",
        ),
        ({"lr_scheduler": "cosine", "lr_decay_steps": 61}, "0 warm-up and 61 decay steps exceed the run's 60; lower"),
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
        optimizer_type="ProdigyPlusScheduleFree", optimizer_args=["use_schedulefree=False"], lr_scheduler="cosine"
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


class Problem:
    """One weight pulled from 1 towards 3, in float64 so that a step size can be read from a difference."""

    def __init__(
        self, optimizer_type: str, *arguments: str, lr: float = 0.5, dtype: torch.dtype = torch.float64
    ) -> None:
        config = OptimizerConfig(optimizer_type=optimizer_type, optimizer_args=list(arguments), learning_rate=lr)
        self.weight = nn.Parameter(torch.ones(4, 5, dtype=dtype))
        self.random = torch.Generator().manual_seed(0)
        groups = [{"params": [self.weight], "name": "lora"}]
        self.optimizer = build_optimizer(config, groups, full_bf16=False)

    def set_gradient(self) -> Tensor:
        noise = torch.randn(4, 5, generator=self.random, dtype=self.weight.dtype)
        self.weight.grad = self.weight.detach() - 3.0 + 0.1 * noise
        return self.weight.grad.clone()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.set_gradient()
            self.optimizer.step()

    def state(self, key: str) -> Tensor:
        return self.optimizer.state[self.weight][key].clone()

    def observe(self, *keys: str) -> tuple[dict[str, float], Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Take a step: what was read before it, gradient, the weight's change, states before and after."""
        read = read_learning_rates(self.optimizer)
        gradient = self.set_gradient()
        before = {key: self.state(key) for key in keys}
        start = self.weight.detach().clone()
        self.optimizer.step()
        return (read, gradient, self.weight.detach() - start, {key: (before[key], self.state(key)) for key in keys})


def test_plain_optimizers_report_the_learning_rate_of_every_group() -> None:
    groups = [
        {"params": [nn.Parameter(torch.ones(2))], "lr": lr, "name": name} for lr, name in ((0.1, "a"), (0.2, "b"))
    ]
    assert read_learning_rates(torch.optim.AdamW(groups)) == {"lr/a": 0.1, "lr/b": 0.2}


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("name", ["Prodigy", "prodigyopt.Prodigy"])
def test_prodigy_moves_the_weights_by_the_reported_step_size(name: str, bias_correction: bool) -> None:
    problem = Problem(name, f"use_bias_correction={bias_correction}", "eps=1e-30")
    problem.train(20)
    d = problem.optimizer.param_groups[0]["d"]
    read, _, change, states = problem.observe("exp_avg", "exp_avg_sq")
    direction = states["exp_avg"][1] / states["exp_avg_sq"][1].sqrt()
    assert read["d/lora"] == d
    assert read["lr/lora"] == 0.5
    assert read["d*lr/lora"] == pytest.approx((-change / direction).mean().item(), rel=1e-8)
    factor = math.sqrt(1 - 0.999**21) / (1 - 0.9**21) if bias_correction else 1.0
    assert read["d*lr/lora"] == pytest.approx(0.5 * d * factor, rel=1e-12)


@pytest.mark.parametrize("bias_correction", [False, True])
def test_dadapt_adam_averages_gradients_times_the_reported_step_size(bias_correction: bool) -> None:
    problem = Problem("DAdaptAdam", f"use_bias_correction={bias_correction}")
    problem.optimizer.param_groups[0]["layer_scale"] = 2.0
    problem.train(10)
    read, gradient, _, states = problem.observe("exp_avg")
    before, after = states["exp_avg"]
    used = (after - 0.9 * before) / (0.1 * gradient)
    assert read["d*lr/lora"] == pytest.approx(used.mean().item(), rel=1e-8)


def test_dadapt_sgd_divides_its_step_size_by_the_first_gradient_norm() -> None:
    problem = Problem("DAdaptSGD")
    assert "d*lr/lora" not in read_learning_rates(problem.optimizer)  # unknown before the first gradient
    problem.train(5)
    read, gradient, _, states = problem.observe("s")
    before, after = states["s"]
    assert read["d*lr/lora"] == pytest.approx(((after - before) / gradient).mean().item(), rel=1e-8)


@pytest.mark.parametrize("name", ["DAdaptation", "DAdaptAdan", "DAdaptAdanIP", "DAdaptAdaGrad"])
def test_the_other_dadaptations_report_d_and_d_times_lr(name: str) -> None:
    problem = Problem(name)
    problem.train(10)
    d = problem.optimizer.param_groups[0]["d"]
    assert read_learning_rates(problem.optimizer) == {"lr/lora": 0.5, "d/lora": d, "d*lr/lora": 0.5 * d}


def test_prodigy_plus_moves_z_by_the_reported_step_size() -> None:
    arguments = ["factored=False", "use_stableadamw=False", "eps=1e-30"]
    problem = Problem("ProdigyPlusScheduleFree", *arguments, dtype=torch.float32)
    problem.train(20)
    d = problem.optimizer.param_groups[0]["d"]
    read, gradient, _, states = problem.observe("z", "exp_avg_sq")
    z_before, z_after = states["z"]
    update = gradient * d / states["exp_avg_sq"][1].sqrt()
    # fp32: z near 1 moves by about 1e-3, known to 1e-7
    assert read["d*lr/lora"] == pytest.approx(((z_before - z_after) / update).mean().item(), rel=1e-3)
    assert (read["d/lora"], read["d*lr/lora"]) == (d, 0.5 * d)


def test_prodigy_plus_with_bias_correction_reports_what_its_own_code_computes() -> None:
    problem = Problem("ProdigyPlusScheduleFree", "use_bias_correction=True", dtype=torch.float32)
    for _ in range(12):
        group = problem.optimizer.param_groups[0]
        dlr, _, _ = problem.optimizer.get_bias_correction(0.5 * group["d"], 0.99, group["k"])
        assert read_learning_rates(problem.optimizer)["d*lr/lora"] == pytest.approx(dlr, rel=1e-9)
        problem.train(1)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("AdamWScheduleFree", ["warmup_steps=4"]),
        ("SGDScheduleFree", ["warmup_steps=4"]),
        ("schedulefree.RAdamScheduleFree", []),
        ("schedulefree.RAdamScheduleFree", ["silent_sgd_phase=False"]),
    ],
)
def test_schedule_free_optimizers_report_the_rate_they_schedule(name: str, arguments: list[str]) -> None:
    problem = Problem(name, *arguments)
    for _ in range(10):
        read = read_learning_rates(problem.optimizer)
        problem.train(1)
        # written by the library during the step, "for logging purposes"
        assert read == {"lr/lora": pytest.approx(problem.optimizer.param_groups[0]["scheduled_lr"], rel=1e-12)}


@pytest.mark.parametrize("warmup", [False, True])
def test_adafactor_with_relative_step_reports_the_rate_it_computes(warmup: bool) -> None:
    problem = Problem("Adafactor", "relative_step=True", "scale_parameter=False", f"warmup_init={warmup}")
    for _ in range(5):
        read = read_learning_rates(problem.optimizer)
        problem.train(1)
        state, group = problem.optimizer.state[problem.weight], problem.optimizer.param_groups[0]
        assert read == {"lr/lora": pytest.approx(problem.optimizer._get_lr(group, state), rel=1e-12)}


def test_torch_adafactors_threshold_is_not_taken_for_a_distance() -> None:
    assert set(read_learning_rates(Problem("torch.optim.Adafactor").optimizer)) == {"lr/lora"}


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def test_an_optimizer_wrapped_by_accelerate_is_read_through(accelerator: Accelerator) -> None:
    problem = Problem("Prodigy")
    problem.train(5)
    assert read_learning_rates(accelerator.prepare_optimizer(problem.optimizer)) == read_learning_rates(
        problem.optimizer
    )
