"""Learning rate schedules: one pure function of the step, and torch's ``LambdaLR`` around it.

Steps are optimizer steps, counted from 0, and know nothing of processes or accumulation: step the schedule
once after each optimizer step, not through accelerate's wrapper (which steps it once per process).

With W warm-up steps out of T and p = min(1, (step - W) / D) after them, the multiplier is (f is the floor,
``lr_scheduler_min_lr_ratio``, towards which shape(p) is squeezed: f + (1 - f) shape(p); D is ``lr_decay_steps``, T - W
by default, as ``lr_decay_iters`` of nanoGPT, which counts the warm-up too; s is ``lr_warmup_start_ratio``):

==========================  =============================================================================
warm-up                     s + (1 - s) (step + 1) / W, for step < W
constant, ..._with_warmup   1
linear                      1 - p
cosine                      (1 + cos(pi p)) / 2, Loshchilov and Hutter 2016, arXiv 1608.03983
cosine_with_restarts        (1 + cos(pi (n p mod 1))) / 2, n = ``lr_scheduler_num_cycles``
polynomial                  (1 - p)^power
rex                         (1 - p) / (1 - p / 2), Chen et al. 2021, arXiv 2107.04197
warmup_stable_decay         1, then over the last ``lr_decay_steps`` half a cosine, Hu et al. 2024, 2404.06395
inverse_sqrt                1 / sqrt((step - W) / t + 1), t = ``lr_scheduler_timescale``; W, or 10000 without one
==========================  =============================================================================

These are the formulas of transformers' schedules of the same names, with one difference: there the warm-up
is step / W, so that the first step of every run has learning rate 0 and is thrown away. Here step s of the
warm-up has the rate which transformers gives to step s + 1; after the warm-up both agree at every step. The
last step of a run is T - 1, so a schedule that ends at 0 never wastes a step on it either.
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from library.config.schema import OptimizerConfig
from library.errors import UserError


def build_schedule(config: OptimizerConfig, optimizer: Optimizer, total_steps: int) -> LambdaLR:
    """Return the schedule of ``config`` over ``total_steps`` optimizer steps, set to the first of them.

    Raises:
        UserError: warm-up and decay do not fit into the run, or the optimizer is schedule-free and the
            schedule is not constant.
    """
    _check_lengths(config, total_steps)
    is_schedule_free = any("train_mode" in g and g.get("use_schedulefree", True) for g in optimizer.param_groups)
    if is_schedule_free and config.lr_scheduler != "constant":
        raise UserError(
            f"lr_scheduler {config.lr_scheduler!r} would fight the schedule-free {config.optimizer_type}; "
            'set lr_scheduler = "constant"'
        )
    return Schedule(optimizer, lambda step: lr_multiplier(config, step, total_steps))


class Schedule(LambdaLR):
    """A schedule of which a loaded state says how far it is, and nothing else: rates are those it was built with."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was; give the groups of the optimizer, loaded before, the rates of the next step.

        torch's own leaves the rates that the optimizer was saved with: of the old schedule, and 0 behind its end.
        """
        rates = self.base_lrs
        super().load_state_dict(state_dict)
        self.base_lrs = rates
        for group, rate, multiplier in zip(self.optimizer.param_groups, rates, self.lr_lambdas, strict=True):
            group["initial_lr"], group["lr"] = rate, rate * multiplier(self.last_epoch)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def lr_multiplier(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the factor on the learning rate at optimizer step ``step`` (from 0) of ``total_steps``.

    Steps past the end keep the rate of the end.
    """
    if config.lr_scheduler == "constant":
        return 1.0
    warmup = resolve_steps(config.lr_warmup_steps, total_steps)
    if step < warmup:
        return config.lr_warmup_start_ratio + (1.0 - config.lr_warmup_start_ratio) * (step + 1) / warmup
    decay = resolve_steps(config.lr_decay_steps, total_steps) or total_steps - warmup
    progress = min(1.0, (step - warmup) / max(1, decay))
    floor = config.lr_scheduler_min_lr_ratio
    return floor + (1.0 - floor) * _shape(config, progress, step, total_steps)


def resolve_steps(steps: int | float, total_steps: int) -> int:
    """Return a number of steps given as such (int) or as a fraction of all (float; at least one step)."""
    if isinstance(steps, int) or steps == 0:
        return int(steps)
    return max(1, round(steps * total_steps))


def _shape(config: OptimizerConfig, progress: float, step: int, total_steps: int) -> float:
    """Return the schedule's shape, from 1 down to 0, at ``progress`` in 0..1 after the warm-up."""
    match config.lr_scheduler:
        case "constant_with_warmup":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return _half_cosine(progress)
        case "cosine_with_restarts":
            within = (config.lr_scheduler_num_cycles * progress) % 1.0
            return _half_cosine(within) if progress < 1.0 else 0.0
        case "polynomial":
            return (1.0 - progress) ** config.lr_scheduler_power
        case "rex":
            return (1.0 - progress) / (1.0 - progress / 2)
        case "warmup_stable_decay":
            decay = resolve_steps(config.lr_decay_steps, total_steps)
            return _half_cosine(min(1.0, max(0.0, (step - (total_steps - decay)) / max(1, decay))))
        case "inverse_sqrt":
            warmup = resolve_steps(config.lr_warmup_steps, total_steps)
            return ((step - warmup) / (config.lr_scheduler_timescale or warmup or 10_000) + 1.0) ** -0.5
    raise AssertionError(f"no schedule {config.lr_scheduler!r}")


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _check_lengths(config: OptimizerConfig, total_steps: int) -> None:
    warmup = resolve_steps(config.lr_warmup_steps, total_steps)
    decay = resolve_steps(config.lr_decay_steps, total_steps)
    if config.lr_scheduler == "constant" or warmup + decay == 0:
        return
    if warmup >= total_steps:
        raise UserError(
            f"lr_warmup_steps: {warmup} warm-up steps do not end within the run's {total_steps}; "
            "lower lr_warmup_steps or train longer"
        )
    if warmup + decay > total_steps:
        raise UserError(
            f"lr_decay_steps: {warmup} warm-up and {decay} decay steps exceed the run's {total_steps}; "
            "lower one of them or train longer"
        )
