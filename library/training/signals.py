"""Requests to a running job from outside: to stop, to save, to sample.

By signal: SIGINT (Ctrl-C), SIGTERM (schedulers, ``kill``) and SIGHUP (a closed terminal; on Windows SIGBREAK) ask it to
stop after the step it is in; a second one ends it at once. By file in the output folder: ``STOP``, ``SAVE``, ``SAMPLE``
ask for just that. The run removes a file when it has done what the file asks for, and at its start those older than it.

Every process of a run must act at the same step. One process alone looks after every step; several agree by one
reduction of eight numbers every two seconds or so, at steps that follow from the time of those before, so that the
device is not waited for at the others. Steps that are skipped count too: a run whose steps are not finite can be
stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from accelerate import Accelerator

FILES = ("STOP", "SAVE", "SAMPLE")
STOPPED_BY_FILE = 3  # exit code; a signal's is 128 + its number, as a shell has it
# Windows has no SIGHUP; a closed window and Ctrl-Break arrive there as SIGBREAK
_SIGNALS = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, n))
_FILE_SECONDS = 1.0  # between two checks of the folder, which may be on a slow network
_AGREEMENT_SECONDS = 2.0  # between two reductions of several processes, about
_MOST_STEPS = 1000  # between them, at most
_ECHO_SECONDS = 2.0  # a launcher repeats the terminal's signal: that is no second one


@dataclass(frozen=True)
class StopRequest:
    """What is asked for, the same on every process."""

    stop: str | None = None  # by what: ``SIGTERM``, ``STOP``
    save: bool = False  # LoRA and state
    sample: bool = False
    again: bool = False  # to save what could not be saved before; with ``save`` its state too

    def __bool__(self) -> bool:
        return self.stop is not None or self.save or self.sample or self.again

    @property
    def exit_code(self) -> int:
        """Return what a process that was stopped leaves with; 0 if it was not."""
        if self.stop is None:
            return 0
        return 128 + signal.Signals[self.stop] if self.stop.startswith("SIG") else STOPPED_BY_FILE


NOTHING = StopRequest()


def resume_hint(stop_request: StopRequest, step: int, state: Path) -> str:
    """Return the line that a stopped run ends with."""
    return f"stopped by {stop_request.stop} after step {step}: go on with --resume {state}, or with --resume auto"


@contextmanager
def interruptible(remark: str) -> Iterator[None]:
    """Inside the block the first signal prints ``remark`` before anything that runs is waited for; a second one kills.

    The ``KeyboardInterrupt`` that it raises then has the remark and the exit code, by which
    :func:`exit_on_user_error` knows.
    """

    def print_and_raise(number: int, frame: FrameType | None) -> None:
        for each in usual:
            signal.signal(each, signal.SIG_DFL)
        print(f"{chr(10) * sys.stderr.isatty()}interrupted: {remark}", file=sys.stderr, flush=True)
        raise KeyboardInterrupt(remark, 128 + number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    alone = threading.current_thread() is threading.main_thread()
    usual = [n for n, handler in before.items() if alone and handler in (signal.SIG_DFL, signal.default_int_handler)]
    for number in usual:
        signal.signal(number, print_and_raise)
    try:
        yield
    finally:
        for number in usual:
            if signal.getsignal(number) is print_and_raise:
                signal.signal(number, before[number])


class SignalHandler:
    """Looks for requests to a run that writes into ``folder``."""

    def __init__(
        self,
        folder: Path,
        accelerator: Accelerator,
        started_at: float,
        overdue: Callable[[], StopRequest] = lambda: NOTHING,
        on_first_signal: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Remove request files from before ``started_at`` (seconds since 1970), which were meant for another run.

        ``overdue`` returns on the main process what must be saved again. ``on_first_signal`` is called with the name of
        the first signal as soon as it comes, between any two lines of Python.
        """
        self._folder, self._accelerator, self._overdue = folder, accelerator, overdue
        self._on_first_signal = on_first_signal
        self._signal = 0
        self._signalled_at = self._files_checked_at = float("-inf")
        self._polls = self._next_reduction = 0
        self._last_reduction = (0, time.monotonic())  # the poll, and when
        if accelerator.is_main_process:
            for name in FILES:
                with suppress(OSError):
                    if (folder / name).stat().st_mtime < started_at - 1:  # file systems count coarsely
                        (folder / name).unlink()

    @property
    def signalled(self) -> bool:
        """Whether a signal arrived at this process."""
        return bool(self._signal)

    def asks_to_stop(self) -> bool:
        """Return whether a signal arrived at this process, or the file lies there, which :meth:`poll` then finds."""
        if (self._folder / "STOP").exists():
            self._files_checked_at = float("-inf")
            return True
        return self.signalled

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block the first signal is kept for :meth:`poll` and the second has its usual effect.

        A launcher's signal to a process that has lost another would be kept for ever: see ``watched`` in
        ``library.processes``, which belongs around it.
        """
        before = {}
        for number in _SIGNALS:
            with suppress(ValueError):  # not in the main thread, where signals arrive
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, a shell's background job
                    before[number] = signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._signal:
            self._signal, self._signalled_at = number, now
            with suppress(RuntimeError):  # it came while a line was being printed, which cannot be done twice at once
                self._on_first_signal(signal.Signals(number).name)
        elif self._accelerator.num_processes == 1 or now - self._signalled_at > _ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # os.kill would end a process of Windows without asking it

    def poll(self) -> StopRequest:
        """Return what is asked for now; every process calls this once after every step and gets the same."""
        self._polls += 1
        if self._accelerator.num_processes == 1:
            return self._as_request(self._signal, *self._local_requests())
        return self._agree() if self._polls >= self._next_reduction else NOTHING

    def remove_files(self, stop_request: StopRequest) -> None:
        """Remove the files of a request that was met (main process)."""
        if self._accelerator.is_main_process:
            was_met = stop_request.stop == "STOP", stop_request.save, stop_request.sample
            for name in (name for name, met in zip(FILES, was_met, strict=True) if met):
                with suppress(OSError):
                    (self._folder / name).unlink(missing_ok=True)

    def _local_requests(self) -> tuple[bool, bool, bool, bool]:
        """Return whether to stop, save, sample and save again: by files, checked once a second, or as it is overdue."""
        now, overdue = time.monotonic(), self._overdue()
        stop = save = sample = False
        if now - self._files_checked_at >= _FILE_SECONDS:
            self._files_checked_at = now
            stop, save, sample = ((self._folder / name).exists() for name in FILES)
        return stop, save or overdue.save, sample, overdue.again

    def _agree(self) -> StopRequest:
        """Sum the main process's numbers and everybody's signals over all processes."""
        main = self._accelerator.is_main_process
        requests = self._local_requests() if main else (False,) * 4
        before, then = self._last_reduction
        self._last_reduction = self._polls, time.monotonic()
        seconds = max(self._last_reduction[1] - then, 1e-6)
        wait = round(_AGREEMENT_SECONDS * max(self._polls - before, 1) / seconds) if main else 0
        # a sum of signals would be another signal: each has a place of its own
        numbers = [int(self._signal == number) for number in _SIGNALS] + [int(is_asked) for is_asked in requests]
        numbers.append(min(max(wait, 1), _MOST_STEPS) if main else 0)
        local = torch.tensor(numbers, dtype=torch.float32, device=self._accelerator.device)
        summed = self._accelerator.reduce(local, reduction="sum").tolist()
        self._next_reduction = self._polls + int(summed[-1])
        arrived = next((number for number, count in zip(_SIGNALS, summed, strict=False) if count), 0)
        return self._as_request(arrived, *(bool(count) for count in summed[len(_SIGNALS) : -1]))

    def _as_request(self, arrived: int, stop: bool, save: bool, sample: bool, again: bool) -> StopRequest:
        name = signal.Signals(arrived).name if arrived else "STOP" if stop else None
        return StopRequest(name, save, sample, again)


def ignore_signals(worker: int) -> None:
    """Leave a data loader's worker alive when its whole group is asked to stop: the step that goes on needs it.

    The loader itself ends its workers by SIGTERM, so who sent one must be known; a handler is not told.
    """

    def end_on_the_loaders_signal() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    for number in _SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # Windows, macOS
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=end_on_the_loaders_signal, daemon=True).start()
