"""What a running job is asked from outside: to stop, to save, to sample.

By signal: SIGINT (Ctrl-C), SIGTERM (schedulers, ``kill``) and SIGHUP (a closed terminal; on Windows SIGBREAK) ask it to
stop after the step it is in; a second one ends it at once. By file in the output folder: ``STOP``, ``SAVE``, ``SAMPLE``
ask for just that; a file is removed when it has been answered, and one that is older than the run is removed at its
start.

Every process of a run must answer at the same step. One process alone looks after every step; several agree by one
reduction of eight numbers every two seconds or so, at steps that follow from the time of those before, so that the
device is not waited for at the others.
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
_FILE_SECONDS = 1.0  # between two looks into the folder, which may be on a slow network
_AGREEMENT_SECONDS = 2.0  # between two reductions of several processes, about
_MOST_STEPS = 1000  # between them, at most
_ECHO_SECONDS = 2.0  # a launcher repeats the terminal's signal: that is no second one


@dataclass(frozen=True)
class StopRequest:
    """What is asked for, the same on every process."""

    stop: str | None = None  # by what: ``SIGTERM``, ``STOP``
    save: bool = False  # LoRA and state
    sample: bool = False
    again: bool = False  # to save what could not be saved before

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
    """Inside the block Ctrl-C is answered with ``remark`` before anything that runs is waited for; a second one kills.

    The ``KeyboardInterrupt`` that it raises then has the remark, by which :func:`exit_on_user_error` knows.
    """

    def answer(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print(f"{chr(10) * sys.stderr.isatty()}interrupted: {remark}", file=sys.stderr, flush=True)
        raise KeyboardInterrupt(remark)

    before = signal.getsignal(signal.SIGINT)
    alone = threading.current_thread() is threading.main_thread() and before is signal.default_int_handler
    if alone:
        signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        if alone and signal.getsignal(signal.SIGINT) is answer:
            signal.signal(signal.SIGINT, before)


class SignalHandler:
    """Looks for requests to a run that writes into ``folder``."""

    def __init__(
        self,
        folder: Path,
        accelerator: Accelerator,
        begun: float,
        has_unsaved: Callable[[], bool] = lambda: False,
        answer: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Remove request files from before ``begun`` (seconds since 1970), which were meant for another run.

        ``has_unsaved`` tells on the main process whether something must be saved that could not be. ``answer`` is
        called with the name of the first signal as soon as it comes, between any two lines of Python.
        """
        self._folder, self._accelerator, self._has_unsaved, self._answer = folder, accelerator, has_unsaved, answer
        self._signal = 0
        self._signalled_at = self._looked_at = float("-inf")
        self._in_step: int | None = None
        self._request = NOTHING
        self._next_step, self._last = 0, (0, time.monotonic())
        if accelerator.is_main_process:
            for name in FILES:
                with suppress(OSError):
                    if (folder / name).stat().st_mtime < begun - 1:  # file systems count coarsely
                        (folder / name).unlink()

    @property
    def signalled(self) -> bool:
        """Whether a signal arrived at this process."""
        return bool(self._signal)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block the first signal is kept for :meth:`look` and the second has its usual effect.

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
                self._answer(signal.Signals(number).name)
        elif self._accelerator.num_processes == 1 or now - self._signalled_at > _ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # os.kill would end a process of Windows without asking it

    def look(self, step: int) -> StopRequest:
        """Return what is asked for after ``step``; every process calls this after every step and gets the same.

        Asking again in the same step gives the same answer.
        """
        if step == self._in_step:
            return self._request
        self._in_step, self._request = step, NOTHING
        if self._accelerator.num_processes == 1:
            self._request = self._as_request(self._signal, *self._local_requests())
        elif step >= self._next_step:
            self._request = self._agree(step)
        return self._request

    def answered(self, stop_request: StopRequest) -> None:
        """Remove the files of an answered request (main process)."""
        if self._accelerator.is_main_process:
            for name, asked in zip(
                FILES, (stop_request.stop == "STOP", stop_request.save, stop_request.sample), strict=True
            ):
                if asked:
                    with suppress(OSError):
                        (self._folder / name).unlink(missing_ok=True)

    def _local_requests(self) -> tuple[bool, bool, bool, bool]:
        """Return whether stop, save and sample are asked for by file (three calls a second), and a save is overdue."""
        now = time.monotonic()
        if now - self._looked_at < _FILE_SECONDS:
            return False, False, False, self._has_unsaved()
        self._looked_at = now
        stop, save, sample = ((self._folder / name).exists() for name in FILES)
        return stop, save, sample, self._has_unsaved()

    def _agree(self, step: int) -> StopRequest:
        """Sum the main process's numbers and everybody's signals over all processes."""
        main = self._accelerator.is_main_process
        local = self._local_requests() if main else (False,) * 4
        before, then = self._last
        self._last = step, time.monotonic()
        seconds = max(self._last[1] - then, 1e-6)
        wait = round(_AGREEMENT_SECONDS * max(step - before, 1) / seconds) if main else 0
        # a sum of signals would be another signal: each has a place of its own
        numbers = [int(self._signal == number) for number in _SIGNALS] + [int(asked) for asked in local]
        own = torch.tensor([*numbers, min(max(wait, 1), _MOST_STEPS) if main else 0], dtype=torch.float32)
        summed = self._accelerator.reduce(own.to(self._accelerator.device), reduction="sum").tolist()
        self._next_step = step + int(summed[-1])
        arrived = next((number for number, count in zip(_SIGNALS, summed, strict=False) if count), 0)
        return self._as_request(arrived, *(bool(count) for count in summed[len(_SIGNALS) : -1]))

    def _as_request(self, arrived: int, stop: bool, save: bool, sample: bool, again: bool) -> StopRequest:
        name = signal.Signals(arrived).name if arrived else "STOP" if stop else None
        return StopRequest(name, save, sample, again)


def ignore_signals(worker: int) -> None:
    """Leave a data loader's worker alive when its whole group is asked to stop: the step that goes on needs it.

    The loader itself ends its workers by SIGTERM, so who sent one must be known; a handler is not told.
    """

    def end_if_the_loader_says_so() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    for number in _SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # Windows, macOS
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=end_if_the_loader_says_so, daemon=True).start()
