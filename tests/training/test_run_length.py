"""The number of steps of a run, counted by taking them."""

from __future__ import annotations

import pytest

from library.config.schema import TrainingConfig
from library.data.batches import DataParallelRank
from library.training.checkpoint.state import Position
from library.training.tasks.task import describe_steps, run_length


def test_a_run_takes_the_steps_that_its_epochs_have_left(subtests: pytest.Subtests) -> None:
    """Counted by taking them: from ``seen`` batches into the second of three epochs, which took seven steps so far."""
    for seen in [0, 1, 3]:
        for per_step in [1, 2, 4, 20]:
            for per_epoch in [1, 5, 13, 14]:
                with subtests.test(f"{seen}, {per_step}, {per_epoch}"):
                    training = TrainingConfig(max_train_epochs=3)
                    begun = Position(step=7, epoch=1, batches=min(seen, per_epoch))
                    steps = 7
                    for epoch in (1, 2):
                        left = per_epoch - (begun.batches if epoch == 1 else 0)
                        while left > 0:
                            left, steps = left - per_step, steps + 1
                    assert run_length(training, per_epoch, per_step, begun) == (steps, 3)
                    by_steps = TrainingConfig(max_train_steps=steps)
                    assert run_length(by_steps, per_epoch, per_step, begun) == (steps, 3)
                    assert run_length(TrainingConfig(max_train_steps=steps + 1), per_epoch, per_step, begun) == (
                        steps + 1,
                        4,
                    )


def test_steps_that_were_passed_over_are_not_taken_in_the_end_instead_of_others() -> None:
    begun = Position(step=3, epoch=1, updates_dropped=2)  # of five batches
    assert run_length(TrainingConfig(max_train_epochs=2), 5, 1, begun) == (10, 3)
    assert run_length(TrainingConfig(max_train_steps=8), 5, 1, begun) == (8, 2)
    assert run_length(TrainingConfig(max_train_steps=9), 5, 1, begun) == (9, 3)  # eleven batches


def test_a_line_says_how_batches_become_steps() -> None:
    two = DataParallelRank(processes=2)
    assert describe_steps(9, two, 2) == (
        "9 batches an epoch, 2 in a step (2 processes): 5 steps an epoch, the last of 1 batch"
    )
    assert describe_steps(8, two, 2) == "8 batches an epoch, 2 in a step (2 processes): 4 steps an epoch"
    assert describe_steps(3, DataParallelRank(2, 0, 2), 4) == (
        "3 batches an epoch, 4 in a step (2 processes x 2 accumulated): 1 step an epoch, of 3 batches"
    )
    assert describe_steps(1420, DataParallelRank(), 8, "window") == (
        "1,420 windows an epoch, 8 in a step: 178 steps an epoch, the last of 4 windows"
    )
