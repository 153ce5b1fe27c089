"""Which matrix kernels suit the processor.

PyTorch's builds for x86 multiply fp32 matrices through MKL, which is Intel's: fast on Intel's processors, and on AMD's
half as fast as oneDNN, whose kernels are generated for the processor at hand (``library.nn.frozen_linear``). PyTorch's
attention kernels for CPUs are built on the same BLAS. The maker decides and not a stop watch, so that a run gives the
same bits each time.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch


@functools.cache
def blas_suits() -> bool:
    """Return whether PyTorch's BLAS is at home on this processor."""
    return torch.backends.mkl.is_available() and _maker() == "GenuineIntel"


def _maker() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "GenuineIntel" if "Intel" in platform.processor() else ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
