"""Saving on a disk that may be full, read-only or gone, and deleting what ``save_last_n_*`` no longer keeps.

While a run goes on, a save that fails is reported in one line and retried a minute later, then after two, four, up to
ten; what was saved before is as it was. What a run ends with must not be lost: it is retried ``save_retries`` times
over some minutes, and then goes into ``save_fallback_dir``.

Nothing is deleted before the newer file is complete on the disk, and only files of this run's name and of an earlier
step or epoch: never the final weights, the best ones, or what a longer run left there.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from library.accelerator import release
from library.config.run_schema import SavingConfig
from library.errors import NotFiniteError, NotRestoredError, UserError, WriteError, reason_of
from library.files import discard
from library.processes import FailedElsewhere

Write = Callable[[Path], list[Path]]  # writes into a folder; returns what it wrote

_FIRST_RETRY, _LAST_RETRY = 60.0, 600.0  # seconds, while training goes on
_FIRST_WAIT, _LAST_WAIT = 5.0, 60.0  # at the end: ten waits are seven minutes


@dataclass
class CheckpointWriter:
    """Writes a run's results into ``folder``, or into ``fallback`` at the worst.

    Attributes:
        retries: at the end of the run.
        say: prints a line.
        failures: saves that failed in a row.
        retry_at: when the next try is due (time.monotonic()); None if nothing is unsaved.
        lacks_state: whether one of the saves that failed has a state.
        in_fallback: what had to go into ``fallback``.
    """

    folder: Path
    fallback: Path
    retries: int
    say: Callable[[str], None]
    failures: int = 0
    retry_at: float | None = None
    lacks_state: bool = False
    in_fallback: list[Path] | None = None

    @property
    def retry_is_due(self) -> bool:
        """Whether it is time to try again what failed."""
        return self.retry_at is not None and time.monotonic() >= self.retry_at

    def write_or_retry_later(self, write: Write, with_state: bool) -> list[Path] | None:
        """Write now; if that fails say so, note when to try again, and return None.

        A save without a state does not make up for one that failed with a state.
        """
        try:
            written = write(self.folder)
        except WriteError as error:
            wait = min(_FIRST_RETRY * 2**self.failures, _LAST_RETRY)
            self.failures, self.retry_at = self.failures + 1, time.monotonic() + wait
            self.lacks_state |= with_state
            self.say(f"warning: {error}; training goes on, trying again in {wait / 60:.0f} min")
            return None
        if self.failures and (with_state or not self.lacks_state):
            self.say(f"saved again: {written[0]}")
            self.failures, self.retry_at, self.lacks_state = 0, None, False
        return written

    def write_or_leave_out(self, write: Write) -> list[Path] | None:
        """Write now; if that fails say so and return None. It is not tried again: by then the weights are others."""
        try:
            return write(self.folder)
        except WriteError as error:
            self.leave_out("saving", error)
            return None

    def write_with_retries(self, write: Write, in_a_hurry: Callable[[], bool] = lambda: False) -> list[Path]:
        """Write, again and again if it must be, elsewhere in the end.

        Args:
            write: as for :meth:`write_or_retry_later`.
            in_a_hurry: whether waiting is over, as somebody is about to end the process.

        Raises:
            WriteError: nor could it be written there.
        """
        for done in range(self.retries + 1):
            try:
                return write(self.folder)
            except WriteError as error:
                if done == self.retries or in_a_hurry():
                    return self._use_fallback(write, error)
                wait = min(_FIRST_WAIT * 2**done, _LAST_WAIT)
                self.say(f"warning: {error}; trying again in {wait:.0f} s ({done + 1} of {self.retries})")
                until = time.monotonic() + wait
                while time.monotonic() < until and not in_a_hurry():
                    time.sleep(min(0.2, wait))
        raise AssertionError("unreachable")

    def write_optional(self, write: Callable[[], object], what: str) -> None:
        """Write what a run can do without (images, plots); say so if that fails, whatever the reason."""
        try:
            write()
        except NotRestoredError:
            raise
        except Exception as error:
            self.leave_out(what, error)

    def leave_out(self, what: str, error: Exception) -> None:
        """Say that ``what``, which the run can do without, failed."""
        if isinstance(error, (WriteError, NotFiniteError)):
            self.say(f"warning: {error}; left out")
        elif isinstance(error, FailedElsewhere):
            self.say(f"warning: {error}; left out, the run goes on")
        else:
            self.say(f"warning: {what} failed ({type(error).__name__}: {reason_of(error)}); left out, the run goes on")
        release()

    def report(self) -> None:
        """Let the run end with an error if its result is not where it should be.

        Raises:
            UserError: it is in the fallback folder.
        """
        if self.in_fallback:
            places = " and ".join(map(str, self.in_fallback))
            raise UserError(f"output_dir: {self.folder} could not be written to; what was trained is in {places}")

    def _use_fallback(self, write: Write, error: WriteError) -> list[Path]:
        self.in_fallback = write(self.fallback)
        self.say(f"warning: {error}; saved in {self.fallback} instead")
        return self.in_fallback


def fallback_folder(wanted: str | None, output_name: str) -> Path:
    """Return where to save what ``output_dir`` does not take; by default beside other temporary files."""
    return Path(wanted).expanduser() if wanted else Path(tempfile.gettempdir()) / f"{output_name}-fallback"


def remove_old(
    folder: Path, name: str, saving: SavingConfig, step: int | None = None, epoch: int | None = None
) -> None:
    """Delete the checkpoints that a save at ``step`` or ``epoch`` makes superfluous.

    ``save_last_n_steps = n`` keeps what was saved in the last n steps; ``save_last_n_epochs = n`` keeps the last n
    epoch files. States follow the same numbers unless ``..._state`` gives others.

    Args:
        folder: the output folder.
        name: the run's output name.
        saving: the settings.
        step, epoch: what has just been saved, one of the two.
    """
    if step is not None:
        last, last_state, number = saving.save_last_n_steps, saving.save_last_n_steps_state, r"step(\d{8})"
        end, unit = step, 1
    else:
        assert epoch is not None
        last, last_state, number = saving.save_last_n_epochs, saving.save_last_n_epochs_state, r"(\d{6})"
        end, unit = epoch + 1, saving.save_every_n_epochs or 1
    pattern = re.compile(rf"{re.escape(name)}-{number}(\.safetensors|-state|)")
    for path in folder.iterdir():
        if not (match := pattern.fullmatch(path.name)):
            continue
        if not match[2] and not any((path / name).is_file() for name in ("adapter_config.json", "config.json")):
            continue  # no adapter of PEFT's, nor a model
        limit = last_state if match[2] == "-state" and last_state is not None else last
        if limit is not None and int(match[1]) < end - unit * limit:
            discard(path)
