"""Commands with a time limit that holds for all they start."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


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
