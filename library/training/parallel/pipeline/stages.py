"""A model cut into stages: where, and what each process keeps.

Every process builds the full model in host memory, keeps the blocks of its stage and frees the others' weights. What
comes before the blocks (embedders, conditioning, rotary tables) stays on every stage: each computes from the batch
itself what its blocks are given besides the streams, so that only these are sent. It is less than a hundredth of FLUX
and of Qwen-Image; the vocabulary's tables of a language model, which are more, stay where they are used.

Stages are cut so that the largest is as small as it can be, counted in time or in weights. The blocks of a model take
about the same time: FLUX's double blocks have 2.4 times the weights of single ones, but each token passes half of them,
and the modulation, a third, is applied to a single vector.

A LoRA in a frozen model stays full on every stage. A stage computes the gradients of its own layers;
``library.training.parallel.step.average_gradients`` adds them up over the stages, and so completes those of layers
that several stages use (embedders, conditioning). Where all weights are trained, each stage has weights, gradients and
optimizer state of its part alone (:class:`Staged`); files are one model's, and states that of one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from library.accelerator import device_mesh, dp_rank_and_size
from library.config.schema import ParallelConfig
from library.errors import UserError
from library.training.parallel.pipeline.p2p import (
    AfterLastBlock,
    NoEmbedding,
    Placeholder,
    ProbeDone,
    StageComm,
    broadcast_from_last,
)
from library.training.parallel.pipeline.schedule import Pipeline
from library.training.parallel.spec import ParallelSpec, SplitPoints


@dataclass(frozen=True)
class Staged:
    """What a stage whose weights are all trained knows of the full model.

    Attributes:
        comm: the stage's place.
        full: name -> shape of every parameter, in the full model's order.
        order: the names of each optimizer group, as a single process numbers them.
        local: this stage's parameters by name.
        owners: name -> stages that have it.
    """

    comm: StageComm
    full: dict[str, torch.Size]
    order: list[list[str]]
    local: dict[str, nn.Parameter]
    owners: dict[str, list[int]]

    def collect(self, accelerator: Accelerator, names: Iterable[str], value_of: Callable[[str], Any]) -> dict[str, Any]:
        """Return on the main process, in host memory, ``value_of`` each parameter from the stage that has it.

        One at a time; the stages of the first pipeline send. Collective.
        """
        comm, found = self.comm, dict[str, Any]()
        for name in names if dp_rank_and_size(accelerator)[0] == 0 else ():
            owner = self.owners[name][0]
            value = [tree_map_only(Tensor, Tensor.cpu, value_of(name)) if owner == comm.index else None]
            if comm.is_first and owner != 0:
                dist.recv_object_list(value, comm.rank(owner), comm.group, comm.device)
            elif owner == comm.index and not comm.is_first:
                dist.send_object_list(value, comm.rank(0), comm.group, comm.device)
            if comm.is_first:
                found[name] = value[0]
        return found


def staged(model: nn.Module) -> Staged | None:
    """Return what a model's stage knows of the full one; None for a model that is not cut, or has a LoRA."""
    return getattr(model, "staged", None)


def _staged_model(model: nn.Module, full: dict[str, nn.Parameter], optimizer: Optimizer, comm: StageComm) -> Staged:
    """Leave ``optimizer`` with the parameters of ``full`` that ``model``, which has been cut, still has; collective."""
    names = {id(parameter): name for name, parameter in full.items()}
    order = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    local = {names[id(parameter)]: parameter for parameter in model.parameters()}
    for group, held in zip(optimizer.param_groups, order, strict=True):
        group["params"] = [local[name] for name in held if name in local]
    for name in full.keys() - local.keys():
        optimizer.state.pop(full[name], None)  # schedule-free optimizers have one, if empty, before the first step
    of_stages = comm.of_all_stages(list(local))
    owners = {name: [stage for stage, held in enumerate(of_stages) if name in held] for name in full}
    return Staged(comm, {name: parameter.shape for name, parameter in full.items()}, order, local, owners)


def partition(sizes: Sequence[float], stages: int) -> list[range]:
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


def plan_stages(model: nn.Module, points: SplitPoints, stages: int, balance: str) -> list[range]:
    """Return the blocks of each stage, cut by "time" or by "weights".

    What is on one stage alone counts with its blocks. What follows the blocks takes a block's time for a block's
    weights (a language model's head); looking into a table takes none.
    """
    weights = [weights_of(model, [name]) for name in points.blocks]
    tables, behind = weights_of(model, points.tables), weights_of(model, points.behind)
    return partition(stage_sizes(weights, tables, behind, balance), stages)


def stage_sizes(blocks: Sequence[int], tables: int, behind: int, balance: str) -> list[float]:
    """Return what each block counts in the balance, from the weights of all, of the tables, and of what follows."""
    if balance == "time":
        return [*[1.0] * (len(blocks) - 1), 1.0 + behind / max(blocks)]
    sizes = list(map(float, blocks))
    sizes[0] += tables
    sizes[-1] += behind
    return sizes


def weights_of(model: nn.Module, names: Sequence[str]) -> int:
    """Return how many weights the submodules ``names`` have that take memory."""
    return sum(p.numel() for name in names for p in model.get_submodule(name).parameters() if not p.is_meta)


def cut(model: nn.Module, points: SplitPoints, comm: StageComm, balance: str) -> range:
    """Leave ``model`` with what its stage needs; return the numbers of the stage's blocks.

    ``balance`` is "time" or "weights". Modules that are taken out stay with whatever else holds them (an adapter
    network, say).

    Raises:
        UserError: there are fewer blocks than stages, or the stages do not make up the model.
    """
    full = weights_of(model, points.blocks)
    local = plan_stages(model, points, comm.count, balance)[comm.index]
    for number, name in enumerate(points.blocks):
        if number not in local:
            model.set_submodule(name, _placeholder(number, local, points.two_streams, comm))
    first = model.get_submodule(points.blocks[0])
    first.register_forward_pre_hook(functools.partial(_probe, comm, points.two_streams), with_kwargs=True)
    if not comm.is_first:
        for name in points.tables:
            model.set_submodule(name, NoEmbedding(model.get_submodule(name), comm.device))  # type: ignore[arg-type]
    if not comm.is_last:
        for name in points.behind:
            model.set_submodule(name, AfterLastBlock())
    held = comm.of_all_stages((weights_of(model, points.blocks), full))
    if any(there != full for _, there in held) or sum(there for there, _ in held) != full:
        raise UserError("pp: the stages do not make up the model; give every process the same files and settings")
    return local


def _placeholder(number: int, local: range, two_streams: bool, comm: StageComm) -> nn.Module:
    """Return what stands for a block of another stage: the neighbours of this stage's blocks receive and send."""
    if number == local.start - 1:
        return Placeholder(two_streams, lambda _: comm.recv())
    return Placeholder(two_streams, comm.keep if number == local.stop else lambda streams: streams)


def _probe(comm: StageComm, two_streams: bool, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the streams in front of the first block, where a pass is made for that."""
    if not comm.probing:
        return
    names = ("hidden_states", "encoder_hidden_states")[: 1 + two_streams]
    given = [kwargs[name] if name in kwargs else args[i] for i, name in enumerate(names)]
    comm.probed = tuple(reversed(given))
    raise ProbeDone


def check_microbatches(parallel: ParallelConfig, largest_batch: int) -> None:
    """Raise a UserError if ``microbatches`` was set to more than the samples of the largest batch."""
    if parallel.pp > 1 and (parallel.microbatches or 1) > largest_batch:
        raise UserError(
            f"microbatches: {parallel.microbatches}, but the dataset's batches have at most {largest_batch} images; "
            f"set batch_size = {parallel.microbatches} there, or lower microbatches"
        )


def prepare_stage(
    accelerator: Accelerator,
    parallel: ParallelConfig,
    spec: ParallelSpec,
    optimizer: Optimizer,
) -> tuple[nn.Module, Any, Pipeline]:
    """Leave ``spec``'s model with this process's stage, on its device; return model, optimizer and pipeline.

    Every call of the model's ``forward`` and methods then gives all stages what the last one has computed.

    Args:
        accelerator: of the run.
        parallel: the layout.
        spec: the model.
        optimizer: of the LoRA, or of all weights.

    Raises:
        UserError: there are fewer blocks than stages, or the processes have read different models.
    """
    mesh, model, full = device_mesh(accelerator)["pp"], spec.model, dict(spec.model.named_parameters())
    comm = StageComm(mesh.get_local_rank(), mesh.size(), accelerator.device, mesh.get_group())
    cut(model, spec.split_points(), comm, parallel.pp_balance)
    if spec.network is not None:
        held = set(model.modules())
        for layer in spec.network.modules.values():
            if layer not in held:
                layer.base.to("meta")  # shapes and dtypes stay
    else:
        model.staged = _staged_model(model, full, optimizer, comm)  # type: ignore[assignment]
    model.to(accelerator.device)
    prepared = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)  # no DDP around a stage
    broadcast_from_last(model, comm, ["forward", *spec.methods])
    pipeline = Pipeline(prepared, comm, parallel.microbatch_count, accelerator.gradient_accumulation_steps)
    return prepared, accelerator.prepare_optimizer(optimizer), pipeline
