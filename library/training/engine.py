"""The update of a step: a step whose loss or gradients are not finite is skipped, and the host does not wait to know.

Whether a step is finite is known on the device; asking for it there would make the host wait in every step. A loss that
is not finite multiplies its gradients by NaN (``nan_if_bad``). Gradients are summed over the batches of a step and
averaged over processes, so their norm is then NaN on every process: all decide alike without another collective. One
question remains: is the norm finite?

- torch's fused optimizers take the answer as ``found_inf``, which was made for loss scalers: their kernels then leave
  weights and state as they are. The answer travels to the host meanwhile, which reads it before the next update
  (``settle``). Average and schedule wait for it, so there is nothing to undo but the count of steps.
- Other optimizers have nothing like it: the host waits for the norm and leaves the step out. It also does so in the
  first step of a fused optimizer, which makes the state.
- With a loss scaler (fp16) the scaler leaves out what is not finite. Gradients that overflow while its scale is above 1
  are its way to find the scale, and count as a step; a loss that is not finite does not.

An update can also make weights infinite from finite gradients: ``has_finite_weights`` is asked before a save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from library.training.optim.ema import WeightAverage
from library.training.optim.factory import unwrapped
from library.training.parallel.gather import all_reduce_and, to_local
from library.training.parallel.step import drop_gradients
from library.training.parallel.zero import ZeroOptimizer


class Engine:
    """Takes the updates of a run; see the module's text.

    Attributes:
        is_whole: whether weights, optimizer, average and schedule are of one step; not amid an update that failed.
        is_settled: whether the host knows that the last step was finite.
        is_late: whether the answer on the last step is still on its way from a GPU.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        optimizer: Any,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        parameters: Sequence[nn.Parameter],
        average: WeightAverage | None = None,
        after_update: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over what a run steps.

        Args:
            accelerator: the process's.
            optimizer, schedule: as prepared.
            parameters: what is trained.
            average: of these.
            after_update: changes the weights that an update left, before they are averaged or looked at.
        """
        self._accelerator, self._optimizer, self._schedule = accelerator, optimizer, schedule
        self._parameters, self._average, self._after_update = parameters, average, after_update
        self._device = parameters[0].device
        self._on_gpu = self._device.type == "cuda"
        self._loss_bad = torch.zeros((), device=self._device)
        self._answer = torch.ones((), dtype=torch.bool, pin_memory=self._on_gpu)
        self._arrived: torch.cuda.Event | None = None
        self._groups: list[dict[str, Any]] = []
        self.is_whole = self.is_settled = True
        self.is_late = False

    def nan_if_bad(self, loss: Tensor) -> Tensor:
        """Return ``loss`` with gradients that are NaN where it is not finite itself; else the same, bit for bit."""
        finite = loss.detach().isfinite()
        self._loss_bad = self._loss_bad + ~finite
        return loss * torch.where(finite, 1.0, math.nan)

    def update(self, grad_norm: Tensor) -> None:
        """Take the optimizer's step unless ``grad_norm`` is not finite; :meth:`settle` completes it, or drops it."""
        assert self.is_settled, "settle the step before"
        optimizer: Any = unwrapped(self._optimizer)
        finite = self._is_finite(torch.as_tensor(grad_norm, device=self._device))
        # what an optimizer keeps on the host counts a step that its kernels leave out
        self._groups = [{k: v for k, v in g.items() if not isinstance(v, Tensor)} for g in optimizer.param_groups]
        self.is_whole = self.is_settled = False
        if self._accelerator.scaler is not None:
            self._optimizer.step()
        elif self._skips_by_itself(optimizer):
            optimizer.found_inf = (~finite).float()
            self._optimizer.step()
            del optimizer.found_inf
        elif bool(finite):
            self._optimizer.step()
        self._after_update()
        self._optimizer.zero_grad()
        self._answer.copy_(finite, non_blocking=True)
        self.is_late = self._on_gpu
        if self._on_gpu:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(self._device))

    def _skips_by_itself(self, optimizer: Any) -> bool:
        """Whether the optimizer's kernels leave out a step (torch's mark); its first step makes its state."""
        own = not isinstance(self._optimizer, ZeroOptimizer)
        return own and bool(optimizer.state) and getattr(optimizer, "_step_supports_amp_scaling", False)

    def _is_finite(self, grad_norm: Tensor) -> Tensor:
        scaler, finite = self._accelerator.scaler, grad_norm.isfinite().all()
        if scaler is None:
            return finite
        bad_losses = self._accelerator.reduce(self._loss_bad, reduction="sum")  # a NaN norm may be the scaler's
        self._loss_bad = torch.zeros_like(self._loss_bad)
        scale = scaler._scale if scaler._scale is not None else torch.ones((), device=self._device)
        return (bad_losses == 0) & (finite | (scale > 1))

    def settle(self) -> bool:
        """Complete the last update if it was finite; return whether it was. It is, where nothing is left to settle."""
        if self.is_settled:
            return True
        if self._arrived is not None:
            self._arrived.synchronize()  # its step is over, or nearly
            self._arrived = None
        self.is_late = False
        self.is_whole = False
        finite = bool(self._answer.numpy())  # host memory: nothing is asked of the device
        if finite:
            if self._average is not None:
                self._average.update()
            if not self._accelerator.optimizer_step_was_skipped:
                self._schedule.step()
        else:
            for group, before in zip(unwrapped(self._optimizer).param_groups, self._groups, strict=True):
                group.update(before)
            drop_gradients(self._optimizer)  # of the step behind it, too
        self.is_whole = self.is_settled = True
        return finite

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that is not taken."""
        drop_gradients(self._optimizer)

    def has_finite_weights(self, alone: bool = False) -> bool:
        """Return whether all that is trained is finite, on all processes; ``alone`` asks no other one."""
        local = [tensor for p in self._parameters if (tensor := to_local(p.detach())).numel()]
        finite = all_finite(local)
        return bool(finite if alone else all_reduce_and(finite, self._accelerator))


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return on their device whether every number of ``tensors`` is finite; nothing waits for the answer."""
    largest = torch._foreach_norm([t.detach() for t in tensors], math.inf)  # keeps NaN
    return torch.stack([value.float().to(largest[0].device) for value in largest]).isfinite().all()
