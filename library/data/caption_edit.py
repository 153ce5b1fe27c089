"""Caption files as they lie on disk: read, changed, and changed back; for library/web/data.py.

A text is known by the hash of its file; who changes one says which they saw, so that nobody's newer words are
overwritten. What a person does not see stays: encoding, byte order mark, the kind of line ends, the last line's end.
Before files are written, their old and new texts go into a journal, a file of JSON that is replaced whole: a change can
be undone after a restart, and nothing is lost if the machine goes down meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.data.new_dataset import MOST_CAPTION_BYTES
from library.errors import UserError
from library.files import atomic_path, read_bytes, rename, write_text
from library.folder_lock import hold

SUFFIXES = (".toml", ".txt", ".caption", ".cap", ".tags", ".tag", ".wd14")  # of what is edited: nothing that is run
_MOST_JOURNAL = 8 * 2**20  # bytes; the oldest changes are forgotten
Change = tuple[str, str | None, str | None, str]  # path, old and new content (None: no file), encoding


@dataclass(frozen=True)
class Text:
    """A text file; ``raw`` is its content with mark and line ends, None if there is no file."""

    raw: str | None
    encoding: str = "utf-8"
    why: str = ""  # it cannot be edited

    @property
    def shown(self) -> str:
        """The text, its lines ended by newlines, without the last line's end."""
        return re.sub("\r\n?", "\n", (self.raw or "").removeprefix("\ufeff")).removesuffix("\n")

    @property
    def hash(self) -> str:
        """What the text is known by."""
        return "" if self.raw is None else hashlib.sha256(self.raw.encode(self.encoding)).hexdigest()[:16]

    def is_as(self, raw: str | None) -> bool:
        """Whether the file holds ``raw``, or is not there if that is None; one that cannot be read is not known."""
        return self.raw == raw and not self.why

    def changed(self, shown: str) -> str | None:
        """Return the content with ``shown`` in place of what was shown; of blank text no file, as training wants it."""
        if not shown.strip():
            return None
        old = self.raw or ""
        ends = re.findall("\r\n|\n|\r", old) or ["\n"]
        usual = max(("\r\n", "\n", "\r"), key=ends.count)
        mark, last = "\ufeff" * old.startswith("\ufeff"), usual * old.endswith(("\n", "\r"))
        return mark + re.sub("\r\n?|\n", usual, shown) + last


def read(path: Path) -> Text:
    """Return a caption file's text."""
    if path.suffix.lower() not in SUFFIXES:
        return Text(None, why=f"is edited here only as {', '.join(SUFFIXES)}")
    if not path.exists():
        return Text(None)
    try:
        data = read_bytes(path, "mend it first", MOST_CAPTION_BYTES)
        encoding = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}.get(data[:2], "utf-8")
        return Text(data.decode(encoding), encoding)
    except UnicodeDecodeError as error:
        return Text(None, why=f"is not UTF-8 (byte {error.start}); save it as UTF-8")
    except UserError as error:
        return Text(None, why=str(error))


def edited(text: str, action: str, find: str, by: str) -> str:
    """Return what a caption becomes; capital and small letters differ.

    Args:
        text: as shown.
        action: "replace" ``find`` by ``by``; put ``by`` "before" or "after" each line that lacks it; "remove" the tag
            ``find``.
    """
    if action == "replace" and find:
        return text.replace(find, by)
    put = action in ("before", "after")
    if not (word := (by if put else find).strip(" ,")):
        raise UserError("change captions: there is nothing to look for or to add; write it")
    if put and not text.strip():
        return word

    def line(old: str) -> str:
        if not put:
            kept = [tag for tag in old.split(",") if tag.strip() != word]
            return old if len(kept) == old.count(",") + 1 else ",".join(kept).strip()
        if not old.strip() or re.search(rf"(?<!\w){re.escape(word)}(?!\w)", old):
            return old
        first, last, touches = (by, old, by[-1]) if action == "before" else (old, by, by[0])
        return f"{first}{', ' if touches.isalnum() else ''}{last}"

    return "\n".join(map(line, text.split("\n")))


def changes_of(texts: Mapping[str, Text], action: str, find: str, by: str) -> list[Change]:
    """Return what :func:`edited` changes in many captions, by path."""
    new = {path: edited(text.shown, action, find, by) for path, text in texts.items()}
    return [
        (path, text.raw, text.changed(new[path]), text.encoding)
        for path, text in texts.items()
        if new[path] != text.shown
    ]


class Journal:
    """The changes of one dataset's files, kept in ``file``; ``find`` checks where a path leads when it is used."""

    def __init__(self, file: Path, find: Callable[[str], Path]) -> None:
        self._file, self._find = file, find

    def stacks(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return what can be undone and what can be redone, the next one last; nothing of what cannot be read."""
        return self._read() or ([], [])

    def _read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | None:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            done, undone = kept["done"], kept["undone"]
            if all(isinstance(one["what"], str) and all(len(c) == 4 for c in one["changes"]) for one in done + undone):
                return done, undone
        return None

    def next_steps(self) -> dict[str, str]:
        """Return what is undone and redone next, or "" ."""
        done, undone = self.stacks()
        return {"undo": done[-1]["what"] if done else "", "redo": undone[-1]["what"] if undone else ""}

    def write(self, what: str, changes: Sequence[Change], more: bool = False, trashed: str = "") -> list[str]:
        """Write new texts; return the paths whose old text is not there any more, which were left alone.

        ``more``: of the last change, if that was the same ``what``: the two are undone together. ``trashed``: what was
        put into the trash besides, by its name there.
        """
        with hold(self._file.with_suffix(".lock")):
            kept = [one for one in changes if one[1] != one[2] and read(self._find(one[0])).is_as(one[1])]
            if kept or trashed:
                done, _ = self.stacks()
                earlier = done.pop()["changes"] if more and done and done[-1]["what"] == what else []
                self._note([*done, {"what": what, "changes": [*earlier, *kept], "trashed": trashed}], [])
            return self._write(changes)

    def step(self, back: bool, restore: Callable[[str], object] = str) -> tuple[str, list[str]]:
        """Undo the last change, or redo what was undone last; return what it was, and paths left alone.

        ``restore`` takes what is to come back from the trash, by its name there; that is not redone.
        """
        with hold(self._file.with_suffix(".lock")):
            done, undone = self.stacks()
            stack, other = (done, undone) if back else (undone, done)
            if not stack:
                raise UserError(f"there is nothing to {'undo' if back else 'redo'}")
            trashed = (entry := stack.pop()).get("trashed")
            other += [] if trashed else [entry]
            self._note(done, undone)
            if trashed:
                restore(trashed)
            changes = [(path, *((new, old) if back else (old, new)), code) for path, old, new, code in entry["changes"]]
            return entry["what"], self._write(changes)

    def _note(self, done: list[dict[str, Any]], undone: list[dict[str, Any]]) -> None:
        """Keep what can be undone and redone; the oldest changes are forgotten where it is too much."""
        while len(text := json.dumps({"done": done, "undone": undone})) > _MOST_JOURNAL and len(done) > 1:
            del done[: len(done) // 2]
        if self._read() is None and self._file.exists():
            rename(self._file, self._file.with_suffix(".broken"))  # for whoever can mend it
        write_text(self._file, text)

    def _write(self, changes: Sequence[Change]) -> list[str]:
        with ThreadPoolExecutor(8) as pool:  # they wait for the disk
            return [path for path in pool.map(self._put, changes) if path]

    def _put(self, change: Change) -> str:
        """Write the new text where the old one still is; return the path where there is neither."""
        path, (name, old, new, encoding) = self._find(change[0]), change
        now = read(path)
        is_old = now.is_as(old)
        if is_old and new is None:
            path.unlink(missing_ok=True)
        elif is_old and old != new:
            with atomic_path(path) as temporary:
                temporary.write_bytes(str(new).encode(encoding))
                if path.exists():
                    temporary.chmod(path.stat().st_mode & 0o777)
        return "" if is_old or now.is_as(new) else name
