"""Tensors that autograd keeps for backward, waiting in host memory.

``pack`` and ``unpack`` are hooks for ``torch.autograd.graph.saved_tensors_hooks``. On a GPU a tensor is copied out on a
side stream while the next block computes, into page-locked memory, and its place on the device is free once nothing
else holds it. Backward wants tensors in the opposite order: when one is asked for, the copy of the one before begins,
so that it arrives while this one is used. The host waits for nothing. On a CPU the same code copies at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

_SMALLEST = 1 << 20  # bytes; smaller tensors stay where they are
_AHEAD = 2  # tensors on their way while one is used: a double block of FLUX has two inputs


@dataclass(eq=False)
class _Away:
    """A tensor in host memory.

    Attributes:
        host: its values. left: when the copy out is through. back: the tensor on the device again, or None so far.
        came: when the copy back is through.
    """

    host: Tensor
    place: int
    left: torch.cuda.Event | None = None
    back: Tensor | None = None
    came: torch.cuda.Event | None = None


class HostOffload:
    """Keeps tensors of ``device`` in host memory between forward and backward."""

    def __init__(self, device: torch.device, smallest: int = _SMALLEST) -> None:
        self.device, self.smallest = device, smallest
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._away: WeakValueDictionary[int, _Away] = WeakValueDictionary()  # by place; the graph keeps them
        self._next = 0

    def pack(self, tensor: Tensor) -> Tensor | _Away:
        """Begin to move ``tensor`` out; return what stands for it. Parameters and small tensors stay."""
        if isinstance(tensor, nn.Parameter) or tensor.device.type != self.device.type or tensor.nbytes < self.smallest:
            return tensor
        on_gpu = self._stream is not None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        away = _Away(host, self._next)
        self._next += 1
        self._away[away.place] = away
        if self._stream is None:
            host.copy_(tensor)
            return away
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            away.left = torch.cuda.Event()
            away.left.record(self._stream)
        tensor.record_stream(self._stream)  # its memory is not given to anyone before the copy is through
        return away

    def unpack(self, away: Tensor | _Away) -> Tensor:
        """Return the tensor on the device again, and begin to bring back those that are wanted next."""
        if isinstance(away, Tensor):
            return away
        self._away.pop(away.place, None)
        self._bring_back(away)
        for place in range(away.place - 1, away.place - 1 - _AHEAD, -1):
            if place in self._away:
                self._bring_back(self._away[place])
        assert away.back is not None
        if away.came is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(away.came)
            away.back.record_stream(current)
        back, away.back = away.back, None  # asked for again (a graph that is kept), it comes once more
        return back

    def _bring_back(self, away: _Away) -> None:
        if away.back is not None:
            return
        if self._stream is None:
            away.back = away.host.clone()
            return
        assert away.left is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(away.left)
            away.back = torch.empty_like(away.host, device=self.device)
            away.back.copy_(away.host, non_blocking=True)
            away.came = torch.cuda.Event()
            away.came.record(self._stream)
