"""Commands run by tests, each with its descendants in one process group, so that nothing outlives a time limit."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.commands import run_with_limit

LIMIT = 240  # seconds; the slowest command takes 20 on a quiet machine


def launcher(processes: int = 2) -> list[str]:
    """Return the arguments of python that start a script in several processes, on a port that nobody has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(port)]


def run_command(
    command: Sequence[str],
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    limit: float = LIMIT,
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` to its end and return code, output and errors; ``environment`` joins this process's.

    Raises:
        AssertionError: it took longer than ``limit`` seconds; what it printed is in the message.
    """
    try:
        return run_with_limit(command, limit, cwd, {"OMP_NUM_THREADS": "1", **(environment or {})})
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"{' '.join(command)}: not done after {limit} s\n{late.stdout}\n{late.stderr}") from None
