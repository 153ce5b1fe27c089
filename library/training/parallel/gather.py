"""A model that is trained in parts, and its optimizer, as one process would have them: for files, and back from them.

Two layouts may have made the parts, the second within what the first left: tensor parallelism keeps some heads' rows or
columns of a weight on each process (``library.nn.tensor_split``), FSDP2 some rows of that (a ``DTensor``).
Or a pipeline left it some of the blocks (``library.training.parallel.pipeline.full_training``).

A LoRA whose weights are split among processes with the base they are in (``lora_placement = "sharded"``).

FSDP2 gathers them with their block, and hands each gradient to the process that has the rows. The optimizer steps on
rows alone: one that treats every number by itself, or sums over all. Files and states are those of one process: what
they hold is gathered before one process writes, and split again when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from library.nn.tensor_split import Split
from library.training.parallel.fsdp import check_sharding, plan_sharding, scatter_like, whole
from library.training.parallel.pipeline.full_training import (
    own_optimizer_state,
    stage_optimizer_state,
    stage_weights,
    staged,
)


class _Cut(NamedTuple):
    """How a parameter was split, and along which of its dimensions."""

    split: Split
    dim: int


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


def whole_weights(model: nn.Module, accelerator: Accelerator) -> dict[str, Tensor]:
    """Return every parameter as a whole on the main process, something empty on others; collective if any is split."""
    if (stage := staged(model)) is not None:
        return stage_weights(stage, accelerator)
    cuts = split_parameters(model)
    return {name: _whole(tensor, cuts.get(name), accelerator) for name, tensor in model.named_parameters()}


def whole_state(part: Any, model: nn.Module, accelerator: Accelerator) -> Any:
    """Return the state dict of an optimizer of ``model``, or of a schedule, in the same way."""
    state = part.state_dict()
    if not isinstance(part, Optimizer):
        return state
    if (stage := staged(model)) is not None:
        return stage_optimizer_state(stage, state, accelerator)
    if "state" not in state:  # several optimizers joined, which take whole weights alone
        return state
    cuts = {i: _Cuttable(*pair) for i, pair in enumerate(_in_order(part, model))}

    def gather(index: int, value: Any) -> Any:
        own = cuts[index]
        is_like = isinstance(value, Tensor) and value.shape == own.parameter.shape
        return _whole(value, own.cut, accelerator) if is_like else whole(value, accelerator)

    states = {i: {k: gather(i, v) for k, v in values.items()} for i, values in state["state"].items()}
    return {**state, "state": states}


def whole_shape(parameter: Tensor, cut: _Cut | None) -> torch.Size:
    """Return the shape that a parameter has as a whole; a ``DTensor`` says that of what FSDP2 split."""
    shape = list(parameter.shape)
    if cut is not None:
        shape[cut.dim] *= cut.split.size
    return torch.Size(shape)


def local_shard(parameter: Tensor, cut: _Cut | None, tensor: Tensor) -> Tensor:
    """Return this process's part of the whole ``tensor``, as it has of ``parameter``."""
    return scatter_like(parameter, tensor if cut is None else cut.split.own(tensor, cut.dim).contiguous())


def own_state(state: dict[str, Any], optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return a whole optimizer's state dict with this process's parts of its tensors."""
    if (stage := staged(model)) is not None:
        return own_optimizer_state(stage, state) if "state" in state else state
    pairs = [_Cuttable(*pair) for pair in _in_order(optimizer, model)]
    if "state" not in state or not any(p.cut or isinstance(p.parameter, DTensor) for p in pairs):
        return state
    own = dict(zip((i for group in state["param_groups"] for i in group["params"]), pairs, strict=True))

    def fit(one: _Cuttable, value: Any) -> Any:
        is_like = isinstance(value, Tensor) and value.shape == whole_shape(one.parameter, one.cut)
        return local_shard(one.parameter, one.cut, value) if is_like else value

    states = {i: {k: fit(own[i], v) for k, v in values.items()} for i, values in state["state"].items()}
    return {**state, "state": states}


class _Cuttable(NamedTuple):
    parameter: Tensor
    cut: _Cut | None


def _in_order(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[Tensor, _Cut | None]]:
    """Yield the parameters as the optimizer numbers them, each with how it was split."""
    cuts: Mapping[str, _Cut] = split_parameters(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, cuts.get(names.get(id(parameter), ""))


def _whole(tensor: Tensor, cut: _Cut | None, accelerator: Accelerator) -> Tensor:
    tensor = tensor.detach()
    if cut is None:
        return whole(tensor, accelerator)
    gathered = cut.split.whole(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, cut.dim)
    return gathered.cpu() if accelerator.is_main_process else gathered.new_empty(0)


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


def to_local(tensor: Tensor) -> Tensor:
    """Return the rows of a split tensor that lie here, as a view; another as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def everywhere(flag: Tensor, accelerator: Accelerator) -> Tensor:
    """Return on every process whether ``flag`` is set on all."""
    return accelerator.reduce(torch.where(flag, 0.0, 1.0), reduction="sum") == 0
