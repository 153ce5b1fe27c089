"""A LoRA whose weights are split among processes with the base they are in (``lora_placement = "sharded"``).

FSDP2 gathers them with their block, and hands each gradient to the process that has the rows. The optimizer steps on
rows alone: one that treats every number by itself, or sums over all. Files and states are those of one process: what
they hold is gathered before one process writes, and split again when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from library.training.sharding import check_sharding, plan_sharding
from library.training.whole_states import own_state, whole_state


class SplitOptimizer(AcceleratedOptimizer):
    """The optimizer of a LoRA that is split; its state dict is that of one process, which holds all weights."""

    def __init__(self, optimizer: Any, model: nn.Module, accelerator: Accelerator) -> None:
        super().__init__(optimizer, device_placement=False)
        self._model, self._accelerator = model, accelerator
        self._gathered: dict[str, Any] | None = None

    @contextmanager
    def gathered(self, with_state: bool) -> Iterator[None]:
        """Inside the block the LoRA is whole, ``with_state`` the state dict on the main process too; collective."""
        self._gathered = whole_state(self.optimizer, self._model, self._accelerator) if with_state else None
        split = list(_split_parameters(self._model))
        for module, name, parameter in split:
            rows = parameter.detach()
            assert isinstance(rows, DTensor)
            module._parameters[name] = nn.Parameter(rows.full_tensor())
        try:
            yield
        finally:
            self._gathered = None
            for module, name, parameter in split:
                module._parameters[name] = parameter

    def state_dict(self) -> dict[str, Any]:
        """Return the state of one process that holds all weights; within :meth:`gathered`, on the main process."""
        assert self._gathered is not None, "the parts of the state are gathered by all processes first"
        return self._gathered

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this process's parts of such a state."""
        self.optimizer.load_state_dict(own_state(state_dict, self.optimizer, self._model))


def _split_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield what is trained and split: the module that has it, its name there, and itself."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and isinstance(parameter, DTensor):
                yield module, name, parameter


def prepare_split(accelerator: Accelerator, blocks: Sequence[str], model: nn.Module, *parts: Any) -> list[Any]:
    """Return ``accelerator.prepare(model, *parts)``, the LoRA split with its base; the first part is the optimizer.

    Raises:
        UserError: accelerate did something else than it was asked for.
    """
    plan_sharding(accelerator, blocks)
    prepared, optimizer, *others = accelerator.prepare(model, *parts)
    check_sharding(accelerator, model, blocks)
    wrapped = SplitOptimizer(optimizer.optimizer, model, accelerator)
    accelerator._optimizers[accelerator._optimizers.index(optimizer)] = wrapped
    return [prepared, wrapped, *others]


def own_rows(tensor: Tensor) -> Tensor:
    """Return the rows of a split tensor that lie here, as a view; another as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def everywhere(flag: Tensor, accelerator: Accelerator) -> Tensor:
    """Return on every process whether ``flag`` is set on all."""
    return accelerator.reduce(torch.where(flag, 0.0, 1.0), reduction="sum") == 0
