"""What a run asks of its output folder before it begins: that it is its own, can be written to, and holds nothing dear.

*One run a folder.* Metrics, settings, samples and control files have one name each, so two runs would mix theirs. A run
holds the folder by a file, ``.lock``, made with ``O_EXCL``, which says who: process, when that process began, machine,
time. It is deleted at the end. A run that was killed leaves it behind; the next one takes it over where it can see that
nobody is there: on the same machine no process of that number began at that time, or the machine has been started anew.
Of other machines and containers nothing can be seen, so a person has to say that the run is over, by deleting the file.

*What is there.* A finished LoRA or model says in its metadata which settings it was trained with. One of other settings
is written over only with ``overwrite``; the same run again, and one that goes on from a state, are free to.

*What cannot be written* is found out by writing: a file with the longest of all names that are to come, of the length
of what is going to be saved, and of that only the names and the length, so it takes no time.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from library.config.markers import SAME_RESULT, options
from library.errors import UserError
from library.files import machine_name, process_began, read_own, rename, seal_json, unseal_json
from library.safetensors_io import read_safetensors_header
from library.training.checkpoint.metadata import without_folders
from library.training.checkpoint.state import OutputNames

LOCK = ".lock"
SETTINGS = "tandem.settings"  # in the metadata of what a run ends with
_EMPTY_SECONDS = 2.0  # within which a lock that has just been made has its content
# Sections of what is not of the LoRA: what is written, shown and looked at, and where the work is done.
_OTHER_SECTIONS = {"saving", "sampling", "validation", "logging", "hub", "accelerate", "parallel"}
_LASTING = {"ema_decay", "save_precision", "save_format"}  # of these sections


class FolderLock:
    """The right to write into ``folder``, of one process at a time; ``say`` prints a line."""

    def __init__(self, folder: Path, name: str, say: Callable[[str], None]) -> None:
        self.path, self._name, self._say = folder / LOCK, name, say
        self._own: bytes | None = None

    def acquire(self) -> None:
        """Take the folder, which is made if need be.

        Raises:
            UserError: another run has it, or it cannot be written to.
        """
        content = seal_json(_this_process() | {"run": self._name, "since": time.time()})
        while True:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                try:
                    os.write(descriptor, content)
                finally:
                    os.close(descriptor)
            except FileExistsError as error:
                if not self.path.parent.is_dir():
                    raise UserError(f"output_dir: {self.path.parent} is a file; choose another folder") from error
                self._take_over()
                continue
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise UserError(
                    f"output_dir: {self.path.parent} cannot be written to ({reason}); choose another folder"
                ) from None
            self._own = content
            return

    def release(self) -> None:
        """Give the folder back; nothing happens if it is not held."""
        own, self._own = self._own, None
        with suppress(OSError):
            if own is not None and self.path.read_bytes() == own:
                self.path.unlink()

    def _take_over(self) -> None:
        """Put away a lock whose run is over.

        Raises:
            UserError: it is not, or nobody here can know.
        """
        try:
            seen = self._read()
            holder: Any = unseal_json(seen) if seen else None
            reason = _holds(holder) if holder is not None else None
            since = datetime.fromtimestamp(holder["since"]).strftime("%Y-%m-%d %H:%M") if reason else ""
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:  # a later version's has other keys
            if isinstance(error, FileNotFoundError) and not self.path.is_symlink():
                return  # given back meanwhile
            why = getattr(error, "strerror", None) or repr(error)
            raise UserError(f"{self.path} cannot be read ({why}); if no run writes there, delete it") from None
        if reason:
            raise UserError(
                f"output_dir: the run {holder['run']} writes into {self.path.parent} since {since} (process "
                f"{holder['pid']} on {holder['host']}); {reason}"
            )
        aside = self.path.with_name(f"{LOCK}.{os.getpid()}")
        with suppress(OSError):  # another process may be faster
            rename(self.path, aside)
            if aside.read_bytes() != seen:  # and hold it already
                _give_back(aside, self.path)
            else:
                aside.unlink()
                self._say(f"note: {self.path}: left behind by a run that was killed; taken over")

    def _read(self) -> bytes:
        """Return the lock's content; nothing if it stays empty, as its process was killed while it made it."""
        end = time.monotonic() + _EMPTY_SECONDS
        while not (content := read_own(self.path)):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        return content


def _give_back(lock: Path, path: Path) -> None:
    """Let another process have its lock again, unless a third one holds ``path`` by now."""
    try:
        os.link(lock, path)
    except OSError:  # also on a file system without hard links, such as exFAT
        if not path.exists():
            rename(lock, path)
    lock.unlink(missing_ok=True)


def _this_process() -> dict[str, Any]:
    host, boot, machine = platform.node(), *machine_name()
    return {"pid": os.getpid(), "began": process_began(os.getpid()), "host": host, "boot": boot, "machine": machine}


def _holds(holder: Mapping[str, Any]) -> str | None:
    """Return what to do as the lock's process is there, or may be; None if it is gone."""
    here = _this_process()
    if holder["machine"] == here["machine"]:
        if process_began(holder["pid"]) != holder["began"]:
            return None
        return "wait for it, stop it (a file STOP there does), or choose another output_dir"
    if holder["host"] == here["host"] and holder["boot"] != here["boot"]:
        return None  # the machine has been started anew since
    return f"it cannot be seen from here: if it is over, delete {LOCK} there, else choose another output_dir"


def try_writing(folder: Path, names: OutputNames, nbytes: int, option: str = "output_dir") -> None:
    """Write and delete a file of the longest name that the run is going to use, ``nbytes`` long.

    Args:
        folder: to write into; made if need be.
        names: of the run.
        nbytes: of what will be saved at once, as far as it is known.
        option: by which the folder is given, for the message.

    Raises:
        UserError: it cannot be written, or there is less room on the disk.
    """
    weights = folder / names.weights(names.stem()).name
    if names.suffix and weights.exists() and not weights.is_file():
        raise UserError(
            f"{option}: {weights} is no file, so none can be written there; move it away, or choose another"
        )
    longest = folder / f".{names.state(names.stem(step=1)).name}.{'0' * 40}.gone"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(longest, "wb") as file:
            file.truncate(nbytes)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        what = longest.name if error.filename and str(error.filename) == str(longest) else f"a file of {nbytes:,} bytes"
        raise UserError(f"{option}: {folder}: {what} cannot be written ({error.strerror}); choose another") from None
    finally:
        with suppress(OSError):
            longest.unlink(missing_ok=True)
    if free < nbytes:
        raise UserError(
            f"{option}: {folder}: a save takes {nbytes / 2**20:,.1f} MiB, and {free / 2**20:,.1f} MiB are free; free "
            "space or choose another folder"
        )


def lasting_settings(config: BaseModel) -> dict[str, Any]:
    """Return what a result follows from, of the settings as asked for, by option; folders by their last part."""
    sections = {name: getattr(config, name).model_dump() for name in type(config).model_fields}
    others = {key for key, _, field in options(config) if SAME_RESULT in field.metadata}
    return {
        key: value
        for name, keys in without_folders(sections).items()
        for key, value in keys.items()
        if key in _LASTING or (name not in _OTHER_SECTIONS and key not in others)
    }


def describe_settings(config: BaseModel, hidden: bool = False) -> str:
    """Return :func:`lasting_settings` as JSON, or ``hidden`` as a hash that tells only whether others are the same."""
    text = json.dumps(lasting_settings(config), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest() if hidden else text


def refuse_to_overwrite(weights: Path, config: BaseModel) -> None:
    """Refuse to begin a run whose result would replace one of other settings.

    Args:
        weights: where it will be: a LoRA's file, the folder of an adapter or a model.
        config: as asked for.

    Raises:
        UserError: names an option that differs.
    """
    files = [weights, *(weights / name for name in ("adapter_model.safetensors", "model.safetensors"))]
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        return
    remedy = "choose another output_name or output_dir, or set overwrite = true"
    try:
        text = (read_safetensors_header(file).get("__metadata__") or {}).get(SETTINGS, "")
        then = json.loads(text) if text.startswith("{") else None
    except ValueError:  # UserError is one
        text = ""
    if not text:
        raise UserError(
            f"output_dir: {weights} is there, and does not say with which settings it was trained; {remedy}"
        )
    if then is None:
        if text != describe_settings(config, hidden=True):
            raise UserError(f"output_dir: {weights} was trained with other settings; {remedy}")
        return
    now = json.loads(json.dumps(lasting_settings(config)))
    for key in sorted(then.keys() & now.keys()):
        if then[key] != now[key]:
            raise UserError(
                f"output_dir: {weights} was trained with {key} = {json.dumps(then[key])}, now it is "
                f"{json.dumps(now[key])}; {remedy}"
            )
