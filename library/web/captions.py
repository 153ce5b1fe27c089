"""Caption files as they lie on disk: read, changed, and changed back.

A text is known by the hash of its file; who changes one says which text they saw, so that nobody's newer words are
overwritten. What a person does not see stays: encoding, byte order mark, the kind of line ends, a last line's end. Before
files are written, their old and new texts go into a journal, one line of JSON a change, in which undo and redo are lines
too: it is what can be undone after a restart, and what is left of a caption if the machine goes down while it is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.errors import UserError, counted
from library.files import atomic_path
from library.folder_lock import FolderLock

MOST_BYTES = 2**20  # of a caption, as in library.data.file_index
_REGEX_SECONDS = 5.0
Changes = list[tuple[str, str | None, str | None]]  # path, the old and new content; None: no file


@dataclass(frozen=True)
class Text:
    """A text file: ``raw`` is its content with mark and line ends, None if there is no file; ``shown`` is for people."""

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

    def changed(self, shown: str) -> str:
        """Return the content with ``shown`` in place of what was shown."""
        old, new = self.raw or "", shown.replace("\r\n", "\n").replace("\r", "\n")
        ends = max(("\r\n", "\n", "\r"), key=re.findall("\r\n|\n|\r", old).count)
        mark, last = "\ufeff" * old.startswith("\ufeff"), ends * old.endswith(("\n", "\r"))
        return mark + new.replace("\n", ends if "\n" in old or "\r" in old else "\n") + last


_read: dict[str, tuple[tuple[int, int], Text]] = {}  # path -> what was read while the file had these bytes and time


def read(path: Path) -> Text:
    """Return a caption file's text; remembered while the file stays as it is."""
    try:
        stat = path.stat()
        seen, text = _read.get(str(path), (None, None))
        if text is not None and seen == (stat.st_size, stat.st_mtime_ns):
            return text
        if not path.is_file() or stat.st_size > MOST_BYTES:
            return Text(None, why="is no text file of up to a MiB")
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Text(None)
    except OSError as error:
        return Text(None, why=f"cannot be read ({error.strerror})")
    encoding = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}.get(data[:2], "utf-8")
    try:
        text = Text(data.decode(encoding), encoding)
    except UnicodeDecodeError as error:
        text = Text(None, why=f"is not UTF-8 (byte {error.start}); save it as UTF-8")
    if time.time_ns() - stat.st_mtime_ns > 2e9:  # a coarse clock could not tell a second change
        if len(_read) > 50_000:
            _read.clear()
        _read[str(path)] = (stat.st_size, stat.st_mtime_ns), text
    return text


class Journal:
    """The changes of one dataset's files; ``find`` checks where a path leads, each time it is used."""

    def __init__(self, folder: Path, dataset: Path, find: Callable[[str], Path]) -> None:
        self._file = folder / f"{hashlib.sha256(os.fsencode(dataset)).hexdigest()[:16]}.jsonl"
        self._find = find

    def stacks(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return what can be undone and what can be redone, the next one last."""
        done: list[dict[str, Any]] = []
        undone: list[dict[str, Any]] = []
        for line in self._file.read_bytes().splitlines() if self._file.is_file() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # cut off when the machine went down
            if entry["what"] == "undo" and done:
                undone.append(done.pop())
            elif entry["what"] == "redo" and undone:
                done.append(undone.pop())
            elif "changes" in entry:
                done.append(entry)
                undone = []
        return done, undone

    def write(self, what: str, changes: Changes, seen: Mapping[str, str] | None = None) -> list[str]:
        """Write new texts; return the paths that had become others' meanwhile and were left alone.

        ``seen``: of a path, the hash of the text that was shown; without it, the old text itself must still be there.
        """
        with self._alone():
            kept = [c for c in changes if (seen[c[0]] if seen else _hash(c[1], c[0])) == read(self._find(c[0])).hash]
            kept = [c for c in kept if c[1] != c[2]]
            if kept:
                self._note({"what": what, "at": time.time(), "changes": kept})
                self._put([(path, new) for path, _, new in kept])
            return [c[0] for c in changes if c not in kept and c[1] != c[2]]

    def step(self, back: bool) -> tuple[str, list[str]]:
        """Undo the last change, or redo what was undone last; return what it was, and paths left alone."""
        with self._alone():
            stack = self.stacks()[0 if back else 1]
            if not stack:
                raise UserError(f"there is nothing to {'undo' if back else 'redo'}")
            entry, put, left = stack[-1], [], []
            for path, old, new in entry["changes"]:
                now, (there, wanted) = read(self._find(path)).raw, (new, old) if back else (old, new)
                if now == there:
                    put.append((path, wanted))
                elif now != wanted:
                    left.append(path)
            self._note({"what": "undo" if back else "redo", "at": time.time()})
            self._put(put)
            return entry["what"], left

    def _note(self, entry: dict[str, Any]) -> None:
        with open(self._file, "ab") as file:
            cut = file.tell() and not self._file.read_bytes().endswith(b"\n")
            file.write(b"\n" * bool(cut) + json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _put(self, texts: Sequence[tuple[str, str | None]]) -> None:
        def put(one: tuple[str, str | None]) -> None:
            path, text = self._find(one[0]), one[1]
            _read.pop(str(path), None)
            if text is None:
                path.unlink(missing_ok=True)
                return
            with atomic_path(path) as temporary:
                temporary.write_bytes(text.encode(_encoding(text, path)))
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
