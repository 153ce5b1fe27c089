"""Optimizers: against reference loops from the papers, against their own libraries, and through a resume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from library.config.schema import OptimizerConfig
from library.errors import UserError
from library.training.checkpoint.state import read_state, write_state
from library.training.optim.factory import averaged_weights, build_optimizer, has_averaged_weights, parse_optimizer_args
from library.training.optim.schedules import build_schedule

NAMES = [
    "AdamW",
    "AdamW8bit",
    "PagedAdamW",
    "PagedAdamW8bit",
    "PagedAdamW32bit",
    "Lion8bit",
    "PagedLion8bit",
    "AdEMAMix8bit",
    "PagedAdEMAMix8bit",
    "SGDNesterov8bit",
    "SGDNesterov",
    "Prodigy",
    "ProdigyPlusScheduleFree",
    "Adafactor",
    "CAME",
    "Lion",
    "AdamWScheduleFree",
    "RAdamScheduleFree",
    "SGDScheduleFree",
    "DAdaptation",
    "DAdaptAdamPreprint",
    "DAdaptAdaGrad",
    "DAdaptAdam",
    "DAdaptAdan",
    "DAdaptAdanIP",
    "DAdaptLion",
    "DAdaptSGD",
    "RMSprop",
]
SCHEDULE_FREE = ["AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree", "ProdigyPlusScheduleFree"]
ADAPTIVE = ("Prodigy", "DAdapt")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*"),
]


def config_for(name: str, *arguments: str, **settings: object) -> OptimizerConfig:
    if not name.startswith(ADAPTIVE) and "learning_rate" not in settings:
        settings["learning_rate"] = 1e-2
    return OptimizerConfig(optimizer_type=name, optimizer_args=list(arguments), **settings)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are faster on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Quadratic:
    """Two weights pulled to a random target; bitsandbytes keeps 8-bit states from 4096 numbers on."""

    def __init__(self, name: str, full_bf16: bool = False, arguments: tuple[str, ...] = ()) -> None:
        dtype = torch.bfloat16 if full_bf16 else torch.float32
        random = torch.Generator().manual_seed(1)
        self.target = torch.randn(64, 80, generator=random) * 0.05
        self.down = nn.Parameter((torch.randn(64, 80, generator=random) * 0.05).to(dtype))
        self.up = nn.Parameter(torch.zeros(7, 3, dtype=dtype))
        groups = [{"params": [self.down], "name": "down"}, {"params": [self.up], "name": "up"}]
        self.optimizer = build_optimizer(config_for(name, *arguments), groups, full_bf16, seed=3)

    def loss(self) -> Tensor:
        return ((self.down.float() - self.target) ** 2).mean() + ((self.up.float() - 0.1) ** 2).mean()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [self.down.detach().clone(), self.up.detach().clone()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def gradients(steps: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(5, 4, generator=random, dtype=torch.float64) for _ in range(steps)]


def test_came_follows_the_algorithm_of_its_paper() -> None:
    lr, (beta1, beta2, beta3), decay, clip = 1e-2, (0.9, 0.99, 0.995), 0.1, 0.8
    weight = nn.Parameter(torch.ones(5, 4, dtype=torch.float64))
    arguments = ("betas=0.9,0.99,0.995", "weight_decay=0.1", "clip_threshold=0.8")
    optimizer = build_optimizer(config_for("came", *arguments), [{"params": [weight]}], full_bf16=False)
    x, m, r, c, r_apart, c_apart = weight.detach().clone(), 0.0, 0.0, 0.0, 0.0, 0.0
    ones_in, ones_out = torch.ones(4, 1).double(), torch.ones(5, 1).double()
    for g in gradients(50):
        # Luo et al. 2023, arXiv 2307.02047, algorithm 2, with sums in place of means as the paper has them
        squares = g * g + 1e-30
        r, c = beta2 * r + (1 - beta2) * squares @ ones_in, beta2 * c + (1 - beta2) * ones_out.t() @ squares
        u = g / (r @ c / (ones_out.t() @ r)).sqrt()
        u = u / max(1.0, float(u.norm()) / 20**0.5 / clip)
        m = beta1 * m + (1 - beta1) * u
        apart = (u - m) ** 2 + 1e-16
        r_apart = beta3 * r_apart + (1 - beta3) * apart @ ones_in
        c_apart = beta3 * c_apart + (1 - beta3) * ones_out.t() @ apart
        confidence = r_apart @ c_apart / (ones_out.t() @ r_apart)
        x = x - lr * (m / confidence.sqrt()) - lr * decay * x
        weight.grad = g.clone()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), x, rtol=1e-4, atol=1e-5)  # it steps in fp32


def test_prodigy_follows_the_loop_of_its_paper() -> None:
    lr, beta1, beta2, d = 0.7, 0.9, 0.99, 1e-6
    weight = nn.Parameter(torch.ones(5, 4, dtype=torch.float64))
    # The paper takes d_k beside eps, the library d_k+1: with a tiny eps neither matters.
    config = config_for("Prodigy", "betas=(0.9, 0.99)", "eps=1e-30", learning_rate=lr)
    optimizer = build_optimizer(config, [{"params": [weight]}], full_bf16=False)
    x0 = x = weight.detach().clone()
    m, v, s = (torch.zeros_like(x) for _ in range(3))
    r = 0.0
    for noise in gradients(80):
        g = x - 3.0 + 0.1 * noise
        # Mishchenko and Defazio 2023, arXiv 2306.06101, algorithm 4
        m = beta1 * m + (1 - beta1) * d * g
        v = beta2 * v + (1 - beta2) * d**2 * g**2
        r = math.sqrt(beta2) * r + (1 - math.sqrt(beta2)) * lr * d**2 * (g * (x0 - x)).sum().item()
        s = math.sqrt(beta2) * s + (1 - math.sqrt(beta2)) * lr * d**2 * g
        x = x - lr * d * m / v.sqrt()
        d = max(d, r / s.abs().sum().item())
        weight.grad = weight.detach() - 3.0 + 0.1 * noise
        optimizer.step()
        # float64 on both sides; the library scales r and s by 1 / d0, which cancels but for rounding
        torch.testing.assert_close(weight.detach(), x, rtol=1e-9, atol=1e-12)
        assert optimizer.param_groups[0]["d"] == pytest.approx(d, rel=1e-9)
    assert d > 0.01  # the estimate left its start, so that the comparison meant something


@pytest.mark.parametrize("full_bf16", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_named_optimizer_reduces_a_quadratic_and_resumes_bit_for_bit(
    name: str, full_bf16: bool, tmp_path: Path
) -> None:
    uninterrupted, first, resumed = (Quadratic(name, full_bf16) for _ in range(3))
    start = uninterrupted.loss().item()
    uninterrupted.train(40)
    first.train(25)
    write_state(tmp_path / "optimizer", first.optimizer.state_dict())
    with torch.no_grad():
        resumed.down.copy_(first.down)
        resumed.up.copy_(first.up)
    resumed.optimizer.load_state_dict(read_state(tmp_path / "optimizer"))
    resumed.train(15)
    assert same(uninterrupted.weights(), resumed.weights())
    with averaged_weights(uninterrupted.optimizer):
        assert uninterrupted.loss().item() < start


@pytest.mark.parametrize("full_bf16", [False, True])
@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_looking_at_averaged_weights_changes_nothing_in_the_training(name: str, full_bf16: bool) -> None:
    plain, watched = Quadratic(name, full_bf16), Quadratic(name, full_bf16)
    plain.train(30)
    for _ in range(10):
        watched.train(3)
        with averaged_weights(watched.optimizer):
            pass
    assert same(plain.weights(), watched.weights())


def test_averaged_weights_are_the_x_sequence_of_the_schedule_free_paper() -> None:
    quadratic = Quadratic("AdamWScheduleFree")
    quadratic.train(20)
    y, z = quadratic.down.detach().clone(), quadratic.optimizer.state[quadratic.down]["z"]
    x = (y - (1 - 0.9) * z) / 0.9  # Defazio et al. 2024, arXiv 2405.15682: y = (1 - beta) z + beta x
    with averaged_weights(quadratic.optimizer):
        torch.testing.assert_close(quadratic.down.detach(), x, rtol=1e-5, atol=1e-7)  # fp32 rounding of a lerp
        assert not torch.equal(quadratic.down.detach(), y)
    assert torch.equal(quadratic.down.detach(), y)


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.mark.parametrize("name", ["AdamW", "ProdigyPlusScheduleFree"])
def test_bf16_training_is_the_same_behind_accelerate_and_a_schedule(accelerator: Accelerator, name: str) -> None:
    plain, wrapped = Quadratic(name, full_bf16=True), Quadratic(name, full_bf16=True)
    wrapped.optimizer = accelerator.prepare_optimizer(wrapped.optimizer)
    schedule = build_schedule(config_for(name), wrapped.optimizer, 10)
    for _ in range(5):
        plain.train(1)
        wrapped.train(1)
        schedule.step()
        with averaged_weights(wrapped.optimizer):
            pass
    assert same(plain.weights(), wrapped.weights())
    assert has_averaged_weights(wrapped.optimizer) == (name in SCHEDULE_FREE)


def test_groups_keep_their_own_learning_rates_and_names() -> None:
    down, up = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    groups = [{"params": [down], "lr": 1e-3, "name": "lora"}, {"params": [up], "lr": 1.6e-2, "name": "lora_plus"}]
    optimizer = build_optimizer(config_for("AdamW"), groups, full_bf16=False)
    down.grad, up.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    # Adam's first step is lr in size, whatever the gradient
    torch.testing.assert_close(up.detach() / down.detach(), torch.full((3,), 16.0))
    assert [group["name"] for group in optimizer.param_groups] == ["lora", "lora_plus"]


def test_adafactor_uses_the_learning_rate_unless_relative_step_is_asked_for() -> None:
    manual = Quadratic("Adafactor").optimizer.param_groups[0]
    assert (manual["lr"], manual["relative_step"], manual["scale_parameter"]) == (1e-2, False, False)
    relative = Quadratic("Adafactor", arguments=("warmup_init=True",)).optimizer.param_groups[0]
    assert (relative["relative_step"], relative["scale_parameter"]) == (True, True)
    Quadratic("Adafactor", arguments=("relative_step=True",)).train(2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weight_decay", "'weight_decay' is not of the form key=value; write it like weight_decay=0.01"),
        ("flag=true", "'true' is no Python value; write flag=True"),
        ("mode=fast", "'fast' is no Python value; write mode='fast'"),
    ],
)
def test_malformed_optimizer_args_say_how_to_write_them(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_optimizer_args([text])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "AdamW",
            ["weight_decy=0.1"],
            "AdamW takes no 'weight_decy'; did you mean 'weight_decay'.*it takes betas, eps",
        ),
        ("AdamW", ["lr=0.1"], "lr is set by learning_rate; set that instead"),
        ("AdamW", ["betas=(2.0, 0.9)"], "AdamW: Invalid beta parameter.*change learning_rate or optimizer_args"),
        ("Prodgy", [], "no optimizer 'Prodgy'; did you mean 'Prodigy'"),
        ("zzz", [], "no optimizer 'zzz'; choose one of AdamW, .*class path"),
        ("my_code.Optimizer", [], "importing my_code.Optimizer runs code of 'my_code'.*; set trust_class_paths = true"),
        ("CAME", ["eps=(1e-30, 1e-16)"], "CAME takes no 'eps'"),
        ("came_pytorch.CAME", [], "needs the package 'came_pytorch'; run pip install came_pytorch"),
        ("torch.optim.nowhere.A", [], "torch.optim.nowhere cannot be imported .*; check the class path"),
        ("torch.optim.AdmW", [], "torch.optim has no class 'AdmW'; did you mean 'AdamW'"),
        ("torch.nn.Linear", [], "torch.nn.Linear is no torch.optim.Optimizer; name a subclass of it"),
    ],
)
def test_optimizers_that_cannot_be_built_say_why(name: str, arguments: list[str], message: str) -> None:
    trusted = name.startswith("came_pytorch")
    config = OptimizerConfig(optimizer_type=name, optimizer_args=arguments, trust_class_paths=trusted)
    with pytest.raises(UserError, match=message):
        build_optimizer(config, [{"params": [nn.Parameter(torch.zeros(2))]}], full_bf16=False)


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam", "DAdaptAdan"])
def test_one_step_size_for_several_learning_rates_is_refused(name: str) -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in (1.0, 16.0)]
    with pytest.raises(UserError, match=r"one learning rate .* remove loraplus_lr_ratio and set text_encoder_lr to"):
        build_optimizer(config_for(name), groups, full_bf16=False)


def test_a_low_learning_rate_for_prodigy_warns() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(2))]}]
    with pytest.warns(UserWarning, match="Prodigy multiplies its step size estimate by learning_rate 0.05; 1.0 is"):
        optimizer = build_optimizer(config_for("Prodigy", learning_rate=0.05), groups, full_bf16=False)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05]  # warned of, but as asked


def test_a_class_path_of_another_package_is_imported_only_when_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strangers.py").write_text(
        "import pathlib, torch\npathlib.Path(__file__).with_name('ran').touch()\nclass Sgd(torch.optim.SGD): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    groups = [{"params": [nn.Parameter(torch.zeros(2))]}]
    with pytest.raises(UserError, match="trust_class_paths"):
        build_optimizer(OptimizerConfig(optimizer_type="strangers.Sgd"), groups, full_bf16=False)
    assert not (tmp_path / "ran").exists()
    trusted = OptimizerConfig(optimizer_type="strangers.Sgd", trust_class_paths=True)
    assert type(build_optimizer(trusted, groups, full_bf16=False)).__name__ == "Sgd"
    assert (tmp_path / "ran").exists()
