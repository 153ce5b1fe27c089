"""Scripts in processes of their own, forked from one that has imported everything already.

Starting a process and importing torch, diffusers and accelerate takes longer than a short training. What a script
prints, how it ends and what signals do to it is as in a process that Python started; each script has a test that starts
it so.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

import torch

from tests.curves import without_curves
from tests.processes import LIMIT, free_ports

ROOT = Path(__file__).resolve().parents[1]
HEAVY = [f"library.training.{name}" for name in ("trainer", "tasks.image_lora", "tasks.chat_lora", "tasks.pretraining")]
PRELOADED = ["tests.worker_group", "train_lora", "train_llm", *HEAVY, "tests.runs"]  # the last has diffusers and peft


def fork_server() -> ForkServerContext:
    """Return the context whose processes begin with everything imported; there is one server in each test process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with mock.patch.dict(os.environ, PYTHONPATH=paths):  # wherever pytest was started, the modules are found
        forkserver.ensure_running()
    return context


def begin_as_started_by_python() -> None:
    """In a forked process: undo what the server left, and end when the test process does."""
    gc.freeze()  # what was imported is garbage to no collection
    os.fsync = lambda descriptor: None  # as in tests/conftest.py
    multiprocessing.set_start_method("fork", force=True)  # of data loaders' workers; else it is the server's own
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # the workers of data loaders see it


class Script:
    """A running script, with its descendants in one process group.

    Attributes:
        pid: of the process, and of its group.
    """

    def __init__(
        self,
        script: Path,
        words: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        lines: bytes = b"",
    ) -> None:
        self._files = [Path(tempfile.mkstemp()[1]) for _ in ("stdin", "stdout", "stderr")]
        self._files[0].write_bytes(lines)
        self._command = [str(script), *map(str, words)]
        settings = {**os.environ, **(environment or {})}
        self._process = fork_server().Process(target=_run, args=(self._command, cwd, settings, self._files))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def has_ended(self) -> bool:
        return self._process.exitcode is not None

    def state(self) -> str:
        """Return what each thread of the process is doing, where Linux tells it: running, or what it waits for."""
        found = []
        for task in Path(f"/proc/{self.pid}/task").glob("*"):
            with suppress(OSError):
                found.append((task / "stat").read_text().rpartition(")")[2].split()[0] + (task / "wchan").read_text())
        return f"threads: {', '.join(found) or 'none'}"

    def wait(self, limit: float = LIMIT) -> subprocess.CompletedProcess[str]:
        """Return exit code, output and errors once it has ended.

        Raises:
            AssertionError: it had not after ``limit`` seconds, and was killed.
        """
        self._process.join(limit)
        late = not self.has_ended()
        if late:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.join()
        texts = [path.read_text() for path in self._files[1:]]
        for path in self._files:
            path.unlink()
        assert not late, "\n".join((f"{self._command}: not done after {limit} s", *texts))
        return subprocess.CompletedProcess(self._command, self._process.exitcode or 0, *texts)


def flags_of(settings: Mapping[str, object]) -> list[str]:
    """Return the command line of ``settings``: a list is several words, True and False a switch, None nothing."""
    words: list[str] = []
    for key, value in settings.items():
        if isinstance(value, bool):
            words.append(f"--{key}" if value else f"--no-{key}")
        elif value is not None:
            words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return words


def run_script(
    script: Path, words: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None, lines: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end; ``lines`` is what it finds on its standard input."""
    return Script(script, words, cwd, environment, lines).wait()


def start_two(
    script: Path, words: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None
) -> list[Script]:
    """Start a script in two processes with the environment that torchrun gives them."""
    group = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports()[0]),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    group |= environment or {}
    return [Script(script, words, cwd, group | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]


def run_code(
    code: str, words: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script of these lines to its end."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        return run_script(Path(file.name), words, cwd, environment)


def _run(command: Sequence[str], cwd: Path, environment: Mapping[str, str], files: Sequence[Path]) -> None:
    begin_as_started_by_python()
    os.setsid()
    for descriptor, path in enumerate(files):
        os.dup2(os.open(path, os.O_WRONLY if descriptor else os.O_RDONLY), descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # for as long as the process lives
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = list(command)
    with without_curves():
        runpy.run_path(command[0], run_name="__main__")
