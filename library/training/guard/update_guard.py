"""No update that is not a number reaches the weights, and nobody waits for the device to find out.

Whether a step's loss and gradients are finite is known on the device; asking for it there would make the host wait in
every step. So the device decides by itself, and the host asks when it reads the loss anyway (``commit``: at steps that
are logged, and before anything looks at the weights).

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
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from library.training.checkpoint.state import Position
from library.training.optim.factory import drop_gradients, unwrapped
from library.training.parallel.gather import all_reduce_and, to_local
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


@dataclass
class RollbackGuard:
    """Takes the updates of a run; see the module's text."""

    task: Task
    _snapshots: list[StepSnapshot] = field(default_factory=list)
    _open: bool = False

    def __post_init__(self) -> None:
        self._device = self.task.parameters()[0].device
        self._reset()

    def _reset(self) -> None:
        self._snapshots.clear()
        self._good = torch.ones((), dtype=torch.bool, device=self._device)
        self._done = torch.zeros((), dtype=torch.int64, device=self._device)
        self._loss_bad = torch.zeros((), device=self._device)
        self._open = False

    def begin(self, position: Position, loss_ema: Tensor | None) -> None:
        """Remember where a step begins; the further batches of the same step change nothing."""
        if self._open:
            return
        optimizer = unwrapped(self.task.optimizer)
        self._snapshots.append(
            StepSnapshot(
                position=_copied(position),
                end=position,
                loss_ema=loss_ema,
                groups=[{k: self._on_host(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
                states={
                    p: {k: self._on_host(v) for k, v in s.items()}
                    for p, s in optimizer.state.items()
                    if isinstance(s, dict)
                },
                schedule=copy.deepcopy(self.task.lr_schedule.state_dict()),
                average=self.task.average.updates if self.task.average is not None else None,
            )
        )
        self._open = True

    def nan_if_bad(self, loss: Tensor) -> Tensor:
        """Return ``loss`` with gradients that are NaN where it is not finite itself; else the same, bit for bit."""
        finite = loss.detach().isfinite()
        self._loss_bad = self._loss_bad + ~finite
        return loss * torch.where(finite, 1.0, math.nan)

    def update(self, grad_norm: Tensor, take_step: Callable[[], None]) -> None:
        """Run ``take_step`` (optimizer and average) if ``grad_norm`` is finite and so are the weights afterwards."""
        self._good = self._good & self._is_finite(torch.as_tensor(grad_norm, device=self._device))
        before = self._tensors()
        kept = {key: tensor.detach().clone() for key, tensor in before.items()}
        gradients = [to_local(p.grad) for p in self.task.parameters() if p.grad is not None]
        _zero_unless(self._good, gradients)
        try:
            take_step()
        except BaseException:  # out of memory half-way: nothing of the step stays
            for key, old in kept.items():
                before[key].copy_(old)
            raise
        after = self._tensors()
        weights = self.task.parameters()
        self._good = self._good & self._everywhere(all_finite([to_local(p) for p in weights]), weights)
        pairs = [(after[key], old) for key, old in kept.items() if key in after and after[key].shape == old.shape]
        _take_unless(self._good, pairs)
        self._done = self._done + self._good

    def end(self, position: Position) -> None:
        """Note that the step is over and how far the run is."""
        self._snapshots[-1].end, self._open = _copied(position), False

    found = False  # only the device knows

    def commit(self, position: Position, before_saving: bool = False) -> StepSnapshot | None:
        """Ask the device; return the first bad step's beginning with run and ``position`` put back to it, or None."""
        closed = len(self._snapshots) - self._open
        done = int(self._done)  # the one point where the host waits
        if done < closed:
            snapshot = self._snapshots[done]
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

    def rollback(self, position: Position) -> bool:
        """Put run and ``position`` back to the beginning of a step that cannot be finished, or of a bad one before.

        Return whether the weights are those from before it.
        """
        opened = self._snapshots[-1] if self._open else None
        if self.commit(position) is None and opened is not None:
            self._put_back(opened)
            vars(position).update(vars(_copied(opened.position)))
        self._reset()
        return True

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
        optimizer = unwrapped(self.task.optimizer)
        found: dict[tuple[int, str], Tensor] = {}
        for i, parameter in enumerate(self.task.parameters()):
            found[i, "weight"] = parameter.data
        for i, shard in enumerate(getattr(self.task.optimizer, "shards", ())):  # ZeRO steps on these
            found[i, "shard"] = shard.data
        for i, group in enumerate(optimizer.param_groups):
            found |= {(i, f"group {k}"): v for k, v in group.items() if isinstance(v, Tensor)}
        for key, own in optimizer.state.items():
            if isinstance(own, dict):
                found |= {(id(key), k): v for k, v in own.items() if isinstance(v, Tensor)}
        if self.task.average is not None:
            found |= {(i, "average"): tensor for i, tensor in enumerate(self.task.average.averages)}
        scaler = self.task.accelerator.scaler
        if scaler is not None and scaler._scale is not None:
            found |= {(0, "scale"): scaler._scale, (0, "growth"): scaler._growth_tracker}
        shared = {
            id(tensor): key for key, tensor in reversed(found.items())
        }  # some libraries share one between weights
        return {key: to_local(t) for key, t in found.items() if self._is_there(t) and shared[id(t)] == key}

    def _everywhere(self, flag: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """``flag``, or where processes have rows of ``weights``, whether it is set on all of them."""
        return all_reduce_and(flag, self.task.accelerator) if isinstance(weights[0], DTensor) else flag

    def _is_there(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the device, or with ``device_map`` on another of its kind, and not on the host."""
        return tensor.device.type == self._device.type

    def _is_back(self, now: Any, then: Any) -> bool:
        """Whether the device has put ``now`` back to what it was; that it holds may lie elsewhere meanwhile."""
        held = isinstance(now, Tensor) and isinstance(then, Tensor) and self._is_there(then)
        return held and now.device == then.device and now.shape == then.shape

    def _put_back(self, snapshot: StepSnapshot) -> None:
        """Give the host's part of the state the values it had at ``snapshot``; forget gradients of a step half done."""
        task, optimizer = self.task, unwrapped(self.task.optimizer)
        for group, old in zip(optimizer.param_groups, snapshot.groups, strict=True):
            for key in [key for key in group if key != "params" and key not in old]:
                del group[key]
            group.update({k: v for k, v in old.items() if not self._is_back(group.get(k), v)})
        for parameter in [p for p in optimizer.state if p not in snapshot.states]:
            del optimizer.state[parameter]
        for parameter, values in snapshot.states.items():
            own = optimizer.state[parameter]
            for key in [key for key in own if key not in values]:
                del own[key]
            own.update({k: v for k, v in values.items() if not self._is_back(own.get(k), v)})
        task.lr_schedule.load_state_dict(snapshot.schedule)
        if task.average is not None:
            assert snapshot.average is not None
            task.average.updates = snapshot.average
        task.accelerator.step = 0  # accelerate's count of batches, from which it knows where a step ends
        drop_gradients(task.optimizer)


class StopGuard:
    """For training in full, where a copy of weights and optimizer state would double the memory: nothing is undone.

    So the host reads the gradients' norm before the optimizer steps, and a step that is not finite is not taken: the
    run is before it, can be saved, and stops. Weights that a step has made infinite are found by the next step, or
    before anything is saved.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.found = False  # a step that is not finite
        self._snapshot: tuple[Position, Tensor | None] | None = None
        self._updating = False

    def begin(self, position: Position, loss_ema: Tensor | None) -> None:
        """As ``RollbackGuard.begin``."""
        self._snapshot = self._snapshot or (_copied(position), loss_ema)

    def nan_if_bad(self, loss: Tensor) -> Tensor:
        """As ``RollbackGuard.nan_if_bad``: then the norm is NaN on every process."""
        return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)

    def update(self, grad_norm: Tensor, take_step: Callable[[], None]) -> None:
        """Run ``take_step`` if ``grad_norm`` is finite; waits for the device."""
        self.found = not bool(torch.as_tensor(grad_norm).isfinite())
        if not self.found:
            self._updating = True
            take_step()
            self._updating = False

    def end(self, position: Position) -> None:
        """As ``RollbackGuard.end``."""
        if not self.found:
            self._snapshot = None

    def commit(self, position: Position, before_saving: bool = False) -> StepSnapshot | None:
        """As ``RollbackGuard.commit``; ``before_saving`` looks at the weights too, on all processes."""
        if self.found:
            return self._back(position)
        if before_saving:
            local = [tensor for p in self.task.parameters() if (tensor := to_local(p)).numel()]
            if not all_reduce_and(all_finite(local), self.task.accelerator):
                self._snapshot = (_copied(position), None)
                return self._back(position)
        return None

    def rollback(self, position: Position) -> bool:
        """Put ``position`` back to the step's beginning; return whether the weights are still those from before it."""
        if self._snapshot is not None:
            self._back(position)
        return not self._updating

    def _back(self, position: Position) -> StepSnapshot:
        assert self._snapshot is not None
        end = _copied(position)
        (before, loss_ema), self._snapshot, self.found = self._snapshot, None, False
        vars(position).update(vars(_copied(before)))
        self.task.accelerator.step = 0
        drop_gradients(self.task.optimizer)
        return StepSnapshot(before, end, loss_ema, [], {}, {}, None)


def build_guard(task: Task) -> RollbackGuard | StopGuard:
    """Return what keeps updates that are not finite from the weights of ``task``."""
    return RollbackGuard(task) if task.rolls_back else StopGuard(task)


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return on their device whether every number of ``tensors`` is finite; nothing waits for the answer."""
    largest = torch._foreach_norm([t.detach() for t in tensors], math.inf)  # keeps NaN
    return torch.stack([value.float().to(largest[0].device) for value in largest]).isfinite().all()


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
        new = [_bits(pairs[i][0]) for i in indices]
        old = [_bits(pairs[i][1]) for i in indices]
        keep = flag.to(new[0])
        torch._foreach_mul_(new, keep)
        torch._foreach_mul_(old, 1 - keep)
        torch._foreach_add_(new, old)


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's memory as integers of its width."""
    return tensor.detach().view(_BITS[tensor.element_size()])
