"""Locks of the file system: one run a folder, one process at a queue.

The system gives a lock back whatever becomes of its process, so a run that was killed leaves nothing to judge; on a
network file system this holds among machines too (``filelock``: flock, or what stands for it).

A run's lock is the file ``.lock`` in its folder, and ``.holder`` beside it says whose it is. Both go when the run ends:
a ``.holder`` without a lock was left behind by a run that was killed.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from library.errors import UserError
from library.files import broken_link

LOCK, HOLDER = ".lock", ".holder"
_SECONDS = 8.0  # within which the workers of a killed run, which have its lock too, see that it is gone


def is_held(folder: Path) -> bool:
    """Return whether a run has ``folder``; where that cannot be seen, whether one has not said that it is over."""
    if not (folder / HOLDER).is_file():
        return False
    try:
        if os.name == "nt":
            FileLock(folder / LOCK, timeout=0).acquire().lock.release()
        else:  # read alone, and shared: the lock may be another user's, and looks must not see each other
            import fcntl

            with open(folder / LOCK, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (Timeout, OSError) as error:
        return not isinstance(error, FileNotFoundError)
    return False


class FolderLock:
    """The right to write into ``folder``, of one process at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self.path, self._holder = folder / LOCK, folder / HOLDER
        self._whose = f"the run {name} (process {os.getpid()} on {platform.node()}, since {since})"
        self._lock = FileLock(self.path, timeout=_SECONDS)

    def acquire(self) -> None:
        """Take the folder, which is made if need be.

        Raises:
            UserError: another run has it, or it cannot be written to.
        """
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            whose = "another run"
            with suppress(OSError, ValueError):
                whose = self._holder.read_text(encoding="utf-8")[:1000].strip() or whose
            raise UserError(
                f"output_dir: {whose} writes into {folder}; wait for it, stop it (a file STOP there does), or choose "
                "another output_dir"
            ) from None
        except FileExistsError:
            what = f"does not exist{link}" if (link := broken_link(folder)) else "is a file"
            raise UserError(f"output_dir: {folder} {what}; choose another folder") from None
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"output_dir: {folder} cannot be written to ({reason}); choose another folder") from None
        with suppress(OSError):
            self._holder.write_text(self._whose, encoding="utf-8")

    def release(self) -> None:
        """Give the folder back; nothing happens if it is not held."""
        if not self._lock.is_locked:
            return
        with suppress(OSError, ValueError):
            if self._holder.read_text(encoding="utf-8") == self._whose:  # else the folder was deleted and made anew
                self._holder.unlink()
                if os.name != "nt" and not isinstance(self._lock, SoftFileLock):  # it is open there, or goes by itself
                    self.path.unlink()
        self._lock.release()


@contextmanager
def hold(lock: Path, seconds: float = 10.0) -> Iterator[None]:
    """Have to oneself what the file ``lock`` stands for, among the processes and threads of one machine.

    The system gives it back whatever becomes of the process, and nothing in the file can be spoilt.

    Args:
        lock: is made if need be, and stays.
        seconds: to wait for it.

    Raises:
        UserError: somebody has it for longer, or it cannot be written.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock, timeout=seconds).acquire()
    except Timeout:
        raise UserError(f"{lock}: another process is at work there; try it again in a moment") from None
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{lock}: cannot be locked ({reason}); check the disk and its rights") from None
    with held:
        yield
