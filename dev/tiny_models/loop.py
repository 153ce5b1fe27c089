"""The loop of every training stage: loss, step, schedule, averaged weights.

The learning rate is half a cosine behind a warm-up, of each optimizer's own height. What a stage makes are the averaged
weights; their decay grows with the number of updates, so that they soon forget the start, as in
``library.training.optim.ema``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from tqdm import trange

from library.config.schema import OptimizerConfig
from library.training.optim.schedules import lr_multiplier

FLOOR = 0.02  # of the cosine


@dataclass(frozen=True)
class Training:
    """What every stage has."""

    steps: int
    batch: int
    warmup: int = 100
    average_decay: float = 0.999


def train(
    phase: str,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_of: Callable[[int], Tensor],
    training: Training,
) -> dict[str, Tensor]:
    """Train ``model`` in place on ``loss_of`` each step; return the averaged weights by name."""

    def update(averages: Any, weights: Any, updates: Tensor) -> None:
        decay = min(training.average_decay, float((1 + updates) / (10 + updates)))
        torch._foreach_lerp_(averages, weights, 1 - decay)

    average = AveragedModel(model, multi_avg_fn=update)
    average.n_averaged.fill_(1)
    cosine = OptimizerConfig(lr_scheduler="cosine", lr_warmup_steps=training.warmup, lr_scheduler_min_lr_ratio=FLOOR)
    schedules = [
        LambdaLR(optimizer, lambda step: lr_multiplier(cosine, step, training.steps)) for optimizer in optimizers
    ]
    for step in (progress := trange(training.steps, desc=phase)):
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        average.update_parameters(model)
        progress.set_postfix(loss=loss.item())
    return average.module.state_dict()
