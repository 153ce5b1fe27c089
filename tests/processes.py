"""Commands run by tests, each with its descendants in one process group, so that nothing outlives a time limit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

LIMIT = 240  # seconds; the slowest command takes 20 on a quiet machine


def free_ports(count: int = 1) -> list[int]:
    """Return ports that nobody has, and that nobody is given who asks for any: gloo does, for each of its connections.

    A test process takes them from a range of its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    found: list[int] = []
    while len(found) < count:
        port = 20000 + 1500 * worker + random.SystemRandom().randrange(1500)  # systems give away 32768 and more
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            found += [] if port in found else [port]
    return found


def launcher(processes: int = 2) -> list[str]:
    """Return the arguments of python that start a script in several processes, on a port of its own."""
    port = str(free_ports()[0])
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", port]


def run_command(
    command: Sequence[str], cwd: Path | None = None, environment: Mapping[str, str] | None = None, limit: float = LIMIT
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` to its end and return code, output and errors; ``environment`` joins this process's.

    Raises:
        AssertionError: it took longer than ``limit`` seconds; what it printed is in the message.
    """
    try:
        return run_with_limit(command, limit, cwd, {"OMP_NUM_THREADS": "1", **(environment or {})})
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"{' '.join(command)}: not done after {limit} s\n{late.stdout}\n{late.stderr}") from None


def run_with_limit(
    command: Sequence[str], seconds: float, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` to its end, with its descendants in a process group; ``environment`` joins this process's.

    ``subprocess.run`` kills only the child at its limit and then waits for the pipes, which a launcher's workers keep
    open: one stuck worker would hold the caller for ever.

    Raises:
        subprocess.TimeoutExpired: it took longer; what it has printed until then is in it, as text.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise subprocess.TimeoutExpired(list(command), seconds, stdout, stderr) from None
    return subprocess.CompletedProcess(list(command), process.returncode, stdout, stderr)
