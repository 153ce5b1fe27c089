"""Optimizer settings without effect are refused by name; spelt-out defaults are not."""

from __future__ import annotations

from typing import Any

from library.config.rules import find_conflicts
from library.config.schema import DatasetArguments, ModelConfig, OptimizerConfig, TrainConfig, effective_learning_rate


def _messages(settings: dict[str, Any]) -> list[str]:
    model, dataset = ModelConfig(pretrained_model_name_or_path="m"), DatasetArguments(dataset_config="d")
    config = TrainConfig(model=model, dataset=dataset, optimizer=OptimizerConfig(**settings))
    return [conflict.message for conflict in find_conflicts(config)]


COSINE = {"lr_scheduler": "cosine"}
RELATIVE = {"optimizer_type": "Adafactor", "optimizer_args": ["relative_step=True"]}


def test_settings_without_effect_are_named_with_the_remedy() -> None:
    prodigy = {"optimizer_type": "prodigyopt.Prodigy", "learning_rate": 1e-4}
    for settings, message in (
        (COSINE | {"lr_scheduler_power": 2.0}, 'with lr_scheduler = "cosine" (it goes with polynomial); remove it'),
        ({"lr_scheduler_min_lr_ratio": 0.1}, 'has no effect with lr_scheduler = "constant"'),
        (COSINE | {"lr_decay_steps": 9}, 'lr_decay_steps: has no effect with lr_scheduler = "cosine"'),
        ({"lr_warmup_steps": 10}, "(it goes with constant_with_warmup, linear, "),
        ({"lr_scheduler": "constant_with_warmup"}, "needs lr_warmup_steps above 0; set it or choose 'constant'"),
        ({"lr_scheduler": "warmup_stable_decay"}, "needs lr_decay_steps above 0"),
        (COSINE | {"optimizer_type": "AdamWScheduleFree"}, 'would fight it; set lr_scheduler = "constant"'),
        (COSINE | {"optimizer_type": "prodigyplus.ProdigyPlusScheduleFree"}, 'set lr_scheduler = "constant"'),
        (RELATIVE | {"learning_rate": 1e-3}, "learning_rate: has no effect with Adafactor's relative_step=True"),
        (RELATIVE | COSINE | {"optimizer_args": ["warmup_init = True"]}, "lr_scheduler: has no effect with"),
        (prodigy, "learning_rate: 0.0001 multiplies the step size that prodigyopt.Prodigy estimates, nothing would"),
    ):
        problem = _messages(settings)[0]
        assert message in problem
        assert "\n" not in problem


def test_settings_that_work_are_let_through() -> None:
    no_averages = {"optimizer_type": "ProdigyPlusScheduleFree", "optimizer_args": ["use_schedulefree=False"]}
    for settings in (
        {},
        COSINE | {"lr_scheduler_power": 1.0, "lr_scheduler_num_cycles": 1, "lr_decay_steps": 0},
        {"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": 0.1, "lr_decay_steps": 0.2},
        {"optimizer_type": "AdamWScheduleFree"},
        COSINE | no_averages,
        RELATIVE | {"optimizer_args": ["relative_step=False"], "learning_rate": 1e-3},
        {"optimizer_type": "Prodigy"},
        {"optimizer_type": "Prodigy", "learning_rate": 0.5},
    ):
        assert _messages(settings) == [], settings


def test_the_learning_rate_is_one_by_default_where_the_step_size_is_estimated() -> None:
    assert effective_learning_rate(OptimizerConfig(optimizer_type="dadaptation.DAdaptLion")) == 1.0
    assert effective_learning_rate(OptimizerConfig(optimizer_type="Prodigy", learning_rate=0.5)) == 0.5
    assert effective_learning_rate(OptimizerConfig(optimizer_type="AdamW")) == 1e-4
