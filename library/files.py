"""Files on disk: safe reads, atomic writes and repair after a crash.

What a person names is read by :func:`reading` or what is made of it (:func:`read_text`, :func:`read_json`, ...): a
folder, a pipe or a device in the place of a file would hang or never end, a file of gigabytes in the place of a
configuration would fill the memory, and each is told in one line instead.

What is written goes to a temporary name in the same folder, ``.<name>.<process and thread>.tmp``, is flushed to the
disk and then renamed, which the operating system does in one step: a reader sees the old content or the new, never
half of one. A folder that exists cannot be renamed onto, so the two change places where the file system can do that
(Linux' ``renameat2``), and elsewhere the old one steps aside as ``.<name>.<process>.old`` for a moment. A folder that
is to be deleted is renamed to ``.<name>.<process>.gone`` first, so that a half-deleted one is never taken for a
complete one. Windows lets nobody rename or delete what somebody has open, a virus scanner for instance: there it is
tried again for two seconds.

``<process>`` names machine (or container), process and when it began. ``clear_leftovers`` thereby knows whose work in
progress it must leave alone: that of processes still running, and for ten minutes that of other machines on the same
disk.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import functools
import hashlib
import io
import json
import os
import platform
import re
import shutil
import stat
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import toml

from library.errors import UserError, WriteError, gathering

_LEFTOVER = re.compile(
    r"\.(?P<name>.+)\.(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<begun>\d+)(-\d+)?\.(?P<kind>tmp|old|gone)"
)

# Another machine's leftover is one when it has not been touched for so long; two renames take no time.
_FOREIGN_SECONDS = {"tmp": 600.0, "gone": 600.0, "old": 5.0}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_RETRY_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.5, 0.75)  # between tries to rename on Windows


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it to ``path`` when the block ends without an error.

    Parent folders are made. When the block raises, the temporary file is removed and ``path`` is untouched.
    """
    target = Path(path)
    temporary = _beside(target, "tmp")
    try:
        if target.exists() and not (target.is_file() or target.is_dir()):  # a rename would replace /dev/null itself
            raise WriteError(target, "is a pipe, socket or device")
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _flush(temporary)
        rename(temporary, target)
    except OSError as error:
        raise WriteError(target, error.strerror or str(error)) from error
    finally:
        with suppress(OSError):  # the folder itself may be what cannot be used
            temporary.unlink(missing_ok=True)


def check_new_folder(folder: Path, option: str = "--save_to") -> None:
    """Raise a UserError if ``folder``, the value of ``option``, holds something or is a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is no empty folder; choose another {option}")


def check_room(target: Path, needed: int) -> None:
    """Raise a UserError if the disk of ``target``, which need not exist, has no room for so many bytes."""
    existing = next(parent for parent in target.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        sizes = f"needs {needed / 1e9:.1f} GB, {existing} has {free / 1e9:.1f} GB"
        raise UserError(f"{target}: {sizes}; free some space or choose another disk")


@contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path]:
    """Yield an empty temporary folder; it takes the place of ``folder`` when the block ends without an error.

    Raises:
        WriteError: it, or a file in it, cannot be written; ``folder`` is as it was.
    """
    target = Path(folder)
    temporary = _beside(target, "tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for inner in [path for path in temporary.rglob("*") if path.is_dir()]:
            _flush_names(inner)
        _flush_names(temporary)
        _replace_folder(temporary, target)
        _flush_names(target.parent)
    except OSError as error:
        raise WriteError(target, error.strerror or str(error)) from error
    except WriteError as error:  # a file in it, by a name that nobody has seen
        raise WriteError(target, error.reason) from error
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    """Delete a file, link or folder, if it is there and can be; ``shutil.rmtree`` keeps links and waits at pipes."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def rename(source: Path, target: Path) -> None:
    """Rename a file, over an existing one too, or a folder to a name that is free (``os.replace``)."""
    for pause in _RETRY_SECONDS if sys.platform == "win32" else ():
        try:
            os.replace(source, target)
            return
        except PermissionError:
            time.sleep(pause)
    os.replace(source, target)


def discard(path: str | Path) -> None:
    """Delete a file or folder; a folder is never seen half deleted under its name."""
    path = Path(path)
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    gone = _beside(path, "gone")
    rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def clear_leftovers(folder: str | Path) -> list[Path]:
    """Delete what killed processes left half-written in ``folder``; return what was put back in its place.

    Put back is a folder that was being replaced when its process was killed, and has no successor yet.

    Args:
        folder: not looked into deeper; may be missing.
    """
    restored: list[Path] = []
    try:
        with os.scandir(folder) as entries:  # pathlib takes seconds for a cache of 100,000 files
            names = sorted(entry.name for entry in entries if entry.name.startswith("."))
    except OSError:
        return restored
    for name in names:
        match = _LEFTOVER.fullmatch(name)
        leftover = Path(folder) / name
        if match is None or _in_use(match, leftover):
            continue
        final = leftover.with_name(match["name"])
        with suppress(OSError):
            if match["kind"] == "old" and not final.exists():
                rename(leftover, final)
                restored.append(final)
            else:
                _remove(leftover)
    return restored


def _in_use(match: re.Match[str], leftover: Path) -> bool:
    machine, pid, owner = match["machine"], match["pid"], f"{match['machine']}-{match['pid']}-{match['begun']}"
    if owner == _process_name(os.getpid()):
        return False  # what is looked for at the start was not made by this process, but by one of the same numbers
    if machine == machine_name() and match["begun"] != "0":
        return process_began(int(pid)) == int(match["begun"])
    try:
        return time.time() - leftover.stat().st_ctime < _FOREIGN_SECONDS[match["kind"]]
    except OSError:
        return False


def _beside(target: Path, kind: str) -> Path:
    if not target.name:  # "." and "/"
        raise WriteError(target, "is a folder")
    thread = f"-{threading.get_native_id()}" if threading.current_thread() is not threading.main_thread() else ""
    return target.with_name(f".{target.name}.{_process_name(os.getpid())}{thread}.{kind}")


@functools.lru_cache(maxsize=4)  # a forked process has another number
def _process_name(pid: int) -> str:
    return f"{machine_name()}-{pid}-{process_began(pid)}"


@functools.cache
def machine_name() -> str:
    """Return hex digits that stand for what numbers processes together: a start of the machine, or of a container.

    Where the system does not tell, they stand for the machine.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        known = f"{boot}{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        known = platform.node()
    return hashlib.blake2b(known.encode(), digest_size=4).hexdigest()


def process_began(pid: int) -> int:
    """Return a number for when a process began, 0 if there is none.

    On Linux clock ticks since boot (proc(5): field 22 of stat), as seconds since 1970 change with the clock.
    """
    if sys.platform != "linux":
        import psutil

        try:
            return round(psutil.Process(pid).create_time() * 100)
        except (psutil.Error, ValueError, OverflowError):
            return 0
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces
        return 0 if state in ("Z", "X") else int(fields[18])
    except (OSError, ValueError, IndexError):
        return 0


def _replace_folder(new: Path, folder: Path) -> None:
    if not folder.exists():
        rename(new, folder)
    elif not _exchange(new, folder):
        old = _beside(folder, "old")
        rename(folder, old)
        try:
            rename(new, folder)
        except OSError:
            rename(old, folder)
            raise
        _remove(old)


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places in one step; return whether this system and file system can."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError, TypeError):  # Windows: there is no library without a name
        return False
    paths = os.fsencode(one), os.fsencode(other)
    return bool(renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0)


def _flush_names(folder: Path) -> None:
    """Wait until a folder's list of names is on the disk; some network file systems have no such thing."""
    with suppress(OSError):
        _flush(folder)


def _flush(path: Path) -> None:
    """Wait until what ``path`` holds is on the disk."""
    # Windows flushes only what is open for writing; elsewhere a folder can only be opened for reading
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_way(path: str | Path) -> None:
    """Remove an empty folder, a pipe or a link that leads nowhere from the place of a file that Tandem makes again."""
    path = Path(path)
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        elif not path.is_file():
            path.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path`` in one step; bytes of file names that are not UTF-8 are spelt."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


MOST_TEXT_BYTES = 64 * 2**20  # of a configuration, prompts, a vocabulary: hundreds of times what such files have
MOST_TOML_BYTES = 4 * 2**20  # of a configuration; the parser takes up to a second for so many
MOST_DATA_BYTES = 16 * 2**30  # of a list of images or of conversations, which is held in memory
_MOST_LINE_BYTES = 64 * 2**20  # of a jsonl file, which is read line by line
_MOST_DEPTH = 64  # of tables within tables

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def reading(path: str | Path, remedy: str = "check the path") -> Iterator[None]:
    """Within the block ``path`` is read: what goes wrong becomes a UserError that ends with ``remedy``.

    What is no regular file is refused before the block, since opening a pipe waits for somebody to write into it.
    """
    try:
        _refuse_irregular(path, remedy)
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{broken_link(path)}; {remedy}") from None
    except OSError as error:
        reason = "its symbolic links form a loop" if error.errno == errno.ELOOP else error.strerror
        raise UserError(f"{path}: cannot be read ({reason}); {remedy}") from error


def broken_link(path: str | Path) -> str:
    """Return of a ``path`` where nothing is ": x is a link to y", if that is the reason; else an empty string."""
    broken = [each for each in (Path(path), *Path(path).parents) if each.is_symlink() and not each.exists()]
    return f": {broken[-1]} is a link to {broken[-1].readlink()}" if broken else ""


def _refuse_irregular(path: str | Path, remedy: str) -> None:
    try:
        kind = _irregular(path)
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise UserError(f"{path}: can be no file's name ({error}); {remedy}") from None
    if kind is not None:
        raise UserError(f"{path}: is {kind}, where a file is wanted; {remedy}")


def _irregular(path: str | Path) -> str | None:
    """Return in words what is in the place of a regular file."""
    kind = stat.S_IFMT(Path(path).stat().st_mode)
    return None if kind == stat.S_IFREG else _KINDS.get(kind, "something else")


def open_own(path: str | Path) -> io.BufferedReader:
    """Open a file that Tandem wrote, to read it.

    Raises:
        OSError: it cannot be read, or something else has come in its place: a pipe would wait, a device never end.
    """
    if (kind := _irregular(path)) is not None:
        raise OSError(errno.EINVAL, f"{kind}, where a file is wanted", str(path))
    return open(path, "rb")


def read_own(path: str | Path) -> bytes:
    """Return the content of a file that Tandem wrote; see :func:`open_own`."""
    with open_own(path) as file:
        return file.read()


def read_bytes(path: str | Path, remedy: str = "check the path", most: int = MOST_DATA_BYTES) -> bytes:
    """Return a file's content; a file of more than ``most`` bytes is refused."""
    with reading(path, remedy), open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > most or len(data := file.read(most + 1)) > most:
            raise UserError(f"{path}: has more than {most / 2**20:,.0f} MiB, too much for such a file; {remedy}")
        return data


def read_text(path: str | Path, remedy: str = "check the path", most: int = MOST_TEXT_BYTES) -> str:
    """Return what a text file holds, in UTF-8 or, where it begins with a byte order mark, in UTF-16.

    Args:
        path: the file; ``~`` is resolved.
        remedy: ends the message where it cannot be read.
        most: bytes that are read.
    """
    try:
        path = Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: no home folder is known for this user; {remedy}") from None
    return decoded(read_bytes(path, remedy, most), path)


def decoded(data: bytes, path: str | Path) -> str:
    """Return the text of a file's ``data``, its lines ended by newlines; ``path`` is for messages.

    Raises:
        UserError: neither UTF-8 nor UTF-16 with a byte order mark, or a text with NUL, which is another encoding's.
    """
    encoding = _encoding_of(data)
    try:
        text = data.decode(encoding).lstrip("\ufeff")  # where two programs each wrote a mark
    except UnicodeDecodeError as error:
        named = "UTF-16" if encoding == "utf-16" else "UTF-8"
        raise UserError(f"{path}: not {named} (byte {error.start}); save it as UTF-8") from None
    if "\0" in text:
        raise UserError(f"{path}: holds NUL, so it is UTF-16, or no text; save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _encoding_of(data: bytes) -> str:
    return "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


def read_toml(path: str | Path, remedy: str = "check the path") -> tuple[dict[str, Any], str]:
    """Return the tables of a TOML file, and its text; ``remedy`` ends the message where it cannot be read."""
    text = read_text(path, remedy, MOST_TOML_BYTES)
    return parse_toml(text, path), text


def parse_toml(text: str, path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML text, which messages call ``path``.

    Python's own parser reads: toml 0.10.2 takes ``[","]`` for two empty strings.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        _refuse_foreign(path, find_program(text))
        if Path(path).suffix.lower() in (".json", ".jsonc", ".yaml", ".yml"):
            named = " or ".join(_PROGRAMS.values())
            raise UserError(f"{path}: is no TOML, and no configuration to train with of {named}; give one") from None
        reason, _, place = str(error).rpartition(" (at ")
        line = re.match(r"line (\d+)", place)
        number = int(line[1]) if line else text.rstrip("\n").count("\n") + 1  # "at end of document"
        hint = "; in Windows paths write '/', or single quotes: 'C:\\images'" if "\\" in text else ""
        raise UserError(f"{path} line {number}: not valid TOML ({reason}); correct this line{hint}") from None
    except (RecursionError, ValueError) as error:  # ValueError: of numbers and dates that there are not
        reason = "too many brackets within brackets" if isinstance(error, RecursionError) else str(error)
        raise UserError(f"{path}: not valid TOML ({reason}); correct it") from None
    _refuse_depth(tables, str(path))
    _refuse_foreign(path, "SimpleTuner" if tables.keys() & _SETTINGS else None)
    return tables


def _refuse_foreign(path: str | Path, program: str | None) -> None:
    if program:
        command = f"python tools/migrate_config.py --save_to my.toml {path}"
        raise UserError(f"{path}: is a configuration of {program}; translate it: {command}") from None


# What a file of another program has in it -> the program; of YAML and JSON alike.
_PROGRAMS = {
    r"\b(training_folder|folder_path)[\"']?\s*:|^job\s*:\s*\w+\s*(#.*)?$": "ai-toolkit",
    r'"(training_method|concept_file_name|balancing_strategy|include_subdirectories)"\s*:': "OneTrainer",
    r'"(--)?(model_family|data_backend_config|instance_data_dir|dataset_type|caption_strategy)"\s*:'
    r"|^\s*(export\s+)?(MODEL_FAMILY|DATALOADER_CONFIG|TRAINING_NUM_PROCESSES|TRAINER_EXTRA_ARGS)\+?=": "SimpleTuner",
}
_SETTINGS = {"model_family", "data_backend_config", "MODEL_FAMILY", "DATALOADER_CONFIG"}  # of SimpleTuner's, as TOML


def find_program(text: str) -> str | None:
    """Return the program, another than Tandem and kohya's, whose configuration a text is; None if it is none's."""
    try:
        return "SimpleTuner" if tomllib.loads(text).keys() & _SETTINGS else None
    except (ValueError, RecursionError):
        found = (program for pattern, program in _PROGRAMS.items() if re.search(pattern, text, re.MULTILINE))
        return next(found, None)


def toml_text(tables: Mapping[str, Any]) -> str:
    """Return ``tables`` as TOML; toml's encoder fails on control characters, and on backslashes before an x."""
    encoder: Any = toml.TomlEncoder()
    encoder.dump_funcs[str] = toml_string
    return str(toml.dumps(tables, encoder))


def toml_string(text: str) -> str:
    """Return ``text`` as a string of TOML, whose escapes are JSON's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_json(path: str | Path, remedy: str = "download it again") -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        UserError: it cannot be read, is no JSON, or holds something else than an object.
    """
    found = parse_json(read_text(path, remedy), str(path), remedy)
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no JSON object; {remedy}")
    return found


def read_json_lines(path: str | Path, refusals: list[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield what each line of a jsonl file holds that is not blank, after "file:line" for messages.

    Lines that are no JSON are passed over where there are ``refusals``, to which their errors are added.

    Raises:
        UserError: the file cannot be read, is neither UTF-8 nor UTF-16 with a byte order mark, or a line is no JSON.
    """
    with reading(path), open(path, "rb") as beginning, open(path, encoding=_encoding_of(beginning.read(2))) as file:
        for number, line in enumerate(iter(functools.partial(file.readline, _MOST_LINE_BYTES), ""), 1):
            where = f"{path}:{number}"
            if len(line) == _MOST_LINE_BYTES and not line.endswith("\n"):
                raise UserError(f"{where}: the line is longer than {_MOST_LINE_BYTES / 2**20:.0f} MiB; cut it up")
            if line.strip():
                with gathering(refusals):
                    yield where, parse_json(line, where)


def parse_json(text: str, where: str, remedy: str = "correct it") -> Any:
    """Return what a JSON text holds; raises a UserError that begins with ``where`` and ends with ``remedy``.

    Refused are also a key given twice, of which Python would take the last, NaN and Infinity, which are no JSON though
    Python reads them, halves of characters, which no file can be written with, and what is nested deeper than anything
    a person would write.
    """
    try:
        found = json.loads(text, parse_constant=_no_number, object_pairs_hook=keys_once)
        if _HALF.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UserError(f"{where}: {half} is half of a character, whose other half is missing; {remedy}") from None
    except RecursionError:
        raise UserError(f"{where}: not valid JSON (too many brackets within brackets); {remedy}") from None
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error}); {remedy}") from None
    _refuse_depth(found, where)
    return found


_HALF = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")


def keys_once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a table's pairs as a dictionary; raises a ValueError that names a key given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{twice!r} stands there twice; keep one")
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _refuse_depth(value: object, where: str) -> None:
    """Refuse what is nested deeper than ``_MOST_DEPTH``, of which whoever walks through it would run out of stack."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise UserError(f"{where}: tables or lists more than {_MOST_DEPTH} deep within each other; correct it")


# Windows': https://learn.microsoft.com/windows/win32/fileio/naming-a-file. What is made here is given to others.
_FORBIDDEN = frozenset('<>:"/\\|?*\x7f') | frozenset(map(chr, range(32)))

_DEVICES = {"con", "prn", "aux", "nul", "conin$", "conout$"} | {
    f"{d}{n}" for d in ("com", "lpt") for n in "0123456789¹²³"
}

_MOST_NAME_BYTES = 255  # ext4, XFS, APFS; NTFS counts characters


def find_bad_name(name: str, more: int = 0) -> str | None:
    """Return in words why no file can have this name on Linux, macOS or Windows; None if it can.

    ``more``: bytes that will be added to it.
    """
    if "/" in name or "\\" in name:
        return "it is a name alone, without a folder"
    if bad := sorted(_FORBIDDEN & set(name)):
        return f"no file's name may hold {bad[0]!r} everywhere; remove it"
    if not name.strip(". ") or name[-1] in ". ":
        return "a file's name may not end in a dot or a space, nor be empty; change it"
    if name.split(".")[0].rstrip().lower() in _DEVICES:
        return f"{name.split('.')[0]} is a device on Windows; choose another name"
    try:
        length = len(name.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return "it holds half of a surrogate pair; correct it"
    if length + more > _MOST_NAME_BYTES:
        return (
            f"it has {length} bytes, and file names may have {_MOST_NAME_BYTES - more} before what is added; shorten it"
        )
    return None


def written_path(text: str, where: str) -> Path:
    """Return the path that a person wrote, with ``~`` resolved; it need not exist. ``where`` begins the message.

    Raises:
        UserError: it can be no path here: too long, of somebody without a home, with characters no name may have.
    """
    try:
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Path(text).expanduser()
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{where} {text[:80]!r} is no path that can be looked at ({reason}); correct it") from None
    return path
