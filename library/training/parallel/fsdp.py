"""Weights split among processes (FSDP2): what is split, and how whole tensors come out of it and go back in.

accelerate's ``prepare`` splits the rows of every weight over the processes of a group and gathers a block's weights
when it is about to run, forward and backward. A split tensor is a ``DTensor``: its shape is the whole's, it holds this
process's rows. ``whole`` and ``scatter_like`` go between the two, so that what is written to disk is the same for every
layout: states and models know nothing of sharding, and a run goes on under another.

Whatever gathers is collective: every process of the run calls it. ``lockstep_batches`` makes processes with
different numbers of batches do so equally often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from library.accelerator import accelerate_shards, dp_rank_and_size, is_model_parallel, is_sharded, zero_stage
from library.errors import UserError

Item = TypeVar("Item")


def plan_sharding(accelerator: Accelerator, blocks: Sequence[str], ignored: Sequence[nn.Module] = ()) -> None:
    """Say before ``prepare`` which classes of modules are gathered as one, and which modules stay whole everywhere.

    Nothing is done where weights are not split.
    """
    if accelerate_shards(accelerator):
        plugin = accelerator.state.fsdp_plugin
        plugin.transformer_cls_names_to_wrap = list(blocks)
        plugin.ignored_modules = list(ignored)


def check_sharding(accelerator: Accelerator, model: nn.Module, blocks: Sequence[str]) -> None:
    """Compare what ``prepare`` did with what was asked.

    Raises:
        UserError: a block or a weight of the model is not split, though it should be, or the other way round.
    """
    asked = accelerate_shards(accelerator)
    found = [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in blocks]
    ignored = {id(p) for m in accelerator.state.fsdp_plugin.ignored_modules for p in m.parameters()} if asked else set()
    wrong = [n for n, p in model.named_parameters() if isinstance(p, DTensor) != (asked and id(p) not in ignored)]
    if wrong or (asked and not (found and all(isinstance(module, FSDPModule) for module in found))):
        where = wrong[0] if wrong else "a block"
        raise UserError(f"shard: accelerate left {where} in another layout than asked; install constraints.txt")


@torch.no_grad()
def whole(value: Any, accelerator: Accelerator) -> Any:
    """Return a tree of dicts, lists and tuples with split tensors gathered: on the CPU, and in the main process alone.

    The others hold empty tensors in their places. Collective if anything in the tree is split, and the same tree
    otherwise.
    """
    if isinstance(value, DTensor):
        gathered = value.full_tensor()
        return gathered.cpu() if accelerator.is_main_process else gathered.new_empty(0)
    if isinstance(value, dict):
        return {key: whole(item, accelerator) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(whole(item, accelerator) for item in value)
    return value


def prepare_lora(
    accelerator: Accelerator, blocks: Sequence[str], model: nn.Module, trained: Sequence[nn.Parameter], *parts: Any
) -> list[Any]:
    """Return ``accelerator.prepare(model, *parts)`` for a LoRA in a frozen model that is split, block by block.

    ``trained`` stay whole on every process: they are small, so any optimizer can train them, and they are saved and
    looked at as ever. ``share_gradients`` does for them what DDP does.

    Raises:
        UserError: accelerate did something else than it was asked for.
    """
    for parameter in trained:
        parameter.data = parameter.data.to(accelerator.device)
    plan_sharding(accelerator, blocks, [nn.ParameterList(trained)])
    prepared = accelerator.prepare(model, *parts)
    check_sharding(accelerator, model, blocks)
    return list(prepared)


def share_gradients(accelerator: Accelerator, trained: Sequence[nn.Parameter]) -> None:
    """Give every process the mean gradients over all batches, where the model is split; else the engine has done it.

    Stages of a pipeline add up to a batch's gradients. A parameter without a gradient here may have one elsewhere (in
    another stage; a dropped-out module): it counts as zero.
    """
    if not is_model_parallel(accelerator) or zero_stage(accelerator) or not trained:
        return
    if isinstance(trained[0], DTensor):  # FSDP2 has averaged them
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    total = accelerator.reduce(torch.cat([g.reshape(-1) for g in gradients]), reduction="sum")
    mean = total / dp_rank_and_size(accelerator)[1]
    parts = mean.split([g.numel() for g in gradients])
    for parameter, gradient, part in zip(trained, gradients, parts, strict=True):
        parameter.grad = gradient.copy_(part.view_as(gradient))


def full_tensor(value: Tensor) -> Tensor:
    """Return a gradient norm as the plain tensor that every process gets; collective if it is split."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def scatter_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return this process's part of a whole ``tensor`` if ``parameter``, of its shape, is split; else ``tensor``."""
    if not isinstance(parameter, DTensor):
        return tensor
    on_device = tensor.to(parameter.device)
    return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)


def lockstep_batches(batches: Iterator[Item], accelerator: Accelerator) -> Iterator[Item | None]:
    """Yield ``batches``; where weights are split, go on with None until no process has any left."""
    if not is_sharded(accelerator):
        yield from batches
        return
    while True:
        batch = next(batches, None)
        left = torch.tensor(float(batch is not None), device=accelerator.device)
        if not accelerator.reduce(left, reduction="sum").item():
            return
        yield batch
