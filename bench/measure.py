"""How the benchmarks measure: cases side by side, and a report in one form.

*Time*: every case lives in a process of its own with one thread; steps are taken in turn, round after round, and
counted in CPU seconds, so that other programs on the machine disturb little; with more threads by the clock. The median
counts. Tandem sets how its threads wait (``WAITING``) and, in training, how its allocator keeps memory (``KEEPING``).
Other programs are measured without these settings, as they come, and with them (:func:`both_ways`).

*Memory*: another process each, freshly loaded; what two steps add at most to the resident memory of the loaded model,
files that are mapped in not counted (Linux: VmHWM, reset through /proc/self/clear_refs), gradients and optimizer state
of the LoRA included.

A :class:`Case` is a function that can be pickled and its arguments; in the child process it builds a
:class:`Stepper`.

On a card a process a :class:`Job` yields rows, within a time limit (:class:`Children`): what fails or hangs takes no
other down.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from library.files import write_text
from library.training.memory.budget import ON_HEAP, UNUSED

_END_SECONDS = 10  # in which a process that has sent all ends
_TRIM_THRESHOLD = 1 << 20  # bytes from which glibc gives memory back at once; for the memory runs only
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
WAITING = {name: os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in os.environ}
KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(ON_HEAP), "MALLOC_TRIM_THRESHOLD_": str(UNUSED)}
SAME = ", same settings"
_PRELOADED = ["diffusers.models.transformers.transformer_flux", "diffusers.loaders.peft", "peft"]  # seconds each time


class Stepper(Protocol):
    """A loaded case."""

    base_bytes: int  # size of the frozen weights

    def step(self) -> float:
        """Take one training step; return its loss."""
        ...


class Case(NamedTuple):
    """What ``build`` makes of ``arguments``, in a process that has ``settings`` in its environment."""

    build: Callable[..., Any]
    arguments: tuple[Any, ...]
    settings: Mapping[str, str] = {}


def both_ways(cases: Mapping[str, Case], settings: Mapping[str, str]) -> dict[str, Case]:
    """Return Tandem's case with its ``settings``, and each other program's as it comes and with the same settings."""
    found = dict[str, Case]()
    for name, case in cases.items():
        same = case._replace(settings=settings)
        found |= {name: same} if name == "tandem" else {name: case, name + SAME: same}
    return found


def clock() -> float:
    """Return the CPU seconds of this process if it has one thread; of several, the clock's."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def step_seconds(stepper: Stepper) -> float:
    """Return how long a step takes."""
    started = clock()
    stepper.step()
    return clock() - started


def measure(cases: Mapping[Any, Case], rounds: int) -> dict[Any, dict[str, float]]:
    """Return CPU seconds of a step of every case, and its memory (:func:`measure_memory`)."""
    found = measure_memory(cases)
    for name, steps in measure_time(cases, rounds).items():
        found[name]["step_s"] = statistics.median(steps)
    return found


def measure_time(
    cases: Mapping[Any, Case], rounds: int, threads: int = 1, take: Callable[[Any], Any] = step_seconds
) -> dict[Any, list[Any]]:
    """Return what ``take`` finds of every case, round after round, the cases taken in turn."""
    workers = {}
    for name, case in cases.items():  # loaded one after the other: building needs memory
        workers[name] = start(_serve_time, case, threads, take, settings=case.settings)
        _receive(*workers[name], name)
    seconds: dict[Any, list[Any]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (process, connection) in workers.items():
            connection.send(True)
            seconds[name].append(_receive(process, connection, name))
    for process, connection in workers.values():
        connection.send(False)
        process.join()
    return seconds


def measure_memory(cases: Mapping[Any, Case]) -> dict[Any, dict[str, float]]:
    """Return what each case's steps add, its peak and its frozen weights in MiB."""
    found = {}
    for name, case in cases.items():
        process, connection = start(_serve_memory, case, settings=case.settings)
        sizes = zip(("added_mib", "peak_mib", "weights_mib"), _receive(process, connection, name), strict=True)
        found[name] = {key: size / 2**20 for key, size in sizes}
        process.join()
    return found


def benchmark_parser(doc: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark with the module's docstring ``doc``; ``rounds``: steps of a case by default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=int, default=rounds, help="timed steps of each case (default: %(default)s)"
        )
    return parser


class Table:
    """Rows of a report, printed as they come.

    Args:
        columns: key of a row -> format of its value, which begins with the column's width: "<20", "8.3f". What a row
            lacks is left blank, and its "error" is printed behind it.
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._columns = {key: (format_, re.match(r"<?\d+", format_)[0]) for key, format_ in columns.items()}  # type: ignore[index]

    def add(self, row: dict[str, Any]) -> None:
        """Print ``row``, the first under the keys, and keep it."""
        if not self.rows:
            print(*(f"{key:{width if width[0] == '<' else '>' + width}}" for key, (_, width) in self._columns.items()))
        self.rows.append(row)
        cells = [
            f"{'':{width}}" if row.get(key) is None else format(row[key], format_)
            for key, (format_, width) in self._columns.items()
        ]
        print(" ".join([*cells, row.get("error", "")]).rstrip(), flush=True)


def finish(rows: list[dict[str, Any]], ratios: Mapping[str, float], path: Path | None, machine: str = "") -> None:
    """Print the ratios; write ``{"machine", "commit", "rows", "ratios"}`` as JSON if a path was given."""
    for name, value in ratios.items():
        print(f"{name:<40} {value:.3f}")
    if path is not None:
        report = {"machine": machine or machine_name(), "commit": commit(), "rows": rows, "ratios": ratios}
        write_text(path, json.dumps(report, indent=1) + "\n")


def machine_name() -> str:
    """Return architecture, cores and torch version."""
    return f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"


def commit() -> str | None:
    """Return the commit of this repository, or None outside of git or without it."""
    if shutil.which("git") is None:
        return None
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip() or None


def resident(field: str, process: int | str = "self") -> int:
    """Return the memory of a process (VmRSS, VmHWM, RssAnon) in bytes."""
    line = next(x for x in Path(f"/proc/{process}/status").read_text().splitlines() if x.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def reason(error: Exception) -> str:
    """Return why a case has no row, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, ModuleNotFoundError):
        return f"left out: needs {error.name}, which is not installed"
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def wait_for(device: torch.device) -> None:
    """Return when ``device`` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def reset_peak() -> None:
    """Set VmHWM to VmRSS."""
    Path("/proc/self/clear_refs").write_text("5")


def _serve_time(connection: Connection, case: Case, threads: int, take: Callable[[Any], Any]) -> None:
    """Measure whenever the parent says so; answer with what was found."""
    torch.set_num_threads(threads)
    built = case.build(*case.arguments)
    take(built)  # the first step allocates and chooses kernels
    connection.send("ready")
    while connection.recv():
        connection.send(take(built))


def _serve_memory(connection: Connection, case: Case) -> None:
    """Answer with (bytes that two steps add at most to the loaded model, total peak, bytes of the base)."""
    torch.set_num_threads(1)
    libc = ctypes.CDLL("libc.so.6")
    if not case.settings.keys() & KEEPING.keys():
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
        libc.mallopt(_M_MMAP_THRESHOLD, _TRIM_THRESHOLD)
    stepper = case.build(*case.arguments)
    gc.collect()
    libc.malloc_trim(0)
    loaded = resident("RssAnon")
    reset_peak()
    stepper.step()
    stepper.step()
    peak = resident("VmHWM") - resident("RssFile")  # code that a first step reads in is not the step's
    connection.send((peak - loaded, peak, stepper.base_bytes))


class Job(NamedTuple):
    """What one process measures: ``rows`` is called with ``arguments`` and a device, and yields rows."""

    name: str
    rows: Callable[..., Iterator[dict[str, Any]]]
    arguments: tuple[Any, ...]
    seconds: float  # at most
    on_cpu: bool = False  # also where there is a card


class Children:
    """Processes that measure, each job with a time limit; none begins after the end.

    Attributes:
        end: when all ends, on the monotonic clock.
    """

    def __init__(self, device: str, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self._device = device

    def rows(self, job: Job, end: float = math.inf) -> list[dict[str, Any]]:
        """Return what the job's process found, by ``end``; the last is {"error": why} if it did not end well."""
        limit = min(job.seconds, min(self.end, end) - time.monotonic())
        if limit <= 0:
            return [{"error": "left out: the time was up"}]
        rows, end = list[dict[str, Any]](), time.monotonic() + limit
        device = torch.device("cpu" if job.on_cpu else self._device)
        process, connection = start(_send, job.rows, (*job.arguments, device), daemon=False)
        try:
            while connection.poll(max(0.0, end - time.monotonic())):
                said = _receive(process, connection, job.name)
                if isinstance(said, str):
                    return [*rows, {"error": said}]
                if said is None:
                    process.join(_END_SECONDS)
                    return rows
                rows.append(said)
            return [*rows, {"error": f"stopped after {limit:.0f} s"}]
        except RuntimeError as error:
            return [*rows, {"error": str(error)}]
        finally:
            if process.is_alive():
                with suppress(ProcessLookupError):  # it has no group yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()


def _send(connection: Connection, measure: Callable[..., Iterator[dict[str, Any]]], arguments: tuple[Any, ...]) -> None:
    """Send each row as it is measured, then None; or, in words, why there is none if it fails."""
    os.setsid()  # with the processes that compile for it in one group, to be stopped together
    if arguments[-1].type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # accelerate would take the card
    try:
        for row in measure(*arguments):
            connection.send(row)
    except Exception as error:  # whatever it is, the other cases are worth having
        connection.send(reason(error))
    else:
        connection.send(None)


def start(
    serve: Callable[..., None], *arguments: Any, daemon: bool = True, settings: Mapping[str, str] | None = None
) -> tuple[Any, Connection]:
    """Call ``serve`` with a connection and ``arguments`` in a process of its own; return that and the other end.

    It is forked from one that has imported the libraries, which saves seconds; with ``settings`` it is a new one, with
    these and no others of ``WAITING`` and ``KEEPING`` in its environment. One that is no ``daemon`` may start processes
    itself, and has to be ended.
    """
    context: Any = multiprocessing.get_context("forkserver" if settings is None else "spawn")
    context.set_forkserver_preload(_PRELOADED)
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, *arguments), daemon=daemon)
    before = dict(os.environ)
    if settings is not None:
        for name in before.keys() & {*WAITING, *KEEPING}:
            del os.environ[name]
        os.environ.update(settings)
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    there.close()
    return process, here


def _receive(process: Any, connection: Connection, name: object) -> Any:
    try:
        return connection.recv()
    except EOFError:
        process.join(_END_SECONDS)
        raise RuntimeError(f"case {name!r} ended with exit code {process.exitcode}; its error is above") from None
