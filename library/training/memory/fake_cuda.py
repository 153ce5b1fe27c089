"""A CUDA device without a GPU: what PyTorch asks of one, answered by a process that has none.

A CPU build of PyTorch lacks the device: ``fake_cuda.cpp`` registers one whose streams are one and whose events have
passed (it is compiled against PyTorch's own headers, and loaded before PyTorch first asks, by ``LD_PRELOAD``; autograd
runs a backward pass on no device that has none registered). :func:`pretend` answers for the Python side of the CUDA
runtime. Nothing is computed on it: ``trace`` walks through programs on fake tensors. Where there is a card only its
kernels are taken from here.

    library_path()    the compiled device
    pretend()         what ``torch.cuda`` answers, in a process that has it
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend

from library.checksums import checksum, read_checked_json, write_checked_json
from library.errors import UserError
from library.files import atomic_path
from library.training.memory.budget import GIB

_SOURCE = Path(__file__).with_name("fake_cuda.cpp")
aten = torch.ops.aten


def has_card() -> bool:
    """Whether PyTorch has a card, and not this device's answers, which :func:`pretend` puts into a CPU build."""
    return torch.backends.cuda.is_built() and torch.cuda.is_available()


def library_path() -> Path:
    """Return the shared library of the device, compiled now if this PyTorch has none yet (ten seconds).

    It finds PyTorch's libraries by their folder: each environment compiles its own.

    Raises:
        UserError: there is no C++ compiler, or it cannot compile against PyTorch's headers.
    """
    text = _SOURCE.read_bytes()
    root = Path(torch.__file__).parent
    key = hashlib.sha256(text + f"{torch.__version__} {root}".encode()).hexdigest()[:16]
    made = cache_folder() / f"fake_cuda-{key}.so"
    record = made.with_suffix(".json")  # what was compiled
    with contextlib.suppress(OSError, ValueError):
        if read_checked_json(record) == checksum(made):
            return made
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None or sys.platform != "linux":
        raise UserError("no C++ compiler for the fake CUDA device; install g++ (Debian: apt-get install g++)")
    made.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(made) as target:
        done = subprocess.run(
            [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", str(_SOURCE), "-o", str(target),
             f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", f"-L{root}/lib", "-ltorch_cpu", "-lc10",
             f"-Wl,-rpath,{root}/lib"],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise UserError(f"{_SOURCE}: {compiler} cannot compile it: {done.stderr.strip().splitlines()[-1]}")
    write_checked_json(record, checksum(made))
    return made


def cache_folder() -> Path:
    """Return where what was compiled and counted is kept for the next time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


class _Idle:
    """A stream, an event or the runtime of a device that has done whatever is asked of it."""

    device_index, device_type, stream_id, cuda_stream = 0, 1, 0, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def record_event(self, event: Any = None) -> Any:
        return event or type(self)()

    def query(self) -> bool:
        return True

    def __getattr__(self, _: str) -> Callable[..., int]:
        return lambda *_, **__: 0  # also cudart's error code

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class Counted(Protocol):
    """A trace: bytes now, the most since :meth:`reset_peak`, and the ``graph`` that is captured."""

    live: int
    peak: int
    graph: FakeGraph | None

    def reset_peak(self) -> None: ...
    def hold(self, pool: Pool, size: int) -> None: ...


class Pool:
    """Memory of graphs: bytes that they ``hold``, of which so many ``live``; handle of ``graph_pool_handle``.

    It keeps the most that lived in it at once until the last of its graphs is gone.
    """

    def __init__(self) -> None:
        self.held = self.live = self.graphs = 0


class FakeGraph:
    """``torch.cuda.CUDAGraph``, which replays nothing: what is allocated within a capture is its pool's."""

    def __init__(self, trace: Counted, **_: Any) -> None:
        self._trace, self.generators = trace, list[Any]()
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
        pass

    def pool(self) -> Pool:
        return self._pool

    def reset(self) -> None:
        if self._drop is not None:
            self._drop()


def _drop(trace: Counted, pool: Pool) -> None:
    pool.graphs -= 1
    if not pool.graphs:
        trace.hold(pool, pool.live)


def pretend(trace: Counted, total: int = 80 * GIB, capability: tuple[int, int] = (9, 0), runtime: bool = True) -> None:
    """Let PyTorch answer for a card of ``total`` bytes, and take its kernels; not undone.

    Import diffusers, transformers, peft and accelerate before: some of their modules would allocate on the device.

    Args:
        trace: what is asked of memory is asked of it.
        total, capability: of the card.
        runtime: false where there is a card whose runtime answers itself.
    """
    cuda: Any = torch.cuda
    cuda.memory_allocated = cuda.memory_reserved = lambda *_: trace.live
    cuda.max_memory_allocated = cuda.max_memory_reserved = lambda *_: trace.peak
    cuda.reset_peak_memory_stats = lambda *_: trace.reset_peak()
    tensor: Any = Tensor
    tensor.record_stream = lambda *_: None
    tensor.pin_memory = lambda self, *_: self
    tensor.numpy = _numpy(Tensor.numpy)
    layer: Any = nn.Module
    layer._apply = _apply
    module: Any = torch
    module.tensor = _tensor(torch.tensor)
    functions: Any = F
    functions.scaled_dot_product_attention = _attention(F.scaled_dot_product_attention)
    functions.rms_norm = _rms_norm(F.rms_norm)
    if runtime:
        _pretend_runtime(trace, total, capability)


def _pretend_runtime(trace: Counted, total: int, capability: tuple[int, int]) -> None:
    """Answer for what a CPU build of PyTorch lacks."""

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    runtime: Any = torch.cuda
    properties = SimpleNamespace(major=capability[0], minor=capability[1], total_memory=total, name="no card")
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "_is_compiled": True,
        "_lazy_init": None, "init": None, "get_device_capability": capability, "get_device_name": "no card",
        "get_device_properties": properties,
        "is_bf16_supported": True, "current_stream": _Idle(), "default_stream": _Idle(), "set_stream": None,
        "set_device": None, "get_arch_list": [], "memory_stats": {}, "ipc_collect": None,
        "synchronize": None, "empty_cache": None, "get_rng_state_all": [], "set_rng_state": None,
        "set_rng_state_all": None, "manual_seed": None, "manual_seed_all": None,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(runtime, name, answer(value))
    runtime._initialized = True  # a checkpoint that preserves the generators' state asks for the device's then
    runtime.get_rng_state = lambda *_: torch.get_rng_state()
    runtime.CUDAGraph, runtime.graph_pool_handle = functools.partial(FakeGraph, trace), Pool
    runtime.is_current_stream_capturing = lambda: trace.graph is not None
    runtime.Stream = runtime.Event = _Idle
    runtime.stream = runtime.device = lambda *_: contextlib.nullcontext()
    runtime.cudart = answer(_Idle())
    runtime.mem_get_info = lambda *_: (max(0, total - trace.live), total)
    bindings: Any = torch._C
    bindings._cuda_getCurrentRawStream = answer(0)
    bindings._cuda_isCurrentStreamCapturing = runtime.is_current_stream_capturing
    bindings._host_emptyCache = answer(None)
    module: Any = torch
    module.is_autocast_available = answer(True)  # or autocast would be off without a word


def _tensor(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let ``torch.tensor`` read numbers out of fake tensors, and copy to the device, where the trace sees it."""

    def tensor(data: Any, device: Any = None, **options: Any) -> Tensor:
        if isinstance(data, list) and any(isinstance(each, FakeTensor) for each in data):
            data = [each.item() if isinstance(each, FakeTensor) else each for each in data]
        made = original(data, **options)
        return made if device is None else made.to(device)

    return tensor


def _numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let fake tensors of the host, weights of a file, be written: as zeros."""

    def numpy(self: Tensor, **options: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return original(self, **options)
        return np.zeros(tuple(self.shape), str(self.dtype).removeprefix("torch."))

    return numpy


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` with new parameters put in place: fake ones cannot be swapped, as PyTorch would."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for name, parameter in self._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                moved = fn(parameter)
            if moved is not parameter:
                self._parameters[name] = nn.Parameter(moved, parameter.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _attention(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Send attention to the operator of a GPU: flash's for half precision, after autocast, and no mask."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if not query.is_cuda:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled("cuda"):
            query, key, value = (each.to(torch.get_autocast_dtype("cuda")) for each in (query, key, value))
        if not (torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled()):
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        if attention_kernel(query, attn_mask) == SDPBackend.FLASH_ATTENTION:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
        wants = any(each.requires_grad for each in (query, key, value)) and torch.is_grad_enabled()
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, wants, dropout_p, is_causal, scale=scale
        )[0]

    return attention


def _rms_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let RMSNorm be the one kernel that it is on a GPU; elsewhere it is several operations in fp32."""

    def rms_norm(
        x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if not x.is_cuda or (weight is not None and weight.dtype != x.dtype):
            return original(x, normalized_shape, weight, eps)
        return _FusedRMSNorm.apply(x, weight)

    return rms_norm


class _FusedRMSNorm(torch.autograd.Function):
    """What the kernel allocates: outputs, one fp32 number a row for backward, and there the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


def attention_kernel(query: Tensor, mask: Tensor | None) -> SDPBackend:
    """Return the kernel of attention: flash's where it can, as on every card since Ampere."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    fits = is_half and mask is None and query.shape[-1] <= 256
    return SDPBackend.FLASH_ATTENTION if fits else SDPBackend.EFFICIENT_ATTENTION
