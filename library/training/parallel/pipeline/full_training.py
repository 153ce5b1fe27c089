"""Stages of which all weights are trained: each has weights, gradients and optimizer state of its blocks alone.

A tied embedding, which the first stage looks into and the last multiplies with, has the sum of both gradients on both;
the gradient norm is that of all stages; files are one model's, and states that of one process, whatever the number of
stages. (A LoRA in a frozen model is full on every stage instead.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from library.accelerator import device_mesh, dp_rank_and_size
from library.training.parallel.pipeline.p2p import StageComm


@dataclass(frozen=True)
class Staged:
    """What a stage knows of the full model, whose names and numbers files have.

    Attributes:
        comm: the stage's place.
        full: name -> shape and dtype of every parameter, in the full model's order.
        order: the names of each optimizer group, as a single process numbers them.
        local: this stage's parameters by name.
        owners: name -> stages that have it.
    """

    comm: StageComm
    full: dict[str, tuple[torch.Size, torch.dtype]]
    order: list[list[str]]
    local: dict[str, nn.Parameter]
    owners: dict[str, list[int]]

    def numbers(self) -> dict[str, int]:
        """Return name -> the number that a single process's optimizer gives it."""
        return {name: i for i, name in enumerate(name for group in self.order for name in group)}

    def local_numbers(self) -> dict[str, int]:
        """Return name -> the number that this stage's optimizer gives it."""
        held = (name for group in self.order for name in group if name in self.local)
        return {name: i for i, name in enumerate(held)}


def staged(model: nn.Module) -> Staged | None:
    """Return what a model's stage knows of the full one; None for a model that is not cut, or has a LoRA."""
    return getattr(model, "staged", None)


def staged_model(model: nn.Module, full: dict[str, nn.Parameter], optimizer: Optimizer, comm: StageComm) -> Staged:
    """Leave ``optimizer`` with the parameters of ``full`` that ``model``, which has been cut, still has; collective."""
    names = {id(parameter): name for name, parameter in full.items()}
    order = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    local = {names[id(parameter)]: parameter for parameter in model.parameters()}
    for group, held in zip(optimizer.param_groups, order, strict=True):
        group["params"] = [local[name] for name in held if name in local]
    for name in full.keys() - local.keys():
        optimizer.state.pop(full[name], None)  # schedule-free optimizers have one, if empty, before the first step
    of_stages: list[Any] = [None] * comm.count
    dist.all_gather_object(of_stages, list(local), comm.group)
    owners = {name: [stage for stage, held in enumerate(of_stages) if name in held] for name in full}
    shapes = {name: (parameter.shape, parameter.dtype) for name, parameter in full.items()}
    return Staged(comm, shapes, order, local, owners)


def clip_stages(accelerator: Accelerator, stage: Staged, limit: float) -> Tensor:
    """Average the gradients over replicas and clip them to the norm of all stages'; return the norm before that."""
    comm, (_, shares) = stage.comm, dp_rank_and_size(accelerator)
    for name, parameter in stage.local.items():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if shares > 1:
            dist.all_reduce(parameter.grad, group=device_mesh(accelerator)["dp"].get_group())
            parameter.grad /= shares
        if len(stage.owners[name]) > 1:
            _add_up(parameter.grad, stage.owners[name], comm)
    counted = [p.grad for name, p in stage.local.items() if stage.owners[name][0] == comm.index and p.grad is not None]
    square = get_total_norm(counted).square()
    dist.all_reduce(square, group=comm.group)
    norm = square.sqrt()
    clip_grads_with_norm_(list(stage.local.values()), limit, norm)
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


def gather_stage_weights(stage: Staged, accelerator: Accelerator) -> dict[str, Tensor]:
    """Return every parameter by name on the main process, in host memory, and nothing on others; collective."""
    return dict(_collected(stage, accelerator, lambda name: stage.local[name].detach()))


def gather_stage_state(stage: Staged, state: dict[str, Any], accelerator: Accelerator) -> dict[str, Any]:
    """Return the state dict that one process's optimizer would have, on the main process; collective.

    ``state`` is that of this stage's.
    """
    if "state" not in state:
        return {name: gather_stage_state(part, own, accelerator) for name, part, own in _joined(stage, state)}
    local, numbers = stage.local_numbers(), stage.numbers()
    collected = _collected(stage, accelerator, lambda name: state["state"].get(local[name], {}))
    entries = {numbers[name]: entry for name, entry in collected if entry}
    groups = [
        {**group, "params": [numbers[name] for name in names]}
        for group, names in zip(state["param_groups"], stage.order, strict=True)
    ]
    return {**state, "state": dict(sorted(entries.items())), "param_groups": groups}


def scatter_stage_state(stage: Staged, state: dict[str, Any]) -> dict[str, Any]:
    """Return what of one process's optimizer state dict is this stage's."""
    if "state" not in state:
        return {name: scatter_stage_state(part, full) for name, part, full in _joined(stage, state)}
    numbers, local = stage.numbers(), stage.local_numbers()
    groups = [
        {**group, "params": [local[name] for name in names if name in local]}
        for group, names in zip(state["param_groups"], stage.order, strict=True)
    ]
    entries = {i: state["state"][numbers[name]] for name, i in local.items() if numbers[name] in state["state"]}
    return {**state, "state": entries, "param_groups": groups}


def _joined(stage: Staged, state: dict[str, Any]) -> Iterator[tuple[str, Staged, dict[str, Any]]]:
    """Yield the states of optimizers that were joined into one (Muon and AdamW), each with what it has of the model.

    The groups of the joined one are theirs in this order.
    """
    begin = 0
    for name, own in state.items():
        order = stage.order[begin : begin + len(own["param_groups"])]
        begin += len(order)
        yield name, replace(stage, order=order, owners={n: stage.owners[n] for names in order for n in names}), own


def _collected(stage: Staged, accelerator: Accelerator, value_of: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    """Yield name -> value of every parameter on the main process, one at a time; the first pipeline's stages send."""
    comm = stage.comm
    if dp_rank_and_size(accelerator)[0] != 0:
        return
    for name, owners in stage.owners.items():
        if comm.is_first:
            received: list[Any] = [None]
            if owners[0] == 0:
                received = [_to_cpu(value_of(name))]
            else:
                dist.recv_object_list(received, comm.rank(owners[0]), comm.group, comm.device)
            yield name, received[0]
        elif owners[0] == comm.index:
            dist.send_object_list([_to_cpu(value_of(name))], comm.rank(0), comm.group, comm.device)


def _to_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value
