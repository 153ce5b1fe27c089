"""Which kernel of attention is the fastest, by timing: no table knows, as cards differ.

cuDNN's is twice as fast as flash attention on an H100 and slower on an A100 or an RTX PRO 6000. So when a shape of
attention first comes, each kernel runs forwards and backwards on random tensors of that shape, three times to warm up
and then seven times, and the median decides. Before that a kernel shows that it is right: its output and its gradients
are compared with float64, and one that is off is never used. What was found is kept in a folder by card, versions and
shape: the next run times nothing.

    choose_kernel             what the option ``attention`` names, once it has shown that it runs here; or for "auto" a
    FastestKernel             that :func:`library.nn.attention.attend` asks, shape by shape
    activate_fastest_flash    chooses among the versions of flash attention that are installed

*When.* A shape is timed in the first forward pass that has it, in a thread of its own: there autocast is off, no hook
sees what is saved for backward, no mode counts operators. For torch.compile the answer is a constant. Where it compiles
for any size (batches of many shapes), 4,160 tokens answer for all. Nothing can be timed while a CUDA graph is captured,
nor within a backward pass: there PyTorch chooses, if the shape never came before. Each process times for itself and
waits for no other.

*FlashAttention 3 and 4* take the place of version 2 in the whole process, forward and backward alike. So the version
is chosen once, before the model runs, at 4,160 tokens.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.attention as torch_attention
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from library.checksums import read_checked_json, write_checked_json
from library.errors import UserError
from library.nn.attention import Backend, KernelName, attend, cudnn_is_sound

TOKENS = 4096 + 64  # of an image of 1024 x 1024 and a caption: where a size is not known, also cuDNN's fault counts
_ROWS = 512  # queries whose scores are in memory at once, in float64
_FLASH = {"flash3": "FA3", "flash4": "FA4"}  # as torch.nn.attention calls them

Kernel = Callable[..., Tensor]  # called as ``attend`` is
Clock = Callable[[Callable[[], object]], float]  # milliseconds that a piece of work takes
Timed = tuple[dict[str, float], dict[str, str]]  # milliseconds by kernel, and why others are left out


class AttentionShape(NamedTuple):
    """What the time of attention depends on beside kernel and card: shapes of [B, H, S, D]; the mask broadcasts."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    dtype: torch.dtype
    mask: tuple[int, ...] | None = None
    mask_dtype: torch.dtype = torch.bool
    causal: bool = False

    def __str__(self) -> str:
        (batch, _, queries, _), keys = self.query, self.key[2]
        tokens = f"{batch} x {queries}" if batch > 1 else f"{queries}"
        tokens += f" tokens to {keys}" if keys != queries else " tokens"
        return tokens + ", masked" * (self.mask is not None) + ", causal" * self.causal


def choose_kernel(
    named: KernelName, device: torch.device, shape: AttentionShape, folder: Path, report: Callable[[str], object]
) -> Backend:
    """Return what is to be the backend of a model's attention.

    Args:
        named: by the user.
        device: that the model attends on.
        shape: heads and dtype of the model, and whether captions are masked, at a size that a kernel is tried on.
        folder: where times are kept.
        report: is given a line for each shape that is timed or remembered.

    Raises:
        UserError: the kernel that is named cannot run there or is wrong, or its package is not installed.
    """
    is_dry_run = isinstance(torch.empty(0, device=device), FakeTensor)  # where nothing runs
    if is_dry_run or (named == "auto" and device.type != "cuda"):
        return named
    if named == "auto":
        chooser = FastestKernel(device.type, folder, report)
        flash = activate_fastest_flash(chooser, device, shape)
        chooser.kernels = {name: partial(attend, backend=name) for name in ("cudnn", flash, "efficient")}  # type: ignore[arg-type]
        return chooser
    try:
        _activate(named)
    except Exception as error:  # whatever the import of a package raises
        raise UserError(f"attention: {named!r} is not installed for this PyTorch ({error}); choose 'auto'") from error
    if reason := _measure({named: partial(attend, backend=named)}, lambda _: 0.0, device, shape)[1].get(named):
        masked = " with the mask that captions of one batch need" if shape.mask else ""
        heads = f"heads of {shape.query[3]} in {str(shape.dtype).removeprefix('torch.')}"
        raise UserError(f"attention: {named!r} {reason} ({heads} on {device.type}{masked}); choose 'auto'")
    return named


@dataclass(eq=False)
class FastestKernel:
    """Chooses the fastest kernel that is right for a shape.

    Attributes:
        device_type: "cuda"; on others PyTorch chooses.
        folder: where times are kept.
        report: is given a line for each shape.
        kernels: name -> kernel.
        clock: measures a kernel; default: by CUDA's events.
    """

    device_type: str
    folder: Path
    report: Callable[[str], object]
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    clock: Clock = field(default_factory=lambda: _by_events)
    _chosen: dict[tuple[torch.device, AttentionShape], Any] = field(default_factory=dict)

    def choose(self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> KernelName:
        """Return the kernel for query [B, H, Sq, D] and key [B, Hkv, Sk, D]; "auto" lets PyTorch choose."""
        if query.device.type != self.device_type:
            return "auto"
        sizes = _known(query.shape, (1, 1, TOKENS, 128)), _known(key.shape, (1, 1, TOKENS, 128))
        if mask is None:
            return self._answer(query.device, *sizes, query.dtype, None, torch.bool, causal)
        covered = _known((1,) * (4 - mask.ndim) + tuple(mask.shape), (1, 1, TOKENS, TOKENS))
        return self._answer(query.device, *sizes, query.dtype, covered, mask.dtype, causal)

    @torch.compiler.assume_constant_result
    def _answer(self, device: torch.device, *of_shape: Any) -> KernelName:
        shape = AttentionShape(*of_shape)
        if (device, shape) in self._chosen:
            return self._chosen[device, shape]
        sound = cudnn_is_sound(shape.key[2], shape.mask is not None)
        kernels = {name: kernel for name, kernel in self.kernels.items() if name != "cudnn" or sound}
        if (found := self.times(kernels, device, shape)) is None:
            return "auto"
        times, left_out = found
        chosen = self._chosen[device, shape] = _fastest(times, "auto")
        others = [f"{name} {ms:.2f}" for name, ms in times.items() if name != chosen]
        others += [f"{name} {reason}" for name, reason in left_out.items()]
        which = f"{chosen}, {times[chosen]:.2f} ms forward and backward" if times else "as PyTorch chooses"
        self.report(f"attention: {which} at {shape}" + (f" ({', '.join(others)})" if others else ""))
        return chosen

    def times(self, kernels: Mapping[str, Kernel], device: torch.device, shape: AttentionShape) -> Timed | None:
        """Return the times of ``kernels``, measured or remembered; None where nothing can be measured now."""
        on_card = device.type == "cuda"
        card = (torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)) if on_card else "cpu"
        versions = {"card": card, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
        key = json.dumps(versions | shape._asdict() | {"kernels": sorted(kernels)}, default=str)
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        if (found := _remembered(path, kernels)) is not None:
            return found
        is_backward = torch._C._current_graph_task_id() != -1  # its thread would wait for itself
        if is_backward or (on_card and torch.cuda.is_current_stream_capturing()):
            return None
        with ThreadPoolExecutor(1) as thread:
            times, left_out = thread.submit(_measure, kernels, self.clock, device, shape).result()
        if on_card:
            torch.cuda.empty_cache()  # the thread's stream may not be the run's
        if times and not any("fails" in reason for reason in left_out.values()):  # which another time may not
            with suppress(UserError):  # a folder that cannot be written: the next run times again
                write_checked_json(path, {"key": json.loads(key), "ms": times, "left_out": left_out})
        return times, left_out


def activate_fastest_flash(chooser: FastestKernel, device: torch.device, shape: AttentionShape) -> str:
    """Let PyTorch's flash attention be the fastest version that is installed and right; return its name."""
    times = dict[str, float]()
    query, key = ((1, heads, TOKENS, width) for _, heads, _, width in (shape.query, shape.key))
    usual = AttentionShape(query, key, shape.dtype)
    for name in (*_FLASH, "flash"):
        with suppress(Exception):  # not installed, or not for this card
            _activate(name)
            if name in _FLASH or times:  # version 2 needs no times alone
                found = chooser.times({name: partial(attend, backend="flash")}, device, usual)
                times |= found[0] if found else {}
    best = _fastest(times, "flash")
    _activate(best)
    return best


def _activate(kernel: str) -> None:
    if kernel in _FLASH:
        torch_attention.activate_flash_attention_impl(_FLASH[kernel])
    elif torch_attention.current_flash_attention_impl() is not None:
        torch_attention.restore_flash_attention_impl()


def _fastest(times: Mapping[str, float], otherwise: str) -> Any:
    return min(times, key=lambda name: times[name], default=otherwise)


def _known(sizes: Sequence[int], otherwise: Sequence[int]) -> tuple[int, ...]:
    """Return ``sizes``, those that torch.compile leaves open replaced."""
    if not torch.compiler.is_compiling():
        return tuple(sizes)
    from torch.fx.experimental.symbolic_shapes import has_static_value  # a second to import

    return tuple(n if has_static_value(n) else other for n, other in zip(sizes, otherwise, strict=True))


def _remembered(path: Path, kernels: Mapping[str, Kernel]) -> Timed | None:
    """Return what a file says of ``kernels``; None where there is none, or it is damaged."""
    try:
        found = read_checked_json(path)
        times = {name: float(ms) for name, ms in found["ms"].items()}
        left_out = {name: str(reason) for name, reason in found["left_out"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    whole = {*times, *left_out} == {*kernels} and times and all(0 < ms < float("inf") for ms in times.values())
    return (times, left_out) if whole else None


def _measure(kernels: Mapping[str, Kernel], clock: Clock, device: torch.device, shape: AttentionShape) -> Timed:
    """Return milliseconds by kernel, of those that are right, and why the others are left out."""
    times, left_out = dict[str, float](), dict[str, str]()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's reasons why a kernel cannot run
        for name, kernel in kernels.items():
            try:
                *tensors, mask = _tensors(shape, device)
                work = partial(_run, kernel, tensors, mask, shape.causal)
                if fault := _fault(work(), tensors, mask, shape):
                    left_out[name] = fault
                else:
                    times[name] = clock(work)
            except UserError:
                left_out[name] = "cannot run it"
            except Exception as error:  # packages raise what they like
                left_out[name] = f"fails: {(str(error).strip() or repr(error)).splitlines()[0]}"
    return times, left_out


def _tensors(shape: AttentionShape, device: torch.device) -> list[Any]:
    """Return random query, key, value and gradient of the output, [B, S, H, D], and a mask that hides some keys."""
    random = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
    options: Any = {"generator": random, "device": device, "dtype": shape.dtype}
    sizes = [(batch, tokens, heads, width) for batch, heads, tokens, width in (*shape[:2], shape.key, shape.query)]
    made = [torch.randn(size, **options, requires_grad=True) for size in sizes]
    mask = None
    if shape.mask is not None:
        mask = torch.ones(shape.mask, dtype=torch.bool, device=device)
        mask[..., shape.mask[-1] - shape.mask[-1] // 8 :] = False  # as a caption's end
        if shape.mask_dtype != torch.bool:
            mask = torch.zeros_like(mask, dtype=shape.mask_dtype).masked_fill(~mask, float("-inf"))
    return [*made, mask]


def _run(kernel: Kernel, tensors: Sequence[Tensor], mask: Tensor | None, causal: bool) -> list[Tensor]:
    """Return the output [B, Sq, H, D] and the gradients of query, key and value."""
    output = kernel(*tensors[:3], mask=mask, causal=causal)
    return [output.detach(), *torch.autograd.grad(output, tensors[:3], tensors[3])]


def _fault(made: list[Tensor], tensors: Sequence[Tensor], mask: Tensor | None, shape: AttentionShape) -> str:
    """Return what is wrong with an output and gradients, "" if nothing is.

    Compared with float64 are the first heads of the first sample and the last of the last. The error of a row may be
    eight times the dtype's epsilon (at least TF32's), of the row or of the rows' root mean square: kernels round scores
    and their gradients too, which makes up to three.
    """
    limit = 8 * max(torch.finfo(shape.dtype).eps, 2.0**-10)
    names = ("output", "gradient of the query", "gradient of the key", "gradient of the value")
    scores = (*shape.query[:3], shape.key[2])
    for last in (False, True):
        part = partial(_part, shared=shape.key[1], last=last)
        seen = None if mask is None else part(mask.expand(scores).transpose(1, 2)).transpose(1, 2)
        exact = _exact([part(tensor) for tensor in tensors], seen, shape.causal)
        for name, ours, right in zip(names, made, exact, strict=True):
            rows = right.norm(dim=-1)
            errors = (part(ours) - right).norm(dim=-1) / rows.clamp_min(rows.square().mean().sqrt())
            if not (error := errors.max().item()) <= limit:  # nor NaN
                return f"is wrong: the {name} is off by {error:.2g}"
    return ""


def _part(tensor: Tensor, shared: int, last: bool) -> Tensor:
    """Return of [B, S, H, D] the heads that share one of the ``shared`` heads of keys: in the first sample, or last."""
    heads = tensor.shape[2] // shared
    return tensor[-1:, :, -heads:] if last else tensor[:1, :, :heads]


def _exact(tensors: Sequence[Tensor], mask: Tensor | None, causal: bool) -> list[Tensor]:
    """Return what :func:`_run` does, by PyTorch's plain formula in float64, some queries at a time."""
    *leaves, gradient = (tensor.detach().double().requires_grad_() for tensor in tensors)
    (query, key, value), outputs = leaves, list[Tensor]()
    for first in range(0, query.shape[1], _ROWS):
        rows = slice(first, first + _ROWS)
        q, keys = query[:, rows], first + _ROWS if causal else key.shape[1]
        seen = None if mask is None else mask[:, :, rows] if mask.dtype == torch.bool else mask[:, :, rows].double()
        outputs.append(attend(q, key[:, :keys], value[:, :keys], mask=seen, causal=causal, backend="math"))
        outputs[-1].backward(gradient[:, rows])
    return [torch.cat(outputs, dim=1).detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _by_events(work: Callable[[], object], warm: int = 3, runs: int = 7) -> float:
    """Return the median milliseconds of ``work`` on the current CUDA device, without the host's launches."""
    for _ in range(warm):
        work()
    torch.cuda.synchronize()  # what the run has queued on its own stream
    torch.cuda._sleep(20_000_000)  # cycles, 10 ms: meanwhile the host queues all runs
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    marks[-1].synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairwise(marks))
