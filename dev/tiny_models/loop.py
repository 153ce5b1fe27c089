"""The loop of every training stage: losses, step, schedule, averaged weights, a state to resume from.

The learning rate is half a cosine behind a warm-up, of each optimizer's own height. What a stage makes are the averaged
weights; their decay grows with the number of updates, so that they soon forget the start, as in
``library.training.optim.ema``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from library.config.schema import OptimizerConfig
from library.files import atomic_path
from library.training.optim.schedules import lr_multiplier

SAVE_EVERY = 250
FLOOR = 0.02  # of the cosine


@dataclass(frozen=True)
class Training:
    """What every stage has."""

    steps: int
    batch: int
    warmup: int = 100
    average_decay: float = 0.999
    sheet_every: int = 1000
    seed: int = 0


def train(
    phase: str,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    losses_of: Callable[[int], Mapping[str, Tensor]],
    training: Training,
    state_path: Path,
    resume: bool,
    snapshot: Callable[[Any, int], None] | None = None,
) -> None:
    """Train ``model`` in place, saving all that a resumed run needs as it goes.

    Args:
        phase: the name in front of the progress.
        losses_of: step -> losses by name, the first of which is minimised.
        snapshot: called every ``sheet_every`` steps with the averaged model and the number of steps done.
    """

    def update(averages: Any, weights: Any, updates: Tensor) -> None:
        decay = min(training.average_decay, float((1 + updates) / (10 + updates)))
        torch._foreach_lerp_(averages, weights, 1 - decay)

    average = AveragedModel(model, multi_avg_fn=update)
    first_step = 0
    if resume:
        state = load_state(state_path)
        first_step = state["step"]
        model.load_state_dict(state["model"])
        average.module.load_state_dict(state["average"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    average.n_averaged.fill_(first_step + 1)
    cosine = OptimizerConfig(lr_scheduler="cosine", lr_warmup_steps=training.warmup, lr_scheduler_min_lr_ratio=FLOOR)
    schedules = [
        LambdaLR(optimizer, lambda step: lr_multiplier(cosine, step, training.steps), first_step - 1)
        for optimizer in optimizers
    ]
    smoothed: dict[str, float] = {}
    for done in (
        progress := tqdm(range(first_step + 1, training.steps + 1), phase, training.steps, initial=first_step)
    ):
        losses = losses_of(done - 1)
        next(iter(losses.values())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        average.update_parameters(model)
        smoothed |= {name: 0.98 * smoothed.get(name, loss.item()) + 0.02 * loss.item() for name, loss in losses.items()}
        progress.set_postfix(smoothed)
        last = done == training.steps
        shown = snapshot is not None and (done % training.sheet_every == 0 or last)
        if done % SAVE_EVERY == 0 or last or shown:
            state = {"model": model.state_dict(), "average": average.module.state_dict(), "step": done}
            save_state(state_path, state | {"optimizers": [optimizer.state_dict() for optimizer in optimizers]})
        if shown:
            snapshot(average.module, done)


def save_state(path: Path, state: dict[str, Any]) -> None:
    with atomic_path(path) as temporary:
        torch.save(state, temporary)


def load_state(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path}: no saved state; run the earlier stage first, or this one without --resume")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
