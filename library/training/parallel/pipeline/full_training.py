"""A language model that is trained whole, in stages: each has weights, gradients and optimizer state of its blocks.

What is more than one stage's is put together here: a tied embedding, which the first stage looks into and the last
multiplies with, has the sum of both gradients on both; the gradient norm is that of all stages; files are one model's,
and states that of one process, whatever the number of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from library.accelerator import device_mesh, dp_rank_and_size
from library.config.schema import ParallelConfig
from library.models.llm.model import TransformerLM
from library.training.parallel.pipeline.p2p import StageComm, broadcast_from_last, open_wires
from library.training.parallel.pipeline.schedule import Pipeline
from library.training.parallel.pipeline.stages import cut, language_outline


@dataclass(frozen=True)
class Staged:
    """What a stage knows of the whole model, whose names and numbers files have.

    Attributes:
        wires: the stage's place.
        whole: name -> shape and dtype of every parameter, in the whole model's order.
        order: the names of each optimizer group, as a single process numbers them.
        own: this stage's parameters by name.
        owners: name -> stages that have it.
    """

    comm: StageComm
    whole: dict[str, tuple[torch.Size, torch.dtype]]
    order: list[list[str]]
    own: dict[str, nn.Parameter]
    owners: dict[str, list[int]]

    def numbers(self) -> dict[str, int]:
        """Return name -> the number that a single process's optimizer gives it."""
        return {name: i for i, name in enumerate(name for group in self.order for name in group)}

    def own_numbers(self) -> dict[str, int]:
        """Return name -> the number that this stage's optimizer gives it."""
        held = (name for group in self.order for name in group if name in self.own)
        return {name: i for i, name in enumerate(held)}


def staged(model: nn.Module) -> Staged | None:
    """Return what a model's stage knows of the whole; None for a model that is not cut."""
    return getattr(model, "staged", None)


def cut_for_training(
    accelerator: Accelerator, parallel: ParallelConfig, model: TransformerLM, optimizer: Optimizer
) -> tuple[nn.Module, Optimizer]:
    """Leave ``model`` and ``optimizer``, whole in host memory, with this process's stage; return them as they run.

    Raises:
        UserError: there are fewer blocks than stages, or the processes have made different models.
    """
    comm = open_wires(accelerator)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    whole = {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}
    order = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    cut(model, language_outline(model), comm, parallel.pp_balance)
    own = {names[id(parameter)]: parameter for parameter in model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if names[id(parameter)] in own]
    model.to(accelerator.device)
    everywhere: list[Any] = [None] * comm.count
    dist.all_gather_object(everywhere, list(own), comm.group)
    owners = {name: [stage for stage, held in enumerate(everywhere) if name in held] for name in whole}
    prepared = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)  # no DDP around a stage
    broadcast_from_last(model, comm, ["forward", "next_logits"])
    model.staged = Staged(comm, whole, order, own, owners)  # type: ignore[assignment]
    return prepared, accelerator.prepare_optimizer(optimizer)


def pipeline_of(model: nn.Module, parallel: ParallelConfig, accumulation: int) -> Pipeline | None:
    """Return what takes batches through ``model``'s stages; None for a model that is not cut."""
    stage = staged(model)
    if stage is None:
        return None
    return Pipeline(model, stage.comm, parallel.pieces, parallel.schedule, accumulation)


def clip_stages(accelerator: Accelerator, stage: Staged, limit: float) -> Tensor:
    """Complete the gradients and scale them, so that the norm of all stages' is at most ``limit``; return it before.

    Gradients become the mean over the data shares.
    """
    comm, (_, shares) = stage.comm, dp_rank_and_size(accelerator)
    for name, parameter in stage.own.items():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if shares > 1:
            dist.all_reduce(parameter.grad, group=device_mesh(accelerator)["dp"].get_group())
            parameter.grad /= shares
        if len(stage.owners[name]) > 1:
            _add_up(parameter.grad, stage.owners[name], comm)
    counted = [p.grad for name, p in stage.own.items() if stage.owners[name][0] == comm.index and p.grad is not None]
    square = get_total_norm(counted).square()
    dist.all_reduce(square, group=comm.group)
    norm = square.sqrt()
    clip_grads_with_norm_(list(stage.own.values()), limit, norm)
    return norm


def _add_up(gradient: Tensor, owners: list[int], comm: StageComm) -> None:
    """Give both owners of a tied weight the same sum, bit for bit, so that their copies stay one weight."""
    first, last = owners
    there = comm.rank(last if comm.index == first else first)
    if comm.index == first:
        other = torch.empty_like(gradient)
        dist.recv(other, there, comm.group)
        gradient += other
        dist.send(gradient, there, comm.group)
    else:
        dist.send(gradient, there, comm.group)
        dist.recv(gradient, there, comm.group)


def stage_weights(stage: Staged, accelerator: Accelerator) -> dict[str, Tensor]:
    """Return every parameter by name on the main process, in host memory, and nothing on others; collective."""
    return dict(_collected(stage, accelerator, lambda name: stage.own[name].detach()))


def stage_optimizer_state(stage: Staged, state: dict[str, Any], accelerator: Accelerator) -> dict[str, Any]:
    """Return the state dict that one process's optimizer would have, on the main process; collective.

    ``state`` is that of this stage's.
    """
    own = stage.own_numbers()
    numbers = stage.numbers()
    collected = _collected(stage, accelerator, lambda name: state["state"].get(own[name], {}))
    entries = {numbers[name]: entry for name, entry in collected if entry}
    groups = [
        {**group, "params": [numbers[name] for name in names]}
        for group, names in zip(state["param_groups"], stage.order, strict=True)
    ]
    return {**state, "state": dict(sorted(entries.items())), "param_groups": groups}


def own_optimizer_state(stage: Staged, state: dict[str, Any]) -> dict[str, Any]:
    """Return what of one process's optimizer state dict is this stage's."""
    numbers, own = stage.numbers(), stage.own_numbers()
    groups = [
        {**group, "params": [own[name] for name in names if name in own]}
        for group, names in zip(state["param_groups"], stage.order, strict=True)
    ]
    entries = {i: state["state"][numbers[name]] for name, i in own.items() if numbers[name] in state["state"]}
    return {**state, "state": entries, "param_groups": groups}


def _collected(stage: Staged, accelerator: Accelerator, value_of: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    """Yield name -> value of every parameter on the main process, one at a time; the first pipeline's stages send."""
    comm = stage.comm
    if dp_rank_and_size(accelerator)[0] != 0:
        return
    for name, owners in stage.owners.items():
        if comm.is_first:
            yield name, _on_host(value_of(name)) if owners[0] == 0 else _received(comm, owners[0])
        elif owners[0] == comm.index:
            _give(comm, value_of(name))


def _give(comm: StageComm, value: Any) -> None:
    """Send a tensor, or a dict of tensors and other values, to the first stage."""
    there, tree = comm.rank(0), value if isinstance(value, dict) else {"": value}
    tensors = {key: t.to(comm.device).contiguous() for key, t in tree.items() if isinstance(t, Tensor)}
    described = {key: (tensors[key].shape, tensors[key].dtype) if key in tensors else v for key, v in tree.items()}
    dist.send_object_list([(isinstance(value, dict), list(tensors), described)], there, comm.group, comm.device)
    for tensor in tensors.values():
        dist.send(tensor, there, comm.group)


def _received(comm: StageComm, stage: int) -> Any:
    said: list[Any] = [None]
    dist.recv_object_list(said, comm.rank(stage), comm.group, comm.device)
    is_dict, tensors, value = said[0]
    for key in tensors:
        shape, dtype = value[key]
        tensor = torch.empty(shape, dtype=dtype, device=comm.device)
        dist.recv(tensor, comm.rank(stage), comm.group)
        value[key] = tensor.cpu()
    return value if is_dict else value[""]


def _on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value
