"""Does memory that was freed come back without page faults? Asked of the kernel, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[3]
_STEPS = """
import resource, sys, torch
torch.set_num_threads(1)
from library.training.memory.budget import keep_freed_memory

def step():
    return sum(torch.ones(size << 18).sum().item() for size in (48, 3, 40, 64))  # MiB

keep_freed_memory() if sys.argv[1] == "keep" else None
step(), step()
begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun)
"""


def faults(*words: str, **environment: str) -> int:
    """Return the page faults of five steps that allocate 155 MiB each."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", _STEPS, *words],
        capture_output=True, text=True, check=True, cwd=_ROOT, env=inherited | environment,
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")
def test_freed_memory_is_taken_again_without_page_faults_unless_the_user_has_decided() -> None:
    without = faults("leave")
    if without < 1000:
        pytest.skip("this malloc keeps what is freed by itself")
    assert faults("keep") < without / 20
    assert faults("keep", MALLOC_MMAP_THRESHOLD_="1000000") > without / 2
