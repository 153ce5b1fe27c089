"""What runs a step on all processes: forward, backward, accumulation, clipping, the update.

A task makes model, optimizer and batches; ``Engine.prepare`` lets accelerate and ``parallel`` wrap them as the layout
says. From then on the trainer calls, for each batch, ``forward_backward``, and at the end of a step ``clip``,
``update`` and ``settle``.

**A step whose loss or gradients are not finite is skipped, and the host does not wait to know.** Whether a step is
finite is known on the device; asking for it there would make the host wait in every step. A loss that is not finite
multiplies its gradients by NaN. Gradients are summed over the batches of a step and averaged over processes, so their
norm is then NaN on every process: all decide alike without another collective. One question remains: is the norm
finite?

- torch's fused optimizers take the answer as ``found_inf``, which was made for loss scalers: their kernels then leave
  weights and state as they are. The answer travels to the host meanwhile, which reads it before the next update
  (``settle``). Average and schedule wait for it, so there is nothing to undo but the count of steps.
- Other optimizers have nothing like it: the host waits for the norm and leaves the step out.
- With a loss scaler (fp16) the scaler leaves out what is not finite. Gradients that overflow while its scale is above 1
  are its way to find the scale, and count as a step; a loss that is not finite does not.

An update can also make weights infinite from finite gradients: ``has_finite_weights`` is asked before a save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from library.accelerator import dp_rank_and_size
from library.config.run_schema import ParallelConfig
from library.data.batches import MicroStep, TensorBatch
from library.errors import NotRestoredError
from library.nn.checkpointing import evaluating
from library.randomness import derive_seed
from library.training.checkpoint.state import Stateful
from library.training.optim.after_update import WeightAverage
from library.training.optim.factory import averaged_weights, unwrapped
from library.training.optim.preconditioning import InputPreconditioner
from library.training.parallel.gather import all_reduce_and, to_local
from library.training.parallel.gradients import clip_gradients, drop_gradients, lockstep_batches, no_sync
from library.training.parallel.parallelize import ParallelSpec, parallelize
from library.training.parallel.pipeline import Pipeline
from library.training.parallel.zero import ZeroOptimizer
from library.training.report.metrics import totals
from library.training.step_graphs import CudaCapture, StepGraphs

ALONE = MicroStep(1.0, 0, 1, 1, True)  # the only batch of its step
Loss = Callable[..., tuple[Tensor, Tensor]]  # model, batch, step -> loss [], and values that metrics are means of


class Engine:
    """Runs the steps of one process; see the module's text.

    Attributes:
        accelerator: the process's.
        models: what runs forward and backward, wrapped: the network, and text encoders that are trained.
        optimizer, schedule: as prepared.
        parameters: what is trained; of split weights the part that lies here.
        average: of the parameters, None without ``ema_decay``.
        preconditioner: keeps what general images use most of the layers' inputs; None without ``preserve_directions``.
        pipeline: None where one process has the whole model.
        graphs: of forward and backward (:meth:`capture_steps`); None where every step runs eagerly.
        is_whole: False only while :meth:`update` or :meth:`settle` runs, and after one of them failed half-way: then
            weights, optimizer, average and schedule may be of different steps. (An update that certainly wrote nothing
            before it failed is taken back.) And after other weights, shown for a while, could not be taken back.
        needs_base: whether what is saved follows from the frozen weights too.
        is_settled: whether the host knows that the last step was finite.
        is_answer_pending: whether the answer on the last step is still on its way from a GPU.
    """

    models: list[nn.Module]
    optimizer: Any
    schedule: LRScheduler
    parameters: Sequence[nn.Parameter]
    average: WeightAverage | None = None
    preconditioner: InputPreconditioner | None = None
    pipeline: Pipeline | None = None
    graphs: StepGraphs | None = None
    needs_base = False

    def __init__(self, accelerator: Accelerator, seed: int) -> None:
        self.accelerator, self.seed = accelerator, seed
        self.is_whole = self.is_settled = True
        self.is_answer_pending = False
        self._counts_writes = False  # whether torch counts what this optimizer writes to the weights

    def prepare(
        self,
        parallel: ParallelConfig,
        spec: ParallelSpec,
        optimizer: Any,
        schedule: LRScheduler,
        trained: Callable[[], Sequence[nn.Parameter]],
        loader: Any = None,
        max_grad_norm: float = 0.0,
        clips_from: int = 0,
        ema_decay: float | None = None,
    ) -> tuple[Any, nn.Module | None]:
        """Wrap what a task has made as the layout runs it; return its loader, and the text encoders that are trained.

        Args:
            parallel, spec, optimizer, loader, max_grad_norm: as of ``parallelize``.
            schedule: of the optimizer.
            trained: returns what is trained, once the model is split.
            clips_from: the first step whose gradients are clipped.
            ema_decay: of an average of the weights.
        """
        prepared = parallelize(self.accelerator, parallel, spec, optimizer, loader, max_grad_norm)
        self._network, encoders = spec.model, prepared.text_encoders
        self.models = [prepared.model] if encoders is None else [prepared.model, encoders]
        self.optimizer, self.schedule, self.pipeline = prepared.optimizer, schedule, prepared.pipeline
        self.parameters = trained()
        self._max_grad_norm, self._clips_from = max_grad_norm, clips_from
        self.average = WeightAverage(self.parameters, ema_decay) if ema_decay else None
        # changes the weights that an update has left; gets whether the step was taken, [] on the device
        self.after_update: Callable[[Tensor], None] = lambda is_taken: None
        self._device = self.parameters[0].device
        self._on_gpu = self._device.type == "cuda"
        self._bad_losses = torch.zeros((), device=self._device)
        self._is_finite_on_host = torch.ones((), dtype=torch.bool, pin_memory=self._on_gpu)
        self._copied: torch.cuda.Event | None = None
        self._groups_before_update: list[dict[str, Any]] = []
        return prepared.loader, encoders

    def forward_backward(
        self, loss_of: Loss, batch: Any, step: int, micro: MicroStep = ALONE, columns: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Add a batch's gradients to the step's; return its loss [] times its weight, and its metrics' totals.

        Processes exchange gradients in a step's last batch only. (accelerate's own ``accumulate`` counts batches; here
        a step may have fewer.)

        Args:
            loss_of: of a task.
            batch: of this process.
            step: optimizer steps before this one.
            micro: the batch's place in the step.
            columns: of the metrics that ``loss_of`` returns.
        """

        def checked(loss: Tensor) -> Tensor:
            return self.nan_if_not_finite(loss) * micro.weight

        # LoRA dropout is the one global draw; seeding it here makes it a function of the batch's place too.
        torch.manual_seed(derive_seed(self.seed, "dropout", step, micro.number))
        self.accelerator.sync_gradients = micro.ends_step
        if self.graphs is not None:
            weight = torch.full((), micro.weight, device=self._device)
            found = self.graphs(self._inputs(batch, step), weight)
            return found[0], found[1:].view(2, -1)
        with nullcontext() if micro.ends_step else no_sync(self.accelerator, self.models):
            if self.pipeline is not None:
                compute = partial(loss_of, self.models[0], step=step)
                loss, metrics = self.pipeline.forward_backward(batch, compute, checked, columns)
            else:
                loss, values = loss_of(self.models[0], batch, step)
                self.accelerator.backward(checked(loss))
                loss, metrics = loss.detach(), totals(values)
        return loss * micro.weight, metrics

    def capture_steps(
        self,
        inputs: Callable[[Any, int], TensorBatch],
        compute: Callable[[nn.Module, Any], tuple[Tensor, Tensor]],
        note: Callable[[str], None],
        required: bool = False,
    ) -> None:
        """Let forward and backward run as CUDA graphs (:mod:`library.training.step_graphs`).

        Args:
            inputs: batch and step -> what ``compute`` takes, on the device: all that is drawn or comes from the host.
            compute: model and inputs -> what a ``Loss`` returns.
            note, required: of ``StepGraphs``.
        """

        def step(given: Any, weight: Tensor) -> Tensor:
            loss, values = compute(self.models[0], given)
            self.accelerator.backward(self.nan_if_not_finite(loss) * weight)
            return torch.cat([(loss.detach() * weight)[None], totals(values).flatten()])

        self._inputs = inputs
        self.graphs = StepGraphs(step, self.parameters, CudaCapture(), note, required)

    def drop_graphs(self) -> None:
        """Give the memory of captured steps back; they are captured again."""
        if self.graphs is not None:
            self.graphs.drop()

    def clip(self, step: int) -> Tensor:
        """Scale the gradients of ``step`` to a norm of ``max_grad_norm``; return their norm before that, []."""
        clips = self._max_grad_norm and step >= self._clips_from
        limit = self._max_grad_norm if clips else math.inf  # with inf the norm is measured, not changed
        return clip_gradients(self.accelerator, self._network, self.parameters, limit)

    def nan_if_not_finite(self, loss: Tensor) -> Tensor:
        """Return ``loss`` with gradients that are NaN where it is not finite itself; else the same, bit for bit."""
        finite = loss.detach().isfinite()
        self._bad_losses += ~finite  # in place, as all that a captured step writes to
        return loss * torch.ones_like(finite, dtype=loss.dtype).masked_fill(~finite, math.nan)

    def update(self, grad_norm: Tensor) -> None:
        """Take the optimizer's step unless ``grad_norm`` is not finite; :meth:`settle` completes it, or drops it.

        If it fails before anything was written, all is as before it. That is certain where torch counts what is written
        (``Tensor._version``), as an earlier step shows: some optimizers write past it, by ``.data`` or their own
        kernels. Adam's fused kernel does so too, but counts the step before.
        """
        assert self.is_settled, "settle the step before"
        optimizer: Any = unwrapped(self.optimizer)
        finite = self._is_finite(torch.as_tensor(grad_norm, device=self._device))
        # what an optimizer keeps on the host counts a step that its kernels leave out
        self._groups_before_update = [
            {k: v for k, v in g.items() if not isinstance(v, Tensor)} for g in optimizer.param_groups
        ]
        weights, state = self._writes_counted(optimizer)
        self.is_whole = self.is_settled = False
        try:
            if self.accelerator.scaler is not None:
                self.optimizer.step()
            elif self._skips_by_itself(optimizer):
                optimizer.found_inf = (~finite).float()
                try:
                    self.optimizer.step()
                finally:
                    del optimizer.found_inf
            elif bool(finite):
                self.optimizer.step()
        except BaseException:
            is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
            if (is_adam or self._counts_writes) and self._writes_counted(optimizer) == (weights, state):
                self._restore_groups()
                self.is_whole = self.is_settled = True
            raise
        if not self._counts_writes:
            trained = [i for i, p in enumerate(self.parameters) if p.grad is not None]
            self._counts_writes = all(self.parameters[i]._version > weights[i] for i in trained)
        if not self.accelerator.optimizer_step_was_skipped:  # by the loss scaler
            self.after_update(finite)
        self.optimizer.zero_grad()
        self._is_finite_on_host.copy_(finite, non_blocking=True)
        self.is_answer_pending = self._on_gpu
        if self._on_gpu:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))
        self.is_whole = True  # nothing failed: settle does the rest

    def _skips_by_itself(self, optimizer: Any) -> bool:
        """Whether the optimizer's kernels leave out a step (torch's mark); SGD's first spoils its momentum."""
        has_state = isinstance(optimizer, torch.optim.Adam) or bool(optimizer.state)
        is_plain = not isinstance(self.optimizer, ZeroOptimizer)
        return is_plain and has_state and getattr(optimizer, "_step_supports_amp_scaling", False)

    def _writes_counted(self, optimizer: Any) -> tuple[list[int], list[int]]:
        """Return how often the weights were written to; of the optimizer's state the same, and which objects it is."""
        kept = [value for state in optimizer.state.values() for value in state.values()]
        state = [value._version for value in kept if isinstance(value, Tensor)]
        return [parameter._version for parameter in self.parameters], [*state, *map(id, kept)]

    def _restore_groups(self) -> None:
        for group, before in zip(unwrapped(self.optimizer).param_groups, self._groups_before_update, strict=True):
            group.update(before)

    def _is_finite(self, grad_norm: Tensor) -> Tensor:
        scaler, finite = self.accelerator.scaler, grad_norm.isfinite().all()
        if scaler is None:
            return finite
        bad_losses = self.accelerator.reduce(self._bad_losses, reduction="sum")  # a NaN norm may be the scaler's
        scale = scaler._scale if scaler._scale is not None else torch.ones((), device=self._device)
        finite = (bad_losses == 0) & (finite | (scale > 1))
        self._bad_losses.zero_()
        return finite

    def settle(self) -> bool:
        """Complete the last update if it was finite, else drop it; return whether it was finite.

        Called again before the next update, it does nothing and returns True.
        """
        if self.is_settled:
            return True
        if self._copied is not None:
            self._copied.synchronize()  # its step is over, or nearly
            self._copied = None
        self.is_answer_pending = False
        self.is_whole = False
        finite = bool(self._is_finite_on_host.numpy())  # host memory: nothing is asked of the device
        if finite:
            if self.average is not None:
                self.average.update()
            if not self.accelerator.optimizer_step_was_skipped:
                self.schedule.step()
        else:
            self._restore_groups()
            drop_gradients(self.optimizer)  # of the step that has begun since
        self.is_whole = self.is_settled = True
        return finite

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that is not taken."""
        drop_gradients(self.optimizer)

    def has_finite_weights(self, alone: bool = False) -> bool:
        """Return whether all that is trained is finite, on all processes; ``alone`` asks no other one."""
        local = [tensor for p in self.parameters if (tensor := to_local(p.detach())).numel()]
        finite = all_finite(local)
        return bool(finite if alone else all_reduce_and(finite, self.accelerator))

    def parts(self) -> dict[str, Stateful]:
        """Return what has a state to save besides the weights."""
        parts: dict[str, Stateful] = {"optimizer": self.optimizer, "schedule": self.schedule}
        if self.accelerator.scaler is not None:
            parts["scaler"] = self.accelerator.scaler
        if self.average is not None:
            parts["average"] = self.average
        if self.preconditioner is not None:
            parts["preconditioner"] = self.preconditioner
        return parts

    @contextmanager
    def deployed_weights(self) -> Iterator[None]:
        """Inside the block the model holds the weights to save and look at: averaged ones, where the run averages.

        Raises:
            NotRestoredError: those in training could not be given back; they are not to be saved.
        """
        failed: BaseException | None = None  # what the block raises, perhaps a NotRestoredError of something else
        try:
            with averaged_weights(self.optimizer), self.average.shown() if self.average else nullcontext():
                try:
                    yield
                except BaseException as error:
                    failed = error
        except NotRestoredError:
            self.is_whole = False
            raise
        if failed is not None:
            self.is_whole &= not (self.needs_base and isinstance(failed, NotRestoredError))
            raise failed

    def mean_over(
        self,
        batches: Callable[[], Iterable[Any]],
        measure: Callable[[Any], tuple[Tensor, Tensor | int]],
        parts: int = 1,
    ) -> list[float]:
        """Return the means, over all of ``batches``, of the ``parts`` that ``measure`` sums up in a batch.

        ``measure`` returns these sums, [] or [parts], and over how many samples or tokens they are. Each process takes
        its share of the batches. The sums are added up before the division, so the means do not depend on the number of
        processes.
        """
        accelerator = self.accelerator
        sums = torch.zeros(parts + 1, dtype=torch.float64, device=accelerator.device)
        rank, processes = dp_rank_and_size(accelerator)
        with evaluating(*self.models):
            for batch in lockstep_batches(islice(batches(), rank, None, processes), accelerator):
                loss, count = measure(next(iter(batches())) if batch is None else batch)
                if batch is not None:  # else only to take part
                    number = torch.as_tensor(count, device=loss.device).double()
                    sums += torch.cat([loss.double().view(parts), number[None]])
        *losses, count = accelerator.reduce(sums, reduction="sum").tolist()
        return [loss / count for loss in losses]


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return on their device whether every number of ``tensors`` is finite; nothing waits for the answer."""
    largest = torch._foreach_norm([t.detach() for t in tensors], math.inf)  # keeps NaN
    return torch.stack([value.float().to(largest[0].device) for value in largest]).isfinite().all()
