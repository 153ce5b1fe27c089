"""The pretraining loop.

An optimizer step is some forward and backward passes, clipping (after the warm-up: before, norms are large because
the weights are fresh, and small learning rates are caution enough), the optimizer, the schedule. Which tokens a step
sees follows from the position. The device is read back only at steps that are logged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from library.accelerator import dp_rank_and_size
from library.errors import UserError
from library.llm.token_batches import TokenBatches
from library.training.guard.update_guard import all_finite
from library.training.optim.lr_tracker import read_learning_rates
from library.training.parallel.pipeline.schedule import Pipeline
from library.training.parallel.step import clip_gradients, no_sync
from library.training.report.metrics import MetricsStream, of_each_process, peak_memory_bytes
from library.training.report.progress import TrainingProgress
from library.training.tasks.pretraining_events import PretrainingPosition

_EMA = 0.95  # weight of the past in loss_ema: a memory of about twenty steps


class BetweenSteps(Protocol):
    """What happens after a step: saving, sampling, validating."""

    @property
    def stopped(self) -> bool: ...

    def is_due(self, step: int) -> bool: ...

    def after_step(self, position: PretrainingPosition) -> None: ...


@dataclass(frozen=True)
class StepPlan:
    """What an optimizer step consists of.

    Attributes:
        total: steps of the run.
        accumulation: forward passes of one process in a step.
        windows, tokens: of a step, over all processes.
        max_grad_norm: gradient norm to clip at; 0 for no clipping.
        clip_from: the first step (from 0) whose gradients are clipped.
        log_every: steps between lines of metrics.
    """

    total: int
    accumulation: int
    windows: int
    tokens: int
    max_grad_norm: float
    clip_from: int
    log_every: int


@dataclass
class Pretrainer:
    """Trains ``model`` from ``position`` to the plan's last step.

    Attributes:
        model: as the engine runs it; called with tokens and targets it returns the loss.
        flops_per_token, peak_flops: for MFU; no MFU where the peak is not known.
        pipeline: that batches go through, where the model is cut into stages.
    """

    accelerator: Accelerator
    model: nn.Module
    optimizer: Optimizer
    lr_schedule: LRScheduler
    batches: TokenBatches
    position: PretrainingPosition
    plan: StepPlan
    metrics: MetricsStream
    progress: TrainingProgress
    between: BetweenSteps
    flops_per_token: float
    peak_flops: float | None
    pipeline: Pipeline | None = None
    _ema: Any = None  # Tensor []
    _clocks: _Clocks = field(default_factory=lambda: _Clocks())

    def run(self) -> None:
        """Train to the end.

        Raises:
            UserError: a loss or a gradient is not finite.
        """
        self.model.train()
        on_gpu = self.accelerator.device.type == "cuda"
        per_pass = self.plan.windows // self.plan.accumulation
        coming = self.batches.from_position(self.position.windows // per_pass, pinned=on_gpu)
        while self.position.step < self.plan.total and not self.between.stopped:
            self._clocks.start()
            loss, grad_norm, rates = self._step(coming)
            self.position.step += 1
            self.position.windows += self.plan.windows
            self._average(loss, grad_norm)
            self.progress.advance(self.position.step)
            if self._is_logged(self.position.step):
                self._log(loss, grad_norm, rates)
            else:
                self._clocks.stop()
            if self.between.is_due(self.position.step):
                self.position.loss_ema = self._finite(float(self._ema), weights=True)
                self.between.after_step(self.position)

    def _step(self, coming: Iterator[Tensor]) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Do one optimizer step; return its mean loss, the gradients' norm before clipping and the rates used."""
        accelerator, losses = self.accelerator, []
        for i in range(self.plan.accumulation):
            begun = time.perf_counter()
            tokens = next(coming)
            self._clocks.waited += time.perf_counter() - begun
            tokens = tokens.to(accelerator.device, non_blocking=True)
            losses.append(self._forward_backward(tokens, last=i == self.plan.accumulation - 1))
        clips = self.plan.max_grad_norm and self.position.step >= self.plan.clip_from
        limit = self.plan.max_grad_norm if clips else math.inf  # with inf the norm is measured, not changed
        grad_norm = clip_gradients(accelerator, self.model, list(self.model.parameters()), limit)
        rates = read_learning_rates(self.optimizer) if self._is_logged(self.position.step + 1) else {}
        self.optimizer.step()
        self.lr_schedule.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean(), torch.as_tensor(grad_norm), rates

    def _forward_backward(self, tokens: Tensor, last: bool) -> Tensor:
        """Add the gradients of ``tokens`` [B, context + 1] to the step's; return their loss."""
        if self.pipeline is not None:
            return self.pipeline.forward_backward(tokens, self._loss)[0]
        with nullcontext() if last else no_sync(self.accelerator, self.model):
            loss, _ = self._loss(tokens)
            self.accelerator.backward(loss / self.plan.accumulation)
        return loss.detach()

    def _loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss [] with gradient, and once more as a figure [1]."""
        with self.accelerator.autocast():
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
        return loss, loss.detach()[None]

    def _average(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Take ``loss`` into the moving average, which stays on the device.

        Once a loss or a gradient is not finite, on whichever process, the norm is not either, nor the average again.
        """
        loss = loss + 0 * grad_norm.to(loss.device)
        if self.position.step == 1:
            self._ema = loss
        elif self._ema is None:  # resumed
            self._ema = torch.tensor(self.position.loss_ema, device=loss.device)
        self._ema = _EMA * self._ema + (1 - _EMA) * loss

    def _finite(self, ema: float, weights: bool = False) -> float:
        """Return ``ema``; collective where ``weights`` are looked at too, which is before something is saved.

        Raises:
            UserError: it is not finite, nor are the weights then, or only these are not.
        """
        if math.isfinite(ema) and not (weights and self._broken_weights()):
            return ema
        raise UserError(
            f"step {self.position.step}: loss, gradients or weights are not finite, and nothing is saved of that; "
            'go on from the last state (resume = "auto") with a lower learning_rate or a longer warm-up'
        )

    def _broken_weights(self) -> bool:
        own = (p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters())
        broken = ~all_finite([tensor for tensor in own if tensor.numel()])
        return bool(self.accelerator.reduce(broken.float(), reduction="sum") > 0)

    def _is_logged(self, step: int) -> bool:
        return step % self.plan.log_every == 0 or step == self.plan.total

    def _log(self, loss: Tensor, grad_norm: Tensor, rates: dict[str, float]) -> None:
        on_device = torch.stack([loss, self._ema, grad_norm.to(loss.device)])
        mean_loss, ema, norm = self.accelerator.reduce(on_device, reduction="mean").tolist()
        self.position.loss_ema = self._finite(ema)
        self._clocks.stop()  # after the device was waited for
        seconds, waited = self._clocks.read()
        values = {
            "step": self.position.step,
            "epoch": self.position.windows // self.batches.windows,
            "loss": mean_loss,
            "loss_ema": ema,
            "perplexity": math.exp(min(mean_loss, 700.0)),
            "grad_norm": norm,
            **rates,
            "tokens": self.position.windows * (self.plan.tokens // self.plan.windows),
            "tokens_per_s": self.plan.tokens / seconds,
            "s_per_it": seconds,
            "data_wait_s": waited,
            "peak_mem_bytes": peak_memory_bytes(),
        }
        share = self.plan.tokens // dp_rank_and_size(self.accelerator)[1]
        own = {"tokens_per_s": share / seconds, "s_per_it": seconds, "data_wait_s": waited}
        values |= of_each_process(self.accelerator, own | {"peak_mem_bytes": values["peak_mem_bytes"]})
        if self.peak_flops is not None:
            speed = values["tokens_per_s"] * self.flops_per_token
            values["mfu"] = speed / (self.peak_flops * self.accelerator.num_processes)
        self.metrics.write(values)
        if self.accelerator.is_main_process:
            self.progress.show(values)


class _Clocks:
    """Seconds a step takes, and waits for data, since they were last read; what happens between steps is left out."""

    def __init__(self) -> None:
        self.waited = 0.0
        self._busy, self._steps, self._begun = 0.0, 0, 0.0

    def start(self) -> None:
        self._begun = time.perf_counter()

    def stop(self) -> None:
        self._busy += time.perf_counter() - self._begun
        self._steps += 1

    def read(self) -> tuple[float, float]:
        """Return seconds and waiting per step, and begin anew."""
        result = self._busy / self._steps, self.waited / self._steps
        self._busy, self._steps, self.waited = 0.0, 0, 0.0
        return result
