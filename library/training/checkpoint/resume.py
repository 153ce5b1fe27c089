"""``resume = "auto"``: go on from the newest complete state in the output folder, or begin.

A process may have been killed at any moment, so the folder is put in order first: half-written files and folders go,
and what was being replaced is put back (``library.files``). A state counts if every file in it is complete; one that is
not is named and passed over. The newest is the one saved last, by the time written in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from library.config.chat_schema import ChatTrainConfig
from library.config.pretrain_schema import PretrainConfig
from library.config.schema import TrainConfig
from library.errors import UserError
from library.files import clear_leftovers
from library.safetensors_io import read_safetensors_header

AUTO = "auto"
_POSITION = "position.json"
Config = TypeVar("Config", "TrainConfig", "ChatTrainConfig", "PretrainConfig")


def resolve_resume(config: Config, accelerator: Accelerator, say: Callable[[str], None]) -> Config:
    """Tidy the output folder, and return ``config`` with the state that ``resume = "auto"`` means, if it says so.

    The main process looks; all return the same.

    Args:
        config: of a run.
        accelerator: not used in a collective way but for the answer.
        say: prints a line.
    """
    folder, name = Path(config.saving.output_dir), config.saving.output_name
    found: list[str | None] = [None]
    if accelerator.is_main_process:
        tidy([folder, folder / "samples"], say)
        if config.training.resume == AUTO:
            state = newest_state(folder, name, say)
            if not config.saving.save_state:
                say("note: without save_state only a run that is asked to stop leaves a state for resume = auto")
            say(f"resume: going on from {state}" if state else f"resume: no state of {name} in {folder}; from scratch")
            found = [None if state is None else str(state)]
    if config.training.resume != AUTO:
        return config
    if accelerator.num_processes > 1:
        broadcast_object_list(found)
    training = config.training.model_copy(update={"resume": found[0]})
    return config.model_copy(update={"training": training})


def tidy(folders: Iterable[Path], say: Callable[[str], None]) -> None:
    """Remove what killed processes left half-written in ``folders``; put back what they were replacing."""
    for folder in folders:
        for restored in clear_leftovers(folder):
            say(f"{restored}: put back; the run that was replacing it did not get to the end")


def newest_state(folder: Path, name: str, say: Callable[[str], None] = lambda _: None) -> Path | None:
    """Return the state of the run ``name`` in ``folder`` that was saved last and is complete; None if there is none."""
    pattern = re.compile(re.escape(name) + r"(-step\d{8}|-\d{6})?-state")
    found: list[tuple[float, str]] = []
    for state in sorted(folder.glob("*-state")):
        if not pattern.fullmatch(state.name):
            continue
        if damage := find_damage(state):
            say(f"resume: {damage}; passed over")
            continue
        position = json.loads((state / _POSITION).read_text(encoding="utf-8"))
        found.append((position.get("saved") or (state / _POSITION).stat().st_mtime, state.name))
    return folder / max(found)[1] if found else None


def find_damage(state: Path) -> str | None:
    """Return in words what is missing or cut off in a state folder; None if it is complete. No tensor is read."""
    if not (state / _POSITION).is_file():
        return f"{state} has no {_POSITION}"
    for file in sorted(state.iterdir()):
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            elif file.suffix == ".safetensors" and not _is_whole(file):
                return f"{file} is cut off"
        except (OSError, ValueError, KeyError, TypeError, UserError) as error:
            return f"{file} cannot be read ({error})"
    return None


def _is_whole(file: Path) -> bool:
    header = read_safetensors_header(file, may_be_cut=True)
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    with open(file, "rb") as opened:
        begin = 8 + int.from_bytes(opened.read(8), "little")
    return file.stat().st_size == begin + max(ends, default=0)
