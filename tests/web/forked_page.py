"""Pages in processes forked from one that has imported the page: Python's start and imports are most of a page's.

``tests/test_windows.py`` starts it as a user does.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]


class Page:
    """The process of a page, with what tests call of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        return None if psutil.pid_exists(self.pid) else 0

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end; raises a ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        try:
            psutil.Process(self.pid).wait(timeout)
        except psutil.NoSuchProcess:
            return
        except psutil.TimeoutExpired:
            raise subprocess.TimeoutExpired("ui.py", timeout or 0) from None


def start(
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    files: int | None = None,
    seconds: float | None = None,
) -> Page:
    """Start ``ui.py`` with ``words`` in ``folder``, in a session of its own; it prints into ``page.log`` there.

    ``files`` and ``seconds`` are as of ``tests.web.page.serve``.
    """
    forking = _forking()
    assert forking.stdin is not None
    assert forking.stdout is not None
    asked = {"words": [*words], "folder": str(folder), "environment": {**environment}}
    forking.stdin.write(json.dumps(asked | {"files": files, "seconds": seconds}) + "\n")
    forking.stdin.flush()
    return Page(int(forking.stdout.readline()))


@cache
def _forking() -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.web.forked_page"], cwd=ROOT, text=True, start_new_session=True, **pipes
    )
    atexit.register(process.terminate)
    return process


def _fork() -> None:
    """Fork for each line of the standard input, and answer the process's number."""
    import ui
    from library.web import app, connections  # noqa: F401

    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            asked = json.loads(line)
            connections._SECONDS = asked["seconds"] or connections._SECONDS
            _prepare(asked)
            code = 1
            try:
                ui.main()
                code = 0
            except SystemExit as left:
                code = int(left.code or 0)
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        print(pid, flush=True)


def _prepare(asked: Mapping[str, Any]) -> None:
    """Let this process be as one that was started for the page."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(Path(asked["folder"]) / "page.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, descriptor)
    os.closerange(3, 32)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.path[0] = str(ROOT)  # was the working directory
    sys.argv = [str(ROOT / "ui.py"), *asked["words"]]
    if asked["files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (asked["files"], resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


if __name__ == "__main__":
    _fork()
