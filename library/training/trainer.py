"""The training loop.

One optimizer step is: ``gradient_accumulation_steps`` batches forward and backward, clipping, the optimizer, the
schedule. Everything random in it is a function of (seed, step, sample), so the loop carries no hidden state: its
whole memory is ``Position`` and what optimizer and schedule hold. The device is read back (one synchronisation)
only at steps that are logged, and before something looks at the weights; ``update_guard`` keeps what is not finite
from them meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from library.accelerator import dp_rank_and_size
from library.errors import UserError
from library.randomness import derive_seed
from library.training.checkpoint.state import Position
from library.training.guard.nonfinite import FaultPolicy, exclude_samples, out_of_memory
from library.training.guard.update_guard import UpdateGuard
from library.training.memory.budget import when_memory_runs_out
from library.training.optim.lr_tracker import StepSizeMonitor, distance_starts, read_learning_rates
from library.training.parallel.fsdp import full_tensor, share_gradients
from library.training.report.metrics import MetricsStream, of_each_process, peak_memory_bytes
from library.training.report.progress import TrainingProgress
from library.training.run import Run

_EMA = 0.95  # weight of the past in loss_ema: a memory of about twenty steps


class Events(Protocol):
    """What the loop tells of its progress."""

    stopped: bool  # whether training is to end here

    def is_due(self, position: Position) -> bool: ...

    def save_before_fault(self, position: Position) -> str | None: ...

    def after_step(self, position: Position) -> None: ...

    def after_epoch(self, position: Position) -> None: ...


@dataclass
class Trainer:
    """Trains a prepared run from ``position`` to its last step."""

    parts: Run
    position: Position
    log_every: int
    metrics: MetricsStream
    progress: TrainingProgress
    events: Events
    faults: FaultPolicy = field(default_factory=FaultPolicy)
    _rates: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._guard = UpdateGuard(self.parts)
        self._distances = StepSizeMonitor(
            self.parts.total_steps, distance_starts(self.parts.optimizer, self.position.step == 0)
        )
        self._step_ended = (0, 0)  # epoch and batches when the last whole step ended

    def run(self) -> None:
        """Train until ``total_steps`` optimizer steps are done.

        Raises:
            UserError: a step is not finite and the policy is to stop.
        """
        if left_out := exclude_samples(self.parts, self.position):
            self.progress.note(f"{left_out} images stay left out, as in the state")
        for model in self.parts.models:
            model.train()
        record = _Record(self.parts.accelerator, self.position, self.parts.step.figure)
        self._step_ended = self.position.epoch, self.position.batches
        while self.position.step < self.parts.total_steps and not self.events.stopped:
            self._epoch(record)
        self._went_back(record)  # where the end was not a step that is logged

    def _epoch(self, record: _Record) -> None:
        """Train to the end of the epoch or of the run; leave ``position`` at the start of the next epoch."""
        position, accelerator = self.position, self.parts.accelerator
        self.parts.batches.set_position(position.epoch, position.batches)
        record.restart_clock()
        for batch, waited in _timed(self.parts.loader):
            self._guard.begin(position, record.ema)
            with when_memory_runs_out(partial(self._out_of_memory, batch)):
                loss, figures, grad_norm = self._batch(batch)
            position.batches += dp_rank_and_size(accelerator)[1]
            record.add(loss, figures, waited, len(batch))
            if not accelerator.sync_gradients:
                continue
            position.step += 1
            position.step_ended, self._step_ended = None, (position.epoch, position.batches)
            self._guard.end(position)
            record.close_step(grad_norm)
            if (self._is_logged(position.step) or self.events.is_due(position)) and self._went_back(record):
                return
            self.progress.advance(position.step)
            if self._is_logged(position.step):
                self._log(record)
            self.events.after_step(position)
            record.restart_clock()
            if position.step == self.parts.total_steps or self.events.stopped:
                return
        if self._went_back(record):
            return
        position.step_ended = None if accelerator.sync_gradients else self._step_ended
        position.epoch, position.batches = position.epoch + 1, 0
        self.events.after_epoch(position)

    def _out_of_memory(self, batch: Any) -> UserError:
        """Stand before the step that does not fit, save, and return the error that names its batch."""
        step, alone = self.position.step + 1, self.parts.accelerator.num_processes == 1
        self._guard.abandon(self.position)
        saved = None
        if alone:  # the other processes wait in a collective that this one does not reach
            with suppress(RuntimeError, MemoryError):
                saved = self.events.save_before_fault(self.position)
        return out_of_memory(self.parts, batch, step, saved, self.faults.memory_advice)

    def _went_back(self, record: _Record) -> bool:
        """Ask whether the steps since the last answer were finite; if not, stand before the first bad one, or stop."""
        mark = self._guard.settle(self.position)
        if mark is None:
            return False
        record.go_back(mark.loss_ema)
        note = self.faults.respond(self.parts, self.position, mark.end, self.events.save_before_fault)
        self._step_ended = self.position.epoch, self.position.batches
        self.progress.note(note)
        self.metrics.write({"step": self.position.step, "updates_dropped": self.position.updates_dropped})
        return True

    def _batch(self, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Forward and backward of one batch; the update too where the accumulation is complete."""
        run, position, accelerator = self.parts, self.position, self.parts.accelerator
        with accelerator.accumulate(*run.models):
            # LoRA dropout is the one global draw; seeding it here makes it a function of the position too.
            rank, _ = dp_rank_and_size(accelerator)  # those that compute one batch together draw the same
            torch.manual_seed(derive_seed(run.step.seed, "dropout", position.step, position.batches, rank))
            loss, figures = run.forward_backward(batch, position.step, self._guard.poisoned)
            grad_norm = None
            if accelerator.sync_gradients:
                share_gradients(accelerator, run.network.parameters())
                limit = run.max_grad_norm or float("inf")  # with inf the norm is measured, not changed
                grad_norm = full_tensor(accelerator.clip_grad_norm_(run.network.parameters(), limit))
                if self._is_logged(position.step + 1):
                    self._rates = read_learning_rates(run.optimizer)  # as this step is going to use them
                self._guard.update(grad_norm, self._update)
                if not accelerator.optimizer_step_was_skipped:
                    run.lr_schedule.step()
            run.optimizer.zero_grad()
        return loss, figures, grad_norm

    def _update(self) -> None:
        self.parts.optimizer.step()
        if self.parts.average is not None:
            self.parts.average.update()

    def _is_logged(self, step: int) -> bool:
        return step % self.log_every == 0 or step == self.parts.total_steps

    def _log(self, record: _Record) -> None:
        values = {"step": self.position.step, "epoch": self.position.epoch, **record.read(), **self._rates}
        values["peak_mem_bytes"] = peak_memory_bytes()
        self.metrics.write(values)
        for remark in self._distances.look(self.position.step, self._rates):
            self.progress.note(remark)
        if self.parts.accelerator.is_main_process:
            self.progress.show(values)


class _Record:
    """Gathers a step's figures on the device; reads them back only when asked to."""

    def __init__(self, accelerator: Accelerator, position: Position, figure: str) -> None:
        self._accelerator, self._position, self._figure = accelerator, position, figure
        self.ema: Tensor | None = None
        self._losses: list[Tensor] = []
        self._figures: list[Tensor] = []
        self._steps, self._samples, self._waited, self._busy = 0, 0, 0.0, 0.0
        self._loss = self._grad_norm = torch.zeros(())
        self._clock = time.perf_counter()

    def add(self, loss: Tensor, figures: Tensor, waited: float, samples: int) -> None:
        """Take in one batch."""
        self._samples += samples
        self._losses.append(loss)
        self._figures.append(figures)
        self._waited += waited

    def close_step(self, grad_norm: Tensor | None) -> None:
        """Take in the end of an optimizer step."""
        self._loss = torch.stack(self._losses).mean()
        first = self._position.step == 1 and self.ema is None
        resumed = torch.tensor(self._position.loss_ema, device=self._loss.device)  # rounded as the average is
        past = self._loss if first else resumed if self.ema is None else self.ema
        self.ema = _EMA * past + (1 - _EMA) * self._loss
        self._losses = []
        if grad_norm is not None:
            self._grad_norm = grad_norm
        self._steps += 1
        now = time.perf_counter()
        self._busy, self._clock = self._busy + now - self._clock, now

    def go_back(self, ema: Tensor | None) -> None:
        """Forget the steps since one at whose beginning ``ema`` was the average, and the batches of one half done."""
        self.ema, self._losses = ema, []

    def restart_clock(self) -> None:
        """Leave out of s/it what was done between steps: saving, sampling, validating."""
        self._clock = time.perf_counter()

    def read(self) -> dict[str, float]:
        """Return the figures since the last call, the loss averaged over processes."""
        ema = self.ema if self.ema is not None else self._loss
        on_device = torch.stack([self._loss, ema, torch.as_tensor(self._grad_norm, device=ema.device)])
        loss, ema_value, grad_norm = self._accelerator.reduce(on_device, reduction="mean").tolist()
        self._position.loss_ema = ema_value
        figures = {
            "loss": loss,
            "loss_ema": ema_value,
            "grad_norm": grad_norm,
            self._figure: float(torch.cat(self._figures).mean()),
        }
        speed = {
            "samples_per_s": self._samples / self._busy,
            "s_per_it": self._busy / self._steps,
            "data_wait_s": self._waited / self._steps,
        }
        self._figures, self._steps, self._samples, self._waited, self._busy = [], 0, 0, 0.0, 0.0
        each = of_each_process(self._accelerator, speed | {"peak_mem_bytes": peak_memory_bytes()})
        speed["samples_per_s"] *= dp_rank_and_size(self._accelerator)[1]  # of all
        return figures | speed | each


def _timed(batches: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    """Yield each batch with the seconds spent waiting for it."""
    iterator = iter(batches)
    while True:
        begun = time.perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch, time.perf_counter() - begun
