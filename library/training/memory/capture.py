"""A CUDA graph without a GPU: what a capture refuses, and the memory that graphs hold.

While :class:`FakeGraph` captures, the trace raises where CUDA would, or where PyTorch's graph would be another one than
its program: where the host reads from the device or waits for it, where what lies on the host is copied to the device
(pageable memory fails, pinned memory is read again at every replay), where a size depends on values, where a random
draw has a generator of its own, and where the state of the device's generator is read or set, as a checkpoint with
``preserve_rng_state`` does. Numbers that an operation takes as arguments are part of the graph.

What is allocated within a capture comes from a :class:`Pool`, which keeps the most that lived in it at once until the
last of its graphs is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# What gives the host a number, or results as large as values say.
_READS = {
    aten._local_scalar_dense.default, aten.item.default, aten.equal.default, aten.is_nonzero.default,
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default,
    aten.unique_consecutive.default, aten.bincount.default,
}  # fmt: skip
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
# These bring a number on the host to the device by a copy; other operations take it as an argument.
_COPIES = {aten._to_copy.default, aten.copy_.default, aten.where.self}


class Pool:
    """Memory of graphs: bytes that they ``hold``, of which so many ``live``; handle of ``graph_pool_handle``."""

    def __init__(self) -> None:
        self.held = self.live = self.graphs = 0


class Capturing(Protocol):
    """A trace: ``graph`` is the one that is captured."""

    graph: FakeGraph | None

    def hold(self, pool: Pool, size: int) -> None: ...


class FakeGraph:
    """``torch.cuda.CUDAGraph``, which replays nothing; ``replays`` counts."""

    def __init__(self, trace: Capturing, **_: Any) -> None:
        self._trace, self.replays, self.generators = trace, 0, list[Any]()
        self._pool = Pool()
        self._drop: Any = None

    def register_generator_state(self, generator: Any) -> None:
        self.generators.append(generator)

    def capture_begin(self, pool: Pool | None = None, **_: Any) -> None:
        assert self._trace.graph is None, "a graph is being captured"
        self._pool = pool or self._pool
        self._pool.graphs += 1
        self._drop = weakref.finalize(self, _drop, self._trace, self._pool)
        self._trace.graph = self

    def capture_end(self) -> None:
        self._trace.graph = None

    def replay(self) -> None:
        self.replays += 1

    def pool(self) -> Pool:
        return self._pool

    def reset(self) -> None:
        if self._drop is not None:
            self._drop()


def _drop(trace: Capturing, pool: Pool) -> None:
    pool.graphs -= 1
    if not pool.graphs:
        trace.hold(pool, pool.live)


def refusal(operation: Any, args: Any, kwargs: dict[str, Any], generators: Sequence[Any]) -> str | None:
    """Return why a capture refuses an operation; None if it does not, or the device has no part in it."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    places = {each.device.type for each in tensors if each.ndim or operation in _COPIES}
    goes_to = kwargs.get("device")
    if goes_to is not None:
        places.add(torch.device(goes_to).type)
    if "cuda" not in places and not any(each.is_cuda for each in tensors):
        return None
    by_mask = operation in _INDEXED and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
    unsized = operation is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    if operation in _READS or by_mask or unsized:
        return f"the host reads values for {operation}"
    if len(places) > 1:
        return f"{operation} copies between host and device"
    if kwargs.get("generator") is not None and all(kwargs["generator"] is not each for each in generators):
        return f"{operation} draws from a generator that the graph does not know"
    return None
