"""The memory that there is, what is kept of it, and how running out is recognised."""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from library.config.schema import SharedTrainingKeys
from library.errors import UserError
from library.nn.checkpointing import ActivationCheckpointing, HostOffload

GIB = 2**30
_MESSAGES = (
    *("can't allocate memory", "not enough memory", "Cannot allocate memory", "std::bad_alloc"),  # of torch on a CPU
    *("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),  # outside of torch's allocator
)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
UNUSED, ON_HEAP = 1 << 28, 1 << 30  # bytes: glibc's trim and mmap thresholds in training


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


@contextmanager
def when_memory_runs_out(explain: Callable[[], UserError]) -> Iterator[None]:
    """Turn running out of memory in the block into ``explain()``'s error, after freeing what the block held."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the activations
    else:
        return
    from library.accelerator import release  # a second to import, which a benchmark's processes do without

    release()
    raise explain()


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees; does nothing without glibc, or where its user has decided.

    A step on a CPU allocates and frees the same tensors over and over. glibc's ``malloc`` returns large blocks to the
    kernel as they are freed, and each comes back page by page, every page a fault and filled with zeros: a tenth of a
    step of a small language model on an EPYC. So blocks up to a GiB come from the heap, of which 256 MiB may lie unused
    at its end. A process that took 820 MiB at its peak then takes 900: blocks on the heap have gaps between them.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_TRIM_THRESHOLD, UNUSED)
    mallopt(_M_MMAP_THRESHOLD, ON_HEAP)


def available_bytes(device: torch.device) -> int:
    """Return how much memory this process could have in all: what it holds, and what is free beside it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    limits = [psutil.Process().memory_info().rss + psutil.virtual_memory().available]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of a container
        with suppress(OSError, ValueError):
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return min(limits)


def tensor_bytes(tensors: Any) -> int:
    """Return the bytes of tensors, those that share memory once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def in_words(count: int) -> str:
    """Return bytes as ``11.3 GiB`` or ``24 MiB``."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def recompute_blocks(
    model: Any,
    blocks: int,
    training: SharedTrainingKeys,
    device: torch.device,
    pairs: Mapping[nn.Module, nn.Module] | None = None,
    chained_args: tuple[str, ...] = (),
) -> None:
    """Let ``model`` compute its blocks again in backward, if ``training`` says so.

    Args:
        model: a transformer of diffusers or a ``TransformerLM``.
        blocks: how many it has.
        training: which blocks, what is kept all the same, where inputs wait.
        device: where the model computes.
        pairs, chained_args: blocks that may run within one checkpoint (:class:`ActivationCheckpointing`).
    """
    if not training.gradient_checkpointing:
        return
    together = None if training.activation_budget_mb or training.cpu_offload_checkpointing else pairs
    offload = HostOffload(device) if training.cpu_offload_checkpointing else None
    keep = training.activation_budget_mb * 2**20
    draws = draws_random_numbers(model)
    model.enable_gradient_checkpointing(ActivationCheckpointing(blocks, keep, offload, together, chained_args, draws))


def draws_random_numbers(model: nn.Module) -> bool:
    """Return whether a forward pass in training draws any: its own dropouts do, and those of adapters in it."""
    modules = list(model.modules())
    own = (module.p for module in modules if isinstance(module, nn.modules.dropout._DropoutNd))
    return any(own) or any(max(getattr(module, "dropouts", (0,))) > 0 for module in modules)
