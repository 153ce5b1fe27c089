"""What a prepared run consists of, in one frozen object: the loop trains it, the events look at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from library.errors import UserError
from library.training.checkpoint import Position, Stateful, load_training_state
from library.training.optimizers import averaged_weights
from library.training.step import FlowStep
from library.training.weight_average import WeightAverage
from networks.injection import LoraNetwork

if TYPE_CHECKING:
    from library.data.order import EpochBatchSampler


@dataclass(frozen=True)
class Run:
    """A run's parts, wrapped by accelerate where that is needed."""

    accelerator: Accelerator
    step: FlowStep
    transformer: nn.Module  # with its LoRA, out of any wrapper
    model: nn.Module  # the same as the engine runs it; ``step`` has the text encoders as the engine runs them
    network: LoraNetwork
    optimizer: torch.optim.Optimizer
    lr_schedule: torch.optim.lr_scheduler.LRScheduler
    loader: DataLoader[Any]  # of Batch
    batches: EpochBatchSampler
    total_steps: int
    max_grad_norm: float
    base_fingerprint: str
    average: WeightAverage | None
    settings: Mapping[str, Any]  # that a state goes on with

    @property
    def models(self) -> list[nn.Module]:
        """What the engine runs forward and backward."""
        return [self.model] if self.step.text_encoders is None else [self.model, self.step.text_encoders]

    def parts(self) -> dict[str, Stateful]:
        """Return what has a state to save besides the LoRA itself."""
        parts: dict[str, Stateful] = {"optimizer": self.optimizer, "schedule": self.lr_schedule}
        if self.accelerator.scaler is not None:
            parts["scaler"] = self.accelerator.scaler
        if self.average is not None:
            parts["average"] = self.average
        return parts

    def resume(self, folder: str) -> Position:
        """Put a saved state back into the run; return where it stands.

        Raises:
            UserError: no state, one of another base, LoRA or optimizer, or one with nothing left to train.
        """
        weights, base = self.network.state_dict(), self.base_fingerprint
        position = load_training_state(folder, weights, self.parts(), base, self.settings)
        if position.step >= self.total_steps:
            raise UserError(
                f"resume: {folder} is at step {position.step} and the run ends at {self.total_steps}; "
                "raise max_train_steps or max_train_epochs"
            )
        return position

    @contextmanager
    def deployed_weights(self) -> Iterator[None]:
        """Inside the block the LoRA holds the weights to save and look at: averaged ones, where the run averages."""
        with averaged_weights(self.optimizer), self.average.shown() if self.average else nullcontext():
            yield
