"""One process a folder, by a file ``.lock``, made with ``O_EXCL``: it says which process, since when, on which machine.

It is deleted at the end. A process that was killed leaves it behind; the next one takes it over where it can see that
nobody is there: on the same machine no process of that number began at that time, or the machine has been started anew.
Of other machines and containers nothing can be seen, so a person has to say that the run is over, by deleting the file.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from library.checksums import seal_json, unseal_json
from library.errors import UserError
from library.files import machine_name, process_began, read_own, rename

LOCK = ".lock"
_EMPTY_SECONDS = 2.0  # within which a lock that has just been made has its content


def is_held(folder: Path) -> bool:
    """Return whether a process holds ``folder``, or may do so on a machine that cannot be seen from here."""
    try:
        return _holds(unseal_json(read_own(folder / LOCK))) is not None
    except (OSError, ValueError, KeyError, TypeError):
        return False


class FolderLock:
    """The right to write into ``folder``, of one process at a time; ``say`` prints a line."""

    def __init__(self, folder: Path, name: str, say: Callable[[str], None]) -> None:
        self.path, self._name, self._say = folder / LOCK, name, say
        self._own: bytes | None = None

    def acquire(self) -> None:
        """Take the folder, which is made if need be.

        Raises:
            UserError: another run has it, or it cannot be written to.
        """
        content = seal_json(_this_process() | {"run": self._name, "since": time.time()})
        while True:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                try:
                    os.write(descriptor, content)
                finally:
                    os.close(descriptor)
            except FileExistsError as error:
                if not self.path.parent.is_dir():
                    raise UserError(f"output_dir: {self.path.parent} is a file; choose another folder") from error
                self._take_over()
                continue
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise UserError(
                    f"output_dir: {self.path.parent} cannot be written to ({reason}); choose another folder"
                ) from None
            self._own = content
            return

    def release(self) -> None:
        """Give the folder back; nothing happens if it is not held."""
        own, self._own = self._own, None
        with suppress(OSError):
            if own is not None and self.path.read_bytes() == own:
                self.path.unlink()

    def _take_over(self) -> None:
        """Put away a lock whose run is over.

        Raises:
            UserError: it is not, or nobody here can know.
        """
        try:
            seen = self._read()
            holder: Any = unseal_json(seen) if seen else None
            reason = _holds(holder) if holder is not None else None
            since = datetime.fromtimestamp(holder["since"]).strftime("%Y-%m-%d %H:%M") if reason else ""
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:  # a later version's has other keys
            if isinstance(error, FileNotFoundError) and not self.path.is_symlink():
                return  # given back meanwhile
            why = getattr(error, "strerror", None) or repr(error)
            raise UserError(f"{self.path} cannot be read ({why}); if no run writes there, delete it") from None
        if reason:
            raise UserError(
                f"output_dir: the run {holder['run']} writes into {self.path.parent} since {since} (process "
                f"{holder['pid']} on {holder['host']}); {reason}"
            )
        aside = self.path.with_name(f"{LOCK}.{os.getpid()}")
        with suppress(OSError):  # another process may be faster
            rename(self.path, aside)
            if aside.read_bytes() != seen:  # and hold it already
                _give_back(aside, self.path)
            else:
                aside.unlink()
                self._say(f"note: {self.path}: left behind by a run that was killed; taken over")

    def _read(self) -> bytes:
        """Return the lock's content; nothing if it stays empty, as its process was killed while it made it."""
        end = time.monotonic() + _EMPTY_SECONDS
        while not (content := read_own(self.path)):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        return content


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
        raise UserError(
            f"{lock}: cannot be locked ({error.strerror or error}); check the disk and its rights"
        ) from None
    with held:
        yield


def _give_back(lock: Path, path: Path) -> None:
    """Let another process have its lock again, unless a third one holds ``path`` by now."""
    try:
        os.link(lock, path)
    except OSError:  # also on a file system without hard links, such as exFAT
        if not path.exists():
            rename(lock, path)
    lock.unlink(missing_ok=True)


def _this_process() -> dict[str, Any]:
    host, boot, machine = platform.node(), *machine_name()
    return {"pid": os.getpid(), "began": process_began(os.getpid()), "host": host, "boot": boot, "machine": machine}


def _holds(holder: Mapping[str, Any]) -> str | None:
    """Return what to do as the lock's process is there, or may be; None if it is gone."""
    here = _this_process()
    if holder["machine"] == here["machine"]:
        if process_began(holder["pid"]) != holder["began"]:
            return None
        return "wait for it, stop it (a file STOP there does), or choose another output_dir"
    if holder["host"] == here["host"] and holder["boot"] != here["boot"]:
        return None  # the machine has been started anew since
    return f"it cannot be seen from here: if it is over, delete {LOCK} there, else choose another output_dir"
