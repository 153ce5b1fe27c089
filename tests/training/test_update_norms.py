"""How far training has moved each kind of layer, and what is said of layers that it does not move."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from library.config.schema import OptimizerConfig
from library.errors import UserError
from library.training.optim.after_update import UpdateNorms
from library.training.optim.factory import build_optimizer
from library.training.optim.schedules import build_schedule
from networks.adapters.lora import LoRALinear
from networks.network import AdapterNetwork, inject_adapter
from tests.runs import lora, metrics, run
from tests.training.optim.test_factory import NAMES, config_for

KINDS = {"lora": ("lora_B.weight",), "loha": ("hada_w2_a",), "lokr": ("lokr_w2", "lokr_w2_b")}  # what begins at zero


def norms_of(line: dict[str, Any]) -> dict[str, float]:
    return {key.removeprefix("update_norm/"): value for key, value in line.items() if key.startswith("update_norm/")}


def from_files(network: AdapterNetwork, kind: str, now: Path, before: Path | None = None) -> dict[str, float]:
    """Return the norm of the change from one state's weights to another's, by kind of layer, in float64."""
    old = {} if before is None else lora(before, "weights")
    squares = defaultdict[str, float](float)
    for name, tensor in lora(now, "weights").items():
        module = next((name.removesuffix(f".{part}") for part in KINDS[kind] if name.endswith(f".{part}")), None)
        if module is not None:
            group = network.targets.group_of(module)
            assert group is not None, name
            squares[group.name] += (tensor.double() - (old[name].double() if old else 0)).square().sum().item()
    return {group: math.sqrt(square) for group, square in squares.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_those_of_the_change_between_two_files(base: Path, dataset: Path, tmp_path: Path, kind: str) -> None:
    save_format = "diffusers" if kind == "lora" else "comfy"
    settings = {"network_type": kind, "save_every_n_steps": 2, "save_state": True, "log_every_n_steps": 3}
    settings |= {"save_format": save_format}
    network = run(base, dataset, tmp_path / "out", **settings, max_train_steps=6).task.network
    states = {step: tmp_path / "out" / f"lora-step{step:08d}-state" for step in (2, 4, 6)}
    read = {line["step"]: norms for line in metrics(tmp_path / "out") if (norms := norms_of(line))}
    assert read.keys() == {2, 3, 4, 6}  # each log and each save, once
    for step, state in states.items():
        assert read[step] == pytest.approx(from_files(network, kind, state), rel=1e-5)  # norms are summed in fp32
    run(base, dataset, tmp_path / "on", **settings, max_train_steps=6, resume=states[2])
    read = {line["step"]: norms for line in metrics(tmp_path / "on") if (norms := norms_of(line))}
    assert read[6] == pytest.approx(from_files(network, kind, states[6], states[2]), rel=1e-5)


def cut(kinds: str, how: Callable[[LoRALinear], None]) -> Any:
    """Let gradients reach no layer of ``kinds``, a regular expression's start of a name."""

    def injected(*arguments: Any, **more: Any) -> AdapterNetwork:
        network = inject_adapter(*arguments, **more)
        for name, layer in network.modules.items():
            if name.startswith(kinds):
                how(layer)
        return network

    return mock.patch("library.training.tasks.lora.inject_adapter", injected)


def never_called(layer: LoRALinear) -> None:
    layer.bypassed = True  # gradients are None


def cut_off(layer: LoRALinear) -> None:
    layer.multiplier = 0.0  # gradients are zero, and weight decay goes on


@pytest.mark.parametrize("steps", [3, 21])
@pytest.mark.parametrize("how", [never_called, cut_off])
def test_layers_that_learn_nothing_are_named_and_the_run_goes_on(
    base: Path, dataset: Path, tmp_path: Path, capfd: Any, steps: int, how: Callable[[LoRALinear], None]
) -> None:
    with cut("single_transformer_blocks", how):
        ended = run(base, dataset, tmp_path, max_train_steps=steps, log_every_n_steps=8)
    warning = next(line for line in capfd.readouterr().out.splitlines() if "have learnt nothing" in line)
    stalled = [name for name in ended.task.network.modules if name.startswith("single_transformer_blocks")]
    assert f"after step {min(steps, 20)}, {len(stalled)} of {len(ended.task.network.modules)} layers (single" in warning
    assert stalled[0] in warning
    assert "exclude_patterns" in warning
    logged = [line["step"] for line in metrics(tmp_path) if "loss" in line]
    assert logged == ([3] if steps == 3 else [8, 16, 20, 21])  # the check is logged whatever log_every_n_steps says
    norms = norms_of(metrics(tmp_path)[-1])
    assert norms["single"] == 0 < norms["img_attn"]


@pytest.mark.parametrize(
    ("settings", "how", "reason"),
    [
        ({}, cut_off, "all gradients are zero; check masks and loss weights"),
        ({"max_train_steps": 21}, cut_off, "after step 20, .*all gradients are zero; check masks and loss weights"),
        ({"learning_rate": 0.0}, lambda layer: None, "the learning rate is 0; set learning_rate"),
    ],
)
def test_a_run_that_learns_nothing_ends_with_an_error_beside_its_file(
    base: Path, dataset: Path, tmp_path: Path, settings: dict[str, Any], how: Callable[[LoRALinear], None], reason: str
) -> None:
    with cut("", how), pytest.raises(UserError, match=f"lora.safetensors: is as it was before .*({reason})"):
        run(base, dataset, tmp_path, **settings)
    assert not any(tensor.any() for name, tensor in lora(tmp_path).items() if "lora_B" in name)


def steps_of(config: OptimizerConfig, count: int, start: float = 0.0, dtype: torch.dtype = torch.float32) -> list[str]:
    """Return what ``count`` steps of a layer are said to have learnt, one answer a step from the 20th on."""
    layer = LoRALinear(nn.Linear(8, 6, bias=False), rank=2, alpha=2, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    layer.initialise(generator)
    nn.init.constant_(layer.lora_B.weight, start)
    optimizer = build_optimizer(config, [{"params": list(layer.trained().values())}], full_bf16=dtype != torch.float32)
    schedule = build_schedule(config, optimizer, 1000)
    norms, said = UpdateNorms({"layer": layer}, {"layer": "attn"}, first_step=0), list[str]()
    for step in range(1, count + 1):
        inputs, target = torch.randn(4, 8, generator=generator), torch.randn(4, 6, generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            (layer(inputs).float() - target).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        norms.after_step(step)
        norms.read(step)
        if step >= norms.checked_at and not norms.is_checked:
            said.append(norms.check(optimizer.param_groups) or "")
    return said


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU", "ignore:.*lr_scheduler.step.*")
@pytest.mark.parametrize("name", NAMES)
def test_no_optimizer_is_at_fault_for_a_slow_start(name: str) -> None:
    assert steps_of(config_for(name), 20) == [""]
    assert steps_of(config_for(name), 20, start=0.1) == [""]  # as one that goes on from a file


def test_a_warm_up_is_waited_for_and_steps_too_small_for_the_weights_are_named() -> None:
    warm_up = {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 300}
    slow = config_for("AdamW", "weight_decay=0", learning_rate=1e-8, **warm_up)
    assert steps_of(slow, 25, start=1.0) == [""] * 6  # 1e-9 would be rounded away, yet the rate still grows
    assert steps_of(config_for("AdamW", learning_rate=1e-8), 25) == [""]  # from zero any step counts
    rounded = config_for("AdamW", "weight_decay=0", learning_rate=1e-9)
    (said,) = steps_of(rounded, 25, start=1.0)
    assert "too small to change them; raise learning_rate" in said
