"""A stand-in for CUDA graphs on the CPU: it records a step's operations with their tensors, and replays just these.

As a CUDA graph it reads and writes the memory that it had at its capture, refuses what a capture refuses (numbers read
by the host, random draws), and leaves what existed before as it was: on a card a capture computes nothing. Graphs of
one pool share their memory: what one has made is NaN as soon as another runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from library.training.step_graphs import Captured, Step


def tensors_in(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


def start_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    """The operations of a step, and what they have made."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # compiled code stays compiled beneath it

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: dict[int, Tensor] = {}  # by address
        self.before: dict[int, tuple[Any, Any]] = {}  # memory that is written to, and its contents

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in str(func)
        # what compiled code is given as a number lies on the host on a card, too
        reads = func is torch.ops.aten._local_scalar_dense.default and start_of(args[0]) in self.made
        if draws or reads:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        for schema, argument in zip(func._schema.arguments, args, strict=False):
            if schema.alias_info is not None and schema.alias_info.is_write:
                for tensor in tensors_in(argument):
                    if (start := start_of(tensor)) not in self.made:
                        storage = tensor.untyped_storage()
                        self.before.setdefault(start, (storage, storage.clone()))
        outputs = func(*args, **kwargs)
        read = {start_of(tensor) for tensor in tensors_in(args, kwargs)}
        for tensor in tensors_in(outputs):
            if start_of(tensor) not in read:
                self.made.setdefault(start_of(tensor), tensor)
        self.calls.append((func, args, kwargs, tensors_in(outputs)))
        return outputs

    def undo(self) -> None:
        for storage, contents in self.before.values():
            storage.copy_(contents)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            for old, new in zip(outputs, tensors_in(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    @torch.no_grad()
    def spoil(self) -> None:
        for tensor in self.made.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)


class RecordedGraphs:
    """Captures steps on the CPU."""

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self.recordings: list[Recording] = []  # those that are in use

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    def __call__(self, step: Step, pool: Any) -> Captured:
        assert (pool is None) == (not self.recordings), "graphs in use share a pool"
        self.captures += 1
        recording = Recording()
        try:
            with recording:
                output = step()
        finally:
            recording.undo()
        recording.spoil()
        self.recordings.append(recording)

        def replay() -> None:
            self.replays += 1
            for other in self.recordings:
                if other is not recording:
                    other.spoil()
            recording.replay()

        return Captured(replay, output, lambda: self.recordings.remove(recording), pool or self)
