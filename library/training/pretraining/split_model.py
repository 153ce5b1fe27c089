"""Pretraining on layers that processes have together (``tp``): what is split and trained, its gradients and their norm.

The parts of weights are plain parameters of their own, with their own optimizer state; norms, learned positions and the
biases behind a sum are whole on every process. Replicas and ``shard`` are FSDP2's, over what ``tp`` left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from library.accelerator import data_share, device_mesh, is_tensor_parallel
from library.models.lm_split import deal_out_heads, lm_split_plan
from library.models.transformer_lm import Block, TransformerLM
from library.training.pipeline.pretraining import clip_stages, staged
from library.training.sharding import whole_number
from library.training.tensor_parallel import shard_blocks, split_layers
from library.training.whole_states import split_parameters


def split_model(accelerator: Accelerator, model: TransformerLM, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Keep of ``model``, whole in host memory, this process's part; return it and its optimizer as they run.

    Raises:
        UserError: heads or widths do not divide.
    """
    mesh, (_, shares) = device_mesh(accelerator), data_share(accelerator)
    processes = mesh["tp"].size()
    split_layers(model, lm_split_plan(model.config, processes, separate=False), mesh["tp"])
    deal_out_heads(model, processes)
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
        return whole_number(accelerator.clip_grad_norm_(model.parameters(), limit))
    group, cuts = device_mesh(accelerator)["tp"].get_group(), split_parameters(model)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = [gradient for name, gradient in gradients.items() if name not in cuts]
    _share(list(map(_local, whole)), group)  # equal but for kernels that add in any order: so copies never part
    parts = [gradient for name, gradient in gradients.items() if name in cuts]
    square = whole_number(get_total_norm(parts)).square()
    dist.all_reduce(square, group=group)
    norm = (square + whole_number(get_total_norm(whole)).square()).sqrt()
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
