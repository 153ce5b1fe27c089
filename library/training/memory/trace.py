"""One trace of a program on fake tensors: what lives on the card at each moment.

PyTorch's ``FakeTensorMode`` gives tensors that have shape, dtype, device and lifetime, and no numbers. On them a step
of a full-size model takes a minute on one core, meets a tensor on the wrong device as the GPU would, and shows how many
bytes live at each moment. Here the device is fake and the host is real: datasets, schedules, captions, LoRA files are
what they are; only what lies on ``cuda``, and what is read from a model's files, has no numbers. Without a card the
device is that of ``fake_cuda``.

    MemoryTrace         a dispatch mode: counts live bytes
    tracing             traces what is done in a block
    device_processes    processes in which ``cuda`` can be traced; patches of PyTorch stay in them

PyTorch's own ``torch.distributed._tools.MemTracker`` counts on fake tensors too, but raises on frozen parameters, whose
gradient it hooks (2.13), and knows nothing of the host's real tensors, and of what kernels take within.

*What is counted.* Storages on the device, from the operation that makes them until nothing holds them, in the 512 bytes
that PyTorch's allocator rounds to: what ``torch.cuda.max_memory_allocated`` reports. Kernels also take memory within
themselves, which no dispatcher sees: flash attention's backward sums the queries' gradient in fp32 (``_WITHIN``); the
products of cuBLAS have a workspace, once a process.

*Numbers that the host reads* (``item``, ``tolist``, ``if tensor``). Small tensors of whole numbers (positions, lengths,
masks) carry their values beside them, as programs decide by them. Of others a made-up number is read: 1.0, true, or
for a count very many. Where the host waits, and what a capture of a graph would refuse, is seen in
``tests/cuda/watched_trace.py``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from library.safetensors_io import read_rows
from library.training.memory.fake_cuda import FakeGraph, Pool, attention_kernel, has_card, library_path

_ROUNDED_TO = 512  # bytes, of PyTorch's caching allocator
aten = torch.ops.aten


@dataclass
class Allocation:
    """Bytes that live: to what part of the run they belong; of a graph, in its pool."""

    bytes: int
    part: str
    pool: Pool | None


class _FakeTensors(FakeTensorMode):
    avoid_device_init = True  # else copying a real tensor to the device would be tried for real


class MemoryTrace(TorchDispatchMode):
    """Counts the bytes of the device's storages; what touches the device is fake.

    Attributes:
        live, peak: bytes now, and the most since :meth:`reset_peak`.
        part: what is allocated from now on belongs to it, until :meth:`relabel` says more.
        parts: bytes now by part.
        phases: of each phase its highest point, bytes by part.
        phase: what is done now, in a word or two; the caller sets it.
        graph: the one that is captured now; see ``fake_cuda``.
        started_at: when; files that are older are a model's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.part, self.phase = "activations", ""
        self.parts: Counter[str] = Counter()
        self.phases: dict[str, dict[str, int]] = {}
        self.graph: FakeGraph | None = None
        self._highest: dict[str, int] = {}  # bytes, by phase
        self._sizes: dict[int, Allocation] = {}
        self.started_at = 0.0
        self._values = WeakIdKeyDictionary()  # of small tensors of whole numbers
        self._false: WeakIdKeyDictionary = WeakIdKeyDictionary()  # what is found in no tensor: NaN
        self.fake = _FakeTensors(allow_non_fake_inputs=True)

    def reset_peak(self) -> None:
        """Begin to look for the most anew."""
        self.peak = self.live

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let dynamo trace under this mode: it is what is compiled that is walked."""
        return True

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        # In inference mode autograd is not there to take composite operations apart.
        if torch.is_inference_mode_enabled() and operation.namespace == "aten" and operation._can_decompose():
            with self:
                return operation.decompose(*args, **kwargs)
        if operation in (aten._local_scalar_dense.default, aten.item.default) and isinstance(args[0], FakeTensor):
            return self._number(args[0])
        if operation is aten._fused_sdp_choice.default and args[0].is_cuda:
            return int(attention_kernel(args[0], kwargs.get("attn_mask")).value)
        if operation is aten.equal.default and any(isinstance(each, FakeTensor) for each in args):
            return True
        if not self._is_fake(operation, args, kwargs):
            return operation(*args, **kwargs)
        values = self._values_of(operation, args, kwargs)
        if values is None and operation is aten.nonzero.default:  # nothing is found, as in _NEVER
            values = torch.zeros(0, args[0].ndim, dtype=torch.int64)
        if operation in _INDEXED:
            args = (args[0], self._without_masks(args[1]), *args[2:])
        if values is not None and operation in _SIZED_BY_VALUES:
            with self.fake:
                result = tree_map(lambda value: torch.empty_like(value, device="cuda"), values)
        else:
            with self.fake:
                result = operation(*args, **kwargs)
        self._carry(operation, args, result, values)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                self._see(tensor)
        if operation in _NEVER or (operation is aten.any.default and args[0].dtype == torch.bool):
            self._false[result] = True
        if within := _WITHIN.get(operation):
            self._add(0, within(args), self._pool)
        if operation in _COPIES and result.device.type == "cpu":
            return self._arrived(operation, args, result)
        return result

    @property
    def _pool(self) -> Pool | None:
        return None if self.graph is None else self.graph.pool()

    def _arrived(self, operation: Any, args: Any, result: Tensor) -> Tensor:
        """Return what a copy gives the host: a tensor of its own, of ones."""
        source = args[1] if operation is aten.copy_.default else args[0]
        if source.device.type == "cpu":
            return result
        if operation is aten.copy_.default:
            return args[0]
        if (values := self._values.get(source)) is not None:
            return values.to(result.dtype)
        return torch.ones(result.shape, dtype=result.dtype)

    def _is_fake(self, operation: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation touches the device, or makes what a file's tensor is to be read into."""
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            return True
        if operation is aten.empty.memory_format and self._is_of_a_model_file():
            return True
        return any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs)))

    def _is_of_a_model_file(self) -> bool:
        """Whether ``read_rows`` asks, for a file that was there before; what the program writes it reads again."""
        frame: Any = sys._getframe(3)
        while frame is not None and (
            "torch" in frame.f_code.co_filename or frame.f_code.co_name == "__torch_dispatch__"  # of a subclass
        ):
            frame = frame.f_back
        if frame is None or frame.f_code is not read_rows.__code__:
            return False
        first = frame.f_locals["first"]
        return first.file.stat().st_mtime < self.started_at and (first.dtype != "U8" or first.bytes > _LARGEST_TEXT)

    def _values_of(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation gives, computed from the values that its inputs carry; None where one has none."""
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        known = [self._values.get(each) if isinstance(each, FakeTensor) else each for each in tensors]
        if not all(v is not None and v.numel() <= _SMALL and not v.is_floating_point() for v in known):
            return None
        if (not tensors and operation not in _FACTORIES) or operation._schema.is_mutable:
            return None
        known_values = {id(tensor): values for tensor, values in zip(tensors, known, strict=True)}
        args, kwargs = tree_map(lambda each: known_values.get(id(each), each), (args, {**kwargs}))
        args = tree_map(lambda each: torch.device("cpu") if isinstance(each, torch.device) else each, args)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return operation(*args, **kwargs)

    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return indices with the places in the stead of each mask whose values are known: they say how many."""
        found: list[Tensor | None] = []
        for index in indices:
            values = None if index is None or index.dtype != torch.bool else self._values.get(index)
            found += [index] if values is None else [self.fake.from_tensor(p).to("cuda") for p in values.nonzero().t()]
        return found

    def _carry(self, operation: Any, args: Any, result: Any, values: Any) -> None:
        """Let ``result`` carry ``values``; what was written into carries none any more."""
        if values is not None:
            for one, value in zip(tree_leaves(result), tree_leaves(values), strict=True):
                if isinstance(one, FakeTensor) and value.numel() <= _SMALL and not value.is_floating_point():
                    self._values[one] = value.clone()
        elif operation._schema.is_mutable and isinstance(args[0], FakeTensor):
            self._values.pop(args[0], None)

    def _number(self, tensor: Tensor) -> Any:
        if (values := self._values.get(tensor)) is not None:
            return values.item()
        if tensor.dtype == torch.bool:
            return tensor not in self._false
        return 1.0 if tensor.dtype.is_floating_point else _VERY_MANY

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = -(-storage.nbytes() // _ROUNDED_TO) * _ROUNDED_TO
        self._sizes[key] = Allocation(size, self.part, pool := self._pool)
        self.parts[self.part] += 0 if pool else size
        self._add(size, 0, pool)
        weakref.finalize(storage, self._freed, key)

    def relabel(self, tensors: Iterable[Tensor], part: str) -> None:
        """Let what ``tensors`` hold belong to ``part``."""
        for tensor in tensors:
            found = self._sizes.get(tensor.untyped_storage()._cdata)
            if found is not None and found.pool is None:  # a pool is activations, whatever is in it
                self.parts[found.part] -= found.bytes
                self.parts[part] += found.bytes
                found.part = part

    def _add(self, size: int, within: int = 0, pool: Pool | None = None) -> None:
        """Note that ``size`` bytes came, of a graph's ``pool``, and ``within`` a kernel for a moment more."""
        if pool is not None:
            pool.live += size
            self.hold(pool, max(pool.held, pool.live + within))
            return
        self.live += size
        now = self.live + within
        self.peak = max(self.peak, now)
        if now > self._highest.get(self.phase, -1):
            self._highest[self.phase] = now
            self.phases[self.phase] = {**self.parts, "activations": self.parts["activations"] + within}

    def hold(self, pool: Pool, size: int) -> None:
        """Let ``pool`` hold ``size`` bytes."""
        more, pool.held = size - pool.held, size
        self.parts["activations"] += more
        self._add(more)

    def _freed(self, key: int) -> None:
        gone = self._sizes.pop(key)
        if gone.pool is None:
            self.parts[gone.part] -= gone.bytes
        self._add(-gone.bytes, 0, gone.pool)


_SMALL, _VERY_MANY = 1 << 16, 1 << 20  # numbers
_LARGEST_TEXT = 512  # bytes: what a file says of a layer is read
_FACTORIES = {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.zeros.default, aten.ones.default}
_SIZED_BY_VALUES = {aten.repeat_interleave.Tensor, aten.nonzero.default, aten.unique_consecutive.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_NEVER = {aten.isnan.default, aten.isinf.default}  # nor anything in a mask: what is searched for is what is wrong
_COPIES = {aten._to_copy.default, aten.copy_.default}


def _query_gradient(args: Any) -> int:
    query = args[1]
    return query.numel() * 4


# Bytes that kernels take within themselves. FlashAttention 2's backward sums the queries' gradient in fp32
# (https://github.com/Dao-AILab/flash-attention, flash_api.cpp: dq_accum).
_WITHIN: dict[Any, Callable[[Any], int]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _query_gradient,
}


@contextlib.contextmanager
def tracing(trace: MemoryTrace) -> Iterator[MemoryTrace]:
    """Trace what is done in the block."""
    trace.started_at = time.time()
    with trace:
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # numbers become tensors on the host and are moved where we see it
        try:
            yield trace
        finally:
            torch._C._set_only_lift_cpu_tensors(before)


# What a launcher sets for a process of several; one that traces is alone.
_OF_A_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def device_processes(count: int = 1) -> Iterator[ProcessPoolExecutor]:
    """Yield processes that have a card, or the fake one, and no output; functions that they call are module-level.

    Raises:
        UserError: the device cannot be compiled.
    """
    settings: dict[str, str] = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if not has_card():
        settings["LD_PRELOAD"] = f"{os.environ.get('LD_PRELOAD', '')} {library_path()}".strip()
    before = {name: os.environ.pop(name, None) for name in (*settings, *_OF_A_GROUP)}
    os.environ.update(settings)
    try:
        with ProcessPoolExecutor(count, get_context("spawn"), _without_output) as pool:
            yield pool
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _without_output() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
