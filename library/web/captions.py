"""Caption files as they lie on disk: read, changed, and changed back.

A text is known by the hash of its file; who changes one says which they saw, so that nobody's newer words are
overwritten. What a person does not see stays: encoding, byte order mark, the kind of line ends, the last line's end.
Before files are written, their old and new texts go into a journal, a file of JSON that is replaced whole: a change can
be undone after a restart, and nothing is lost if the machine goes down meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.errors import UserError
from library.files import atomic_path, write_text
from library.folder_lock import FolderLock
from library.web.jobs import ROOT

SUFFIXES = (".toml", ".txt", ".caption", ".cap", ".tags", ".tag", ".wd14")  # of what is edited: nothing that is run
MOST_BYTES = 2**20  # of a caption, as in library.data.file_index
_REGEX_SECONDS = 5.0
_MOST_JOURNAL = 8 * 2**20  # bytes; the oldest changes are forgotten
Changes = list[tuple[str, str | None, str | None, str]]  # path, old and new content (None: no file), encoding


@dataclass(frozen=True)
class Text:
    """A text file; ``raw`` is its content with mark and line ends, None if there is no file."""

    raw: str | None
    encoding: str = "utf-8"
    why: str = ""  # it cannot be edited

    @property
    def shown(self) -> str:
        """The text, its lines ended by newlines, without the last line's end."""
        return (self.raw or "").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")

    @property
    def hash(self) -> str:
        """What the text is known by."""
        return "" if self.raw is None else hashlib.sha256(self.raw.encode(self.encoding)).hexdigest()[:16]

    def changed(self, shown: str) -> str | None:
        """Return the content with ``shown`` in place of what was shown; of blank text no file, as training wants it."""
        if not shown.strip():
            return None
        old, new = self.raw or "", shown.replace("\r\n", "\n").replace("\r", "\n")
        ends = max(("\r\n", "\n", "\r"), key=re.findall("\r\n|\n|\r", old).count)
        mark, last = "\ufeff" * old.startswith("\ufeff"), ends * old.endswith(("\n", "\r"))
        return mark + new.replace("\n", ends if "\n" in old or "\r" in old else "\n") + last


def read(path: Path) -> Text:
    """Return a caption file's text."""
    if path.suffix.lower() not in SUFFIXES:
        return Text(None, why=f"is edited here only as {', '.join(SUFFIXES)}")
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= MOST_BYTES):
            return Text(None, why="is no text file of up to a MiB")
        data = path.read_bytes()
        encoding = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}.get(data[:2], "utf-8")
        return Text(data.decode(encoding), encoding)
    except (FileNotFoundError, NotADirectoryError):
        return Text(None)
    except OSError as error:
        return Text(None, why=f"cannot be read ({error.strerror})")
    except UnicodeDecodeError as error:
        return Text(None, why=f"is not UTF-8 (byte {error.start}); save it as UTF-8")


def edited(
    texts: Sequence[str], action: str, find: str, by: str, *, regex: bool, case: bool, missing: bool
) -> list[str]:
    """Return what many captions become.

    Args:
        texts: as shown.
        action: "replace" ``find`` by ``by``; put ``by`` "before" or "after" each line; "remove" the tag ``find``.
        regex: ``find`` is a regular expression. case: capital and small letters differ.
        missing: put ``by`` only where a caption lacks it.

    Raises:
        UserError: of an expression that is none, or takes too long.
    """
    if action == "replace" and find:
        pattern, flags = find if regex else re.escape(find), 0 if case else re.IGNORECASE
        asked = json.dumps([pattern, flags, by if regex else by.replace("\\", r"\\"), list(texts)])
        command = [sys.executable, "-m", "library.web.captions"]  # a process, since no thread can be told to end
        options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": _REGEX_SECONDS}
        try:
            done = subprocess.run(command, input=asked, **options)
        except subprocess.TimeoutExpired:
            raise UserError(f"find: takes longer than {_REGEX_SECONDS:g} s; nest no repetitions") from None
        if done.returncode:
            raise UserError(f"find: is no regular expression that can be used ({done.stdout.strip()}); correct it")
        return list(json.loads(done.stdout))

    put, word = action in ("before", "after"), (by if action in ("before", "after") else find).strip(" ,")
    if not word:
        raise UserError("change captions: there is nothing to look for or to add; write it")

    def line(text: str) -> str:
        if not put:
            tags = text.split(",")
            kept = [tag for tag in tags if tag.strip().casefold() != word.casefold()]
            return text if len(kept) == len(tags) else ",".join(kept).strip()
        if not text.strip() or (missing and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)):
            return text
        glue = ", " if by[-1:].isalnum() or (action == "after" and by[:1].isalnum()) else ""
        return f"{by}{glue}{text}" if action == "before" else f"{text}{glue}{by}"

    return [word if put and not text.strip() else "\n".join(map(line, text.split("\n"))) for text in texts]


class Journal:
    """The changes of one dataset's files; ``find`` checks where a path leads, each time it is used."""

    def __init__(self, folder: Path, dataset: Path, find: Callable[[str], Path]) -> None:
        self._file = folder / f"{hashlib.sha256(os.fsencode(dataset)).hexdigest()[:16]}.json"
        self._find = find

    def stacks(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return what can be undone and what can be redone, the next one last."""
        if not self._file.is_file():
            return [], []
        kept = json.loads(self._file.read_text(encoding="utf-8"))
        return kept["done"], kept["undone"]

    def write(self, what: str, changes: Changes) -> list[str]:
        """Write new texts; return the paths whose old text is not there any more, which were left alone."""
        with self._alone():
            changes = [change for change in changes if change[1] != change[2]]
            kept = [change for change in changes if read(self._find(change[0])).raw == change[1]]
            if kept:
                self._note([*self.stacks()[0], {"what": what, "changes": kept}], [])
                self._put([(path, new, encoding) for path, _, new, encoding in kept])
            return [path for path, *rest in changes if (path, *rest) not in kept]

    def step(self, back: bool) -> tuple[str, list[str]]:
        """Undo the last change, or redo what was undone last; return what it was, and paths left alone."""
        with self._alone():
            done, undone = self.stacks()
            stack, other = (done, undone) if back else (undone, done)
            if not stack:
                raise UserError(f"there is nothing to {'undo' if back else 'redo'}")
            other.append(entry := stack.pop())
            put, left = [], []
            for path, old, new, encoding in entry["changes"]:
                now, (there, wanted) = read(self._find(path)).raw, (new, old) if back else (old, new)
                if now == there:
                    put.append((path, wanted, encoding))
                elif now != wanted:
                    left.append(path)
            self._note(done, undone)
            self._put(put)
            return entry["what"], left

    def _note(self, done: list[dict[str, Any]], undone: list[dict[str, Any]]) -> None:
        """Write what can be undone and redone; the oldest changes are forgotten where it is too much."""
        while len(text := json.dumps({"done": done, "undone": undone})) > _MOST_JOURNAL and len(done) > 1:
            del done[: len(done) // 2]
        write_text(self._file, text)

    def _put(self, texts: Sequence[tuple[str, str | None, str]]) -> None:
        def put(one: tuple[str, str | None, str]) -> None:
            path, text, encoding = self._find(one[0]), *one[1:]
            if text is None:
                path.unlink(missing_ok=True)
                return
            with atomic_path(path) as temporary:
                temporary.write_bytes(text.encode(encoding))
                if path.exists():
                    temporary.chmod(path.stat().st_mode & 0o777)

        with ThreadPoolExecutor(8) as pool:  # they wait for the disk
            list(pool.map(put, texts))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One change at a time, of all pages over this folder."""
        lock, end = FolderLock(self._file.with_suffix(""), "captions", lambda line: None), time.monotonic() + 20
        while True:
            try:
                lock.acquire()
                break
            except UserError:
                if time.monotonic() > end:
                    raise UserError(f"{lock.path}: another page changes these captions; try again") from None
                time.sleep(0.02)
        try:
            yield
        finally:
            lock.release()


def main() -> None:
    """Replace in the texts that stdin gives, for :func:`edited`."""
    pattern, flags, by, texts = json.load(sys.stdin)
    try:
        print(json.dumps([re.sub(pattern, by, text, flags=flags | re.MULTILINE) for text in texts]))
    except (re.error, RecursionError, OverflowError, IndexError) as error:
        raise SystemExit(print(error) or 1) from None


if __name__ == "__main__":
    main()
