"""What is captured on the fake device in tests of the capture itself; run by ``device.py`` in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from library.training.memory.trace import tracing
from tests.cuda.watched_trace import WatchedTrace, pretend

_MIB = 2**20


def _on_device() -> Tensor:
    return torch.ones(4, 4, device="cuda")


# By name: what is done with a matrix on the device, and with another on the host.
STEPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a number is read": lambda x, _: x.sum().item(),
    "numbers are read": lambda x, _: x.tolist(),
    "a branch": lambda x, _: x if x.sum() > 0 else -x,
    "to the host": lambda x, _: x.to("cpu", non_blocking=True),
    "from the host": lambda x, y: x + y.to("cuda", non_blocking=True),
    "written from the host": lambda x, y: x.copy_(y),
    "a tensor of numbers": lambda x, _: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda"),
    "a list of places": lambda x, _: x[[0, 2]],
    "a mask": lambda x, _: x[x > 0],
    "a mask that is written": lambda x, _: x.masked_fill_(x > 0, 2).index_put_((x > 1,), x.new_zeros(())),
    "places of values": lambda x, _: x.nonzero(),
    "another generator": lambda x, _: x + torch.randn(4, 4, device="cuda", generator=torch.Generator("cuda")),
    "the generator's state": lambda x, _: torch.cuda.get_rng_state(),
    "a checkpoint that preserves it": lambda x, _: checkpoint(torch.sin, x, use_reentrant=False),
    "a seed": lambda x, _: torch.manual_seed(1),
    "the device is waited for": lambda x, _: torch.cuda.synchronize(),
    "a stream is waited for": lambda x, _: torch.cuda.current_stream().synchronize(),
    "an event is waited for": lambda x, _: torch.cuda.current_stream().record_event().synchronize(),
    "the cache is emptied": lambda x, _: torch.cuda.empty_cache(),
    "host memory is pinned": lambda x, y: y.pin_memory(),
    "numbers as arguments": lambda x, _: (
        (x * 2.5).masked_fill(x > 0, 3.0)[1:, 2] + torch.full((3,), 7.0, device="cuda")
    ),
    "a number on the host as an argument": lambda x, _: x * torch.tensor(2.0),
    "a draw of the device's generator": lambda x, _: x + torch.randn(4, 4, device="cuda"),
    "a checkpoint that preserves nothing": lambda x, _: checkpoint(
        torch.sin, x, use_reentrant=False, preserve_rng_state=False
    ),
    "places on the device": lambda x, _: x.index_select(0, torch.arange(2, device="cuda")),
    "work on the host": lambda x, y: x * (y + 1).sum().item(),
}


def refusals(_folder: Any) -> dict[str, Any]:
    """Return of each of ``STEPS`` what its capture refused."""
    trace, found = WatchedTrace(), dict[str, Any]()
    pretend(trace)
    with tracing(trace):
        for name, step in STEPS.items():
            x, y = _on_device(), torch.ones(4, 4)
            trace.refused.clear()
            with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
                assert torch.cuda.is_current_stream_capturing()
                step(x, y)
            found[name] = trace.refused[:]
    return found


def memory(_folder: Any) -> dict[str, Any]:
    """Return MiB that live before two captures of one pool, within them, after, and once they are dropped."""
    trace, live = WatchedTrace(), list[int]()
    pretend(trace)

    def note() -> None:
        live.append(trace.live // _MIB)

    def step(size: int) -> Tensor:
        wide = torch.empty(size * _MIB // 2, dtype=torch.uint8, device="cuda")
        return (wide + wide)[:1] + 1  # two at once; a small one is left

    with tracing(trace):
        kept = torch.empty(10 * _MIB, dtype=torch.uint8, device="cuda")
        note()
        graphs, pool = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()], torch.cuda.graph_pool_handle()
        for graph, size in zip(graphs, (40, 60), strict=True):
            with torch.cuda.graph(graph, pool=pool):
                output = step(size)
            graph.replay()
            note()
        graphs[0].reset()
        note()
        parts = dict(trace.parts)
        del output
        graphs[1].reset()
        note()
        del kept
        note()
    return {"live": live, "activations": parts["activations"] // _MIB, "peak": trace.peak // _MIB}
