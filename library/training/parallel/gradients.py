"""What processes do together in a step: whose gradients are averaged, what the norm is of, who still has batches.

Whatever communicates is collective: every process of the run calls it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
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
from library.training.parallel.gather import split_parameters, to_full
from library.training.parallel.pipeline import StageParameters, stage_parameters
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
    """Inside the block, a batch that is not a step's last, processes exchange no gradients."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(accelerator.no_sync(model))
        yield


def clip_gradients(accelerator: Accelerator, model: nn.Module, trained: Sequence[nn.Parameter], limit: float) -> Tensor:
    """Complete the gradients of ``trained``, scale them to a norm of at most ``limit``; return the norm before that.

    ``model`` is the one that ``parallelize`` was given, ``trained`` its LoRA's parameters or all.
    """
    if (stage := stage_parameters(model)) is not None:
        return _clip_stages(accelerator, stage, limit)
    if is_tensor_parallel(accelerator):
        names = split_parameters(model)
        split = {id(parameter) for name, parameter in model.named_parameters() if name in names}
        if any(id(parameter) in split for parameter in trained):
            return _clip_tensor_parallel(accelerator, trained, split, limit)
    average_gradients(accelerator, trained)
    return to_full(accelerator.clip_grad_norm_(trained, limit))


def drop_gradients(optimizer: Any) -> None:
    """Forget the gradients of a step that is not taken, wherever an engine keeps them."""
    optimizer.drop_gradients() if isinstance(optimizer, ZeroOptimizer) else unwrapped(optimizer).zero_grad()


def average_gradients(accelerator: Accelerator, trained: Sequence[nn.Parameter]) -> None:
    """Give every process the mean gradients over all batches, where no engine has done it.

    Stages of a pipeline add up to a batch's gradients. A parameter without a gradient here may have one elsewhere (in
    another stage; a dropped-out module): it counts as zero.
    """
    if not is_model_parallel(accelerator) or zero_stage(accelerator) or not trained:
        return
    if isinstance(trained[0], DTensor):  # FSDP2 has averaged them
        return
    gradients = _gradients(trained)
    mean = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(mean)
    mean /= dp_rank_and_size(accelerator)[1]
    for gradient, part in zip(gradients, mean.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _gradients(parameters: Collection[nn.Parameter]) -> list[Tensor]:
    """Return the gradient of each parameter, zeros where it has none."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _average(gradients: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Average each gradient over ``group``, in place: those of a full model are too large for one flat copy."""
    if group.size() > 1:
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
            gradient /= group.size()


def _clip_stages(accelerator: Accelerator, stage: StageParameters, limit: float) -> Tensor:
    """Average the gradients over replicas and clip them to the norm of all stages'; return the norm before that."""
    comm = stage.comm
    gradients = dict(zip(stage.local, _gradients(stage.local.values()), strict=True))
    _average(gradients.values(), device_mesh(accelerator)["dp"].get_group())
    for name, gradient in gradients.items():
        first, *others = stage.owners[name]
        if others:
            _add_other(gradient, comm.rank(others[0] if comm.index == first else first), comm.group)
    counted = [gradient for name, gradient in gradients.items() if stage.owners[name][0] == comm.index]
    return _clip_together(stage.local.values(), counted, comm.group, limit)


def _add_other(gradient: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    """Add the gradient that process ``there`` has of a tied weight; both get the same sum, bit for bit."""
    other = torch.empty_like(gradient)
    exchange = [dist.P2POp(dist.isend, gradient, rank, group), dist.P2POp(dist.irecv, other, rank, group)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    gradient += other


def _clip_tensor_parallel(
    accelerator: Accelerator, trained: Sequence[nn.Parameter], split: set[int], limit: float
) -> Tensor:
    """Average the gradients over replicas and clip them to the norm of the full model's; return the norm before that.

    Args:
        accelerator: of the run.
        trained: all parameters.
        split: ids of those of which each process has a part.
        limit: the largest norm.
    """
    mesh = device_mesh(accelerator)
    _average(_gradients(trained), mesh["dp"].get_group())
    group, first = mesh["tp"].get_group(), mesh["tp"].get_local_rank() == 0
    full = _gradients([parameter for parameter in trained if id(parameter) not in split])
    _average(full, group)  # equal but for kernels that add in any order: so the copies never part
    parts = [parameter.grad for parameter in trained if id(parameter) in split and parameter.grad is not None]
    return _clip_together(trained, parts + full if first else parts, group, limit)


def _clip_together(
    parameters: Iterable[nn.Parameter], counted: list[Tensor], group: dist.ProcessGroup, limit: float
) -> Tensor:
    """Clip to the norm of the gradients that all processes of ``group`` have ``counted``, each tensor once."""
    square = get_total_norm(counted).square()
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    clip_grads_with_norm_(parameters, limit, norm)
    return norm
