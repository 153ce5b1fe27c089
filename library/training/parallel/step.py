"""What processes do together in a step: whose gradients are averaged, what the norm is of, who still has batches.

Whatever communicates is collective: every process of the run calls it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from library.accelerator import (
    device_mesh,
    dp_rank_and_size,
    is_model_parallel,
    is_sharded,
    is_tensor_parallel,
    zero_stage,
)
from library.training.optim.factory import unwrapped
from library.training.parallel.gather import split_parameters, to_full, to_local
from library.training.parallel.pipeline.stages import Staged, staged
from library.training.parallel.zero import ZeroOptimizer

Item = TypeVar("Item")


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


@contextmanager
def no_sync(accelerator: Accelerator, models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block, a batch that is not a step's last, processes exchange no gradients.

    accelerate sees to all layouts but FSDP2 within ``tp``.
    """
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(accelerator.no_sync(model))
        within_tp = models[0] if is_tensor_parallel(accelerator) and isinstance(models[0], FSDPModule) else None
        if within_tp is not None:
            within_tp.set_requires_gradient_sync(False)
        yield
        if within_tp is not None:
            within_tp.set_requires_gradient_sync(True)


def clip_gradients(accelerator: Accelerator, model: nn.Module, trained: Sequence[nn.Parameter], limit: float) -> Tensor:
    """Complete the gradients of ``trained``, scale them to a norm of at most ``limit``; return the norm before that.

    ``model`` is the one that ``parallelize`` was given, ``trained`` its LoRA's parameters or all.
    """
    if (stage := staged(model)) is not None:
        return _clip_stages(
            accelerator, stage, split_parameters(model) if is_tensor_parallel(accelerator) else (), limit
        )
    if is_tensor_parallel(accelerator):
        ids, cuts = {id(parameter) for parameter in trained}, split_parameters(model)
        if any(id(p) in ids for name, p in model.named_parameters() if name in cuts):
            return _clip_tensor_parallel(accelerator, model, set(cuts), limit)
    average_gradients(accelerator, trained)
    return to_full(accelerator.clip_grad_norm_(trained, limit))


def drop_gradients(optimizer: Any) -> None:
    """Forget the gradients of a step that is not taken, wherever an engine keeps them."""
    optimizer.drop_gradients() if isinstance(optimizer, ZeroOptimizer) else unwrapped(optimizer).zero_grad()


def average_gradients(accelerator: Accelerator, lora: Sequence[nn.Parameter]) -> None:
    """Give every process the mean gradients over all batches, where no engine has done it.

    Stages of a pipeline add up to a batch's gradients. A parameter without a gradient here may have one elsewhere (in
    another stage; a dropped-out module): it counts as zero.
    """
    if not is_model_parallel(accelerator) or zero_stage(accelerator) or not lora:
        return
    if isinstance(lora[0], DTensor):  # FSDP2 has averaged them
        return
    for parameter in lora:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    _average([p.grad for p in lora if p.grad is not None], None, dp_rank_and_size(accelerator)[1])


def _clip_stages(accelerator: Accelerator, stage: Staged, split: Container[str], limit: float) -> Tensor:
    """Average the gradients over replicas and clip them to the norm of all stages'; return the norm before that.

    ``split`` are names of weights of which the processes of a stage have parts (``tp``); each has all of the others.
    """
    comm, (_, replicas) = stage.comm, dp_rank_and_size(accelerator)
    parts, full = list[Tensor](), list[Tensor]()
    for name, parameter in stage.local.items():
        gradient = parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if replicas > 1:
            dist.all_reduce(gradient, group=device_mesh(accelerator)["dp"].get_group())
            gradient /= replicas
        first, *others = stage.owners[name]
        if others:
            _add_other(gradient, comm.rank(others[0] if comm.index == first else first), comm.group)
        if comm.index == first:
            (parts if name in split else full).append(gradient)
    of_parts: Tensor | float = 0.0
    if is_tensor_parallel(accelerator):
        group = device_mesh(accelerator)["tp"].get_group()
        copies = [p.grad for name, p in stage.local.items() if name not in split and p.grad is not None]
        _average(copies, group, group.size())  # equal but for kernels that add in any order: so copies never part
        of_parts = _sum_of_squares(parts, group)
    square = to_full(get_total_norm(full)).square() + of_parts
    dist.all_reduce(square, group=comm.group)
    norm = square.sqrt()
    clip_grads_with_norm_(list(stage.local.values()), limit, norm)
    return norm


def _add_other(gradient: Tensor, there: int, group: dist.ProcessGroup) -> None:
    """Add the gradient that process ``there`` has of a tied weight; both get the same sum, bit for bit."""
    other = torch.empty_like(gradient)
    exchange = [dist.P2POp(dist.isend, gradient, there, group), dist.P2POp(dist.irecv, other, there, group)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    gradient += other


def _clip_tensor_parallel(accelerator: Accelerator, model: nn.Module, split: set[str], limit: float) -> Tensor:
    """The norm is that of all parts of ``split`` weights, and of the weights that every process has in full, once."""
    group = device_mesh(accelerator)["tp"].get_group()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    full = [gradient for name, gradient in gradients.items() if name not in split]
    if full:  # they are equal but for kernels that add in any order: so copies never part
        _average(list(map(to_local, full)), group, group.size())
    square = _sum_of_squares([gradient for name, gradient in gradients.items() if name in split], group)
    norm = (square + to_full(get_total_norm(full)).square()).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    torch._foreach_mul_([to_local(gradient) for gradient in gradients.values()], scale)
    return norm


def _sum_of_squares(gradients: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Return it of the gradients of all processes of ``group``, []."""
    square = to_full(get_total_norm(gradients)).square()
    dist.all_reduce(square, group=group)
    return square


def _average(gradients: list[Tensor], group: dist.ProcessGroup | None, count: int) -> None:
    """Add each gradient up over ``group``, or all processes, and divide it by ``count``."""
    mean = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(mean, group=group)
    mean /= count
    for gradient, part in zip(gradients, mean.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
