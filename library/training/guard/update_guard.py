"""No update that is not a number reaches the weights, and nobody waits for the device to find out.

Whether a step's loss and gradients are finite is known on the device; asking for it there would make the host wait in
every step. So the device decides by itself, and the host asks when it reads the loss anyway (``commit``: at steps that
are logged, and before anything looks at the weights), or when it has heard of a bad step: each step's answer is copied
to the host, which looks at it one step later, while the device works on that.

1. A loss that is not finite multiplies its gradients by NaN (``nan_if_bad``). Gradients are summed over the batches of
   a step and averaged over processes, so after that their norm is NaN on every process: all decide alike, and no
   collective is added. What remains is one question: is the gradient norm finite?
2. Before the optimizer runs, weights and what it keeps are copied. It steps on gradients that are set to zero where
   the answer is no. Then, for each tensor, the device takes the new values if gradients and new weights are finite and
   the copies if not. This is a selection between bit patterns (new * flag + old * (1 - flag) as integers), which NaN
   cannot get through, in a few kernels over all tensors; optimizers need no support for it.
3. The flag stays down once it is down: what follows a bad step changes nothing until the host has asked. A count of
   the good steps tells it which step was the first bad one.
4. What lives on the host (``k`` and ``d`` of Prodigy, step counts, learning rates, the schedule) is remembered at each
   step's beginning; ``commit`` puts the bad step's back. The run then is exactly before that step, whatever
   ``log_every_n_steps`` is, and the loop goes on from there as the policy says.

What it costs: the copies, 4 bytes a weight and what the optimizer keeps (8 for AdamW), while the optimizer runs; no
activations live at that time, so the peak of a step does not rise. With a loss scaler (fp16) gradients that overflow
are its business while its scale is above 1; a loss that is not finite, or gradients that are not at scale 1, are ours.

In full training the copies would double the memory (``Task.rolls_back`` is not set): nothing is undone, a bad step is
not taken, and the run stops before it or passes over it. torch's fused optimizers leave everything as it is where the
device sets their ``found_inf``, which is there for loss scalers; all others have nothing like it, so for them the host
waits for the gradients' norm in every step. Weights that a step has made infinite are found by the next step, or before
anything is saved.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from library.training.checkpoint.state import Position
from library.training.optim.factory import unwrapped
from library.training.parallel.gather import all_reduce_and, to_local
from library.training.parallel.step import drop_gradients
from library.training.parallel.zero import ZeroOptimizer
from library.training.tasks.task import Task

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class StepSnapshot:
    """The beginning of a step: all of a run's state that is not held in tensors on the device."""

    position: Position
    end: Position  # where the step ended, once it did
    loss_ema: Tensor | None
    groups: list[dict[str, Any]]
    states: dict[Tensor, dict[str, Any]]
    schedule: dict[str, Any]
    average: int | None


class UpdateGuard:
    """Takes the updates of a run; see the module's text.

    Attributes:
        found: whether the host knows already that a step was not finite.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._device = task.parameters()[0].device
        self._snapshots: list[StepSnapshot] = []
        self._half_updated = False  # a step has begun that cannot be undone, and is not over
        self._undo: list[tuple[Tensor, Tensor]] = []  # what a step that is not over changes, and how it was
        self._on_gpu = self._device.type == "cuda"
        self._told = torch.ones((), dtype=torch.bool, pin_memory=self._on_gpu)  # the last answer that has arrived
        self._arrived: torch.cuda.Event | None = None
        self._reset()

    def _reset(self) -> None:
        self._snapshots.clear()
        self._good = torch.ones((), dtype=torch.bool, device=self._device)
        self._done = torch.zeros((), dtype=torch.int64, device=self._device)
        self._loss_bad = torch.zeros((), device=self._device)
        self._open = self.found = False
        self._arrived = None
        self._told.fill_(True)

    def begin(self, position: Position, loss_ema: Tensor | None) -> None:
        """Remember where a step begins; the further batches of the same step change nothing."""
        if not self._open:
            self._snapshots.append(self._snapshot(position, loss_ema))
            self._open = True

    def _snapshot(self, position: Position, loss_ema: Tensor | None) -> StepSnapshot:
        optimizer, average = unwrapped(self.task.optimizer), self.task.average
        return StepSnapshot(
            position=_copied(position),
            end=_copied(position),
            loss_ema=loss_ema,
            groups=[{k: self._on_host(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
            states={
                p: {k: self._on_host(v) for k, v in s.items()}
                for p, s in optimizer.state.items()
                if isinstance(s, dict)
            },
            schedule=copy.deepcopy(self.task.lr_schedule.state_dict()),
            average=None if average is None else average.updates,
        )

    def nan_if_bad(self, loss: Tensor) -> Tensor:
        """Return ``loss`` with gradients that are NaN where it is not finite itself; else the same, bit for bit."""
        finite = loss.detach().isfinite()
        self._loss_bad = self._loss_bad + ~finite
        return loss * torch.where(finite, 1.0, math.nan)

    def update(self, grad_norm: Tensor, take_step: Callable[[Tensor | None], None]) -> None:
        """Run ``take_step`` (optimizer and average) such that nothing changes unless ``grad_norm`` is finite.

        ``take_step`` gets the device's answer where the average has to heed it.
        """
        self._good = self._good & self._is_finite(torch.as_tensor(grad_norm, device=self._device))
        (self._take_or_undo if self.task.rolls_back else self._take_or_skip)(take_step)
        self._done = self._done + self._good

    def _take_or_undo(self, take_step: Callable[[Tensor | None], None]) -> None:
        """Take the step; put the copies back where gradients or new weights are not finite."""
        before = self._tensors()
        copies = {key: tensor.detach().clone() for key, tensor in before.items()}
        self._undo = [(before[key], old) for key, old in copies.items()]
        gradients = [to_local(p.grad) for p in self.task.parameters() if p.grad is not None]
        _zero_unless(self._good, gradients)
        take_step(None)
        after = self._tensors()
        weights = self.task.parameters()
        finite = all_finite([to_local(p) for p in weights])
        if isinstance(weights[0], DTensor):  # of which other processes have other rows
            finite = all_reduce_and(finite, self.task.accelerator)
        self._good = self._good & finite
        pairs = [(after[key], old) for key, old in copies.items() if key in after and after[key].shape == old.shape]
        _take_unless(self._good, pairs)

    def _take_or_skip(self, take_step: Callable[[Tensor | None], None]) -> None:
        """Take the step if the gradients are finite: the optimizer's kernels look, or else the host waits for them."""
        optimizer: Any = unwrapped(self.task.optimizer)
        looks = getattr(optimizer, "_step_supports_amp_scaling", False)  # torch's mark of what heeds found_inf
        if not looks and not bool(self._good):
            self.found = True
            return
        self._half_updated = True
        optimizer.found_inf = (~self._good).float() if looks else None
        take_step(self._good)
        del optimizer.found_inf

    def end(self, position: Position) -> None:
        """Note that the step is over and how far the run is; ``found`` if it, or on a GPU the one before, was bad."""
        self._snapshots[-1].end, self._open = _copied(position), False
        self._undo, self._half_updated = [], False
        self._listen()
        if self._on_gpu:
            self._told.copy_(self._good, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(self._device))
        elif self._device.type == "cpu":
            self._told.copy_(self._good)
            self._listen()

    def _listen(self) -> None:
        """Take in the answer that was sent last."""
        if self._arrived is not None:
            self._arrived.synchronize()  # its step is over, or nearly
        self.found |= not self._told.numpy()  # host memory: nothing is asked of the device

    def commit(self, position: Position, before_saving: bool = False) -> StepSnapshot | None:
        """Ask the device; return the first bad step's beginning with run and ``position`` put back to it, or None.

        ``before_saving`` also looks, on all processes, at weights that no step has looked at.
        """
        closed = len(self._snapshots) - self._open
        done = int(self._done)  # the one point where the host waits
        snapshot = self._snapshots[done] if done < closed else None
        if snapshot is None and before_saving and not self.task.rolls_back and not self._has_finite_weights():
            snapshot = self._snapshot(position, None)
        if snapshot is not None:
            snapshot.position.nonfinite_in_row *= not done
            self._put_back(snapshot)
            vars(position).update(vars(_copied(snapshot.position)))
            self._reset()
            return snapshot
        if closed:
            position.nonfinite_in_row = 0
        opened = self._snapshots[closed:]
        self._reset()
        self._snapshots, self._open = opened, bool(opened)
        return None

    def rollback(self, position: Position) -> tuple[bool, StepSnapshot | None]:
        """Put run and ``position`` back to the beginning of a step that cannot be finished, or of a bad one before.

        Return whether the weights are those from before it, and the step's beginning, None if all steps are over.
        """
        opened, undo, self._undo = self._snapshots[-1] if self._open else None, self._undo, []
        with torch.no_grad():
            for tensor, old in undo if opened is not None else ():  # the step may be half taken, or wholly
                tensor.copy_(old)
        bad = self.commit(position)
        if bad is None and opened is not None:
            self._put_back(opened)
            vars(position).update(vars(_copied(opened.position)))
        self._reset()
        return not self._half_updated, bad or opened

    def _has_finite_weights(self) -> bool:
        local = [tensor for p in self.task.parameters() if (tensor := to_local(p)).numel()]
        return bool(all_reduce_and(all_finite(local), self.task.accelerator))

    def _is_finite(self, grad_norm: Tensor) -> Tensor:
        scaler, finite = self.task.accelerator.scaler, grad_norm.isfinite().all()
        if scaler is None:
            return finite
        bad_losses = self.task.accelerator.reduce(self._loss_bad, reduction="sum")  # the scaler forgives a NaN norm
        self._loss_bad = torch.zeros_like(self._loss_bad)
        scale = scaler._scale if scaler._scale is not None else torch.ones((), device=self._device)
        return (bad_losses == 0) & (finite | (scale > 1))

    def _on_host(self, value: Any) -> Any:
        """A copy of a value that the host can change; tensors on the device are taken care of there."""
        if isinstance(value, Tensor):
            return value if self._is_there(value) else value.clone()
        return copy.copy(value)

    def _tensors(self) -> dict[tuple[int, str], Tensor]:
        """Everything on the device that a step changes, by its place."""
        own, optimizer = self.task.optimizer, unwrapped(self.task.optimizer)
        found: dict[tuple[int, str], Tensor] = {}
        for i, parameter in enumerate(self.task.parameters()):
            found[i, "weight"] = parameter.data
        for i, shard in enumerate(own.shards if isinstance(own, ZeroOptimizer) else ()):  # what ZeRO steps on
            found[i, "shard"] = shard.data
        for i, group in enumerate(optimizer.param_groups):
            found |= {(i, f"group {k}"): v for k, v in group.items() if isinstance(v, Tensor)}
        for key, state in optimizer.state.items():
            if isinstance(state, dict):
                found |= {(id(key), k): v for k, v in state.items() if isinstance(v, Tensor)}
        if self.task.average is not None:
            found |= {(i, "average"): tensor for i, tensor in enumerate(self.task.average.averages)}
        scaler = self.task.accelerator.scaler
        if scaler is not None and scaler._scale is not None:
            found |= {(0, "scale"): scaler._scale, (0, "growth"): scaler._growth_tracker}
        shared = {
            id(tensor): key for key, tensor in reversed(found.items())
        }  # some libraries share one between weights
        return {key: to_local(t) for key, t in found.items() if self._is_there(t) and shared[id(t)] == key}

    def _is_there(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the device, or with ``device_map`` on another of its kind, and not on the host."""
        return tensor.device.type == self._device.type

    def _is_back(self, now: Any, then: Any) -> bool:
        """Whether the device has put ``now`` back to what it was; that it holds may lie elsewhere meanwhile."""
        held = isinstance(now, Tensor) and isinstance(then, Tensor) and self._is_there(then)
        return held and now.device == then.device and now.shape == then.shape

    def _restore(self, now: dict[str, Any], then: Mapping[str, Any]) -> None:
        for key in now.keys() - then.keys() - {"params"}:
            del now[key]
        now.update({k: v for k, v in then.items() if not self._is_back(now.get(k), v)})

    def _put_back(self, snapshot: StepSnapshot) -> None:
        """Give the host's part of the state the values it had at ``snapshot``; forget gradients of a step half done."""
        task, optimizer = self.task, unwrapped(self.task.optimizer)
        for group, old in zip(optimizer.param_groups, snapshot.groups, strict=True):
            self._restore(group, old)
        for parameter in [p for p in optimizer.state if p not in snapshot.states]:
            del optimizer.state[parameter]
        for parameter, values in snapshot.states.items():
            self._restore(optimizer.state[parameter], values)
        task.lr_schedule.load_state_dict(snapshot.schedule)
        if task.average is not None:
            assert snapshot.average is not None
            task.average.updates = snapshot.average
        drop_gradients(task.optimizer)


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return on their device whether every number of ``tensors`` is finite; nothing waits for the answer."""
    largest = torch._foreach_norm([t.detach() for t in tensors], math.inf)  # keeps NaN
    return torch.stack([value.float().to(largest[0].device) for value in largest]).isfinite().all()


_TOGETHER = 64  # tensors put back by one kernel


def _copied(position: Position) -> Position:
    return replace(position, skipped_samples=list(position.skipped_samples))


def _by_bits(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of the tensors of one width on one device."""
    alike: dict[tuple[int, torch.device], list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        if tensor.numel():
            alike[tensor.element_size(), tensor.device].append(i)
    yield from alike.values()


@torch.no_grad()
def _zero_unless(flag: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set ``tensors`` to zero where ``flag`` is not set; NaN too."""
    for indices in _by_bits(tensors):
        bits = [_bits(tensors[i]) for i in indices]
        torch._foreach_mul_(bits, flag.to(bits[0]))


@torch.no_grad()
def _take_unless(flag: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write each pair's second tensor over the first where ``flag`` is not set."""
    for indices in _by_bits([new for new, _ in pairs]):
        keep = flag.to(_bits(pairs[indices[0]][0]))
        for first in range(0, len(indices), _TOGETHER):  # the old ones stay as they are, and a product takes memory
            part = indices[first : first + _TOGETHER]
            new = [_bits(pairs[i][0]) for i in part]
            torch._foreach_mul_(new, keep)
            torch._foreach_add_(new, torch._foreach_mul([_bits(pairs[i][1]) for i in part], 1 - keep))


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's memory as integers of its width."""
    return tensor.detach().view(_BITS[tensor.element_size()])
