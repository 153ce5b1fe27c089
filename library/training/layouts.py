"""A LoRA's model as the processes of a run share it: whichever of the layouts of ``[parallel]`` was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from library.accelerator import is_pipelined, is_sharded, is_tensor_parallel, zero_stage
from library.config.parallel_schema import ParallelConfig
from library.nn.tensor_split import Parts
from library.training.pipeline.lora import prepare_stage
from library.training.pipeline.schedule import Pipeline
from library.training.pipeline.stages import Outline
from library.training.sharding import prepare_lora
from library.training.split_lora import prepare_split
from library.training.tensor_parallel import prepare_split_lora
from library.training.zero import prepare_zero
from networks.injection import AdapterNetwork


@dataclass(frozen=True)
class Shareable:
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
    outline: Callable[[], Outline]
    blocks: Sequence[str]
    split_plan: Callable[[int], dict[str, Parts]]
    called_too: Sequence[str] = ()


class Prepared(NamedTuple):
    """Model, optimizer and loader as they run."""

    model: nn.Module
    optimizer: Any
    loader: Any
    pipeline: Pipeline | None = None


def prepare_shared(
    accelerator: Accelerator,
    parallel: ParallelConfig,
    shareable: Shareable,
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
    model, network, parts = shareable.model, shareable.network, (optimizer, loader)
    trained, blocks = network.parameters(), shareable.blocks
    plan = shareable.split_plan(parallel.tp) if is_tensor_parallel(accelerator) else {}
    if is_pipelined(accelerator):
        outline, methods = shareable.outline(), ["forward", *shareable.called_too]
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
        for method in shareable.called_too:
            register_fsdp_forward_method(model, method)
    return Prepared(*prepared)
