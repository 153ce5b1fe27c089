"""Captions that a command of the user's writes for images without one, before a dataset is read.

``caption_command = "my_captioner --image {image}"`` is split as a shell would split it, but no shell runs it, and
``{image}`` becomes the image's absolute path: whatever characters a name has, it stays one argument, and none begins
with a dash. What the command prints is written beside the image, where the next run finds it. Subsets with
``class_tokens`` or a ``metadata_file`` have their captions. Only the training's own settings name a command, never a
dataset TOML, which may come from a stranger.

A command has ten minutes and 16 MiB of output for an image. It is waited for itself, not for what it leaves running:
its output goes to a file, so a server that it starts and that keeps its stdout blocks nothing. It is a session of its
own, which is killed with all its processes where it is given up, and when this process is interrupted or asked to end.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from library.data.config import DatasetConfig
from library.data.sources import uncaptioned
from library.errors import UserError
from library.files import write_text

_IMAGE = "{image}"
_MOST_SECONDS, _MOST_BYTES = 600.0, 2**24
_CONTROL, _LONGEST = re.compile(r"[\x00-\x1f\x7f]"), 20_000  # characters; text encoders read a few thousand
# An argument of its own, or the end of one (--image={image}, file=@{image}): within code for a shell or Python, a name
# that holds code would run.
_PLACE = re.compile(r"[\w=:@/.,+-]*\{image\}")


def write_captions(command: str, config: DatasetConfig, start: Callable[[str, int], Callable[[int], None]]) -> None:
    """Run ``command`` for every image of the dataset that has no caption, and write what it prints.

    Args:
        command: of the training config.
        config: the dataset.
        start: ``start(description, total) -> advance(n)``, for the progress bar.

    Raises:
        UserError: it cannot be run, fails or prints nothing; captions written before stay.
    """
    words = command_words(command)
    every = [subset for dataset in config.datasets for subset in dataset.subsets if subset.settings.num_repeats]
    subsets = [one for one in every if one.metadata_file is None and not one.settings.class_tokens]
    if not subsets:
        raise UserError(f"{config.path}: caption_command: every subset has class_tokens or a metadata_file; remove it")
    files = {image: file for subset in subsets for image, file in uncaptioned(subset).items()}
    if files:
        advance = start("writing captions", len(files))
    for image, file in files.items():
        if not file.exists():  # a.png and a.jpg share one
            write_text(file, f"{caption_of(words, image)}\n")
        advance(1)


def command_words(command: str) -> list[str]:
    """Return the words of a caption command, ``{image}`` still in them.

    Raises:
        UserError: there is no place for the image, or one where its name could be taken for code.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"caption_command: {command!r}: {error}; close the quotes") from None
    if not any(_IMAGE in word for word in words):
        raise UserError(f'caption_command: {command!r} lacks {_IMAGE}; write "my_captioner --image {_IMAGE}"')
    if code := [word for word in words if _IMAGE in word and (word is words[0] or not _PLACE.fullmatch(word))]:
        remedy = f"give {_IMAGE} as an argument of its own, to a shell as: sh -c 'my_captioner \"$1\"' sh {_IMAGE}"
        raise UserError(f"caption_command: {code[0]!r}: there a file's name could run as code; {remedy}")
    return words


def caption_of(words: list[str], image: Path) -> str:
    """Return what the command says of an image, in one line.

    Raises:
        UserError: it cannot be run, fails, prints nothing or too much, or takes too long.
    """
    arguments = [word.replace(_IMAGE, str(image)) for word in words]
    try:
        code, printed, complaints = _run(arguments, image)
        text = " ".join(printed.decode("utf-8").split())
    except OSError as error:
        raise UserError(f"caption_command: {words[0]!r} cannot be run ({error.strerror}); check its name") from None
    except UnicodeDecodeError:
        raise UserError(f"{image}: caption_command prints no UTF-8; let it print text") from None
    if code or not text:
        last_line = complaints.decode("utf-8", "replace").strip().splitlines()[-1:] or ["nothing on stderr"]
        ended = f"exit status {code}{'' if code else ' and no caption'} ({last_line[0].strip()})"
        raise UserError(f"{image}: caption_command ended with {ended}; put it right: captions already written stay")
    if len(text) > _LONGEST or _CONTROL.search(text):
        problem = "control characters, as of colours" if len(text) <= _LONGEST else f"{len(text):,} characters"
        raise UserError(f"{image}: caption_command prints {problem}; let it print the caption alone")
    return text


def _run(arguments: list[str], image: Path) -> tuple[int, bytes, bytes]:
    """Return the exit status of a command, and what it has written to stdout and stderr by then."""
    with TemporaryFile() as output, TemporaryFile() as complaints:
        child = subprocess.Popen(arguments, 0, None, subprocess.DEVNULL, output, complaints, start_new_session=True)
        until = time.monotonic() + _MOST_SECONDS
        with _killed_on_error(child):
            code = None
            while code is None:
                with suppress(subprocess.TimeoutExpired):
                    code = child.wait(0.05)
                endless = sum(os.fstat(stream.fileno()).st_size for stream in (output, complaints)) > _MOST_BYTES
                if endless or (code is None and time.monotonic() > until):
                    what = "prints without end" if endless else f"has not ended after {_MOST_SECONDS:g} s"
                    raise UserError(f"{image}: caption_command {what}; put it right: captions already written stay")
        output.seek(0)
        complaints.seek(0)
        return code, output.read(_MOST_BYTES), complaints.read(_MOST_BYTES)


@contextmanager
def _killed_on_error(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill the child's session if the block is left by an error, by Ctrl-C, or because this process is to end."""

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    is_main = threading.current_thread() is threading.main_thread()  # where signals arrive
    taken = [number for number in numbers if is_main and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in taken:
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # as a shell says it
        yield
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL) if sys.platform != "win32" else child.kill()
        child.wait()
        raise
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
