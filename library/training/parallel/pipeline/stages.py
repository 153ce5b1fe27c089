"""A model cut into stages.

Every process builds the whole model in host memory, keeps the blocks of its stage and lets go of the others' weights.
What stands before the blocks (embedders, conditioning, rotary tables) stays on every stage: each computes from the
batch itself what its blocks are told besides the streams, so that only these travel. It is less than a hundredth of
FLUX and of Qwen-Image; the vocabulary's tables of a language model, which are more, stay where they are used.

Stages are cut so that the largest is as small as it can be, counted in time or in weights. The blocks of a model take
about the same time: FLUX's double blocks have 2.4 times the weights of single ones, but each token passes half of them,
and the modulation, a third, is applied to a single vector. Layers of an adapter are kept whole by every stage, trained
or not, since they are small: see ``lora``.

A LoRA in a frozen model that is cut into stages.

The LoRA stays whole on every process, as with ``shard``: it is small, so any optimizer can train it, norms and averages
are those of the whole, and files and states are written and read as ever. A stage computes the gradients of its own
layers; ``library.training.parallel.fsdp.share_gradients`` adds them up over the stages, and so completes those of
layers that several stages use (embedders, conditioning).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from library.accelerator import device_mesh, prepare_loader
from library.config.schema import ParallelConfig
from library.errors import UserError
from library.models.llm.model import TransformerLM
from library.nn.tensor_split import Parts
from library.training.parallel.pipeline.p2p import (
    AfterLastBlock,
    Identity,
    NoEmbedding,
    Probed,
    RecvStage,
    SendStage,
    StageComm,
    broadcast_from_last,
    open_wires,
)
from library.training.parallel.pipeline.schedule import Pipeline
from library.training.parallel.tensor import split_layers
from networks.network import AdapterNetwork


@dataclass(frozen=True)
class SplitPoints:
    """Where a model can be cut.

    Attributes:
        blocks: names of the repeated modules in running order.
        two_streams: whether these take image and text; else they take one stream.
        tables: embeddings that only the first stage looks into.
        behind: what follows the blocks, in running order.
    """

    blocks: list[str]
    two_streams: bool
    behind: tuple[str, ...]
    tables: tuple[str, ...] = ()


def outline_of(model: nn.Module, blocks: Sequence[nn.Module], behind: Sequence[str]) -> SplitPoints:
    """Return the outline of a diffusion transformer with two streams."""
    names = {id(module): name for name, module in model.named_modules()}
    return SplitPoints([names[id(block)] for block in blocks], True, tuple(behind))


def language_outline(model: TransformerLM) -> SplitPoints:
    """Return the outline of a language model."""
    tables = ("embedding", "positions") if model.positions is not None else ("embedding",)
    return SplitPoints([f"blocks.{i}" for i in range(len(model.blocks))], False, ("norm", "lm_head"), tables)


def share_out(sizes: Sequence[float], stages: int) -> list[range]:
    """Return which neighbouring blocks of ``sizes`` make each stage: the largest stage is as small as it can be.

    Raises:
        UserError: there are fewer blocks than stages.
    """
    if len(sizes) < stages:
        raise UserError(f"pp: {stages} stages, but the model has {len(sizes)} blocks; lower pp")
    sums = [sum(sizes[:i]) for i in range(len(sizes) + 1)]

    @functools.cache
    def best(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        """The size of the largest of ``left`` stages from block ``first`` on, and where each of them ends."""
        if left == 1:
            return sums[-1] - sums[first], (len(sizes),)
        options = []
        for end in range(first + 1, len(sizes) - left + 2):
            largest, ends = best(end, left - 1)
            options.append((max(sums[end] - sums[first], largest), (end, *ends)))
        return min(options)

    _, ends = best(0, stages)
    return [range(begin, end) for begin, end in zip((0, *ends[:-1]), ends, strict=True)]


def plan_stages(model: nn.Module, outline: SplitPoints, stages: int, balance: str) -> list[range]:
    """Return the blocks of each stage, cut by "time" or by "weights".

    What stands on one stage alone counts with its blocks. What follows the blocks takes a block's time for a block's
    weights (a language model's head); looking into a table takes none.
    """
    weights: list[float] = [weights_of(model, [name]) for name in outline.blocks]
    sizes, behind = [1.0] * len(weights), weights_of(model, outline.behind)
    if balance == "time":
        sizes[-1] += behind / max(weights)
        return share_out(sizes, stages)
    weights[0] += weights_of(model, outline.tables)
    weights[-1] += behind
    return share_out(weights, stages)


def weights_of(model: nn.Module, names: Sequence[str]) -> int:
    """Return how many weights the submodules ``names`` have that take memory."""
    return sum(p.numel() for name in names for p in model.get_submodule(name).parameters() if not p.is_meta)


def cut(model: nn.Module, outline: SplitPoints, comm: StageComm, balance: str) -> range:
    """Leave ``model`` with what its stage needs; return the numbers of the stage's blocks.

    ``balance`` is "time" or "weights". Modules that are taken out stay with whatever else holds them (an adapter
    network, say); see :func:`free_weights`.

    Raises:
        UserError: there are fewer blocks than stages, or the stages do not make up the model.
    """
    whole = weights_of(model, outline.blocks)
    own = plan_stages(model, outline, comm.count, balance)[comm.index]
    for number, name in enumerate(outline.blocks):
        if number not in own:
            model.set_submodule(name, _stand_in(number, own, outline.two_streams, comm))
    first = model.get_submodule(outline.blocks[0])
    first.register_forward_pre_hook(functools.partial(_probe, comm, outline.two_streams), with_kwargs=True)
    if not comm.is_first:
        for name in outline.tables:
            model.set_submodule(name, NoEmbedding(model.get_submodule(name), comm.device))  # type: ignore[arg-type]
    if not comm.is_last:
        for name in outline.behind:
            model.set_submodule(name, AfterLastBlock())
    _compare(weights_of(model, outline.blocks), whole, comm)
    return own


def _stand_in(number: int, own: range, two_streams: bool, comm: StageComm) -> nn.Module:
    if number == own.start - 1:
        return RecvStage(two_streams, comm)
    return SendStage(two_streams, comm) if number == own.stop else Identity(two_streams)


def _probe(comm: StageComm, two_streams: bool, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the streams in front of the first block, where a pass is made for that."""
    if not comm.probing:
        return
    names = ("hidden_states", "encoder_hidden_states")[: 1 + two_streams]
    given = [kwargs[name] if name in kwargs else args[i] for i, name in enumerate(names)]
    comm.probed = tuple(reversed(given))
    raise Probed


def _compare(own: int, whole: int, comm: StageComm) -> None:
    """Raise a UserError unless the stages hold each block once."""
    held: list[Any] = [None] * comm.count
    dist.all_gather_object(held, (own, whole), comm.group)
    if any(there != whole for _, there in held) or sum(there for there, _ in held) != whole:
        raise UserError("pp: the stages do not make up the model; give every process the same files and settings")


@torch.no_grad()
def free_weights(module: nn.Module) -> None:
    """Drop the memory of a module's frozen weights; shapes and dtypes stay."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to("meta")


def check_pieces(parallel: ParallelConfig, largest_batch: int) -> None:
    """Raise a UserError if ``microbatches`` was set to more than the samples of the largest batch."""
    if parallel.is_pipelined and (parallel.microbatches or 1) > largest_batch:
        raise UserError(
            f"microbatches: {parallel.microbatches}, but the dataset's batches have at most {largest_batch} images; "
            f"set batch_size = {parallel.microbatches} there, or lower microbatches"
        )


def prepare_stage(
    accelerator: Accelerator,
    parallel: ParallelConfig,
    model: nn.Module,
    outline: SplitPoints,
    network: AdapterNetwork,
    methods: Sequence[str],
    optimizer: Any,
    loader: Any,
    plan: Mapping[str, Parts] | None = None,
) -> tuple[Pipeline, nn.Module, Any, Any]:
    """Leave ``model`` with this process's stage, on its device; return the pipeline, and what accelerate has prepared.

    Args:
        accelerator, parallel: of the run.
        model: whole, in host memory, with its LoRA.
        outline: where it can be cut.
        network: the LoRA.
        methods: of the model, that then give every stage what the last one has computed.
        optimizer, loader: of the run.
        plan: layer -> how several processes have it together (``tp``), of the whole model.

    Raises:
        UserError: there are fewer blocks than stages, or the processes have read different models.
    """
    comm = open_wires(accelerator)
    cut(model, outline, comm, parallel.pp_balance)
    held = set(model.modules())
    for layer in network.modules.values():
        if layer not in held:
            free_weights(layer.base)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(accelerator.device)
    if plan:
        here = {name for name, _ in model.named_modules()}
        own = {name: parts for name, parts in plan.items() if name in here}
        split_layers(model, own, device_mesh(accelerator)["tp"])
    model.to(accelerator.device)
    prepared = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)  # no DDP around a stage
    broadcast_from_last(model, comm, methods)
    steps = accelerator.gradient_accumulation_steps
    pipeline = Pipeline(prepared, comm, parallel.pieces, parallel.schedule, steps)
    return pipeline, prepared, accelerator.prepare_optimizer(optimizer), prepare_loader(accelerator, loader)
