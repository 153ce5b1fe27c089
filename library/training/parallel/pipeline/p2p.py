"""What connects a stage with its neighbours.

A stage runs the model's own forward pass. The module in front of its first block puts in what the previous stage has
sent, the one behind its last block keeps what goes to the next, and what would come after the blocks ends the pass with
:class:`StageDone`. Who moves the streams depends on who asked for the pass:

- in training torch's schedule does, with their gradients back (``library.training.parallel.pipeline.schedule``);
- a plain call of the model, to sample or to validate, is made by all stages together: each waits for the one before it,
  and all get what the last has computed. Nothing overlaps in that, and there is no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

Streams = tuple[Tensor, ...]


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
        probed: the streams in front of the first block, where a pass is made only to see their shapes.
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

    def of_all_stages(self, value: Any) -> list[Any]:
        """Return every stage's ``value``, in their order; collective."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, self.group)
        return values

    def recv(self) -> Streams:
        """Return what the stage begins with; waits for the previous stage unless a schedule has."""
        if self.scheduled:
            return self.inbox
        there, described = self.rank(self.index - 1), [None]
        dist.recv_object_list(described, there, self.group, self.device)
        streams = self._empty(described[0])
        for stream in streams:
            dist.recv(stream, there, self.group)
        return tuple(streams)

    def keep(self, streams: Streams) -> Streams:
        """Put what the stage ends with into the outbox; return it."""
        self.outbox = tuple(stream.contiguous() for stream in streams)
        return streams

    def send(self) -> None:
        """Give the outbox to the next stage."""
        there, streams = self.rank(self.index + 1), [t.detach().contiguous() for t in self.outbox]
        dist.send_object_list([_described(streams)], there, self.group, self.device)
        for stream in streams:
            dist.send(stream, there, self.group)
        self.outbox = ()

    def from_last(self, output: Any) -> Any:
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


def broadcast_from_last(model: nn.Module, comm: StageComm, methods: Sequence[str]) -> None:
    """Make every call of ``methods`` one of all stages, which gives each what the last stage has computed."""
    for name in methods:
        setattr(model, name, _of_all(getattr(model, name), comm))


def _of_all(method: Callable[..., Any], comm: StageComm) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if comm.scheduled or comm.probing:
            return method(*args, **kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        except StageDone:
            comm.send()
        return comm.from_last(output)

    return call


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

    def __init__(self, table: nn.Embedding, device: torch.device) -> None:
        super().__init__()
        zero = torch.zeros((), dtype=table.weight.dtype, device=device)
        self.weight = zero.expand(table.weight.shape)

    def forward(self, indices: Tensor) -> Tensor:
        """Return zeros [*indices, W]."""
        return self.weight[0].expand(*indices.shape, -1)


def contiguous_gradient(stream: Tensor) -> Tensor:
    """Return ``stream``, whose gradient then lies in memory in one piece, as sending needs it."""
    alias = stream.view_as(stream)
    if alias.requires_grad:
        alias.register_hook(Tensor.contiguous)
    return alias
