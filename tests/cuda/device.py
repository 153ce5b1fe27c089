"""Processes on the fake CUDA device: one that has imported everything, and a fork of it for each call.

device = FakeDevice()
found = device.walk("train", folder, model_type="flux", flags=["--fp8_scaled"])    a function of ``walks.py``
monkeypatch.setattr(dry_run, "device_processes", device.processes)                 what the library counts in one
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from library.errors import UserError
from library.training.memory.fake_cuda import library_path

ROOT = Path(__file__).resolve().parents[2]


class FakeDevice:
    """Started once for many calls; in the place of a pool of processes too, as ``device_processes`` has it."""

    def __init__(self) -> None:
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        settings = {"LD_PRELOAD": str(library_path()), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.device"],
            env={**os.environ, **settings, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def walk(self, function: str, folder: Path, **arguments: Any) -> dict[str, Any]:
        """Return what a function of ``walks.py`` returns; ``folder`` is its first argument."""
        from tests.cuda import walks

        return self.submit(getattr(walks, function), folder, **arguments).result()

    @contextmanager
    def processes(self, _count: int = 1) -> Iterator[FakeDevice]:
        """Yield this, as ``device_processes`` yields a pool."""
        yield self

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        """Call a function of a module in a process of its own, and wait for it.

        What is not a ``UserError`` is raised as an ``AssertionError`` with its traceback.
        """
        process, future = self._process, Future[Any]()
        assert process.stdin is not None
        assert process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            question, answer = Path(folder, "question"), Path(folder, "answer")
            question.write_bytes(pickle.dumps((Path.cwd(), call, arguments, keywords)))
            process.stdin.write(f"{folder}\n".encode())
            process.stdin.flush()
            status = process.stdout.readline()
            assert answer.is_file(), f"{call.__name__} ended without an answer: {status!r}"
            found, error = pickle.loads(answer.read_bytes())
        if error is None:
            future.set_result(found)
        else:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """End the processes."""
        self._process.terminate()  # processes that others have forked hold its standard input open
        self._process.wait(60)


def _serve() -> None:
    """Fork for each line of the standard input; say on the standard output when that one has ended."""
    from tests.cuda import walks  # noqa: F401  # has everything imported

    gc.freeze()  # what was imported is garbage to no collection
    told = os.dup(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            with tempfile.TemporaryFile() as log:
                for descriptor in (1, 2):
                    os.dup2(log.fileno(), descriptor)
                _answer(Path(line.strip()))
                sys.stdout.flush()
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        os.write(told, f"{status}\n".encode())


def _answer(folder: Path) -> None:
    """Call what is pickled in ``folder``; write what it returns and what it raises there."""
    found, error = None, None
    try:
        place, function, arguments, keywords = pickle.loads((folder / "question").read_bytes())
        os.chdir(place)
        found = function(*arguments, **keywords)
    except UserError as wrong:
        error = wrong
    except BaseException:
        error = AssertionError(traceback.format_exc())
    (folder / "answer").write_bytes(pickle.dumps((found, error)))


if __name__ == "__main__":
    _serve()
