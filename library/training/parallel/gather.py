"""The way back: full tensors of what a layout split, for files, and shards of full tensors that were read.

What is written is the same for every layout, so a run goes on under another. Three layouts split tensors, the second
within what the first left: a pipeline keeps some of the parameters (``pipeline.full_training``), tensor parallelism
some heads' rows or columns of a weight (``library.nn.tensor_split``), FSDP2 some rows of that (a ``DTensor``, whose
shape is the full one). ZeRO's optimizer (``zero``) gathers by itself, in the same words.

Gathering is collective: every process of the run calls it; the main process alone gets the full tensors, in host
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from library.nn.tensor_split import Split
from library.training.parallel.pipeline.full_training import (
    gather_stage_state,
    gather_stage_weights,
    scatter_stage_state,
    staged,
)
from library.training.parallel.zero import ZeroOptimizer


class _Cut(NamedTuple):
    """How tensor parallelism split a parameter, and along which of its dimensions."""

    split: Split
    dim: int


def to_local(tensor: Tensor) -> Tensor:
    """Return the rows of a split tensor that lie here, as a view; another as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def to_full(tensor: Tensor) -> Tensor:
    """Return FSDP2's split tensor in full on every process; another as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def scatter_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return this process's rows of a full ``tensor`` if ``parameter``, of its shape, is split; else ``tensor``."""
    if not isinstance(parameter, DTensor):
        return tensor
    on_device = tensor.to(parameter.device)
    return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)


def all_reduce_and(flag: Tensor, accelerator: Accelerator) -> Tensor:
    """Return on every process whether ``flag`` is set on all."""
    return accelerator.reduce(torch.where(flag, 0.0, 1.0), reduction="sum") == 0


def split_parameters(model: nn.Module) -> dict[str, _Cut]:
    """Return the parameters of ``model`` of which this process has the part of a layer, by name."""
    found = {}
    for name, module in model.named_modules():
        split = getattr(module, "split", None)
        if isinstance(split, Split) and isinstance(module, (nn.Linear, nn.Embedding)):
            found[f"{name}.weight"] = _Cut(split, split.dim)
            if split.dim == 0 and getattr(module, "bias", None) is not None:
                found[f"{name}.bias"] = _Cut(split, 0)
    return found


def full_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape that every parameter of the model has in full."""
    if (stage := staged(model)) is not None:
        return {name: shape for name, (shape, _) in stage.full.items()}
    cuts = split_parameters(model)
    return {name: _full_shape(parameter, cuts.get(name)) for name, parameter in model.named_parameters()}


def gather_weights(model: nn.Module, accelerator: Accelerator) -> dict[str, Tensor]:
    """Return every parameter in full on the main process, something empty on others."""
    if (stage := staged(model)) is not None:
        return gather_stage_weights(stage, accelerator)
    cuts = split_parameters(model)
    return {name: _gather(tensor, cuts.get(name), accelerator) for name, tensor in model.named_parameters()}


@torch.no_grad()
def scatter_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put this process's shards of full ``weights`` into the model; all that it has must be there."""
    cuts, stage = split_parameters(model), staged(model)
    for name, parameter in (stage.local if stage is not None else dict(model.named_parameters())).items():
        parameter.copy_(_scatter(parameter, cuts.get(name), weights[name]))


def gathered(optimizer: Any, with_state: bool = True) -> AbstractContextManager[None]:
    """Inside the block the main process sees a LoRA in full and, ``with_state``, the optimizer's ``state_dict``."""
    return optimizer.gathered(with_state) if isinstance(optimizer, ShardedOptimizer | ZeroOptimizer) else nullcontext()


class ShardedOptimizer(AcceleratedOptimizer):
    """The optimizer of weights that are split; its state dict is that of one process, which holds all of them."""

    def __init__(self, optimizer: Any, model: nn.Module, accelerator: Accelerator, gathers_lora: bool) -> None:
        super().__init__(optimizer, device_placement=False)
        self._model, self._accelerator, self._gathers_lora = model, accelerator, gathers_lora
        self._state: dict[str, Any] | None = None

    @contextmanager
    def gathered(self, with_state: bool) -> Iterator[None]:
        """As :func:`gathered`; collective."""
        self._state = self._gather_state() if with_state else None
        split = list(_lora_shards(self._model)) if self._gathers_lora else []
        for module, name, parameter in split:
            module._parameters[name] = nn.Parameter(to_full(parameter.detach()))
        try:
            yield
        finally:
            self._state = None
            for module, name, parameter in split:
                module._parameters[name] = parameter

    def state_dict(self) -> dict[str, Any]:
        """Return the full state; within :meth:`gathered`, on the main process."""
        assert self._state is not None, "all processes gather the state first"
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this process's shards of a full state."""
        self.optimizer.load_state_dict(self._scatter_state(state_dict))

    def _gather_state(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        if (stage := staged(self._model)) is not None:
            return gather_stage_state(stage, state, self._accelerator)
        if "state" not in state:  # several optimizers joined, which take full weights alone
            return state
        pairs = list(self._parameters())

        def gather(index: int, value: Any) -> Any:
            parameter, cut = pairs[index]
            if not isinstance(value, Tensor):
                return value
            return _gather(value, cut if value.shape == parameter.shape else None, self._accelerator)

        states = {i: {k: gather(i, v) for k, v in values.items()} for i, values in state["state"].items()}
        return {**state, "state": states}

    def _scatter_state(self, state: dict[str, Any]) -> dict[str, Any]:
        if (stage := staged(self._model)) is not None:
            return scatter_stage_state(stage, state)
        if "state" not in state:
            return state
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        pairs = dict(zip(numbers, self._parameters(), strict=True))

        def scatter(index: int, value: Any) -> Any:
            parameter, cut = pairs[index]
            is_like = isinstance(value, Tensor) and value.shape == _full_shape(parameter, cut)
            return _scatter(parameter, cut, value) if is_like else value

        states = {i: {k: scatter(i, v) for k, v in values.items()} for i, values in state["state"].items()}
        return {**state, "state": states}

    def _parameters(self) -> Iterator[tuple[Tensor, _Cut | None]]:
        """Yield the parameters as the optimizer numbers them, each with how it was split."""
        cuts = split_parameters(self._model)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, cuts.get(names.get(id(parameter), ""))


def shard_optimizer(
    accelerator: Accelerator, optimizer: Any, model: nn.Module, gathers_lora: bool = False
) -> ShardedOptimizer:
    """Return ``optimizer``, which accelerate has prepared, as one that gathers and scatters its state."""
    wrapped = ShardedOptimizer(optimizer.optimizer, model, accelerator, gathers_lora)
    accelerator._optimizers[accelerator._optimizers.index(optimizer)] = wrapped
    return wrapped


def _full_shape(parameter: Tensor, cut: _Cut | None) -> torch.Size:
    shape = list(parameter.shape)  # of a DTensor the full one
    if cut is not None:
        shape[cut.dim] *= cut.split.size
    return torch.Size(shape)


@torch.no_grad()
def _gather(tensor: Tensor, cut: _Cut | None, accelerator: Accelerator) -> Tensor:
    if cut is None and not isinstance(tensor, DTensor):
        return tensor.detach()
    full = to_full(tensor.detach())
    full = full if cut is None else cut.split.gather(full, cut.dim)
    return full.cpu() if accelerator.is_main_process else full.new_empty(0)


def _scatter(parameter: Tensor, cut: _Cut | None, tensor: Tensor) -> Tensor:
    return scatter_like(parameter, tensor if cut is None else cut.split.local(tensor, cut.dim).contiguous())


def _lora_shards(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield what is trained and split: the module that has it, its name there, and itself."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and isinstance(parameter, DTensor):
                yield module, name, parameter
