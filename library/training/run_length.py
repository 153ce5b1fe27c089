"""How many optimizer steps and epochs a run has, and how its batches become steps."""

from __future__ import annotations

import math

from library.config.pretrain_schema import LLMTrainingConfig
from library.config.schema import TrainingConfig
from library.data.batches import DataParallelRank
from library.errors import counted
from library.training.checkpoint.state import Position


def run_length(
    training: TrainingConfig | LLMTrainingConfig, per_epoch: int, per_step: int, start: Position
) -> tuple[int, int]:
    """Return the number of optimizer steps of the run, and of epochs; the last epoch may be incomplete.

    Epochs win over steps. The last step of an epoch is a smaller one where ``per_step`` does not divide ``per_epoch``.
    A run that goes on with another number of processes takes as many steps as its epochs have left. Skipped steps (they
    were not finite) do not count: others are taken in their place, if need be in another epoch.

    Args:
        training: max_train_steps, max_train_epochs.
        per_epoch, per_step: batches, or windows, of an epoch and of a full step over all processes.
        start: where the run begins or goes on.
    """
    in_epoch = math.ceil(per_epoch / per_step)
    passed = (start.epoch + 1) * in_epoch - math.ceil(max(0, per_epoch - start.batches) / per_step)  # skipped ones too
    steps = training.max_train_steps
    if training.max_train_epochs is not None:
        steps = start.step + training.max_train_epochs * in_epoch - (passed - start.updates_dropped)
    return steps, math.ceil((passed + steps - start.step) / in_epoch)


def describe_steps(per_epoch: int, dp_rank: DataParallelRank, per_step: int, unit: str = "batch") -> str:
    """Return in a line how an epoch's batches, or another ``unit``, become steps."""
    several = f"{unit}es" if unit == "batch" else f"{unit}s"
    counts = {"processes": dp_rank.processes, "accumulated": dp_rank.accumulation}
    of = " x ".join(f"{count} {what}" for what, count in counts.items() if count > 1)
    steps, left = math.ceil(per_epoch / per_step), per_epoch % per_step
    last = f", {'of' if steps == 1 else 'the last of'} {left} {unit if left == 1 else several}" if left else ""
    return (
        f"{per_epoch:,} {several} an epoch, {per_step:,} in a step{f' ({of})' if of else ''}: "
        f"{counted(steps, 'step')} an epoch{last}"
    )
