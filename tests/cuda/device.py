"""Processes on the fake CUDA device: one that has imported everything, and a fork of it for each walk.

    device = FakeDevice()
    found = device.walk("train", folder, model_type="flux", flags=["--fp8_scaled"])

``walks.py`` has the functions that are walked through. An exception in one is an ``AssertionError`` here, with its
traceback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from library.training.memory.fake_cuda import library_path

ROOT = Path(__file__).resolve().parents[2]


class FakeDevice:
    """Started once for many walks."""

    def __init__(self) -> None:
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        settings = {"LD_PRELOAD": str(library_path()), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.device"],
            env={**os.environ, **settings, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def walk(self, function: str, folder: Path, **arguments: Any) -> dict[str, Any]:
        """Return what ``function`` of ``walks.py`` returns; ``folder`` is its first argument, the others are JSON's."""
        process, answer = self._process, folder / "answer.json"
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([function, str(folder), arguments, str(answer)]) + "\n")
        process.stdin.flush()
        said = process.stdout.readline()
        assert answer.is_file(), f"{function} ended without an answer: {said}"
        found = json.loads(answer.read_text())
        answer.unlink()
        assert "raised" not in found, found["raised"]
        return found

    def close(self) -> None:
        """End the processes."""
        self._process.terminate()  # processes that others have forked hold its standard input open
        self._process.wait(60)


def _serve() -> None:
    """Fork for each line of the standard input; say on the standard output when that one has ended."""
    from tests.cuda import walks

    told = os.dup(1)
    for line in sys.stdin:
        function, folder, arguments, answer = json.loads(line)
        child = os.fork()
        if child == 0:
            with tempfile.TemporaryFile() as log:
                for descriptor in (1, 2):
                    os.dup2(log.fileno(), descriptor)
                walks.answer(function, Path(folder), arguments, Path(answer))
                sys.stdout.flush()
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        os.write(told, f"{status}\n".encode())


if __name__ == "__main__":
    _serve()
