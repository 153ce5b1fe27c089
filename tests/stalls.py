"""A test run that can no longer end says where it stands, and ends.

Each test has a limit of its own (``timeout`` in pyproject.toml). pytest-timeout would keep it by a thread of the test's
process, which two things escape: a test that waits in C while it holds the interpreter's lock, and a test process that
ended but whose forked children hold the pipe on which pytest-xdist waits. So the limit is kept by faulthandler, whose
timer needs no interpreter; children give the pipe up when they are forked; whatever is left is told from outside.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import stat
import sys
import threading
import time

import psutil
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

LONG = 60.0
"""Seconds from which a test is told as soon as it ends: where a run is cut off, what took its time is known."""

LIMIT = {"not slow": 800.0, "all": 2400.0}
"""Seconds in which no test begins or ends until the run is ended: longer than the longest limit of one test."""


class StallReporter:
    """In the process that hands out the tests: names the tests that run when nothing has moved for long."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._running: dict[str, float] = {}
        self._moved = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._moved = self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._moved = time.monotonic()
        seconds = self._moved - self._running.pop(nodeid, self._moved)
        if seconds > LONG:
            print(f"\n{nodeid} took {seconds:.0f} s", file=sys.__stderr__, flush=True)

    def _watch(self) -> None:
        while time.monotonic() - self._moved < self._limit:
            time.sleep(5)
        now = time.monotonic()
        waits = [f"  {test}, begun {now - since:.0f} s ago" for test, since in self._running.items()]
        print(f"\nno test has begun or ended for {self._limit:.0f} s; running:", *waits, sep="\n", file=sys.__stderr__)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())[:300]
                print(
                    process.pid,
                    process.ppid(),
                    process.status(),
                    sum(process.cpu_times()[:2]),
                    command,
                    file=sys.__stderr__,
                )
                process.kill()
        os._exit(1)


def end_process_after(seconds: float, config: pytest.Config) -> None:
    """End this process ``seconds`` from now, with all threads' stacks shown, whatever it is doing by then."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[fault_handler_stderr_fd_key])


def give_pipes_up_in_children() -> None:
    """Let no forked child hold this test process's pipes to pytest-xdist: they would seem open after its death."""
    pipes = [descriptor for descriptor in range(3, 256) if _is_pipe(descriptor)]

    def give_up() -> None:
        empty = os.open(os.devnull, os.O_RDWR)
        for pipe in pipes:
            os.dup2(empty, pipe)

    os.register_at_fork(after_in_child=give_up)


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:  # not open
        return False


def watch(config: pytest.Config) -> None:
    """Guard this process's part of a run: a worker's pipes, or the whole from the process that hands out tests."""
    if hasattr(config, "workerinput"):
        give_pipes_up_in_children()
    elif config.getoption("numprocesses", None):
        config.pluginmanager.register(
            StallReporter(LIMIT["not slow" if "not slow" in config.option.markexpr else "all"])
        )
