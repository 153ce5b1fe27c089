"""Pipeline parallelism: each process (a stage) has some neighbouring blocks, and batches go through all of them.

**Cutting.** Every process builds the full model in host memory, keeps the blocks of its stage and frees the others'
weights. What comes before the blocks (embedders, conditioning, rotary tables) stays on every stage: each computes from
the batch itself what its blocks are given besides the hidden states, so that only these are sent. It is less than a
hundredth of FLUX and of Qwen-Image; the embedding and the head of a language model, which are more, stay where they are
used.

Stages are cut so that the largest is as small as it can be, counted in time or in weights. The blocks of a model take
about the same time: FLUX's double blocks have 2.4 times the weights of single ones, but each token passes half of them,
and the modulation, a third, is applied to a single vector.

**Running.** A stage runs the model's own forward pass. The module in front of its first block puts in what the previous
stage has sent, the one after its last block keeps what goes to the next, and what would come after the blocks ends the
pass with :class:`StageDone`. In training torch's schedule moves the hidden states and their gradients
(:class:`Pipeline`). A plain call of the model, to sample or to validate, is made by all stages together: each waits for
the one before it, and all get what the last has computed. Nothing overlaps in that, and there is no gradient.

**Schedule.** A batch is cut into microbatches of equal size, so that stages work at the same time on different ones. A
stage alternates forward and backward passes as soon as it can (1F1B), so that the first stage holds the activations of
as many microbatches as there are stages, and not of all. With S stages and M microbatches a stage waits for (S - 1) in
(M + S - 1) of the time.

torch's schedule has buffers of one shape: a batch of another shape has a schedule of its own. The first batch of a run
is run once more than needed, by which torch learns dtypes; shapes of later ones are seen from a pass that ends in front
of the blocks.

**Gradients.** A LoRA in a frozen model stays full on every stage. A stage computes the gradients of its own layers;
``gradients.average_gradients`` adds them up over the stages, and so completes those of layers that several stages use
(embedders, conditioning). Where all weights are trained, each stage has weights, gradients and optimizer state of its
part alone (:class:`StageParameters`); files are one model's, and states those of one process.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from library.accelerator import dp_rank_and_size
from library.config.run_schema import ParallelConfig
from library.errors import UserError
from library.models.llm.model import TransformerLM
from library.randomness import derive_seed
from library.training.report.metrics import totals

# --- where a model can be cut --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitPoints:
    """Where a pipeline can cut a model.

    Attributes:
        blocks: names of the repeated modules in running order.
        two_streams: whether these take image and text; else they take one stream.
        tail: what follows the blocks, in running order.
        embeddings: those that only the first stage looks into.
    """

    blocks: list[str]
    two_streams: bool
    tail: tuple[str, ...]
    embeddings: tuple[str, ...] = ()


def transformer_split_points(
    model: nn.Module, blocks: Sequence[nn.Module], tail: Sequence[str], streams: int = 2
) -> SplitPoints:
    """Return where a diffusion transformer whose blocks pass on so many streams can be cut."""
    names = {id(module): name for name, module in model.named_modules()}
    return SplitPoints([names[id(block)] for block in blocks], streams == 2, tuple(tail))


def lm_split_points(model: TransformerLM) -> SplitPoints:
    """Return where a language model can be cut."""
    embeddings = ("embedding", "positions") if model.positions is not None else ("embedding",)
    return SplitPoints([f"blocks.{i}" for i in range(len(model.blocks))], False, ("norm", "lm_head"), embeddings)


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


def plan_stages(model: nn.Module, points: SplitPoints, stages: int) -> list[range]:
    """Return the blocks of each stage, so that the stages take as equal a time as they can.

    Each block counts the same. The tail takes a block's time for a block's weights (a language model's head); looking
    into an embedding takes none.
    """
    largest = max(weights_of(model, [name]) for name in points.blocks)
    last = 1.0 + weights_of(model, points.tail) / largest
    return partition([*[1.0] * (len(points.blocks) - 1), last], stages)


def weights_of(model: nn.Module, names: Sequence[str]) -> int:
    """Return how many weights the submodules ``names`` have that take memory."""
    return sum(p.numel() for name in names for p in model.get_submodule(name).parameters() if not p.is_meta)


def check_microbatches(parallel: ParallelConfig, largest_batch: int) -> None:
    """Raise a UserError if ``microbatches`` was set to more than the samples of the largest batch."""
    if parallel.pp > 1 and (parallel.microbatches or 1) > largest_batch:
        raise UserError(
            f"microbatches: {parallel.microbatches}, but the dataset's batches have at most {largest_batch} images; "
            f"set batch_size = {parallel.microbatches} there, or lower microbatches"
        )


# --- a stage and its neighbours ------------------------------------------------------------------------------------

Streams = tuple[Tensor, ...]  # the hidden states between two blocks: (text, image), or one


class StageDone(Exception):
    """Ends a forward pass where the stage ends."""


class ProbeDone(Exception):
    """Ends a forward pass in front of the first block."""


@dataclass
class StageComm:
    """One stage's place among the others.

    Attributes:
        index, count: of this stage, and how many there are.
        scheduled: whether a schedule moves the streams; else a plain call does.
        probing: whether a pass is made only to see the shapes of the streams in front of the first block, ``probed``.
        inbox: what the stage begins with.
        outbox: what it ends with.
    """

    index: int
    count: int
    device: torch.device
    group: dist.ProcessGroup
    scheduled: bool = False
    probing: bool = False
    probed: Streams = ()
    inbox: Streams = ()
    outbox: Streams = ()

    @property
    def is_first(self) -> bool:
        """Whether the stage begins with the batch."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage ends with the loss."""
        return self.index == self.count - 1

    def rank(self, stage: int) -> int:
        """Return the process that runs ``stage`` of the same pipeline."""
        return dist.get_global_rank(self.group, stage)

    def all_gather(self, value: Any) -> list[Any]:
        """Return every stage's ``value``, in their order; collective."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, self.group)
        return values

    def recv(self) -> Streams:
        """Return what the stage begins with; waits for the previous stage unless a schedule has."""
        if self.scheduled:
            return self.inbox
        previous, described = self.rank(self.index - 1), [None]
        dist.recv_object_list(described, previous, self.group, self.device)
        streams = self._empty(described[0])
        for stream in streams:
            dist.recv(stream, previous, self.group)
        return tuple(streams)

    def keep(self, streams: Streams) -> Streams:
        """Put what the stage ends with into the outbox; return it."""
        self.outbox = tuple(stream.contiguous() for stream in streams)
        return streams

    def send(self) -> None:
        """Give the outbox to the next stage."""
        following, streams = self.rank(self.index + 1), [t.detach().contiguous() for t in self.outbox]
        dist.send_object_list([_described(streams)], following, self.group, self.device)
        for stream in streams:
            dist.send(stream, following, self.group)
        self.outbox = ()

    def broadcast_from_last(self, output: Any) -> Any:
        """Return to every stage the ``output`` of the last: a tensor, or tensors in a tuple or a list."""
        tensors, structure = tree_flatten(output)
        described = [(structure, _described(tensors)) if self.is_last else None]
        source = self.rank(self.count - 1)
        dist.broadcast_object_list(described, source, self.group, self.device)
        assert described[0] is not None
        structure, shapes = described[0]
        tensors = [t.detach().contiguous() for t in tensors] if self.is_last else self._empty(shapes)
        for tensor in tensors:
            dist.broadcast(tensor, source, self.group)
        return tree_unflatten(tensors, structure)

    def _empty(self, shapes: Any) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]


def _described(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


class Placeholder(nn.Module):
    """Stands for a block of another stage: ``change`` says what goes out of what comes in.

    Its arguments are a block's: of models with two streams image and text, which blocks return as (text, image); of
    others one stream. The rest is not used.
    """

    def __init__(self, two_streams: bool, change: Callable[[Streams], Streams]) -> None:
        super().__init__()
        self.two_streams, self.change = two_streams, change

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Any = None, *_: Any, **__: Any) -> Any:
        """Return the streams as a block does."""
        streams = self.change((encoder_hidden_states, hidden_states) if self.two_streams else (hidden_states,))
        return streams if self.two_streams else streams[0]


class AfterLastBlock(nn.Module):
    """Stands for what comes after the blocks: the pass ends."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise :class:`StageDone`."""
        raise StageDone


class NoEmbedding(nn.Module):
    """Stands for an embedding whose rows another stage looks up: zeros that take no memory."""

    def __init__(self, embedding: nn.Embedding, device: torch.device) -> None:
        super().__init__()
        zero = torch.zeros((), dtype=embedding.weight.dtype, device=device)
        self.weight = zero.expand(embedding.weight.shape)

    def forward(self, indices: Tensor) -> Tensor:
        """Return zeros [*indices, W]."""
        return self.weight[0].expand(*indices.shape, -1)


def cut(model: nn.Module, points: SplitPoints, comm: StageComm) -> None:
    """Leave ``model`` with what its stage needs; collective.

    Modules that are taken out stay with whatever else holds them (an adapter network, say).

    Raises:
        UserError: there are fewer blocks than stages, or the stages do not make up the model.
    """
    full = weights_of(model, points.blocks)
    local = plan_stages(model, points, comm.count)[comm.index]
    for number, name in enumerate(points.blocks):
        if number not in local:
            model.set_submodule(name, _placeholder(number, local, points.two_streams, comm))
    first = model.get_submodule(points.blocks[0])
    first.register_forward_pre_hook(functools.partial(_probe, comm, points.two_streams), with_kwargs=True)
    if not comm.is_first:
        for name in points.embeddings:
            model.set_submodule(name, NoEmbedding(model.get_submodule(name), comm.device))  # type: ignore[arg-type]
    if not comm.is_last:
        for name in points.tail:
            model.set_submodule(name, AfterLastBlock())
    stages = comm.all_gather((weights_of(model, points.blocks), full))
    if any(total != full for _, total in stages) or sum(total for total, _ in stages) != full:
        raise UserError("pp: the stages do not make up the model; give every process the same files and settings")


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


def call_together(model: nn.Module, comm: StageComm, methods: Sequence[str]) -> None:
    """Make every call of ``methods`` one of all stages, which gives each what the last stage has computed."""
    for name in methods:
        setattr(model, name, _called_together(getattr(model, name), comm))


def _called_together(method: Callable[..., Any], comm: StageComm) -> Callable[..., Any]:
    """Return a model's ``method`` that all stages call together, and that gives each what the last has computed."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if comm.scheduled or comm.probing:
            return method(*args, **kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        except StageDone:
            comm.send()
        return comm.broadcast_from_last(output)

    return call


# --- the stage of a model whose weights are all trained ------------------------------------------------------------


@dataclass(frozen=True)
class StageParameters:
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


def stage_parameters(model: nn.Module) -> StageParameters | None:
    """Return what a model's stage knows of the full one; None for a model that is not cut, or has a LoRA."""
    return getattr(model, "stage_parameters", None)


def train_stage(model: nn.Module, full: Mapping[str, nn.Parameter], optimizer: Optimizer, comm: StageComm) -> None:
    """Leave ``optimizer`` with the parameters of ``full`` that ``model``, which has been cut, still has; collective."""
    names = {id(parameter): name for name, parameter in full.items()}
    order = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    local = {names[id(parameter)]: parameter for parameter in model.parameters()}
    for group, in_group in zip(optimizer.param_groups, order, strict=True):
        group["params"] = [local[name] for name in in_group if name in local]
    for name in full.keys() - local.keys():
        optimizer.state.pop(full[name], None)  # schedule-free optimizers have one, if empty, before the first step
    of_stages = comm.all_gather(list(local))
    owners = {name: [stage for stage, in_stage in enumerate(of_stages) if name in in_stage] for name in full}
    shapes = {name: parameter.shape for name, parameter in full.items()}
    model.stage_parameters = StageParameters(comm, shapes, order, local, owners)  # type: ignore[assignment]


# --- batches through the stages ------------------------------------------------------------------------------------

Compute = Callable[[Any], tuple[Tensor, Tensor]]  # a microbatch -> its loss [], metrics [n] or [n, columns]
_MOST_SCHEDULES = 4  # whose buffers are kept
Kinds = list[tuple[torch.dtype, bool]]  # of streams: dtype, and whether they have a gradient


class _Stage(nn.Module):
    """What torch takes for the stage: the forward pass of a microbatch, from what came in to what goes out."""

    def __init__(self, model: nn.Module, comm: StageComm) -> None:
        super().__init__()
        self.model, self.comm = model, comm
        self.microbatches: list[Any] = []
        self.compute: Compute | None = None
        self.checked: Callable[[Tensor], Tensor] = lambda loss: loss
        self.scale = 1.0
        self.results: list[Tensor] = []  # loss and totals of each microbatch, [1 + 2 * columns], on the last stage
        self.kinds: tuple[Kinds, Kinds] | None = None  # of what comes in, of what goes out

    def forward(self, *received: Tensor, number: Tensor) -> Any:
        """Return the streams, or on the last stage the microbatch's share of the loss; ``number`` is [1] on the CPU."""
        assert self.compute is not None
        i = int(number)
        self.comm.inbox = tuple(map(_contiguous_gradient, received))
        try:
            loss, metrics = self.compute(self.microbatches[i])
            self.results[i] = torch.cat([loss.detach().float()[None], totals(metrics).to(loss.device).flatten()])
            streams: Streams = (self.checked(loss) * self.scale,)
        except StageDone:
            streams = self.comm.outbox
        self.comm.inbox = self.comm.outbox = ()
        self.kinds = self.kinds or (_kinds(received), _kinds(streams))
        return streams[0] if self.comm.is_last else streams  # a loss in a tuple would have no gradient


class Pipeline:
    """Takes batches forward and backward through the stages.

    Args:
        model: this process's stage, as the engine runs it.
        comm: its place among the others.
        microbatches: into how many a batch is cut, if it can be.
        accumulation: batches of an optimizer step, whose gradients are averaged.
    """

    def __init__(self, model: nn.Module, comm: StageComm, microbatches: int, accumulation: int) -> None:
        self.comm = comm
        self._stage = _Stage(model, comm)
        self._count, self._accumulation = microbatches, accumulation
        self._schedules: dict[Any, Any] = {}

    def forward_backward(
        self, batch: Any, compute: Compute, checked: Callable[[Tensor], Tensor] = lambda loss: loss, columns: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Add the batch's gradients to the stage's weights; return on every stage its loss [] and metrics' ``totals``.

        Args:
            batch: has a length and ``chunk(count)``, as tensors have; the same on all stages.
            compute: the loss of one of its microbatches. A batch's loss is the mean over them.
            checked: is put around every loss before its gradients are made.
            columns: of the metrics.
        """
        stage, comm = self._stage, self.comm
        count = microbatches_of(len(batch), self._count)
        stage.microbatches, stage.compute, stage.checked = list(batch.chunk(count)), compute, checked
        stage.scale, stage.results = 1 / (count * self._accumulation), [torch.zeros(())] * count
        # what is random (dropout) differs from stage to stage
        torch.manual_seed(derive_seed(torch.initial_seed(), "stage", comm.index))
        schedule = self._schedule(count)
        numbers = torch.arange(count)
        comm.scheduled = True
        try:
            schedule.step(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:  # torch's words for what a forward pass has raised
            raise error.__cause__ or error from None
        finally:
            comm.scheduled = False
            stage.microbatches, stage.compute = [], None
        if comm.is_last:
            result = torch.stack(stage.results).sum(dim=0)
        else:
            result = torch.empty(1 + 2 * columns, device=comm.device)
        dist.broadcast(result, comm.rank(comm.count - 1), comm.group)
        return result[0] / count, result[1:].view(2, columns)

    def gathered(self, values: list[Any]) -> list[Any]:
        """Return all stages' ``values``, in the stages' order."""
        return [value for values in self.comm.all_gather(values) for value in values]

    def _schedule(self, count: int) -> Any:
        """Return the schedule for the present microbatches; all stages come to the same."""
        key = count, _shapes(self._stage.microbatches[0])
        schedule = self._schedules[key] = self._schedules.pop(key, None) or self._new_schedule(count)
        if len(self._schedules) > _MOST_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]  # used longest ago
        return schedule

    def _new_schedule(self, count: int) -> Any:
        comm = self.comm
        examples: dict[str, Any] = {} if self._stage.kinds is None else self._examples()
        stage = PipelineStage(self._stage, comm.index, comm.count, comm.device, group=comm.group, **examples)
        # torch's 1F1B refuses fewer microbatches than stages, which leave nothing to alternate
        kind = Schedule1F1B if count >= comm.count else ScheduleGPipe
        return kind(stage, count, loss_fn=lambda loss, _: loss, scale_grads=False)

    @torch.no_grad()
    def _examples(self) -> dict[str, tuple[Tensor, ...]]:
        """Return tensors without memory that are as what comes in and what goes out."""
        stage, comm = self._stage, self.comm
        assert stage.compute is not None
        assert stage.kinds is not None
        comm.probing = True
        with suppress(ProbeDone):
            stage.compute(stage.microbatches[0])
        comm.probing = False
        shapes, comm.probed = [stream.shape for stream in comm.probed], ()
        incoming, outgoing = stage.kinds
        taken = _like([] if comm.is_first else shapes, incoming)
        return {"input_args": taken, "output_args": _like([torch.Size()] if comm.is_last else shapes, outgoing)}


def microbatches_of(samples: int, wanted: int) -> int:
    """Return into how many equal parts a batch of ``samples`` is cut: ``wanted``, or the next that divides it."""
    return next(count for count in range(min(wanted, samples), samples + 1) if samples % count == 0)


def _contiguous_gradient(stream: Tensor) -> Tensor:
    """Return ``stream``, whose gradient then lies in memory in one piece, as sending needs it."""
    alias = stream.view_as(stream)
    if alias.requires_grad:
        alias.register_hook(Tensor.contiguous)
    return alias


def _kinds(streams: tuple[Tensor, ...]) -> Kinds:
    return [(stream.dtype, stream.requires_grad) for stream in streams]


def _like(shapes: list[torch.Size], kinds: Kinds) -> tuple[Tensor, ...]:
    pairs = zip(shapes, kinds, strict=True)
    return tuple(torch.empty(s, dtype=dtype, device="meta", requires_grad=grad) for s, (dtype, grad) in pairs)


def _shapes(value: Any) -> Any:
    """Return the shapes of all tensors in a batch."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    parts = vars(value) if dataclasses.is_dataclass(value) else value
    parts = parts.values() if isinstance(parts, dict) else parts
    return tuple(map(_shapes, parts)) if isinstance(parts, Iterable) and not isinstance(parts, str) else ()
