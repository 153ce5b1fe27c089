"""What processes do together in a step: whose gradients are averaged, what the norm is of, who still has batches.

Whatever communicates is collective: every process of the run calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

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
from library.training.parallel.pipeline.full_training import clip_stages, staged
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
def no_sync(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Inside the block gradients are added up where they are made: processes exchange them in a step's last pass."""
    if not is_tensor_parallel(accelerator):
        with accelerator.no_sync(model):
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
    yield
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)


def clip_gradients(accelerator: Accelerator, model: nn.Module, trained: Sequence[nn.Parameter], limit: float) -> Tensor:
    """Complete the gradients of ``trained``, scale them to a norm of at most ``limit``; return the norm before that.

    ``model`` is the one that ``parallelize`` was given, ``trained`` its LoRA's parameters or all.
    """
    if (stage := staged(model)) is not None:
        return clip_stages(accelerator, stage, limit)
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
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in lora]
    total = accelerator.reduce(torch.cat([g.reshape(-1) for g in gradients]), reduction="sum")
    mean = total / dp_rank_and_size(accelerator)[1]
    for parameter, gradient, part in zip(lora, gradients, mean.split([g.numel() for g in gradients]), strict=True):
        parameter.grad = gradient.copy_(part.view_as(gradient))


def _clip_tensor_parallel(accelerator: Accelerator, model: nn.Module, split: set[str], limit: float) -> Tensor:
    """The norm is that of all parts of ``split`` weights, and of the weights that every process has in full, once."""
    group = device_mesh(accelerator)["tp"].get_group()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    full = [gradient for name, gradient in gradients.items() if name not in split]
    _average(list(map(to_local, full)), group)  # equal but for kernels that add in any order: so copies never part
    square = to_full(get_total_norm([gradient for name, gradient in gradients.items() if name in split])).square()
    dist.all_reduce(square, group=group)
    norm = (square + to_full(get_total_norm(full)).square()).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    torch._foreach_mul_([to_local(gradient) for gradient in gradients.values()], scale)
    return norm


def _average(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """Give every process of ``group`` the mean of each gradient."""
    if not gradients:
        return
    mean = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(group.size())
    dist.all_reduce(mean, group=group)
    for gradient, part in zip(gradients, mean.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
