"""Batches through the stages: torch's 1F1B schedule, which sends streams forward and gradients back.

A batch is cut into microbatches of equal size, so that stages work at the same time on different ones. A stage
alternates forward and backward passes as soon as it can, so that the first stage holds the activations of as many
microbatches as there are stages, and not of all. With S stages and M microbatches a stage waits for (S - 1) in
(M + S - 1) of the time.

torch has buffers for the streams in each schedule, which are of one shape: a batch of another shape has a schedule of
its own. The first batch of a run is run once more than needed, by which torch learns what the streams are; later shapes
are seen from a pass that ends in front of the blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from library.randomness import derive_seed
from library.training.parallel.pipeline.p2p import ProbeDone, StageComm, StageDone, Streams, contiguous_gradient
from library.training.report.metrics import totals

Compute = Callable[[Any], tuple[Tensor, Tensor]]  # a microbatch -> its loss [], metrics [n] or [n, columns]
_MOST_SCHEDULES = 4  # whose buffers are kept
Kinds = list[tuple[torch.dtype, bool]]  # of streams: dtype, and whether they have a gradient


class _Stage(nn.Module):
    """What torch takes for the stage: the forward pass of a microbatch, from what came in to what goes out."""

    def __init__(self, model: nn.Module, comm: StageComm) -> None:
        super().__init__()
        self.model, self.comm = model, comm
        self.microbatches: list[Any] = []
        self.compute: Compute | None = None
        self.checked: Callable[[Tensor], Tensor] = lambda loss: loss
        self.scale = 1.0
        self.seen: list[Tensor] = []  # loss and totals of each microbatch, [1 + 2 * columns], on the last stage
        self.kinds: tuple[Kinds, Kinds] | None = None  # of what comes in, of what goes out

    def forward(self, *received: Tensor, number: Tensor) -> Any:
        """Return the streams, or on the last stage the microbatch's share of the loss; ``number`` is [1] on the CPU."""
        assert self.compute is not None
        i = int(number)
        self.comm.inbox = tuple(map(contiguous_gradient, received))
        try:
            loss, metrics = self.compute(self.microbatches[i])
            self.seen[i] = torch.cat([loss.detach().float()[None], totals(metrics).to(loss.device).flatten()])
            streams: Streams = (self.checked(loss) * self.scale,)
        except StageDone:
            streams = self.comm.outbox
        self.comm.inbox = self.comm.outbox = ()
        self.kinds = self.kinds or (_kinds(received), _kinds(streams))
        return streams[0] if self.comm.is_last else streams  # a loss in a tuple would have no gradient


class Pipeline:
    """Takes batches forward and backward through the stages.

    Args:
        model: this process's stage, as the engine runs it.
        comm: its place among the others.
        microbatches: into how many a batch is cut, if it can be.
        accumulation: batches of an optimizer step, whose gradients are averaged.
    """

    def __init__(self, model: nn.Module, comm: StageComm, microbatches: int, accumulation: int) -> None:
        self.comm = comm
        self._stage = _Stage(model, comm)
        self._count, self._accumulation = microbatches, accumulation
        self._schedules: dict[Any, Any] = {}

    def forward_backward(
        self, batch: Any, compute: Compute, checked: Callable[[Tensor], Tensor] = lambda loss: loss, columns: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Add the batch's gradients to the stage's weights; return on every stage its loss [] and metrics' ``totals``.

        Args:
            batch: has a length and ``chunk(count)``, as tensors have; the same on all stages.
            compute: the loss of one of its microbatches. A batch's loss is the mean over them.
            checked: is put around every loss before its gradients are made.
            columns: of the metrics.
        """
        stage, comm = self._stage, self.comm
        count = microbatches_of(len(batch), self._count)
        stage.microbatches, stage.compute, stage.checked = list(batch.chunk(count)), compute, checked
        stage.scale, stage.seen = 1 / (count * self._accumulation), [torch.zeros(())] * count
        # what is random (dropout) differs from stage to stage
        torch.manual_seed(derive_seed(torch.initial_seed(), "stage", comm.index))
        schedule = self._schedule(count)
        numbers = torch.arange(count)
        comm.scheduled = True
        try:
            schedule.step(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:  # torch's words for what a forward pass has raised
            raise error.__cause__ or error from None
        finally:
            comm.scheduled = False
            stage.microbatches, stage.compute = [], None
        seen = torch.stack(stage.seen).sum(dim=0) if comm.is_last else torch.empty(1 + 2 * columns, device=comm.device)
        dist.broadcast(seen, comm.rank(comm.count - 1), comm.group)
        return seen[0] / count, seen[1:].view(2, columns)

    def gathered(self, values: list[Any]) -> list[Any]:
        """Return all stages' ``values``, in the stages' order."""
        return [value for values in self.comm.of_all_stages(values) for value in values]

    def _schedule(self, count: int) -> Any:
        """Return the schedule for the present microbatches; all stages come to the same."""
        key = count, _shapes(self._stage.microbatches[0])
        schedule = self._schedules[key] = self._schedules.pop(key, None) or self._new_schedule(count)
        if len(self._schedules) > _MOST_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]  # used longest ago
        return schedule

    def _new_schedule(self, count: int) -> Any:
        comm = self.comm
        examples: dict[str, Any] = {} if self._stage.kinds is None else self._examples()
        stage = PipelineStage(self._stage, comm.index, comm.count, comm.device, group=comm.group, **examples)
        # torch's 1F1B refuses fewer microbatches than stages, which leave nothing to alternate
        kind = Schedule1F1B if count >= comm.count else ScheduleGPipe
        return kind(stage, count, loss_fn=lambda loss, _: loss, scale_grads=False)

    @torch.no_grad()
    def _examples(self) -> dict[str, tuple[Tensor, ...]]:
        """Return tensors without memory that are as what comes in and what goes out."""
        stage, comm = self._stage, self.comm
        assert stage.compute is not None
        assert stage.kinds is not None
        comm.probing = True
        with suppress(ProbeDone):
            stage.compute(stage.microbatches[0])
        comm.probing = False
        shapes, comm.probed = [stream.shape for stream in comm.probed], ()
        incoming, outgoing = stage.kinds
        taken = _like([] if comm.is_first else shapes, incoming)
        return {"input_args": taken, "output_args": _like([torch.Size()] if comm.is_last else shapes, outgoing)}


def microbatches_of(samples: int, wanted: int) -> int:
    """Return into how many equal parts a batch of ``samples`` is cut: ``wanted``, or the next that divides it."""
    return next(count for count in range(min(wanted, samples), samples + 1) if samples % count == 0)


def _kinds(streams: tuple[Tensor, ...]) -> Kinds:
    return [(stream.dtype, stream.requires_grad) for stream in streams]


def _like(shapes: list[torch.Size], kinds: Kinds) -> tuple[Tensor, ...]:
    pairs = zip(shapes, kinds, strict=True)
    return tuple(torch.empty(s, dtype=dtype, device="meta", requires_grad=grad) for s, (dtype, grad) in pairs)


def _shapes(value: Any) -> Any:
    """Return the shapes of all tensors in a batch."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    parts = vars(value) if dataclasses.is_dataclass(value) else value
    parts = parts.values() if isinstance(parts, dict) else parts
    return tuple(map(_shapes, parts)) if isinstance(parts, Iterable) and not isinstance(parts, str) else ()
