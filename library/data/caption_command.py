"""Captions that a command of the user's writes for images without one, before a dataset is read.

``caption_command = "my_captioner --image {image}"`` is split as a shell would split it, but no shell runs it, and
``{image}`` becomes the image's absolute path: whatever characters a name has, it stays one argument, and none begins
with a dash. What the command prints is written beside the image, where the next run finds it. Subsets with
``class_tokens`` or a ``metadata_file`` have their captions. Only the training's own settings name a command, never a
dataset TOML, which may come from a stranger.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from library.data.config import DatasetConfig
from library.data.sources import uncaptioned
from library.errors import UserError
from library.files import write_text

_IMAGE = "{image}"
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
    files = all_uncaptioned(config)
    advance = start("captioning", len(files))
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


def all_uncaptioned(config: DatasetConfig) -> dict[Path, Path]:
    """Return every image of a dataset that a command is to caption, with the file that its caption belongs in."""
    every = [subset for dataset in config.datasets for subset in dataset.subsets if subset.settings.num_repeats]
    subsets = [one for one in every if one.metadata_file is None and one.settings.class_tokens is None]
    if not subsets:
        raise UserError(f"{config.path}: caption_command: every subset has class_tokens or a metadata_file; remove it")
    return {image: file for subset in subsets for image, file in uncaptioned(subset).items()}


def caption_of(words: list[str], image: Path) -> str:
    """Return what the command says of an image, in one line.

    Raises:
        UserError: it cannot be run, fails, or prints nothing.
    """
    arguments = [word.replace(_IMAGE, str(image)) for word in words]
    try:
        done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        text = " ".join(done.stdout.decode("utf-8").split())
    except OSError as error:
        raise UserError(f"caption_command: {words[0]!r} cannot be run ({error.strerror}); check its name") from None
    except UnicodeDecodeError:
        raise UserError(f"{image}: caption_command prints no UTF-8; let it print text") from None
    if done.returncode or not text:
        last_line = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["nothing on stderr"]
        ended = f"exit status {done.returncode}{'' if done.returncode else ' and no caption'} ({last_line[0].strip()})"
        raise UserError(f"{image}: caption_command ended with {ended}; put it right: captions already written stay")
    if len(text) > _LONGEST or _CONTROL.search(text):
        problem = "control characters, as of colours" if len(text) <= _LONGEST else f"{len(text):,} characters"
        raise UserError(f"{image}: caption_command prints {problem}; let it print the caption alone")
    return text
