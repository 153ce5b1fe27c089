"""What is known about the files of a dataset, remembered from run to run.

Opening 100,000 images at every start to learn their size takes minutes on a network disk, hashing their
content longer. Each cache folder therefore keeps an ``index.json`` (:class:`FileMemory`): per file its bytes and
modification time, and what was read while it had them (width and height, a hash of the content, a caption's text). A
start lists each folder once and opens only what is new or changed. The file carries a checksum: where that does not
fit, everything is read again.

A file modified within two seconds of being read is not remembered: with a coarse file clock a second change
could leave size and time as they were (git calls such entries "racily clean").
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
from library.data.images import read_header
from library.data.new_dataset import MOST_CAPTION_BYTES
from library.errors import UserError
from library.files import read_bytes, read_text

_VERSION = 2
_RACY_NS = 2_000_000_000
_THREADS = 8  # waiting for the disk, not for the processor


Stats = tuple[int, int]  # bytes, mtime_ns


@dataclass(slots=True)
class SourceFile:
    """An image or mask on disk; ``size`` is (width, height), ``content`` 32 hex digits, both once read."""

    path: str
    bytes: int
    mtime_ns: int
    size: tuple[int, int] | None = None
    content: str | None = None
    frames: int = 1  # or pages; read with the size

    @property
    def stat(self) -> Stats:
        """What it was known by when it was listed."""
        return self.bytes, self.mtime_ns


_OF_SYSTEMS = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__macosx"})  # hidden where they are made


def list_folder(
    folder: str | Path, recursive: bool = False, besides: Iterable[Path] = (), dangling: list[str] | None = None
) -> dict[str, Stats]:
    """Return name -> (bytes, mtime_ns) of the files in ``folder``, sorted by name; hidden and system files left out.

    Args:
        folder: where to look.
        recursive: also in the folders inside; a file there is named "sub/name". A folder that links lead to twice is
            read once.
        besides: folders inside that are not looked into.
        dangling: names of links that lead nowhere, pipes, sockets and devices are added.
    """
    files: dict[str, Stats] = {}
    for name, entry in _walk(folder, recursive, besides):
        if _is(entry.is_file):
            with suppress(FileNotFoundError):  # deleted since it was listed
                stat = entry.stat()
                files[name] = (stat.st_size, stat.st_mtime_ns)
        elif dangling is not None and not _is(entry.is_dir):
            dangling.append(name)
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


class FileMemory:
    """What was read of files, by kind and by a name for the file, as long as its bytes and modification time stay.

    ``file`` is where that is kept, in a cache folder that need not exist yet.
    """

    def __init__(self, file: Path, version: int, kinds: Sequence[str]) -> None:
        self._file, self._version = file, version
        self._known: dict[str, dict[str, list[Any]]] = {kind: {} for kind in kinds}
        self._changed = False
        try:
            stored = read_checked_json(file)
            if stored["version"] == version:
                self._known = {kind: dict(stored[kind]) for kind in kinds}
        except (OSError, ValueError, KeyError, TypeError):
            pass  # absent or damaged: everything is read again

    def recall(self, kind: str, key: str, stat: Stats) -> list[Any]:
        """Return the values that were read while the file was as ``stat`` says; empty if there are none."""
        known = self._known[kind].get(key, [None, None])
        return known[2:] if (known[0], known[1]) == stat else []

    def keep(self, kind: str, key: str, stat: Stats, read_at_ns: int, *values: Any) -> None:
        """Remember ``values``, which were read from ``read_at_ns`` on, unless the file had just been written."""
        if read_at_ns - stat[1] > _RACY_NS:
            self._known[kind][key] = [*stat, *values]
            self._changed = True

    def save(self) -> None:
        """Write what was read since the last save."""
        if not self._changed:
            return
        try:
            write_checked_json(self._file, {"version": self._version, **self._known})
        except UserError as error:
            raise UserError(f"{error}: set cache_directory") from None
        self._changed = False


class FileIndex:
    """The memory of one cache folder; ``folder`` need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._root = str(folder.parent) + os.sep
        # of images: width, height, content or None, frames; of captions: their text
        self._memory = FileMemory(folder / "index.json", _VERSION, ("images", "captions"))
        self._files: dict[str, SourceFile] = {}
        self.save = self._memory.save

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
            if known := self._memory.recall("images", self._key(path), stat):
                width, height, file.content, file.frames = known
                file.size = (width, height)
        return file

    def measure(self, files: Iterable[SourceFile]) -> None:
        """Read the width, height and number of frames of those whose size is not known yet."""

        def header(file: SourceFile) -> None:
            file.size, file.frames = read_header(file.path)

        self._read([file for file in files if file.size is None], header)

    def hash_contents(self, files: Iterable[SourceFile]) -> None:
        """Hash the content of those whose content is not known yet."""

        def content(file: SourceFile) -> None:
            file.content = content_hash(read_bytes(file.path))

        self._read([file for file in files if file.content is None], content)

    def _read(self, files: list[SourceFile], read: Callable[[SourceFile], None]) -> None:
        if not files:
            return
        started = time.time_ns()
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(read, files, chunksize=64):
                pass
        for file in files:
            if file.size is not None:
                values = (*file.size, file.content, file.frames)
                self._memory.keep("images", self._key(file.path), file.stat, started, *values)

    def caption(self, path: str, stat: Stats) -> str:
        """Return a caption file's text (UTF-8), remembered or read."""
        key = self._key(path)
        if known := self._memory.recall("captions", key, stat):
            return str(known[0])
        started = time.time_ns()
        text = read_text(path, most=MOST_CAPTION_BYTES)
        self._memory.keep("captions", key, stat, started, text)
        return text

    def knows(self, file: SourceFile) -> bool:
        """Whether ``file`` came from this index."""
        return self._files.get(file.path) is file

    def _key(self, path: str) -> str:
        """Files beside the cache folder go by relative name, so a moved folder is known; others in full."""
        return path[len(self._root) :] if path.startswith(self._root) else path


def checked_bytes(file: SourceFile) -> bytes:
    """Return the content of a file that has been hashed."""
    data = read_bytes(file.path)
    if content_hash(data) != file.content:
        raise UserError(f"{file.path}: changed while it was being cached; start again")
    return data
