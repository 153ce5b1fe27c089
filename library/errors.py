"""One exception for everything a user can put right, and the filter that everything printed passes through.

A ``UserError`` carries one line: which file, key or tensor is wrong, why, and what to do about it. Scripts
wrap their ``main`` in :func:`exit_on_user_error`, which prints that line and leaves with exit code 2. A bug
in Tandem is any other exception and keeps its traceback.

Names of files and tensors, metadata and captions come from strangers, and a terminal obeys what some characters in
them say: it moves the cursor, paints over what stood there, turns the text around. Whatever a script prints goes
through :func:`printable`: ``print`` by the stream that ``exit_on_user_error`` puts before stdout, rich's tables by
``library.console.Console``, which leaves rich's own colours alone.
"""

from __future__ import annotations

import difflib
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any, TextIO, cast

# C0, DEL and C1 controls; what turns the direction of text (Unicode TR 9) or breaks lines; marks nobody sees; and the
# halves of surrogate pairs, which no encoding has: Python puts them for bytes of a file name that are not UTF-8.
_STEERING = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)

# What the place of a file can be wrong with, whatever a program does: no bug, and no traceback.
_OF_PLACES = {
    *(errno.EACCES, errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS),
}


class UserError(ValueError):
    """Bad input from outside, described in one line that ends with the remedy; of a configuration, a line a mistake."""

    def __str__(self) -> str:
        """Return the lines."""
        return "\n".join(map(str, self.args))


class WriteError(UserError):
    """A file or folder that cannot be written: the disk is full, read-only, gone, or belongs to somebody else."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: cannot be written ({reason}); free space or choose another folder")
        self.reason = reason


class NotFiniteError(UserError):
    """Numbers that are not finite where a picture should be made of them."""


class NotRestoredError(Exception):
    """A change of the model for a while that could not be taken back: no run may go on after it."""

    __str__ = UserError.__str__


@contextmanager
def undone(what: str, undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` after the block, however it ends: what is changed for a while is changed inside of this one.

    The block begins before the first change, so that half of a change is taken back too; ``undo`` works from copies
    that were made before, whatever was reached.

    Raises:
        NotRestoredError: ``undo`` failed, for whatever reason; no scope whose errors are optional may go on after it.
    """
    before = ""
    try:
        yield
    except BaseException as failure:
        before = f" after {type(failure).__name__}: {reason_of(failure)}"
        raise
    finally:
        try:
            undo()
        except BaseException as error:
            raise NotRestoredError(
                f"{what} could not be taken back ({type(error).__name__}: {reason_of(error)}){before}; start again "
                "with --resume auto"
            ) from error


_MOST_SHOWN = 2000  # characters of a line


def reason_of(error: BaseException) -> str:
    """Return the first line of what another package's exception says, or its name if it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def counted(number: int, noun: str, many: str = "") -> str:
    """Return "1 image", "2 images"; ``many``: the plural, where it is not the noun and an s."""
    return f"{number:,} {noun if number == 1 else many or f'{noun}s'}"


def nearest_of(word: str, candidates: Iterable[str], similarity: float = 0.6) -> str | None:
    """Return the candidate nearest to ``word``, if one is at least so similar (0 to 1)."""
    nearest = difflib.get_close_matches(word, list(candidates), n=1, cutoff=similarity)
    return nearest[0] if nearest else None


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the candidate nearest to ``word``, or an empty string."""
    nearest = nearest_of(word, candidates)
    return f"; did you mean {nearest!r}?" if nearest else ""


@contextmanager
def gathering(refusals: list[str] | None) -> Iterator[None]:
    """Within the block a UserError is added to ``refusals``, and ends it; without a list it is raised."""
    try:
        yield
    except UserError as error:
        if refusals is None:
            raise
        refusals.append(str(error))


@contextmanager
def error_prefix(where: str) -> Iterator[None]:
    """Put ``where`` (a file, a section) in front of any ``UserError`` raised inside the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def printable(text: str, keep: str = "") -> str:
    """Return ``text`` with every character that steers a terminal spelt as Python spells it, ``\\x1b``.

    Args:
        text: from outside, or with something from outside in it.
        keep: characters to leave, such as the ends of lines that are wanted.
    """
    return _STEERING.sub(lambda match: match[0] if match[0] in keep else _spelt(match[0]), text)


def _spelt(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte that is not UTF-8, as os.fsdecode gives it
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def names_in_short(names: Sequence[object], shown: int = 5) -> str:
    """Return the first few names, :func:`printable`, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(printable(str(name)) for name in names[:shown]) + more


class LastingStream:
    """A text stream that takes whatever it is given: no run ends because the disk with its log is full.

    The same holds where a terminal was closed or who read a pipe has ended. Text that cannot be written is lost.

    Attributes:
        failed: why text may be lost, None if none is.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.failed = stream, cast(Exception | None, None)

    def write(self, text: str) -> int:
        """Write ``text``."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Write what has been waiting."""
        self._try(self._stream.flush)

    def _try(self, write: Callable[[], object]) -> bool:
        try:
            write()
        except (OSError, ValueError) as error:  # ValueError: somebody has closed it
            self.failed = error
            return False
        return True

    def end(self) -> None:
        """Let Python's own flush at its end succeed: what still waits then goes nowhere."""
        if not self._try(self._stream.flush) and not self._stream.closed:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class PrintableStream:
    """A text stream whose lines steer no terminal; rich, which writes colours, goes past it.

    All else is asked of the :class:`LastingStream` behind it, so whatever is lost is known in one place.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = LastingStream(stream)  # the name by which rich.console.Console.file looks for it

    def write(self, text: str) -> int:
        """Write ``text``, its own line ends and tabs as they are."""
        return self.rich_proxied_file.write(printable(text, keep="\n\t"))

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def one_line(error: UserError | NotRestoredError) -> str:
    """Return an error's message, printable, without the middle where somebody's value of thousands of characters is.

    A configuration with several problems keeps a line for each of them; no other message has more than one.
    """
    lines = [printable(str(line).strip()) for line in error.args]
    most, end = _MOST_SHOWN, 400
    return "\n".join(line if len(line) <= most else f"{line[: most - end]} [...] {line[-end:]}" for line in lines)


@contextmanager
def _lasting_streams() -> Iterator[None]:
    """Inside the block what is printed is printable and its stream lasting."""
    for number in range(3):  # what the shell closed (">&-"): a file that is opened next is not to take its place
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
    for stream in (sys.stdout, sys.stderr):  # a pipe on Windows has an encoding of few letters
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    streams = [stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr)]  # noqa: SIM115  # None if closed
    output, complaints = PrintableStream(streams[0]), LastingStream(streams[1])
    with redirect_stdout(cast(TextIO, output)), redirect_stderr(cast(TextIO, complaints)):
        try:
            yield
        finally:
            output.end()
            if output.failed is not None and not isinstance(output.failed, BrokenPipeError):  # who read wants no more
                why = getattr(output.failed, "strerror", None) or output.failed
                print(f"warning: not all that was printed could be written ({why})", file=sys.stderr)
            complaints.end()


def exit_on_user_error(main: Callable[[], None]) -> Callable[[], None]:
    """Decorate a script's ``main``: a ``UserError`` or ``NotRestoredError`` is one line on stderr, exit code 2.

    So do a path that the system refuses to look at (too long, in somebody else's folder, under what is no folder) and
    Ctrl-C, with the shell's own exit code for it, 130. What ``main`` prints is made :func:`printable`, and
    characters that the output's encoding lacks are spelt.
    """

    @wraps(main)
    @_lasting_streams()
    def wrapped() -> None:
        try:
            Path.cwd()  # one that was removed raises: torch would end the process as it is imported
            main()
        except (UserError, NotRestoredError) as error:
            reason = one_line(error)
        except OSError as error:
            is_gone = error.filename is None and error.errno == errno.ENOENT  # as the system says it of where we are
            if not is_gone and (error.filename is None or error.errno not in _OF_PLACES):
                raise
            place = "the working directory" if is_gone else printable(str(error.filename))
            reason = f"{place}: cannot be used ({error.strerror}); correct the path"
        except RuntimeError as error:
            if "home directory" not in str(error):  # as pathlib says of a "~" that it cannot resolve
                raise
            reason = "a path begins with '~' and no home is known for it; write the path out"
        except KeyboardInterrupt as interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one does not wait for threads to end
            if not interrupt.args:  # else it has been said, see ``library.training.signals.interruptible``
                print("interrupted", file=sys.stderr)
            raise SystemExit(interrupt.args[1] if interrupt.args[1:] else 130) from None
        else:
            return
        print(f"error: {reason}", file=sys.stderr)
        raise SystemExit(2)

    return wrapped
