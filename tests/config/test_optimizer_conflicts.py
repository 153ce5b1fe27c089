"""Optimizer settings without effect are refused by name; spelt-out defaults are not."""

from __future__ import annotations

from typing import Any

import pytest

from library.config.rules import find_conflicts
from library.config.schema import DatasetArguments, ModelConfig, OptimizerConfig, TrainConfig, effective_learning_rate


def _messages(settings: dict[str, Any]) -> list[str]:
    model, dataset = ModelConfig(pretrained_model_name_or_path="m"), DatasetArguments(dataset_config="d")
    config = TrainConfig(model=model, dataset=dataset, optimizer=OptimizerConfig(**settings))
    return [conflict.message for conflict in find_conflicts(config)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lr_scheduler": "cosine", "lr_scheduler_power": 2.0},
            'lr_scheduler_power: has no effect with lr_scheduler = "cosine" (it goes with polynomial); remove it',
        ),
        (
            {"lr_scheduler": "linear", "lr_scheduler_num_cycles": 3},
            'lr_scheduler_num_cycles: has no effect with lr_scheduler = "linear"',
        ),
        (
            {"lr_scheduler_min_lr_ratio": 0.1},
            'lr_scheduler_min_lr_ratio: has no effect with lr_scheduler = "constant"',
        ),
        (
            {"lr_scheduler": "cosine", "lr_decay_steps": 9},
            'lr_decay_steps: has no effect with lr_scheduler = "cosine"',
        ),
        ({"lr_warmup_steps": 10}, "(it goes with constant_with_warmup, linear, "),
        (
            {"lr_scheduler": "constant_with_warmup"},
            "needs lr_warmup_steps above 0; set it or choose 'constant'",
        ),
        ({"lr_scheduler": "warmup_stable_decay"}, "needs lr_decay_steps above 0"),
        (
            {"optimizer_type": "AdamWScheduleFree", "lr_scheduler": "cosine"},
            'would fight it; set lr_scheduler = "constant"',
        ),
        (
            {"optimizer_type": "prodigyplus.ProdigyPlusScheduleFree", "lr_scheduler": "linear"},
            'set lr_scheduler = "constant"',
        ),
        (
            {"optimizer_type": "Adafactor", "optimizer_args": ["relative_step=True"], "learning_rate": 1e-3},
            "learning_rate: has no effect with Adafactor's relative_step=True; remove one of the two",
        ),
        (
            {
                "optimizer_type": "Adafactor",
                "optimizer_args": ["warmup_init = True"],
                "lr_scheduler": "cosine",
            },
            "lr_scheduler: has no effect with Adafactor's relative_step=True",
        ),
        (
            {"optimizer_type": "prodigyopt.Prodigy", "learning_rate": 1e-4},
            "learning_rate: 0.0001 multiplies the step size that prodigyopt.Prodigy estimates, "
            "nothing would be learned; set learning_rate = 1.0 or leave it out",
        ),
    ],
)
def test_settings_without_effect_are_named_with_the_remedy(settings: dict[str, Any], message: str) -> None:
    problem = _messages(settings)[0]
    assert message in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "lr_scheduler": "cosine",
            "lr_scheduler_power": 1.0,
            "lr_scheduler_num_cycles": 1,
            "lr_decay_steps": 0,
        },
        {"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": 0.1, "lr_decay_steps": 0.2},
        {"optimizer_type": "AdamWScheduleFree"},
        {
            "optimizer_type": "ProdigyPlusScheduleFree",
            "optimizer_args": ["use_schedulefree=False"],
            "lr_scheduler": "cosine",
        },
        {"optimizer_type": "Adafactor", "optimizer_args": ["relative_step=False"], "learning_rate": 1e-3},
        {"optimizer_type": "Prodigy"},
        {"optimizer_type": "Prodigy", "learning_rate": 0.5},
    ],
)
def test_settings_that_work_are_let_through(settings: dict[str, Any]) -> None:
    assert _messages(settings) == []


def test_the_learning_rate_is_one_by_default_where_the_step_size_is_estimated() -> None:
    assert effective_learning_rate(OptimizerConfig(optimizer_type="dadaptation.DAdaptLion")) == 1.0
    assert effective_learning_rate(OptimizerConfig(optimizer_type="Prodigy", learning_rate=0.5)) == 0.5
    assert effective_learning_rate(OptimizerConfig(optimizer_type="AdamW")) == 1e-4
