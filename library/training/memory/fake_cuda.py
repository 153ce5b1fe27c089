"""A CUDA device without a GPU: every operation is walked through, and none is computed.

PyTorch's ``FakeTensorMode`` gives tensors that have shape, dtype, device and lifetime, and no numbers. On them a step
of a full-size model takes a minute on one core, meets a tensor on the wrong device as the GPU would, and shows how many
bytes live at each moment. Here the device is fake and the host is real: datasets, schedules, captions, LoRA files are
what they are; only what lies on ``cuda``, and what is read from a model's files, has no numbers.

What a CPU build of PyTorch lacks for it is the device: ``fake_cuda.cpp`` registers one whose streams are one and whose
events have passed (it is compiled against PyTorch's own headers, and loaded before PyTorch first asks, by
``LD_PRELOAD``), and :func:`pretend` answers for the Python side of the CUDA runtime. Where there is a card nothing of
this is needed: fake tensors on ``cuda`` are walked there as they are.

    library_path()    the compiled device
    pretend()         what ``torch.cuda`` answers, in a process that has it
    Walk              a dispatch mode: counts live bytes, and sees where the host waits for the device

*What is counted.* Storages on the device, from the operation that makes them until nothing holds them, in the 512 bytes
that PyTorch's allocator rounds to: what ``torch.cuda.max_memory_allocated`` reports. Kernels also take memory within
themselves, which no dispatcher sees: flash attention's backward sums the queries' gradient in fp32 (``_WITHIN``); the
products of cuBLAS have a workspace, once a process.

*The host's waits.* A number that is read (``item``, ``tolist``, ``if tensor``) or copied to the host without
``non_blocking`` stops the queue of work; a walk notes the place. Small tensors of whole numbers (positions, lengths,
masks) carry their values beside them, as programs decide by them. Of others a made-up number is read: 1.0, true, or
for a count very many.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from library.errors import UserError
from library.files import atomic_path
from library.safetensors_io import read_rows

_SOURCE = Path(__file__).with_name("fake_cuda.cpp")
_STEP = 2**22  # bytes; finer steps are not seen in a picture
_ROUNDED_TO = 512  # bytes, of PyTorch's caching allocator
GIB = 2**30
aten = torch.ops.aten


def library_path() -> Path:
    """Return the shared library of the device, compiled now if this PyTorch has none yet (ten seconds).

    Raises:
        UserError: there is no C++ compiler, or it cannot compile against PyTorch's headers.
    """
    text = _SOURCE.read_bytes()
    key = hashlib.sha256(text + torch.__version__.encode()).hexdigest()[:16]
    made = cache_folder() / f"fake_cuda-{key}.so"
    if made.exists():
        return made
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None or sys.platform != "linux":
        raise UserError("no C++ compiler for the fake CUDA device; install g++ (Debian: apt-get install g++)")
    made.parent.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    with atomic_path(made) as target:
        done = subprocess.run(
            [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", str(_SOURCE), "-o", str(target),
             f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", f"-L{root}/lib", "-ltorch_cpu", "-lc10",
             f"-Wl,-rpath,{root}/lib"],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise UserError(f"{_SOURCE}: {compiler} cannot compile it: {done.stderr.strip().splitlines()[-1]}")
    return made


def cache_folder() -> Path:
    """Return where what was compiled and counted is kept for the next time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


class _Stream:
    """The one stream."""

    device_index, device_type, stream_id, cuda_stream = 0, 1, 0, 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("cuda", 0)

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def _nothing(self, *_: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = _nothing

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class _Event:
    """One that has passed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def _nothing(self, *_: Any) -> None:
        return None

    record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class _Runtime:
    """What is asked of ``cudart``: pinning."""

    def cudaHostRegister(self, *_: Any) -> int:
        return 0

    cudaHostUnregister = cudaHostRegister


def pretend(walk: Walk, total: int = 80 * GIB, capability: tuple[int, int] = (9, 0), runtime: bool = True) -> None:
    """Let PyTorch answer for a card of ``total`` bytes, and take its kernels; not undone.

    Import diffusers, transformers, peft and accelerate before: some of their modules would allocate on the device.

    Args:
        walk: what is asked of memory is asked of it.
        total, capability: of the card.
        runtime: false where there is a card whose runtime answers itself.
    """
    cuda: Any = torch.cuda
    cuda.memory_allocated = cuda.memory_reserved = lambda *_: walk.live
    cuda.max_memory_allocated = cuda.max_memory_reserved = lambda *_: walk.peak
    cuda.reset_peak_memory_stats = lambda *_: walk.reset_peak()
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
        _pretend_runtime(walk, total, capability)


def _pretend_runtime(walk: Walk, total: int, capability: tuple[int, int]) -> None:
    """Answer for what a CPU build of PyTorch lacks."""

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    runtime: Any = torch.cuda
    properties = SimpleNamespace(major=capability[0], minor=capability[1], total_memory=total, name="no card")
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "_is_compiled": True,
        "_lazy_init": None, "init": None, "get_device_capability": capability, "get_device_name": "no card",
        "get_device_properties": properties,
        "is_bf16_supported": True, "synchronize": None, "empty_cache": None, "current_stream": _Stream(),
        "default_stream": _Stream(), "set_stream": None, "set_device": None, "set_rng_state": None,
        "get_rng_state_all": [], "set_rng_state_all": None, "manual_seed": None, "manual_seed_all": None,
        "get_arch_list": [], "is_current_stream_capturing": False, "memory_stats": {}, "ipc_collect": None,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(runtime, name, answer(value))
    runtime.Stream, runtime.Event = _Stream, _Event
    runtime.stream = runtime.device = lambda *_: contextlib.nullcontext()
    runtime.cudart = answer(_Runtime())
    runtime.get_rng_state = lambda *_: torch.get_rng_state()
    runtime.mem_get_info = lambda *_: (max(0, total - walk.live), total)
    bindings: Any = torch._C
    bindings._cuda_getCurrentRawStream = answer(0)
    bindings._cuda_isCurrentStreamCapturing = answer(False)
    module: Any = torch
    module.is_autocast_available = answer(True)  # or autocast would be off without a word


def _tensor(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let ``torch.tensor`` read numbers out of fake tensors, and copy to the device, where the walk sees it."""

    def tensor(data: Any, device: Any = None, **options: Any) -> Tensor:
        if isinstance(data, list) and any(isinstance(each, FakeTensor) for each in data):
            data = [each.item() if isinstance(each, FakeTensor) else each for each in data]
        made = own(data, **options)
        return made if device is None else made.to(device)

    return tensor


def _numpy(own: Callable[..., Any]) -> Callable[..., Any]:
    """Let fake tensors of the host, weights of a file, be written: as zeros."""

    def numpy(self: Tensor, **options: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return own(self, **options)
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


def _attention(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Send attention to the operator of a GPU: flash's for half precision, after autocast, and no mask."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if not query.is_cuda:
            return own(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled("cuda"):
            query, key, value = (each.to(torch.get_autocast_dtype("cuda")) for each in (query, key, value))
        if not (torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled()):
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        if _kernel(query, attn_mask) == SDPBackend.FLASH_ATTENTION:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
        wants = any(each.requires_grad for each in (query, key, value)) and torch.is_grad_enabled()
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, wants, dropout_p, is_causal, scale=scale
        )[0]

    return attention


def _rms_norm(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let RMSNorm be the one kernel that it is on a GPU; elsewhere it is several operations in fp32."""

    def rms_norm(
        x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if not x.is_cuda or (weight is not None and weight.dtype != x.dtype):
            return own(x, normalized_shape, weight, eps)
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


def _kernel(query: Tensor, mask: Tensor | None) -> SDPBackend:
    """Return the kernel of attention: flash's where it can, as on every card since Ampere."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    fits = is_half and mask is None and query.shape[-1] <= 256
    return SDPBackend.FLASH_ATTENTION if fits else SDPBackend.EFFICIENT_ATTENTION


@dataclass(frozen=True)
class Wait:
    """Where the host waited for the device: the walk's phase, and the lines that led there, the innermost last."""

    phase: str
    operation: str
    where: tuple[str, ...]


@dataclass
class Allocation:
    """Bytes that live: to what part of the run they belong, and where they were made."""

    bytes: int
    part: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    where: str


class _FakeTensors(FakeTensorMode):
    avoid_device_init = True  # else copying a real tensor to the device would be tried for real


class Walk(TorchDispatchMode):
    """Counts the bytes of the device's storages, and notes the host's waits; what touches the device is fake.

    Attributes:
        live, peak: bytes now, and the most since :meth:`reset_peak`.
        part: what is allocated from now on belongs to it, until :meth:`relabel` says more.
        parts: bytes now by part.
        history: whenever the phase changed, or the bytes by ``_STEP``: the phase, and bytes by part.
        phase: what is done now, in a word or two; the caller sets it.
        waits: of the host.
        at_peak: what lived then, where ``traces``.
        begun: when; files that are older are a model's.
    """

    def __init__(self, traces: bool = False) -> None:
        super().__init__()
        self.live = self.peak = self._noted = 0
        self.part, self.phase = "activations", ""
        self.parts: Counter[str] = Counter()
        self.history: list[tuple[str, dict[str, int]]] = []
        self.waits: list[Wait] = []
        self.traces = traces
        self.at_peak: list[Allocation] = []
        self._sizes: dict[int, Allocation] = {}
        self.begun = 0.0
        self._values = WeakIdKeyDictionary()  # of small tensors of whole numbers
        self._false: WeakIdKeyDictionary = WeakIdKeyDictionary()  # what is found in no tensor: NaN
        self.fake = _FakeTensors(allow_non_fake_inputs=True)

    def reset_peak(self) -> None:
        """Begin to look for the most anew."""
        self.peak, self.at_peak = self.live, []

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
            return int(_kernel(args[0], kwargs.get("attn_mask")).value)
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
                result = tree_map(lambda own: torch.empty_like(own, device="cuda"), values)
        else:
            with self.fake:
                result = operation(*args, **kwargs)
        self._carry(operation, args, result, values)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                self._see(tensor, operation)
        if operation in _NEVER or (operation is aten.any.default and args[0].dtype == torch.bool):
            self._false[result] = True
        if within := _WITHIN.get(operation):
            self._add(0, within(args))
        if operation in _COPIES and result.device.type == "cpu":
            return self._arrived(operation, args, kwargs, result)
        return result

    def _arrived(self, operation: Any, args: Any, kwargs: Any, result: Tensor) -> Tensor:
        """Return what a copy gives the host: a tensor of its own, of ones."""
        source = args[1] if operation is aten.copy_.default else args[0]
        if source.device.type == "cpu":
            return result
        if not (kwargs.get("non_blocking") or (operation is aten.copy_.default and len(args) > 2 and args[2])):
            self.waits.append(Wait(self.phase, str(operation), _lines()))
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
        """Whether ``read_rows`` asks, for a file that was there before; what the walk writes it reads again."""
        frame: Any = sys._getframe(3)
        while frame is not None and "torch" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None or frame.f_code is not read_rows.__code__:
            return False
        first = frame.f_locals["first"]
        return first.file.stat().st_mtime < self.begun and (first.dtype != "U8" or first.bytes > _LARGEST_TEXT)

    def _values_of(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation gives, computed from the values that its inputs carry; None where one has none."""
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        known = [self._values.get(each) if isinstance(each, FakeTensor) else each for each in tensors]
        if not all(v is not None and v.numel() <= _SMALL and not v.is_floating_point() for v in known):
            return None
        if (not tensors and operation not in _FACTORIES) or operation._schema.is_mutable:
            return None
        mine = {id(tensor): values for tensor, values in zip(tensors, known, strict=True)}
        args, kwargs = tree_map(lambda each: mine.get(id(each), each), (args, {**kwargs}))
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
            for one, own in zip(tree_leaves(result), tree_leaves(values), strict=True):
                if isinstance(one, FakeTensor) and own.numel() <= _SMALL and not own.is_floating_point():
                    self._values[one] = own.clone()
        elif operation._schema.is_mutable and isinstance(args[0], FakeTensor):
            self._values.pop(args[0], None)

    def _number(self, tensor: Tensor) -> Any:
        if tensor.device.type == "cuda":
            self.waits.append(Wait(self.phase, "item", _lines()))
        if (values := self._values.get(tensor)) is not None:
            return values.item()
        if tensor.dtype == torch.bool:
            return tensor not in self._false
        return 1.0 if tensor.dtype.is_floating_point else _VERY_MANY

    def _see(self, tensor: Tensor, operation: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = -(-storage.nbytes() // _ROUNDED_TO) * _ROUNDED_TO
        where = " < ".join(reversed(_lines(4))) if self.traces and size > 2**20 else ""
        self._sizes[key] = Allocation(size, self.part, str(operation), tuple(tensor.shape), str(tensor.dtype), where)
        self.parts[self.part] += size
        self._add(size)
        weakref.finalize(storage, self._freed, key)

    def living(self) -> list[Allocation]:
        """Return what lives now."""
        return [replace(each) for each in self._sizes.values()]

    def relabel(self, tensors: Iterable[Tensor], part: str) -> None:
        """Let what ``tensors`` hold belong to ``part``."""
        for tensor in tensors:
            if (found := self._sizes.get(tensor.untyped_storage()._cdata)) is not None:
                self.parts[found.part] -= found.bytes
                self.parts[part] += found.bytes
                found.part = part

    def _add(self, size: int, within: int = 0) -> None:
        """Note that ``size`` bytes came, of them ``within`` a kernel for a moment."""
        self.live += size
        now = self.live + within
        if now > self.peak:
            self.peak = now
            if self.traces:
                self.at_peak = self.living()
        if not self.history or self.history[-1][0] != self.phase or abs(now - self._noted) >= _STEP:
            self._noted = now
            parts = {**self.parts, "activations": self.parts["activations"] + within}
            self.history.append((self.phase, parts))

    def _freed(self, key: int) -> None:
        gone = self._sizes.pop(key)
        self.parts[gone.part] -= gone.bytes
        self._add(-gone.bytes)


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


_ROOT = Path(__file__).resolve().parents[3]


def _lines(count: int = 6) -> tuple[str, ...]:
    """Return the innermost lines of this repository that led here, the innermost last."""
    here = Path(__file__)
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(_ROOT)) and ".venv" not in f.filename]
    own = [f for f in frames if Path(f.filename) != here]
    return tuple(f"{Path(f.filename).relative_to(_ROOT)}:{f.lineno} {f.name}" for f in own[-count:])


@contextlib.contextmanager
def walking(walk: Walk) -> Iterator[Walk]:
    """Walk through what is done in the block."""
    walk.begun = time.time()
    with walk:
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # numbers become tensors on the host and are moved where we see it
        try:
            yield walk
        finally:
            torch._C._set_only_lift_cpu_tensors(before)
