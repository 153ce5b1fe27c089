"""A trace that also sees where the host waits for the device, and what the capture of a CUDA graph would refuse.

While a graph is captured, :class:`WatchedTrace` raises where CUDA would, or where PyTorch's graph would be another one
than its program: where the host reads from the device or waits for it, where what lies on the host is copied to the
device (pageable memory fails, pinned memory is read again at every replay), where a size depends on values, where a
random draw has a generator of its own, and where the state of the device's generator is read or set, as a checkpoint
with ``preserve_rng_state`` does. Numbers that an operation takes as arguments are part of the graph.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from library.training.memory import fake_cuda
from library.training.memory.trace import MemoryTrace

aten = torch.ops.aten
_NUMBERS = {aten._local_scalar_dense.default, aten.item.default}
# What gives the host a number, or results as large as values say.
_READS = {
    *_NUMBERS, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default, aten.masked_select.default,
    aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default, aten.bincount.default,
}  # fmt: skip
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
# These bring a number on the host to the device by a copy; other operations take it as an argument.
_COPIES = {aten._to_copy.default, aten.copy_.default, aten.where.self}
_OF_RUNTIME = ("synchronize", "empty_cache", "set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Wait:
    """Where the host waited for the device: the trace's phase, and the lines that led there, the innermost last."""

    phase: str
    operation: str
    where: tuple[str, ...]


@dataclass(frozen=True)
class Made:
    """What made a storage on the device; its number among all."""

    operation: str
    shape: tuple[int, ...]
    dtype: str
    number: int


class WatchedTrace(MemoryTrace):
    """See the module's text.

    Attributes:
        waits: of the host.
        refused: what captures refused, and the lines that asked for it.
        log: None, or a list to which every operation on the device adds its name and arguments; see :meth:`logging`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self.refused: list[str] = []
        self.log: list[str] | None = None
        self._operation = ""
        self._count = self._count_before = 0  # storages: so far, and when the log began
        self._made: dict[int, Made] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and operation.namespace == "aten" and operation._can_decompose():
            return super().__torch_dispatch__(operation, types, args, kwargs)  # comes again in its parts
        if self.graph is not None and (why := refusal(operation, args, kwargs, self.graph.generators)):
            self.refuse(why)
        if _is_waited_for(operation, args, kwargs):
            name = "item" if operation in _NUMBERS else str(operation)
            self.waits.append(Wait(self.phase, name, _lines()))
        self._operation = str(operation)
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        if self.log is not None and any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs, result))):
            self.log.append(f"{operation} {tree_map(self._in_words, (args, kwargs, result))}")
        return result

    def refuse(self, why: str) -> bool:
        """Raise, while a graph is captured, as CUDA would; else return false.

        Raises:
            RuntimeError: a graph is being captured.
        """
        if self.graph is not None:
            self.refused.append(" < ".join((why, *_lines()[::-1])))
            raise RuntimeError(f"refused while a CUDA graph is captured: {self.refused[-1]}")
        return False

    @contextlib.contextmanager
    def logging(self) -> Iterator[list[str]]:
        """Yield a list of what the block's operations are and work on: names, numbers, storages, shapes, strides.

        A storage is named by its number among all, or among the block's if it was made there: two blocks of one log
        issue the same operations on the same places.
        """
        self.log, self._count_before = [], self._count
        try:
            yield self.log
        finally:
            self.log = None

    def living(self) -> list[tuple[str, Made]]:
        """Return of what lives now its part of the run, and what made it."""
        return [(self._sizes[key].part, made) for key, made in self._made.items()]

    def _in_words(self, each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        if not each.is_cuda:
            return each.tolist() if each.ndim == 0 and not isinstance(each, FakeTensor) else tuple(each.shape)
        number = self._made[each.untyped_storage()._cdata].number
        place = f"held {number}" if number <= self._count_before else f"new {number - self._count_before}"
        return place, each.dtype, tuple(each.shape), each.stride(), each.storage_offset()

    def _see(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self._made:
            self._count += 1
            self._made[key] = Made(self._operation, tuple(tensor.shape), str(tensor.dtype), self._count)
        super()._see(tensor)

    def _freed(self, key: int) -> None:
        del self._made[key]
        super()._freed(key)


def _is_waited_for(operation: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the host waits: a number is read, or copied to the host without ``non_blocking``."""
    if operation in _NUMBERS:
        return isinstance(args[0], FakeTensor) and args[0].is_cuda
    if operation is aten._to_copy.default:
        goes_to = kwargs.get("device")
        to_host = args[0].is_cuda and goes_to is not None and torch.device(goes_to).type == "cpu"
        return to_host and not kwargs.get("non_blocking")
    if operation is aten.copy_.default:
        return args[1].is_cuda and not args[0].is_cuda and not (len(args) > 2 and args[2])
    return False


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


def pretend(trace: WatchedTrace) -> None:
    """Let PyTorch answer for a card, as ``fake_cuda.pretend``, and refuse what a capture does not allow."""
    fake_cuda.pretend(trace)
    runtime: Any = torch.cuda

    def refused(name: str, value: Any = None) -> Callable[..., Any]:
        return lambda *_, **__: trace.refuse(name) or value

    class Idle(fake_cuda._Idle):
        synchronize = refused("the host waits for a stream or an event")

    for name in _OF_RUNTIME:
        setattr(runtime, name, refused(f"torch.cuda.{name}"))
    runtime.get_rng_state_all = refused("torch.cuda.get_rng_state_all", [])
    runtime.get_rng_state = lambda *_: trace.refuse("torch.cuda.get_rng_state") or torch.get_rng_state()
    runtime.Stream = runtime.Event = Idle
    runtime.current_stream = runtime.default_stream = lambda *_, **__: Idle()
    tensor: Any = Tensor
    tensor.pin_memory = lambda self, *_: trace.refuse("host memory is pinned") or self


def _lines() -> tuple[str, ...]:
    """Return the six innermost lines of this repository that led here, the innermost last."""
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(_ROOT)) and ".venv" not in f.filename]
    inner = ("trace.py", "fake_cuda.py", Path(__file__).name)
    shown = [f for f in frames if Path(f.filename).name not in inner]
    return tuple(f"{Path(f.filename).relative_to(_ROOT)}:{f.lineno} {f.name}" for f in shown[-6:])
