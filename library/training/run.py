"""What a prepared run consists of, in one frozen object: ``prepare_run`` builds it from networks and data, the loop
trains it, the events look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from library.accelerator import dp_rank_and_size, expect_many_shapes
from library.config.schema import resume_keys
from library.errors import UserError
from library.training.checkpoint.state import Position, Stateful, load_training_state, refuse_finished
from library.training.optim.ema import WeightAverage
from library.training.optim.factory import averaged_weights, build_optimizer
from library.training.optim.schedules import build_schedule, total_steps
from library.training.parallel.gather import SplitOptimizer
from library.training.parallel.parallelize import ParallelizableModel, parallelize
from library.training.parallel.pipeline.schedule import Pipeline
from library.training.parallel.pipeline.stages import check_pieces, outline_of
from library.training.parallel.zero import ZeroOptimizer
from library.training.tasks.image_lora import Networks, training_loader
from library.training.tasks.image_step import FlowStep, TrainingStep
from library.training.tasks.lora_plan import NetworkPlan
from networks.injection import AdapterNetwork

if TYPE_CHECKING:
    from library.config.schema import TrainConfig
    from library.data.dataset import TrainingData
    from library.models.family import Family
    from library.training.tasks.image_step import Teacher


class EpochBatches(Protocol):
    """What orders the batches of an epoch: ``library.data.batches.EpochBatchSampler`` or another."""

    def set_position(self, epoch: int, first_batch: int = 0) -> None: ...

    def batches_per_epoch(self, epoch: int | None = None) -> int: ...


@dataclass(frozen=True)
class Run:
    """A run's parts, wrapped by accelerate where that is needed."""

    accelerator: Accelerator
    step: TrainingStep
    transformer: nn.Module  # with its LoRA, out of any wrapper
    model: nn.Module  # the same as the engine runs it; ``step`` has the text encoders as the engine runs them
    network: AdapterNetwork
    optimizer: torch.optim.Optimizer
    lr_schedule: torch.optim.lr_scheduler.LRScheduler
    loader: DataLoader[Any]
    batches: EpochBatches
    total_steps: int
    max_grad_norm: float
    base_fingerprint: str
    average: WeightAverage | None
    settings: Mapping[str, Any]  # that a state goes on with
    pipeline: Pipeline | None = None  # that batches go through, where the model is cut into stages

    @property
    def models(self) -> list[nn.Module]:
        """What the engine runs forward and backward."""
        return [self.model] if self.step.text_encoders is None else [self.model, self.step.text_encoders]

    def forward_backward(
        self, batch: Any, step: int, checked: Callable[[Tensor], Tensor] = lambda loss: loss
    ) -> tuple[Tensor, Tensor]:
        """Add a batch's gradients to those of the optimizer step ``step``; return its loss [] and its figures.

        ``checked`` is put around every loss before its gradients are made.
        """

        if self.pipeline is not None:
            compute = partial(self.step.loss, self.model, step=step)
            return self.pipeline.forward_backward(batch, compute, checked)
        loss, figures = self.step.loss(self.model, batch, step)
        self.accelerator.backward(checked(loss))
        return loss.detach(), figures

    def parts(self) -> dict[str, Stateful]:
        """Return what has a state to save besides the LoRA itself."""
        parts: dict[str, Stateful] = {"optimizer": self.optimizer, "schedule": self.lr_schedule}
        if self.accelerator.scaler is not None:
            parts["scaler"] = self.accelerator.scaler
        if self.average is not None:
            parts["average"] = self.average
        return parts

    @contextmanager
    def whole(self, with_state: bool = True) -> Iterator[None]:
        """Inside the block the main process can save LoRA and, ``with_state``, :meth:`parts`; all have to enter it."""
        own = self.optimizer
        with own.gathered(with_state) if isinstance(own, (SplitOptimizer, ZeroOptimizer)) else nullcontext():
            yield

    def resume(self, folder: str, finished_too: bool = False) -> Position:
        """Put a saved state back into the run; return where it stands.

        ``finished_too`` allows a state at the run's last step, whose end is yet to come.

        Raises:
            UserError: no state, one of another base, LoRA or optimizer, one with nothing left to train, or one that
                stands where this number of processes cannot share the batches that are left of the epoch.
        """
        weights, base = self.network.state_dict(), self.base_fingerprint
        position = load_training_state(folder, weights, self.parts(), base, self.settings)
        refuse_finished(folder, position, self.total_steps, finished_too)
        _, shares = dp_rank_and_size(self.accelerator)
        if position.batches % shares:
            raise UserError(
                f"resume: {folder} stands after batch {position.batches} of its epoch, which "
                f"{shares} processes cannot divide; go on with as many as it was trained with"
            )
        return position

    @contextmanager
    def deployed_weights(self) -> Iterator[None]:
        """Inside the block the LoRA holds the weights to save and look at: averaged ones, where the run averages."""
        with averaged_weights(self.optimizer), self.average.shown() if self.average else nullcontext():
            yield


def prepare_run(
    config: TrainConfig,
    family: Family,
    plan: NetworkPlan,
    networks: Networks,
    data: TrainingData,
    accelerator: Accelerator,
    teacher: Teacher | None = None,
) -> Run:
    """Build optimizer and schedule, and let accelerate wrap and compile the networks."""
    training, lora = config.training, networks.lora
    optimizer = build_optimizer(config.optimizer, plan.parameter_groups(lora), training.full_bf16, training.seed)
    batches, loader = training_loader(data, config.dataset, accelerator)
    steps = total_steps(training, batches.batches_per_epoch() // dp_rank_and_size(accelerator)[1])
    lr_schedule = build_schedule(config.optimizer, optimizer, steps)
    transformer, text_encoders, pipeline = networks.transformer, None, None
    check_pieces(config.parallel, max(data.train.batch_sizes.values()))
    parallelizable = ParallelizableModel(
        transformer,
        lora,
        lambda: outline_of(transformer, family.blocks(transformer), family.behind_blocks),
        family.repeated_blocks,
        family.split_plan,
    )
    shared = parallelize(
        accelerator, config.parallel, parallelizable, config.optimizer.max_grad_norm, optimizer, loader
    )
    if shared is not None:  # the configuration's rules leave it no text encoders to train
        model, optimizer, loader, pipeline = shared
    else:
        if len(data.train.batch_sizes) > 1:
            expect_many_shapes(accelerator)
        trained = transformer if plan.trains_transformer else None
        # The transformer lies where prepare_networks put it; with blocks_to_swap that is not the device alone.
        model, text_encoders, optimizer, loader = accelerator.prepare(
            trained, networks.text_encoders, optimizer, loader, device_placement=[False, True, True, True]
        )
    if model is None:  # DDP refuses a network with nothing to train
        model = accelerator.prepare_model(transformer, device_placement=False, evaluation_mode=True)
    fingerprint = networks.text_fingerprint
    trained_text = {} if fingerprint is None else {"text_encoders": fingerprint}
    return Run(
        accelerator=accelerator,
        step=FlowStep(family, config.flow, training.seed, text_encoders, teacher),
        transformer=transformer,
        model=model,
        network=lora,
        optimizer=optimizer,
        lr_schedule=lr_schedule,
        loader=loader,
        batches=batches,
        total_steps=steps,
        max_grad_norm=config.optimizer.max_grad_norm,
        base_fingerprint=family.fingerprint(),
        average=WeightAverage(lora.parameters(), decay) if (decay := config.saving.ema_decay) else None,
        settings=resume_keys(config) | trained_text,
        pipeline=pipeline,
    )
