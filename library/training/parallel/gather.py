"""Gather what a layout split, for files, and scatter full tensors that were read.

Files are the same for every layout, so a run can resume under another. Each layout splits in one way:

    pp       a stage has some of the parameters (``pipeline.StageParameters``)
    tp       a process has the rows or columns of some heads (``library.nn.tensor_split``)
    shard    a process has some rows (FSDP2's ``DTensor``, whose shape is the full one)
    zero     a process has a part of the optimizer's state (``zero.ZeroOptimizer`` gathers it)

Gathering is collective: every process of the run calls it. Only the main process gets the full tensors, in host memory.

torch's own functions for this (``torch.distributed.checkpoint.state_dict``) know FSDP2 alone, name what torch's
optimizers number, and take a step without gradients where there is no state yet, which not every optimizer survives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from library.nn.tensor_split import Split
from library.training.parallel.pipeline import stage_parameters


def to_local(tensor: Tensor) -> Tensor:
    """Return this process's rows of FSDP2's split tensor, as a view; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def to_full(tensor: Tensor) -> Tensor:
    """Return FSDP2's split tensor in full on every process; another tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_reduce_and(flag: Tensor, accelerator: Accelerator) -> Tensor:
    """Return on every process whether ``flag`` is set on all."""
    return accelerator.reduce(torch.where(flag, 0.0, 1.0), reduction="sum") == 0


def split_parameters(model: nn.Module) -> dict[str, Split]:
    """Return how tensor parallelism split parameters of ``model``, by name; a bias is split along with outputs."""
    found = {}
    for module in model.modules():
        split = getattr(module, "split", None)
        if isinstance(split, Split) and isinstance(module, (nn.Linear, nn.Embedding)):
            found[id(module.weight)] = split
            if split.dim == 0 and getattr(module, "bias", None) is not None:
                found[id(module.bias)] = split
    return {name: found[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in found}


def local_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that this process has, or has a part of, by their names in the full model."""
    if (stage := stage_parameters(model)) is not None:
        return stage.local
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass without backward leaves the root's full weights, which are freed later
    return dict(model.named_parameters())


def full_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape that every parameter of the model has in full."""
    if (stage := stage_parameters(model)) is not None:
        return stage.full
    cuts = split_parameters(model)
    return {name: _full_shape(parameter, cuts.get(name)) for name, parameter in model.named_parameters()}


def gather_weights(model: nn.Module, accelerator: Accelerator) -> dict[str, Tensor]:
    """Return every parameter in full on the main process, empty tensors on others."""
    parameters = local_parameters(model)
    return _gather_each(model, accelerator, parameters, full_shapes(model), parameters.__getitem__)


@torch.no_grad()
def scatter_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put this process's shards of full ``weights``, which name all parameters, into the model."""
    cuts = split_parameters(model)
    for name, parameter in local_parameters(model).items():
        parameter.copy_(_scatter(parameter, cuts.get(name), weights[name]))


class SplitOptimizer(AcceleratedOptimizer):
    """The optimizer of weights that are split; its state dict is that of one process, which holds all of them."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False)
        self._full_state: dict[str, Any] | None = None

    @contextmanager
    def gathered(self, with_state: bool) -> Iterator[None]:
        """As :func:`gathered`; collective."""
        self._full_state = self.gather_state() if with_state else None
        try:
            yield
        finally:
            self._full_state = None

    def gather_state(self) -> dict[str, Any]:
        """Return the full state on the main process; collective."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the full state; within :meth:`gathered`, on the main process."""
        assert self._full_state is not None, "all processes gather the state first"
        return self._full_state


def gathered(optimizer: Any, with_state: bool = True) -> AbstractContextManager[None]:
    """Inside the block the main process sees, ``with_state``, the optimizer's full ``state_dict``."""
    return optimizer.gathered(with_state) if isinstance(optimizer, SplitOptimizer) else nullcontext()


class ShardedOptimizer(SplitOptimizer):
    """The optimizer of a model whose parameters are split."""

    def __init__(self, optimizer: Any, model: nn.Module, accelerator: Accelerator) -> None:
        super().__init__(optimizer)
        self._model, self._accelerator = model, accelerator
        # noted here, since a forward pass may leave FSDP2's full ones in the model
        self._parameters, stage = local_parameters(model), stage_parameters(model)
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        groups = [group["params"] for group in optimizer.param_groups]
        self._order = [[names[id(p)] for p in group] for group in groups] if stage is None else stage.order

    def gather_state(self) -> dict[str, Any]:
        return self._gather(self.optimizer.state_dict(), self._order)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this process's shards of a full state."""
        self.optimizer.load_state_dict(self._scatter(state_dict, self._order))

    def _gather(self, state: dict[str, Any], order: Sequence[list[str]]) -> dict[str, Any]:
        if "state" not in state:
            return {key: self._gather(part, names) for key, part, names in _joined(state, order)}
        full, local_numbers = _numbers(order), _numbers(order, self._parameters)

        def entry(name: str) -> Any:
            return state["state"].get(local_numbers[name], {})

        entries = _gather_each(self._model, self._accelerator, self._parameters, full, entry)
        states = {full[name]: entry for name, entry in entries.items() if entry}
        return {**state, "state": states, "param_groups": _renumbered(state["param_groups"], order, full)}

    def _scatter(self, state: dict[str, Any], order: Sequence[list[str]]) -> dict[str, Any]:
        if "state" not in state:
            return {key: self._scatter(part, names) for key, part, names in _joined(state, order)}
        cuts, full, local_numbers = split_parameters(self._model), _numbers(order), _numbers(order, self._parameters)

        def scatter(name: str) -> Any:
            parameter, cut = self._parameters[name], cuts.get(name)
            shape = _full_shape(parameter, cut)
            entry = state["state"][full[name]]
            return tree_map_only(Tensor, lambda t: _scatter(parameter, cut, t) if t.shape == shape else t, entry)

        states = {number: scatter(name) for name, number in local_numbers.items() if full[name] in state["state"]}
        return {**state, "state": states, "param_groups": _renumbered(state["param_groups"], order, local_numbers)}


def _joined(
    state: dict[str, Any], order: Sequence[list[str]]
) -> Iterator[tuple[str, dict[str, Any], Sequence[list[str]]]]:
    """Yield the states of optimizers that are joined into one (Muon and AdamW), each with the groups that are its."""
    begin = 0
    for key, part in state.items():
        end = begin + len(part["param_groups"])
        yield key, part, order[begin:end]
        begin = end


def _numbers(order: Iterable[list[str]], local: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Return name -> the number by which torch's optimizer knows a parameter of ``order``, or of those ``held``."""
    return {name: i for i, name in enumerate(n for n in chain(*order) if local is None or n in local)}


def _renumbered(groups: Any, order: Iterable[list[str]], numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return ``groups`` with the parameters of ``order`` that have a number."""
    pairs = zip(groups, order, strict=True)
    return [{**group, "params": [numbers[name] for name in names if name in numbers]} for group, names in pairs]


def _full_shape(parameter: Tensor, cut: Split | None) -> torch.Size:
    shape = list(parameter.shape)  # of a DTensor the full one
    if cut is not None:
        shape[cut.dim] *= cut.size
    return torch.Size(shape)


@torch.no_grad()
def _gather_each(
    model: nn.Module,
    accelerator: Accelerator,
    parameters: Mapping[str, Tensor],
    names: Iterable[str],
    value_of: Callable[[str], Any],
) -> dict[str, Any]:
    """Return name -> the full value on the main process: a tensor of each parameter, or a dict of them.

    ``value_of`` returns this process's part of the value by a name; it is called for names in ``parameters`` alone.
    """
    cuts, stage = split_parameters(model), stage_parameters(model)

    def full(name: str, tensor: Tensor) -> Tensor:
        cut = cuts.get(name) if tensor.shape == parameters[name].shape else None
        if cut is None and not isinstance(tensor, DTensor):
            return tensor.detach()
        gathered = to_full(tensor.detach()) if cut is None else cut.gather(tensor.detach(), cut.dim)
        return gathered.cpu() if accelerator.is_main_process else gathered.new_empty(0)

    def gather(name: str) -> Any:
        return tree_map_only(Tensor, lambda tensor: full(name, tensor), value_of(name))

    return {name: gather(name) for name in names} if stage is None else stage.collect(accelerator, names, gather)


def _scatter(parameter: Tensor, cut: Split | None, tensor: Tensor) -> Tensor:
    """Return this process's part of a full ``tensor`` if ``parameter``, of its shape, is split; else ``tensor``."""
    if cut is not None:
        return cut.local(tensor, cut.dim).contiguous()
    if not isinstance(parameter, DTensor):
        return tensor
    on_device = tensor.to(parameter.device)
    return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)
