"""One way in: a model, its optimizer and its batches, as the layout of ``[parallel]`` runs them.

=============================  ==================================================================
``dp`` alone                   accelerate: DDP, or a single process
``shard`` (and ``dp``: HSDP)   FSDP2 by accelerate: rows of every weight, gathered a block at a time
``tp``                         parts of each large layer (``tensor``)
``pp``                         some of the blocks (``pipeline``)
``zero``                       DeepSpeed (``zero``)
=============================  ==================================================================

A LoRA is small: it stays full on every process, so that any optimizer can train it, and averages, samples and files see
it as ever; ``step.average_gradients`` does for it what DDP does. Where all weights are trained, gradients and
optimizer state are split as the weights are. ``gather`` is the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from library.accelerator import prepare_loader
from library.config.schema import ParallelConfig
from library.errors import UserError
from library.models.llm.model import TransformerLM, shard_heads
from library.training.parallel.gather import ShardedOptimizer
from library.training.parallel.pipeline.schedule import Pipeline
from library.training.parallel.pipeline.stages import prepare_stage
from library.training.parallel.spec import ParallelSpec
from library.training.parallel.tensor import prepare_tensor_parallel
from library.training.parallel.zero import prepare_zero


class Parallelized(NamedTuple):
    """What runs: the model in the engine's wrapper, optimizer, loader, and what else was asked for."""

    model: nn.Module
    optimizer: Any
    loader: Any
    text_encoders: nn.Module | None = None
    pipeline: Pipeline | None = None


def parallelize(
    accelerator: Accelerator,
    parallel: ParallelConfig,
    spec: ParallelSpec,
    optimizer: Any,
    loader: Any = None,
    max_grad_norm: float = 0.0,
) -> Parallelized:
    """Return ``spec``'s model as ``parallel`` runs it.

    Args:
        accelerator: of the run, set up for ``parallel``.
        parallel: the layout.
        spec: the model.
        optimizer: of what is trained.
        loader: of all processes' batches, None if there is none to prepare.
        max_grad_norm: to clip to, for an engine that clips by itself.

    Raises:
        UserError: the model cannot be shared so, or an engine did something else than it was asked for.
    """
    plan = spec.tp_plan(parallel.tp) if parallel.tp > 1 else {}
    text_encoders, pipeline = None, None
    if parallel.splits_model and not (parallel.zero or parallel.device_map):
        for parameter in spec.lora:  # full on every process, whatever becomes of the base
            parameter.data = parameter.data.to(accelerator.device)
    if parallel.zero:
        model, optimizer = prepare_zero(accelerator, spec, optimizer, max_grad_norm)
    elif parallel.pp > 1:
        model, optimizer, pipeline = prepare_stage(accelerator, parallel, spec, optimizer)
    elif parallel.tp > 1:
        model, optimizer = prepare_tensor_parallel(accelerator, spec, plan, optimizer)
    elif parallel.shard > 1:
        model, optimizer = _prepare_fsdp(accelerator, spec, optimizer)
    else:
        trains = any(parameter.requires_grad for parameter in spec.model.parameters())  # else DDP would refuse it
        # the model stays where it was put: with swapped blocks that is not the device alone
        model = accelerator.prepare_model(spec.model, device_placement=False, evaluation_mode=not trains)
        if spec.text_encoders is not None:
            text_encoders = accelerator.prepare_model(spec.text_encoders)
        optimizer = accelerator.prepare_optimizer(optimizer)
    if plan and isinstance(spec.model, TransformerLM):
        shard_heads(spec.model, parallel.tp)
    for method in spec.methods:
        register_fsdp_forward_method(spec.model, method)  # nothing happens to a model that is not FSDP2's
    if spec.network is None and (parallel.shard > 1 or plan or pipeline):
        optimizer = ShardedOptimizer(optimizer.optimizer, spec.model, accelerator)
    accelerator._optimizers[-1] = optimizer  # in the place of the one that it has prepared
    loader = None if loader is None else prepare_loader(accelerator, loader)
    return Parallelized(model, optimizer, loader, text_encoders, pipeline)


def _prepare_fsdp(accelerator: Accelerator, spec: ParallelSpec, optimizer: Any) -> tuple[nn.Module, Any]:
    """Rows of every weight but a LoRA's are split, and gathered with their block."""
    plugin = accelerator.state.fsdp_plugin
    plugin.transformer_cls_names_to_wrap = list(spec.blocks)
    plugin.ignored_modules = [nn.ParameterList(spec.lora)] if spec.lora else []
    model, optimizer = accelerator.prepare(spec.model, optimizer)
    check_sharding(accelerator, spec.model, spec.blocks)
    return model, optimizer


def check_sharding(accelerator: Accelerator, model: nn.Module, blocks: Sequence[str]) -> None:
    """Raise a UserError unless ``prepare`` split the model's blocks and weights but for those to be left full."""
    found = [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in blocks]
    full = {id(p) for module in accelerator.state.fsdp_plugin.ignored_modules for p in module.parameters()}
    wrong = [name for name, p in model.named_parameters() if isinstance(p, DTensor) == (id(p) in full)]
    if wrong or not found or not all(isinstance(module, FSDPModule) for module in found):
        where = wrong[0] if wrong else "a block"
        raise UserError(f"shard: accelerate left {where} in another layout than asked; install constraints.txt")
