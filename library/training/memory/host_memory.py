"""Memory that a training step on a CPU gives back and takes again in the next one stays in the process.

A step allocates and frees the same tensors over and over. glibc's ``malloc`` returns large blocks to the kernel as they
are freed, and each comes back page by page, every page a fault and filled with zeros: a tenth of a step of a small
language model on an EPYC, a fifth with the models of other programs. So blocks up to a GiB come from the heap, of
which 256 MiB may lie unused at its end. A process that took 820 MiB at its peak then takes 900: blocks on the heap have
gaps between them. (GPUs are another matter; their memory is PyTorch's to keep.)
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_UNUSED, _ON_HEAP = 1 << 28, 1 << 30  # bytes


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees; does nothing without glibc, or where its user has decided."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_TRIM_THRESHOLD, _UNUSED)
    mallopt(_M_MMAP_THRESHOLD, _ON_HEAP)
