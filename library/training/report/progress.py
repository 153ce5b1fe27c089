"""What a person sees of a run: what it prepares, one live line while it trains, and a summary table at its end.

*Before the first step.* A task plans its steps (:meth:`Preparation.plan`) once it has looked at the files and before
anything takes long. Then each says when it begins; what is counted (:func:`counting`) begins by its description. Until
the run has taken a step the list lies in ``PREPARING`` in the output folder, written about once a second, and the page
shows it: ``{"steps": {name: words}, "name": of what is done now, "done": 3, "total": 34, "text": "3 of 34, ..."}``.
Later the file names what takes time between two steps, sampling and validating, and has no steps.

A time is told only after it was measured: the first item of a step gives the first estimate, with the loading of the
model in it; from the second item on it is left out. What a step took is kept, by what its items are (:class:`Work`), so
that the list of a later run can say a time too; where nothing is known it says counts and passes of the model alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from rich.console import Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.status import Status
from rich.table import Table
from rich.text import Text

from library.checksums import read_checked_json, write_checked_json
from library.console import Console, plain_table
from library.errors import UserError
from library.files import write_text

PREPARING = ".preparing.json"  # in a run's folder, before its first step
LOADING, SAMPLING, FIRST_STEP = "loading the model", "sampling", "the first step"
_QUIET_SECONDS, _WORTH_TELLING = 10.0, 5.0
_RECENT_SECONDS = 600.0  # by whose steps, and pauses between them, the time that is left is told

Advance = Callable[[int], None]


class Work(NamedTuple):
    """Countable work of a step: how many items, and the file that keeps what they took by kind, size and device."""

    items: int
    kept: Path

    @classmethod
    def of(cls, items: int, folder: Path, *kind: object) -> Work:
        """Return the work of ``items``, whose times are kept in ``folder`` by all that they depend on."""
        return cls(items, folder / f"{hashlib.sha256(repr(kind).encode()).hexdigest()[:24]}.json")

    def told(self) -> str:
        """Return how long it takes, as last time, in words; "" if that is not known, or a few seconds."""
        with suppress(OSError, ValueError, TypeError):  # none yet, or a damaged one
            loading, each = read_checked_json(self.kept)
            if self.items and (seconds := loading + each * self.items) >= _WORTH_TELLING:
                return f"; about {duration(seconds)}, as last time"
        return ""

    def keep(self, loading: float, each: float) -> None:
        """Keep the seconds before the first item, and those of an item."""
        with suppress(UserError, OSError):  # a folder that cannot be written: the next run knows nothing
            write_checked_json(self.kept, [loading, each])


class Preparation:
    """What a run does before its first step; see the module's text.

    Attributes:
        folder: of the run's output; on the main process, while it is the run's.
        steps: name -> words, in their order.
        work: name -> work, of those that are counted and whose times are kept.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.steps: dict[str, str] = {}
        self.work: Mapping[str, Work] = {}
        self._written = 0.0

    def plan(self, steps: Mapping[str, str], console: Console, work: Mapping[str, Work] | None = None) -> None:
        """Add what is to be done, and say it, with the time that ``work`` took the last time."""
        self.work = work or {}
        steps = {name: words + (self.work[name].told() if name in self.work else "") for name, words in steps.items()}
        self.steps |= steps
        lines = (f"  {name}: {words}" for name, words in steps.items())
        console.print("before the first step:", *lines, sep="\n", soft_wrap=True)

    def begin(self, name: str, total: int = 0) -> Callable[[int], str]:
        """Begin a step, planned or not; return ``advance(n)``, which counts and says how far it is."""
        self.steps.setdefault(name, "")
        done, before, began = 0, 0, time.monotonic()
        since = began
        self._write(0.0, name=name, done=0, total=total, text="")

        def advance(by: int) -> str:
            nonlocal done, before, since
            done, now, text = done + by, time.monotonic(), f"{done + by:,} of {total:,}"
            if before < done < total:
                text += f", about {duration((total - done) * (now - since) / (done - before))} left"
            if by and done == total and before and name in self.work and self.folder is not None:
                each = (now - since) / (done - before)
                self.work[name].keep(max(0.0, since - began - before * each), each)
            if not before:
                before, since = done, now
            self._write(1.0, name=name, done=done, total=total, text=text)
            return text

        return advance

    @contextmanager
    def between_steps(self, name: str, folder: Path | None) -> Iterator[None]:
        """Say the ``name`` of what is done between two steps, while the block runs; ``folder``: of the run's output."""
        is_later = self.folder is None and folder is not None
        if is_later:
            self.folder, self.steps = folder, {}
            self._write(0.0, name=name)
        try:
            yield
        finally:
            if is_later:
                self.end()

    def end(self) -> None:
        """Take the list away: the first step was taken, or there will be none."""
        if self.folder is not None:
            (self.folder / PREPARING).unlink(missing_ok=True)
            self.folder = None

    def _write(self, seconds: float, **now: str | int) -> None:
        """Write the file, if it was not in the last ``seconds``."""
        if self.folder is not None and time.monotonic() - self._written >= seconds:
            with suppress(UserError):  # a full disk is told where something must be saved
                write_text(self.folder / PREPARING, json.dumps({"steps": self.steps, **now}))
            self._written = time.monotonic()


@contextmanager
def counting(console: Console) -> Iterator[Callable[[str, int], Advance]]:
    """Yield ``start(description, total) -> advance(n)`` for countable work such as caching images.

    A terminal has a live line of it. Elsewhere a line is printed at the beginning, each ``_QUIET_SECONDS`` at most, at
    the end.
    """
    with console.status("") if console.is_terminal else nullcontext() as live:
        yield partial(print_progress, console, live)


def print_progress(
    console: Console, live: Status | None, name: str, total: int, seconds: float = _QUIET_SECONDS
) -> Advance:
    """Say how far the work is, and how long the rest takes: as it begins, each ``seconds`` at most, as it ends.

    The work is a step of what the run prepares, where the console is a run's. ``live``: the line in a terminal.
    """
    count, done, last, alone = (console.preparation or Preparation()).begin(name, total), 0, float("-inf"), Lock()

    def advance(by: int) -> None:
        nonlocal done, last
        with alone:
            done, now, line = done + by, time.monotonic(), f"{name}: {count(by)}"
            if live is not None:
                live.update(Text(line if done < total else " "))
            if done >= total or (live is None and now - last >= seconds):
                last = now
                console.print(line, soft_wrap=True)

    advance(0)
    return advance


def loads_in_table(rows: Iterable[Sequence[str]]) -> Table:
    """Return the table of the programs that load a LoRA file; a row is ``networks.files.verify.LoadsIn.row``."""
    table = plain_table("loads in", "layers read", "largest difference", "otherwise", left=("otherwise",))
    for row in rows:
        table.add_row(*row)
    return table


class TrainingProgress:
    """The live lines of a training run: how far, how long still; and below, the newest metrics.

    Where the output is no terminal (a log file, CI) a line is printed at most every ``_QUIET_SECONDS`` instead, and
    every line begins with the time.

    Attributes:
        doing: what goes on, for people: "training", or the name of a :meth:`phase`.
    """

    def __init__(self, console: Console, total_steps: int, total_epochs: int, first_step: int) -> None:
        self._console, self._total, self._epochs, self.doing = console, total_steps, total_epochs, "training"
        self._bar = Progress(
            TextColumn("[bold]{task.fields[phase]:<10}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[epoch]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            speed_estimate_period=_RECENT_SECONDS,
        )
        self._task: TaskID = self._bar.add_task("", total=total_steps, completed=first_step, phase=self.doing, epoch="")
        self._numbers = Text("")
        self._live = Live(Group(self._bar, self._numbers), console=console, refresh_per_second=4)
        self._last_line = float("-inf")
        self._newest: dict[str, float] = {}
        self._shown, self._busy, self._waited = 0, 0.0, 0.0

    def __enter__(self) -> TrainingProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def unmute(self) -> None:
        """Print also where this is not the main process: it failed, and says what becomes of the run."""
        if self._console.quiet:
            self.__exit__()  # the main process has the live lines
            self._console.quiet = False

    def advance(self, step: int) -> None:
        """Move the bar to ``step``."""
        self._bar.update(self._task, completed=step)

    def show(self, metrics: dict[str, float]) -> None:
        """Show the newest metrics."""
        self._newest = metrics
        self._shown, self._busy = self._shown + 1, self._busy + metrics["s_per_it"]
        self._waited += metrics["data_wait_s"]
        self._numbers.plain = one_line(metrics)
        epoch = f"epoch {int(metrics['epoch']) + 1}/{self._epochs}"
        self._bar.update(self._task, epoch=epoch)
        now, step = time.monotonic(), int(metrics["step"])
        if not self._console.is_terminal and (now - self._last_line >= _QUIET_SECONDS or step == self._total):
            self._last_line = now
            left = self._bar.tasks[0].time_remaining  # None before the second step, since the first compiles
            eta = "" if left is None else f"  eta {duration(left)}"
            self.note(f"step {step}/{self._total}  {epoch}  {one_line(metrics)}{eta}")

    def note(self, text: str) -> None:
        """Print a line that stays, above the live ones; in a log file with the time before it."""
        at = "" if self._console.is_terminal else time.strftime("%Y-%m-%d %H:%M:%S  ")
        self._console.print(f"{at}{text}", soft_wrap=True)

    def summary(self) -> list[tuple[str, str]]:
        """Return the rows on speed, as means over what was shown, and on the last learning rates."""
        if not self._shown:
            return []
        speed = f"{self._busy / self._shown:.2f} s/it, of it {self._waited / self._shown:.2f} s waiting for data"
        return [("learning rate", "  ".join(_rates(self._newest))), ("speed", speed)]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what is going on (validating, sampling, saving) while the block runs."""
        before, self.doing = self.doing, name
        self._bar.update(self._task, phase=name)
        try:
            yield
        finally:
            self.doing = before
            self._bar.update(self._task, phase=before)


def one_line(metrics: dict[str, float]) -> str:
    """Return average loss, lr, d*lr (where the optimizer has a d), speed and memory in one short line.

    Waiting for data is told where it takes more than a twentieth of a step.
    """
    speed, waited = metrics["s_per_it"], metrics["data_wait_s"]
    waiting = f" ({waited:.2f} s of it waiting for data)" if waited > speed / 20 else ""
    parts = [f"avg loss {metrics['loss_ema']:#.4g}", *_rates(metrics), f"{speed:.2f} s/it{waiting}"]
    parts += [f"{metrics['peak_mem_bytes'] / 2**30:.1f} GiB"]
    return "  ".join(parts)


def _rates(metrics: dict[str, float]) -> list[str]:
    """Return lr and d*lr of the first parameter group in words."""
    rates = [value for key, value in metrics.items() if key.startswith("lr/")]
    effective = [value for key, value in metrics.items() if key.startswith("d*lr/")]
    has_d = any(key.startswith("d/") for key in metrics)
    parts = [f"lr {rates[0]:.1e}"] if rates else []
    return parts + ([f"d·lr {effective[0]:.1e}"] if effective and has_d else [])


def duration(seconds: float) -> str:
    """Return seconds in words: ``1 h 5 min``, ``3 min 20 s`` or ``20 s``."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def shown_path(path: Path) -> str:
    """Return ``path`` relative to the working directory where it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):  # it lies elsewhere; the working directory was removed
        return str(path)
