"""What is known about the files of a dataset, remembered from run to run.

Opening 100,000 images at every start to learn their size takes minutes on a network disk, hashing their
content longer. Each cache folder therefore keeps an ``index.json`` (:class:`FileIndex`): per file its bytes, the times
of its content and of its inode, and what was read while it had them (width and height, a hash of the content, a
caption's text). A start lists each folder once and opens only what is new or changed. The file carries a checksum:
where that does not fit, everything is read again.

Programs set a file's time of modification as they like (``cp -p``, ``rsync``, ``unzip``), so a file can be replaced by
another of equal length and time. Nobody sets the inode's time (ctime). Files that were copied, touched or restored are
read again for it, and that is all: what is encoded is kept by content. The inode's number is not compared: some network
file systems give another one at every mount. On Windows the third time is that of creation.

A file modified within two seconds of being read is not remembered: with a coarse file clock a second change
could leave size and times as they were (git calls such entries "racily clean"). The inode's time counts in ticks of the
kernel's clock: a file whose inode has just been changed is read when the tick is over.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.checksums import read_checked_json, write_checked_json
from library.data.images import read_header, reduced
from library.data.new_dataset import MOST_CAPTION_BYTES
from library.errors import UserError
from library.files import read_bytes, read_text

_VERSION = 5
_RACY_NS = 2_000_000_000
_TICK_NS = 20_000_000  # twice the longest tick of Linux
_THREADS = max(8, os.cpu_count() or 1)  # Pillow and hashing let go of the interpreter's lock; the rest waits for disks
_OF_IMAGES = ("sizes", "contents", "decoded")
_REDUCED = 256  # pixels a side that a check decodes JPEGs to, several times as fast as in full


Stats = tuple[int, int, int]  # bytes, mtime_ns, ctime_ns
Read = Callable[[str], Sequence[Any] | None]  # of a file's path: what is to be remembered, None for nothing
Start = Callable[[int], Callable[[int], None]]  # start(total) -> advance(n)


@dataclass(slots=True)
class SourceFile:
    """An image or mask on disk; ``size`` is (width, height), ``content`` 32 hex digits, both once read."""

    path: str
    bytes: int
    mtime_ns: int
    ctime_ns: int
    size: tuple[int, int] | None = None
    content: str | None = None
    frames: int = 1  # or pages; read with the size

    @property
    def stat(self) -> Stats:
        """What it was known by when it was listed."""
        return self.bytes, self.mtime_ns, self.ctime_ns

    def note(self, kind: str, values: Sequence[Any] | None) -> None:
        """Take over what the index has of one of the kinds of images, if it has it."""
        if values and kind != "contents":
            self.size, self.frames = (values[0], values[1]), values[2]
        if values and kind != "sizes":
            self.content = values[-1]


_OF_SYSTEMS = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__macosx"})  # hidden where they are made


def list_folder(
    folder: str | Path, recursive: bool = False, besides: Iterable[Path] = (), others: dict[str, bool] | None = None
) -> dict[str, Stats]:
    """Return name -> ``Stats`` of the files in ``folder``, sorted by name; hidden and system files left out.

    Links that lead nowhere, pipes, sockets and devices are files whose ``Stats`` are 0: reading one tells what it is.

    Args:
        folder: where to look.
        recursive: also in the folders inside; a file there is named "sub/name". A folder that links lead to twice is
            read once.
        besides: folders inside that are not looked into.
        others: these are put here instead, name -> False, and folders, name -> True.
    """
    files: dict[str, Stats] = {}
    for name, entry in _walk(folder, recursive, besides):
        if _is(entry.is_file):
            with suppress(FileNotFoundError):  # deleted since it was listed
                stat = entry.stat()
                files[name] = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        elif others is not None:
            others[name] = _is(entry.is_dir)
        elif not _is(entry.is_dir):
            files[name] = (0, 0, 0)
    return dict(sorted(files.items()))


def files_inside(folder: str | Path, besides: Iterable[Path] = ()) -> list[str]:
    """Return the names ("sub/name") of the files in the folders inside ``folder``, sorted; they are not looked at.

    An empty list where one of these folders cannot be read.
    """
    try:
        return sorted(name for name, entry in _walk(folder, True, besides) if "/" in name and _is(entry.is_file))
    except UserError:
        return []


def _walk(folder: str | Path, recursive: bool, besides: Iterable[Path]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield name and entry of all there is in ``folder``; see :func:`list_folder`."""
    seen = {os.path.realpath(path) for path in besides}
    waiting = [("", str(folder))]
    while waiting:
        prefix, place = waiting.pop()
        if recursive and os.path.realpath(place) in seen:
            continue
        seen.add(os.path.realpath(place))
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.name.startswith(".") or entry.name.lower() in _OF_SYSTEMS:
                        continue
                    yield prefix + entry.name, entry
                    if recursive and _is(entry.is_dir):
                        waiting.append((f"{prefix}{entry.name}/", entry.path))
        except OSError as error:
            raise UserError(f"{place}: cannot be read ({error.strerror}); check its permissions") from error


def _is(ask: Callable[[], bool]) -> bool:
    """Return what a listed entry answers; no of a symbolic link to itself."""
    try:
        return ask()
    except OSError:
        return False


def content_hash(data: bytes) -> str:
    """Return 32 hex digits of a file's content (BLAKE2b)."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class FileIndex:
    """The memory of one cache folder; ``folder`` need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._root = str(folder.parent) + os.sep
        # kind -> path -> bytes, times, and what was read: "sizes" (width, height, frames), "contents" (hash), "decoded"
        # (all of these), "captions" (text); of masks, by the key that asks for them, what look() was told to read
        self._known: dict[str, dict[str, list[Any]]] = {}
        self._files: dict[str, SourceFile] = {}
        self._changed = False
        with suppress(OSError, ValueError, KeyError, TypeError):  # absent or damaged: everything is read again
            stored = read_checked_json(folder / "index.json")
            if stored["version"] == _VERSION:
                self._known = {kind: dict(known) for kind, known in stored.items() if kind != "version"}

    def _recall(self, kind: str, path: str, stat: Stats) -> list[Any] | None:
        """Return the values that were read while the file was as ``stat`` says; None if there are none."""
        known = self._known.get(kind, {}).get(self._key(path), [])
        return known[3:] if tuple(known[:3]) == stat else None

    def save(self) -> None:
        """Write what was read since the last save."""
        if not self._changed:
            return
        try:
            write_checked_json(self.folder / "index.json", {"version": _VERSION, **self._known})
        except UserError as error:
            raise UserError(f"{error}: set cache_directory") from None
        self._changed = False

    def image(self, path: str, stat: Stats) -> SourceFile:
        """Return the record of an image, with what is remembered of it; the same object for the same path.

        Raises:
            UserError: the path is not UTF-8, so that no cache and no file of ours could name it.
        """
        file = self._files.get(path)
        if file is None:
            if any("\ud800" <= character <= "\udfff" for character in path):
                raise UserError(f"{path}: the name is not UTF-8; rename the file")
            file = self._files[path] = SourceFile(path, *stat)
            for kind in _OF_IMAGES:
                file.note(kind, self._recall(kind, path, stat))
        return file

    def measure(self, files: Iterable[SourceFile]) -> None:
        """Read the width, height and number of frames of those whose size is not known yet."""

        def header(path: str) -> list[int]:
            size, frames = read_header(path)
            return [*size, frames]

        self._read("sizes", [file for file in files if file.size is None], header)

    def hash_contents(self, files: Iterable[SourceFile]) -> None:
        """Hash the content of those whose content is not known yet."""
        new = [file for file in files if file.content is None]
        self._read("contents", new, lambda path: [content_hash(read_bytes(path))])

    def decode(self, files: Iterable[SourceFile], start: Start) -> dict[str, str]:
        """Decode images to their end, measure and hash them; return what is wrong with which, by path.

        Args:
            files: those that were decoded as they are before are passed over.
            start: ``start(total) -> advance(n)``, of those that are decoded.
        """
        problems: dict[str, str] = {}

        def whole(path: str) -> list[Any] | None:
            try:
                data = read_bytes(path)
                size, frames = read_header(path)
                reduced(data, path, _REDUCED)
            except UserError as error:  # not remembered: what is needed may be installed, or a share come back
                problems[path] = str(error).removeprefix(f"{path}: ")
                return None
            return [*size, frames, content_hash(data)]

        self._read("decoded", files := list(files), whole, start)
        return {file.path: problems[file.path] for file in files if file.path in problems}

    def look(
        self, kind: str, files: Iterable[SourceFile], read: Read, start: Start = lambda _: lambda _: None
    ) -> dict[str, Sequence[Any]]:
        """Return by path what ``read`` says of the path of each file (JSON), or said of it before, under ``kind``.

        What a file said is kept unless it had just been written. ``start(total) -> advance(n)``, of those that are
        read; files of which ``read`` returns None are left out.
        """
        stats = {file.path: file.stat for file in files}
        found: dict[str, Sequence[Any] | None] = {path: self._recall(kind, path, stats[path]) for path in stats}
        new = [path for path, values in found.items() if values is None]
        _let_tick_pass(stats[path][2] for path in new)
        advance, started = start(len(new)) if new else (lambda _: None), time.time_ns()
        with ThreadPoolExecutor(_THREADS) as pool:
            for path, values in zip(new, (pool.map if len(new) > 1 else map)(read, new), strict=True):
                advance(1)
                found[path], stat = values, stats[path]
                is_coarse = stat[2] % 1_000_000_000 == 0  # a clock of whole seconds
                if values is not None and started - (max(stat[1:]) if is_coarse else stat[1]) > _RACY_NS:
                    self._known.setdefault(kind, {})[self._key(path)] = [*stat, *values]
                    self._changed = True
        return {path: values for path, values in found.items() if values is not None}

    def _read(self, kind: str, files: Sequence[SourceFile], read: Read, *start: Start) -> None:
        found = self.look(kind, files, read, *start)
        for file in files:
            file.note(kind, found.get(file.path))

    def caption(self, path: str, stat: Stats) -> str:
        """Return a caption file's text (UTF-8), remembered or read."""
        file = SourceFile(path, *stat)
        return str(self.look("captions", [file], lambda _: [read_text(path, most=MOST_CAPTION_BYTES)])[path][0])

    def knows(self, file: SourceFile) -> bool:
        """Whether ``file`` came from this index."""
        return self._files.get(file.path) is file

    def _key(self, path: str) -> str:
        """Files beside the cache folder go by relative name, so a moved folder is known; others in full."""
        return path[len(self._root) :] if path.startswith(self._root) else path


def _let_tick_pass(ctimes: Iterable[int]) -> None:
    """Wait until a further change of an inode has another time than the last."""
    wait = max(ctimes, default=0) + _TICK_NS - time.time_ns()
    if 0 < wait <= _TICK_NS:
        time.sleep(wait / 1e9)


def checked_bytes(file: SourceFile) -> bytes:
    """Return the content of a file that has been hashed."""
    data = read_bytes(file.path)
    if content_hash(data) != file.content:
        raise UserError(f"{file.path}: changed while it was being cached; start again")
    return data
