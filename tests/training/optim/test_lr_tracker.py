"""The tracker's numbers are those the optimizers use: each is found again in how weights or states moved."""

from __future__ import annotations

import math

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from library.config.schema import OptimizerConfig
from library.training.optim.factory import build_optimizer
from library.training.optim.lr_tracker import read_learning_rates


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
        return (
            read,
            gradient,
            self.weight.detach() - start,
            {key: (before[key], self.state(key)) for key in keys},
        )


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
