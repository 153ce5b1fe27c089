"""A model, its optimizer and its batches, as the layout of ``[parallel]`` runs them: :func:`parallelize`.

=============================  ==================================================================
``dp`` alone                   accelerate: DDP, or a single process
``shard`` (and ``dp``: HSDP)   FSDP2 by accelerate: rows of every weight, gathered a block at a time
``tp``                         parts of each large layer (``tensor``)
``pp``                         some of the blocks (``pipeline``)
``zero``                       DeepSpeed (``zero``)
``device_map``                 one process drives several GPUs (:func:`place_blocks`)
=============================  ==================================================================

A task describes its model in a :class:`ParallelSpec`, so that any layout can share it among processes.

A LoRA is small: it stays full on every process, so that any optimizer can train it, and averages, samples and files see
it as ever; ``gradients.average_gradients`` does for it what DDP does. Where all weights are trained, gradients and
optimizer state are split as the weights are. ``gather`` is the way back.

With a device map each GPU has a run of neighbouring blocks. accelerate's ``dispatch_model`` places the weights and puts
hooks around the modules that move what comes in to where the weights are; what lies outside the blocks stays on the
first GPU, and so does the result. A LoRA lies beside the layers that it changes. Autograd takes gradients back the same
way. One GPU works at a time: a run has the memory of all and the speed of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator, dispatch_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from library.accelerator import device_mesh, prepare_loader
from library.config.run_schema import ParallelConfig
from library.errors import UserError
from library.models.llm.model import Block, TransformerLM, lm_split_plan, shard_heads
from library.nn.tensor_split import Parts
from library.training.memory.budget import in_words, tensor_bytes
from library.training.parallel.gather import ShardedOptimizer
from library.training.parallel.pipeline import (
    Pipeline,
    SplitPoints,
    StageComm,
    call_together,
    cut,
    lm_split_points,
    partition,
    train_stage,
)
from library.training.parallel.tensor import split_layers
from library.training.parallel.zero import prepare_zero
from networks.network import AdapterNetwork


@dataclass(frozen=True)
class ParallelSpec:
    """A model and what layouts ask about it.

    Attributes:
        model: full, in host memory where ``ParallelConfig.splits_model``, else on its device; changed in place.
        blocks: class names of the modules that FSDP2 gathers as one.
        split_points: where a pipeline can cut it.
        tp_plan: number of processes -> layer -> how they share it; raises a UserError where they cannot.
        network: the LoRA in the frozen model; None trains all weights.
        text_encoders: trained beside the model, full on every process.
        methods: of the model, called besides ``forward``.
    """

    model: nn.Module
    blocks: Sequence[str]
    split_points: Callable[[], SplitPoints]
    tp_plan: Callable[[int], dict[str, Parts]]
    network: AdapterNetwork | None = None
    text_encoders: nn.Module | None = None
    methods: Sequence[str] = ()

    @property
    def lora(self) -> list[nn.Parameter]:
        """The LoRA's parameters, none where all weights are trained."""
        return [] if self.network is None else self.network.parameters()


def lm_parallel_spec(model: TransformerLM, network: AdapterNetwork | None = None) -> ParallelSpec:
    """Return what layouts ask about a language model, whose q, k and v a LoRA needs apart."""
    return ParallelSpec(
        model,
        [Block.__name__],
        lambda: lm_split_points(model),
        lambda processes: lm_split_plan(model.config, processes, separate=network is not None),
        network,
        methods=["next_logits"],  # what samples are made with
    )


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
    text_encoders, pipeline = spec.text_encoders, None
    if parallel.splits_model and not (parallel.zero or parallel.device_map):
        for parameter in spec.lora:  # full on every process, whatever becomes of the base
            parameter.data = parameter.data.to(accelerator.device)
    if parallel.zero:
        model, optimizer = prepare_zero(accelerator, spec.model, spec.lora, optimizer, max_grad_norm)
    elif parallel.shard > 1:
        model, optimizer = _apply_fsdp(accelerator, spec, optimizer)
    elif parallel.tp > 1:
        model = _apply_tp(accelerator, parallel, spec)
        optimizer = accelerator.prepare_optimizer(optimizer)
    elif parallel.pp > 1:
        model, pipeline = _apply_pp(accelerator, parallel, spec, optimizer)
        optimizer = accelerator.prepare_optimizer(optimizer)
    else:
        model, text_encoders = _apply_ddp(accelerator, spec)
        optimizer = accelerator.prepare_optimizer(optimizer)
    if spec.network is None and (parallel.shard > 1 or parallel.tp > 1 or parallel.pp > 1):
        optimizer = ShardedOptimizer(optimizer.optimizer, spec.model, accelerator)
    accelerator._optimizers[-1] = optimizer  # in the place of the one that it has prepared
    loader = None if loader is None else prepare_loader(accelerator, loader)
    return Parallelized(model, optimizer, loader, text_encoders, pipeline)


def _apply_ddp(accelerator: Accelerator, spec: ParallelSpec) -> tuple[nn.Module, nn.Module | None]:
    """All weights are everywhere, and DDP averages gradients; alone, the model as it is."""
    trains = any(parameter.requires_grad for parameter in spec.model.parameters())  # else DDP would refuse it
    # the model stays where it was put: with swapped blocks that is not the device alone
    model = accelerator.prepare_model(spec.model, device_placement=False, evaluation_mode=not trains)
    return model, None if spec.text_encoders is None else accelerator.prepare_model(spec.text_encoders)


def _apply_fsdp(accelerator: Accelerator, spec: ParallelSpec, optimizer: Any) -> tuple[nn.Module, Any]:
    """Rows of every weight but a LoRA's are split, and gathered with their block."""
    plugin = accelerator.state.fsdp_plugin
    plugin.transformer_cls_names_to_wrap = list(spec.blocks)
    plugin.ignored_modules = [nn.ParameterList(spec.lora)] if spec.lora else []
    model, optimizer = accelerator.prepare(spec.model, optimizer)
    check_sharding(accelerator, spec.model, spec.blocks)
    for method in spec.methods:
        register_fsdp_forward_method(spec.model, method)
    return model, optimizer


def _apply_tp(accelerator: Accelerator, parallel: ParallelConfig, spec: ParallelSpec) -> nn.Module:
    """Each process has parts of the large layers.

    The parts of trained weights are plain parameters of their own, with their own optimizer state; norms, learned
    positions and the biases behind a sum are full on every process, as a LoRA is.
    """
    split_layers(spec.model, spec.tp_plan(parallel.tp), device_mesh(accelerator)["tp"])
    if isinstance(spec.model, TransformerLM):
        shard_heads(spec.model, parallel.tp)
    return _without_ddp(accelerator, spec.model)


def _apply_pp(
    accelerator: Accelerator, parallel: ParallelConfig, spec: ParallelSpec, optimizer: Any
) -> tuple[nn.Module, Pipeline]:
    """Each process has some of the blocks.

    Every call of the model's ``forward`` and methods then gives all stages what the last one has computed.
    """
    mesh, model, full = device_mesh(accelerator)["pp"], spec.model, dict(spec.model.named_parameters())
    comm = StageComm(mesh.get_local_rank(), mesh.size(), accelerator.device, mesh.get_group())
    cut(model, spec.split_points(), comm)
    if spec.network is None:
        train_stage(model, full, optimizer, comm)
    else:
        modules = set(model.modules())
        for layer in spec.network.modules.values():
            if layer not in modules:
                layer.base.to("meta")  # shapes and dtypes stay
    prepared = _without_ddp(accelerator, model)
    call_together(model, comm, ["forward", *spec.methods])
    return prepared, Pipeline(prepared, comm, parallel.microbatch_count, accelerator.gradient_accumulation_steps)


def _without_ddp(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return ``model`` on its device, with autocast; ``step`` exchanges its gradients."""
    model.to(accelerator.device)
    return accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)


def check_sharding(accelerator: Accelerator, model: nn.Module, blocks: Sequence[str]) -> None:
    """Raise a UserError unless ``prepare`` split the model's blocks and weights but for those to be left full."""
    found = [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in blocks]
    full = {id(p) for module in accelerator.state.fsdp_plugin.ignored_modules for p in module.parameters()}
    wrong = [name for name, p in model.named_parameters() if isinstance(p, DTensor) == (id(p) in full)]
    if wrong or not found or not all(isinstance(module, FSDPModule) for module in found):
        where = wrong[0] if wrong else "a block"
        raise UserError(f"shard: accelerate left {where} in another layout than asked; install constraints.txt")


def devices_to_fill(parallel: ParallelConfig, accelerator: Accelerator) -> list[torch.device]:
    """Return this machine's GPUs if ``device_map`` asks for them, else nothing.

    Raises:
        UserError: there are several processes, or fewer than two GPUs.
    """
    if parallel.device_map is None:
        return []
    if accelerator.num_processes > 1:
        raise UserError("device_map: one process drives all GPUs; start with python, or set shard instead of it")
    count = torch.cuda.device_count()
    if count < 2:
        raise UserError(f'device_map: needs two GPUs, this process sees {count}; remove it, or set memory = "auto"')
    return [torch.device("cuda", number) for number in range(count)]


def place_blocks(transformer: nn.Module, blocks: Sequence[nn.Module], devices: Sequence[torch.device]) -> str:
    """Put ``transformer`` with its LoRA on ``devices`` so that the fullest holds as little as can be; return how.

    Parameters on another device than before are new objects: call it before an optimizer is built.

    Raises:
        UserError: there are fewer blocks than devices.
    """
    if len(blocks) < len(devices):
        raise UserError(f"device_map: {len(devices)} GPUs for {len(blocks)} blocks; hide some (CUDA_VISIBLE_DEVICES)")
    names = {id(module): name for name, module in transformer.named_modules()}
    sizes = [tensor_bytes((*block.parameters(), *block.buffers())) for block in blocks]
    within = {id(t) for block in blocks for t in (*block.parameters(), *block.buffers())}
    outside = tensor_bytes([t for t in (*transformer.parameters(), *transformer.buffers()) if id(t) not in within])
    sizes[0] += outside
    runs = partition(sizes, len(devices))
    places = {names[id(blocks[i])]: device for run, device in zip(runs, devices, strict=True) for i in run}
    elsewhere = dict.fromkeys(_beside(transformer, set(places)), devices[0])
    whole_map = {name: str(device) for name, device in (elsewhere | places).items()}
    dispatch_model(transformer, whole_map, main_device=str(devices[0]), force_hooks=True)
    run_sizes = [in_words(sum(sizes[i] for i in run)) for run in runs]
    parts = (f"{device} {len(run)} blocks, {size}" for device, run, size in zip(devices, runs, run_sizes, strict=True))
    return f"device map: {'; '.join(parts)}"


def _beside(transformer: nn.Module, blocks: set[str]) -> list[str]:
    """Return the names of the modules and tensors right under ``transformer`` that hold no block."""
    children = [name for name, _ in transformer.named_children() if not any(b.startswith(f"{name}.") for b in blocks)]
    direct = (*transformer.named_parameters(recurse=False), *transformer.named_buffers(recurse=False))
    return [*children, *(name for name, _ in direct)]
