"""A LoRA's model as the processes of a run share it: whichever of the layouts of ``[parallel]`` was asked for.

Pretraining on layers that processes have together (``tp``): what is split and trained, its gradients and their norm.

The parts of weights are plain parameters of their own, with their own optimizer state; norms, learned positions and the
biases behind a sum are whole on every process. Replicas and ``shard`` are FSDP2's, over what ``tp`` left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from library.accelerator import device_mesh, dp_rank_and_size, is_pipelined, is_sharded, is_tensor_parallel, zero_stage
from library.config.schema import ParallelConfig
from library.models.llm.model import Block, TransformerLM, lm_split_plan, shard_heads
from library.nn.tensor_split import Parts
from library.training.parallel.fsdp import full_tensor, prepare_lora
from library.training.parallel.gather import prepare_split, split_parameters
from library.training.parallel.pipeline.full_training import clip_stages, staged
from library.training.parallel.pipeline.schedule import Pipeline
from library.training.parallel.pipeline.stages import SplitPoints, prepare_stage
from library.training.parallel.tensor import prepare_split_lora, shard_blocks, split_layers
from library.training.parallel.zero import prepare_zero
from networks.network import AdapterNetwork


@dataclass(frozen=True)
class ParallelizableModel:
    """A model with its LoRA, and what is known of sharing it out.

    Attributes:
        model: whole; where processes get parts of it, in host memory.
        network: the LoRA in it.
        outline: returns where a pipeline can cut it.
        blocks: class names of what is gathered as one.
        split_plan: number of processes -> how they have each layer together.
        called_too: the model's methods that are called besides ``forward``.
    """

    model: nn.Module
    network: AdapterNetwork
    outline: Callable[[], SplitPoints]
    blocks: Sequence[str]
    split_plan: Callable[[int], dict[str, Parts]]
    called_too: Sequence[str] = ()


class Prepared(NamedTuple):
    """Model, optimizer and loader as they run."""

    model: nn.Module
    optimizer: Any
    loader: Any
    pipeline: Pipeline | None = None


def parallelize(
    accelerator: Accelerator,
    parallel: ParallelConfig,
    parallelizable: ParallelizableModel,
    max_grad_norm: float,
    optimizer: Any,
    loader: Any,
) -> Prepared | None:
    """Return what ``parallel`` makes of a model, or None where every process has all of it: that is accelerate's.

    Args:
        accelerator, parallel: of the run.
        shareable: the model; changed in place.
        max_grad_norm: to clip to, for an engine that clips by itself.
        optimizer, loader: not yet prepared.

    Raises:
        UserError: the model cannot be shared out so, or an engine did something else than it was asked for.
    """
    model, network, parts = parallelizable.model, parallelizable.network, (optimizer, loader)
    trained, blocks = network.parameters(), parallelizable.blocks
    plan = parallelizable.split_plan(parallel.tp) if is_tensor_parallel(accelerator) else {}
    if is_pipelined(accelerator):
        outline, methods = parallelizable.outline(), ["forward", *parallelizable.called_too]
        pipeline, *stage = prepare_stage(accelerator, parallel, model, outline, network, methods, *parts, plan)
        return Prepared(stage[0], stage[1], stage[2], pipeline)
    if zero_stage(accelerator):
        return Prepared(*prepare_zero(accelerator, model, trained, max_grad_norm, *parts))
    if is_tensor_parallel(accelerator):
        prepared = prepare_split_lora(accelerator, plan, blocks, model, trained, *parts)
    elif parallel.splits_lora:
        prepared = prepare_split(accelerator, blocks, model, *parts)
    elif is_sharded(accelerator):
        prepared = prepare_lora(accelerator, blocks, model, trained, *parts)
    else:
        return None
    if is_sharded(accelerator):
        for method in parallelizable.called_too:
            register_fsdp_forward_method(model, method)
    return Prepared(*prepared)


def split_model(accelerator: Accelerator, model: TransformerLM, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Keep of ``model``, whole in host memory, this process's part; return it and its optimizer as they run.

    Raises:
        UserError: heads or widths do not divide.
    """
    mesh, (_, shares) = device_mesh(accelerator), dp_rank_and_size(accelerator)
    processes = mesh["tp"].size()
    split_layers(model, lm_split_plan(model.config, processes, separate=False), mesh["tp"])
    shard_heads(model, processes)
    if shares == 1:
        model.to(accelerator.device)
    else:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        shard_blocks(model, [Block.__name__], mesh["dp", "shard"])
        register_fsdp_forward_method(model, "next_logits")  # what samples are made with
        now = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [now[names[id(parameter)]] for parameter in group["params"]]
    prepared = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)  # autocast alone
    return prepared, accelerator.prepare_optimizer(optimizer)


@contextmanager
def gradients_stay(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
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


def clip_gradients(accelerator: Accelerator, model: nn.Module, limit: float) -> Tensor:
    """Scale the gradients of ``model`` so that the norm of all of them is at most ``limit``; return it before that."""
    if (stage := staged(model)) is not None:
        return clip_stages(accelerator, stage, limit)
    if not is_tensor_parallel(accelerator):
        return full_tensor(accelerator.clip_grad_norm_(model.parameters(), limit))
    group, cuts = device_mesh(accelerator)["tp"].get_group(), split_parameters(model)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = [gradient for name, gradient in gradients.items() if name not in cuts]
    _share(list(map(_local, whole)), group)  # equal but for kernels that add in any order: so copies never part
    parts = [gradient for name, gradient in gradients.items() if name in cuts]
    square = full_tensor(get_total_norm(parts)).square()
    dist.all_reduce(square, group=group)
    norm = (square + full_tensor(get_total_norm(whole)).square()).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    torch._foreach_mul_([_local(gradient) for gradient in gradients.values()], scale)
    return norm


def _share(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """Give every process of ``group`` the mean of each gradient."""
    if not gradients:
        return
    mean = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(group.size())
    dist.all_reduce(mean, group=group)
    for gradient, part in zip(gradients, mean.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
