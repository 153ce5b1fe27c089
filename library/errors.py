"""One exception for everything a user can put right.

A ``UserError`` carries one line: which file, key or tensor is wrong, why, and what to do about it. Scripts
wrap their ``main`` in :func:`exit_on_user_error`, which prints that line and leaves with exit code 2. A bug
in Tandem is any other exception and keeps its traceback.
"""

from __future__ import annotations

import difflib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps


class UserError(ValueError):
    """Bad input from outside, described in one line that ends with the remedy."""


class WriteError(UserError):
    """A file or folder that cannot be written: the disk is full, read-only, gone, or belongs to somebody else."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: cannot be written ({reason}); free space or choose another folder")
        self.reason = reason


def nearest_of(word: str, candidates: Iterable[str], similarity: float = 0.6) -> str | None:
    """Return the candidate nearest to ``word``, if one is at least so similar (0 to 1)."""
    nearest = difflib.get_close_matches(word, list(candidates), n=1, cutoff=similarity)
    return nearest[0] if nearest else None


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the candidate nearest to ``word``, or an empty string."""
    nearest = nearest_of(word, candidates)
    return f"; did you mean {nearest!r}?" if nearest else ""


@contextmanager
def error_prefix(where: str) -> Iterator[None]:
    """Put ``where`` (a file, a section) in front of any ``UserError`` raised inside the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def one_line(error: UserError) -> str:
    """Return an error's message without the traceback that torch's data loader workers put in front of it.

    A configuration with several problems keeps a line for each of them.
    """
    text = str(error).strip()
    if "Traceback (most recent call last)" in text:
        text = text.rpartition("\n")[2]
    return text.removeprefix(f"{UserError.__module__}.{UserError.__qualname__}: ")


def exit_on_user_error(main: Callable[[], None]) -> Callable[[], None]:
    """Decorate a script's ``main``: a ``UserError`` becomes one line on stderr and exit code 2.

    So does Ctrl-C, with the shell's own exit code for it, 130, and what a ``KeyboardInterrupt`` has to say.
    """

    @wraps(main)
    def wrapped() -> None:
        try:
            main()
        except UserError as error:
            print(f"error: {one_line(error)}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt as interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one does not wait for threads to end
            print(": ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
            raise SystemExit(130) from None

    return wrapped
