"""What a run's folder says about it: its position, its settings and its results.

A folder with ``metrics.jsonl``, or with the ``config.toml`` that a trainer wrote, is a run. Of ``metrics.jsonl`` only
the end is read to say where it stands. Every file is read once for each of its versions, since a list of runs is drawn
every few seconds. Nothing heavy is imported here.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from library.config.model_types import LANGUAGE_MODELS
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, Script, fields
from library.files import parse_toml, rename
from library.training.report.metrics_file import parse_line
from library.training.report.progress import PREPARING

Read = TypeVar("Read")
_END_BYTES = (2**12, 2**17)  # of metrics: about 8 lines; of a hundred processes a line is longer
_MOST_TEXT = 2**20  # bytes of a configuration
_DEPTH = 4  # folders below an output folder in which runs are looked for
NO_RUNS = re.compile(r"\..*|samples|.*-state")  # in folders that are called so
_RUN_HEADING = re.compile(r"# Tandem .*: the settings of this run")
_SAMPLE = re.compile(r"step(\d{6,})_(\d{2,})\.png")
CHOSEN = "chosen.json"  # in a run's folder: which file was kept as its best
KEPT = "tandem.kept"  # in the metadata of a kept file: the name of the checkpoint that it is a copy of
_STATE = re.compile(r"step(\d+)-state")
_HEADER_BYTES = 2**23  # of a file; the largest have half of it


def mtime(path: Path) -> float:
    """Return when a file or folder was changed, in seconds since 1970; 0 if there is none."""
    with suppress(OSError, ValueError):
        return path.stat().st_mtime
    return 0.0


def cached_by_mtime(read: Callable[[Path], Read]) -> Callable[[Path], Read | None]:
    """Have a file read once for each of its versions; None of one that cannot be read, is a link or no file."""
    kept = lru_cache(maxsize=4000)(lambda path, *version: read(path))

    def read_once(path: Path) -> Read | None:
        with suppress(Exception):  # whatever a file of somebody else's makes its reader do
            about = path.lstat()
            if stat.S_ISREG(about.st_mode):
                return kept(path, about.st_ino, about.st_size, about.st_mtime_ns)
        return None

    return read_once


@cached_by_mtime
def newest_metrics(file: Path) -> dict[str, float]:
    """Return a run's newest metrics by key, ``s_per_it`` as the median of its last lines."""
    for most in _END_BYTES:
        with open(file, "rb") as opened:
            begin = opened.seek(max(0, file.stat().st_size - most))
            records = [record for line in opened.read(most).split(b"\n")[begin > 0 :] if (record := parse_line(line))]
        if any("loss" in record for record in records):
            break
    newest = {key: value for record in records for key, value in record.items()}
    if speeds := [record["s_per_it"] for record in records if "s_per_it" in record]:
        newest["s_per_it"] = median(speeds)
    return newest


@cached_by_mtime
def text_of(file: Path) -> str:
    """Return a configuration, or another short text, as it is."""
    with open(file, "rb") as opened:
        return opened.read(_MOST_TEXT).decode("utf-8", "replace")


@cached_by_mtime
def object_in(file: Path) -> dict[str, Any]:
    """Return the object in a small JSON file."""
    return dict(json.loads(text_of(file) or ""))


@cached_by_mtime
def _settings(file: Path) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in parse_toml(text_of(file) or "", file).items():
        flat |= value if isinstance(value, dict) else {key: value}
    return flat


def settings_of(*folders: Path | None) -> dict[str, Any]:
    """Return option -> value of the ``config.toml`` in the first of ``folders`` that has one; else nothing."""
    return next(filter(None, (_settings(folder / "config.toml") for folder in folders if folder)), {})


def script_of(settings: dict[str, Any]) -> Script[Any]:
    """Return the script that settings are for."""
    if {"data_dir", "init_from"} & settings.keys():
        return LLM
    return LANGUAGE_LORA if settings.get("model_type") in LANGUAGE_MODELS else LORA


@cache
def defaults_of(script: Script[Any]) -> dict[str, Any]:
    """Return what is meant where a configuration says nothing."""
    return {key: None if field.is_required() else field.default for key, (_, field) in fields(script).items()}


def is_run(folder: Path) -> bool:
    """Return whether a trainer wrote there: metrics, its settings, or what it prepares; a suggestion is no run."""
    wrote = any(mtime(folder / name) > 0 for name in ("metrics.jsonl", PREPARING))
    return wrote or _RUN_HEADING.match(text_of(folder / "config.toml") or "") is not None


def find_runs(place: Path) -> Iterator[Path]:
    """Yield the folders of runs in ``place`` and below; links are not followed."""
    for folder, inner, _ in os.walk(place):
        is_deep = len(Path(folder).parts) - len(place.parts) == _DEPTH
        inner[:] = [] if is_deep else [name for name in inner if not NO_RUNS.fullmatch(name)]
        if is_run(Path(folder)):
            yield Path(folder)


def _is_not_linked(place: Path) -> bool:
    """Return whether a folder of samples is a run's own; one that is a link shows what lies elsewhere."""
    return not (place.is_symlink() or place.parent.is_symlink())


def samples_of(folder: Path) -> list[tuple[str, str, dict[int, Path]]]:
    """Return a run's sample images: of each prompt its kind ("samples" or "general"), its text, and step -> file."""
    found: dict[tuple[str, str], dict[int, Path]] = {}
    for place in filter(_is_not_linked, (folder / "samples", folder / "samples/general")):
        for path in sorted(place.glob("step*_*.png"), key=lambda path: (len(path.name), path.name)):
            if match := _SAMPLE.fullmatch(path.name):
                found.setdefault((place.name, match[2]), {})[int(match[1])] = path
    return [(kind, _prompt(files[max(files)]) or f"Prompt {n}", files) for (kind, n), files in found.items()]


@cached_by_mtime
def _prompt(path: Path) -> str:
    from PIL import Image  # tools that only look at a run's files start without it

    with Image.open(path, formats=["PNG"]) as image:
        line = str(image.info.get("prompt", ""))
    text, _, strength = line.partition(" --strength ")
    return text.partition(" --")[0] + (f", strength {strength}" if strength else "")


def texts_of(folder: Path) -> list[tuple[int, str]]:
    """Return what a language model wrote as samples, with the step, the newest first."""
    place = folder / "samples"
    found = sorted(place.glob("*.txt"), reverse=True)[:20] if _is_not_linked(place) else []
    return [(int("0" + re.sub(r"\D", "", path.stem)), (text_of(path) or "")[:20_000]) for path in found]


def states_of(folder: Path) -> list[tuple[str, str]]:
    """Return a run's states, the newest first: the folder's name, and the step that it is of."""
    found = sorted(folder.glob("*-state"), key=mtime, reverse=True)
    return [(f.name, f"step {int(at[1])}" if (at := _STATE.search(f.name)) else "the end") for f in found]


class Checkpoint(NamedTuple):
    """A LoRA file that a run has saved; its step, -1 if that is not known; that, and what was measured, in words."""

    path: Path
    step: int = -1
    about: str = ""


@cached_by_mtime
def header_of(file: Path) -> dict[str, Any]:
    """Return the header of a .safetensors file."""
    with open(file, "rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        return dict(json.loads(opened.read(min(length, _HEADER_BYTES))))


@cached_by_mtime
def _validations(file: Path) -> dict[int, dict[str, float]]:
    with open(file, "rb") as opened:
        records = [record for line in opened if b'"val_' in line and (record := parse_line(line))]
    return {int(record["step"]): record for record in records}


def output_name(folder: Path) -> str:
    """Return the name of what the run in ``folder`` ends with, without its ending."""
    settings = settings_of(folder)
    return str(settings.get("output_name", defaults_of(script_of(settings))["output_name"]))


def keep_other_run(folder: Path, name: str) -> str:
    """Rename what the run ``name`` would replace of another run in ``folder``; return a line that says so, or ""."""
    has_run = settings_of(folder) and (folder / "metrics.jsonl").is_file()
    if not has_run or (other := output_name(folder)) == name:
        return ""
    kept = [path for path in (folder / "metrics.jsonl", folder / "config.toml", folder / "samples") if path.exists()]
    for old in kept:
        rename(old, free_name(old.with_name(f"{old.stem}.{other}{old.suffix}")))
    names = ", ".join(path.name for path in kept)
    return f"{folder} holds the run {other}: its {names} are kept with .{other} in their names; give each run a folder"


def own_names(folder: Path) -> re.Pattern[str]:
    """Return what a run calls its LoRA files, as ``OutputNames`` does; disks of macOS and Windows ignore case."""
    return re.compile(rf"{re.escape(output_name(folder))}(-step\d{{8}}|-\d{{6}}|-best)?\.safetensors", re.IGNORECASE)


def free_name(path: Path, taken: Sequence[Path] = ()) -> Path:
    """Return ``path``, or with the first number behind its name that nothing has."""
    ending = path.suffix if path.suffix in (".safetensors", ".jsonl", ".toml") else ""  # else a dot of the name
    stem = path.name.removesuffix(ending)
    tries = (path if n == 1 else path.with_name(f"{stem}-{n}{ending}") for n in range(1, 10_000))
    return next(each for each in tries if not os.path.lexists(each) and each not in taken)


def name_to_keep(folder: Path) -> str:
    """Return a free name for a copy of a run's checkpoint; -best is the name of what ``save_best`` writes."""
    return free_name(folder / f"{output_name(folder)}-chosen.safetensors").stem


def chosen_of(folder: Path) -> Checkpoint | None:
    """Return the file that was kept as the best of a run; None if there is none, or it is gone."""
    record = object_in(folder / CHOSEN) or {}
    path = folder / Path(str(record.get("file"))).name
    return Checkpoint(path, record.get("step", -1), record.get("about", "")) if path.is_file() else None


def checkpoints_of(folder: Path) -> list[Checkpoint]:
    """Return the LoRAs that a run has saved under its own name, by step; of a step what it ended with last."""
    own = own_names(folder)
    validations, steps = _validations(folder / "metrics.jsonl") or {}, dict[Path, int]()
    for path in folder.glob("*.safetensors"):
        if own.fullmatch(path.name):
            said = str(((header_of(path) or {}).get("__metadata__") or {}).get("ss_steps"))
            found = re.search(r"-step(\d{8})\.", path.name) or re.fullmatch(r"(\d{1,15})", said)
            steps[path] = int(found[1]) if found else -1
    least, rows = min((validations.get(step, {}).get("val_loss", inf) for step in steps.values()), default=inf), []
    for path, step in sorted(steps.items(), key=lambda item: (item[1], item[0])):
        values, about = validations.get(step, {}), path.stem if step < 0 else f"step {step}"
        held_out = f"{'lowest ' * (values.get('val_loss') == least)}held-out loss"
        numbers = {held_out: values.get("val_loss"), "changed elsewhere": values.get("val_prior_loss")}
        about += "".join(f", {what} {value:#.4g}" for what, value in numbers.items() if value is not None)
        rows.append(Checkpoint(path, step, about))
    return rows
