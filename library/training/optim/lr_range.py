"""The learning rate range test: the loss while the learning rate rises from nothing to far too much (Smith 2015,
"Cyclical Learning Rates for Training Neural Networks", arXiv 1506.01186, section 3.3).

The rate grows by the same factor in every step. The loss of a training step would show little of it: most of its
spread comes from the sigmas drawn. So after every step the same images are seen at the same noise and the same sigmas,
as in validation, and that loss is drawn.

Suggested is a tenth of the rate at which the loss is lowest, the rule of fastai's ``lr_find`` ("minimum": Gugger 2018,
"How Do You Find A Good Learning Rate"). What the rule knows is where things break in this many steps; a long run may
want less. Where the loss still falls at the largest rate, or never falls, nothing is suggested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from library.config.optimizer_types import estimates_step_size
from library.config.schema import OptimizerConfig
from library.errors import UserError
from library.nn.modes import evaluating
from library.randomness import derive_seed
from library.training.optim.factory import parse_optimizer_args
from library.training.report.plots import STYLE, save_figure
from library.training.tasks.image_lora import ImageLora

RULE = "a tenth of the rate at the lowest loss (fastai's lr_find; Gugger 2018)"
_PROBE_SIGMAS = (0.2, 0.5, 0.8)
_BROKEN = 4.0  # times the first loss: fastai's lr_find ends there too
_SMOOTHING = 0.8  # weight of the past in the drawn average
_LEAST_FALL = 0.002  # share of the first loss: less is no fall


@dataclass(frozen=True)
class RangeTest:
    """Rates and the loss after a step at each; ``rates`` may end early, where the loss broke."""

    rates: list[float]
    losses: list[float]
    before: float  # the loss without any step
    ended: bool  # early

    def smoothed(self) -> list[float]:
        """Return the losses as a moving average that begins at ``before``."""
        average, values = self.before, []
        for loss in self.losses:
            average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
            values.append(average)
        return values

    def suggestion(self) -> tuple[float | None, str]:
        """Return a learning rate, if the curve allows one, and the reason in words."""
        values = self.smoothed()
        lowest = min(range(len(values)), key=values.__getitem__)
        if values[lowest] > self.before * (1 - _LEAST_FALL):
            return None, "the loss does not fall at any rate; take more steps, or look at the data"
        if lowest == len(values) - 1 and not self.ended:
            return None, f"the loss still falls at the largest rate {self.rates[-1]:.2g}; raise lr_to"
        return self.rates[lowest] / 10, RULE


def refuse_own_rates(config: OptimizerConfig) -> None:
    """Refuse optimizers that set their own learning rate.

    Raises:
        UserError: with the reason.
    """
    relative = {"relative_step", "warmup_init"} & {
        k for k, v in parse_optimizer_args(config.optimizer_args).items() if v
    }
    if estimates_step_size(config.optimizer_type) or relative:
        raise UserError(
            f"optimizer_type: {config.optimizer_type} finds its own step size, there is nothing to sweep; train with "
            "learning_rate = 1.0 and watch d in lr.png, or test AdamW"
        )


def sweep(task: ImageLora, lr_from: float, lr_to: float, steps: int, advance: Callable[[int], None]) -> RangeTest:
    """Train ``steps`` steps on the run's own batches while the rate rises from ``lr_from`` to ``lr_to``.

    Groups whose rate differs (LoRA+, text encoders) keep their proportion. The weights are left as they end up.
    """
    step, optimizer, seed = task.step, task.optimizer, task.seed
    base = optimizer.param_groups[0]["initial_lr"] or 1.0
    shares = [group["initial_lr"] / base for group in optimizer.param_groups]
    batches = _for_ever(task)
    probe = next(batches)

    def probe_loss() -> float:
        with evaluating(*task.models):
            return float(step.validation_losses(task.models[0], probe, _PROBE_SIGMAS).mean())

    for model in task.models:
        model.train()
    test = RangeTest([], [], probe_loss(), False)
    growth = (lr_to / lr_from) ** (1 / max(1, steps - 1))
    for number, batch in zip(range(steps), chain([probe], batches), strict=False):
        rate = lr_from * growth**number
        for group, share in zip(optimizer.param_groups, shares, strict=True):
            group["lr"] = rate * share
        torch.manual_seed(derive_seed(seed, "range test", number))
        loss, _ = step.loss(task.models[0], batch, number)
        task.accelerator.backward(loss)
        task.clip_gradients(number)
        optimizer.step()
        optimizer.zero_grad()
        advance(1)
        value = probe_loss()
        if not math.isfinite(value) or value > _BROKEN * test.before:
            return RangeTest(test.rates, test.losses, test.before, True)
        test.rates.append(rate)
        test.losses.append(value)
    return test


def _for_ever(task: ImageLora) -> Iterator[Any]:
    for epoch, _ in enumerate(repeat(None)):
        task.batches.set_position(epoch, 0)
        yield from task.loader


def draw(test: RangeTest, save_to: Path) -> list[Path]:
    """Draw loss against learning rate as PNG and SVG; return their paths."""
    rate, reason = test.suggestion()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot(test.rates, test.losses, color="#0072B2", alpha=0.3, linewidth=1, label="after each step")
        axes.plot(test.rates, test.smoothed(), color="#0072B2", linewidth=2, label="moving average")
        axes.axhline(test.before, color="#555555", linewidth=0.9, linestyle="--", label="untrained")
        if rate is not None:
            axes.axvline(rate, color="#D55E00", linewidth=1.2)
            axes.annotate(
                f"suggested {rate:.2g}", (rate, 0.97), xycoords=("data", "axes fraction"), xytext=(4, 0),
                textcoords="offset points", va="top", color="#D55E00",
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_title("Loss against learning rate")
        axes.set_xlabel(f"learning rate\n{reason}")
        axes.legend()
    return save_figure(figure, save_to)


def as_lines(test: RangeTest) -> Sequence[dict[str, float]]:
    """Return one flat object a step, as metrics.jsonl has them."""
    rows = zip(test.rates, test.losses, test.smoothed(), strict=True)
    return [{"step": i + 1, "lr": lr, "loss": loss, "loss_ema": ema} for i, (lr, loss, ema) in enumerate(rows)]
