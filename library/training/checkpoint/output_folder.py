"""What a run asks of its output folder before it begins: that it is its own, can be written to, and holds nothing dear.

*One run a folder.* Metrics, settings, samples and control files have one name each, so two runs would mix theirs: a run
holds its folder by a lock (``library/folder_lock.py``).

*What is there.* A finished LoRA or model says in its metadata which settings it was trained with. One of other settings
is written over only with ``overwrite``; the same run again, and one that goes on from a state, are free to.

*What cannot be written* is found out by writing: a file with the longest of all names that are to come, of the length
of what is going to be saved, and of that only the names and the length, so it takes no time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from library.config.markers import SAME_RESULT, options
from library.errors import UserError
from library.safetensors_io import read_safetensors_header
from library.training.checkpoint.metadata import without_folders
from library.training.checkpoint.state import OutputNames
from library.training.report.run_folder import KEPT, header_of

SETTINGS = "tandem.settings"  # in the metadata of what a run ends with
# Sections of what is not of the LoRA: what is written, shown and looked at, and where the work is done.
_OTHER_SECTIONS = {"saving", "sampling", "validation", "logging", "hub", "accelerate", "parallel"}
_LASTING = {"ema_decay", "save_precision", "save_format"}  # of these sections


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


def same_name_beside(weights: Path) -> Path | None:
    """Return a file or folder with the name of ``weights`` that another run wrote, in a folder beside this run's."""
    folder = weights.parent.resolve()
    with suppress(OSError):  # a folder that may be written to, and not be read above
        others = (each / weights.name for each in sorted(folder.parent.iterdir()) if each != folder)
        return next((path for path in others if path.exists()), None)
    return None


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


def refuse_kept(weights: Path) -> None:
    """Refuse to write over the copy of a checkpoint that a person has kept under this name."""
    if KEPT in ((header_of(weights) or {}).get("__metadata__") or {}):
        raise UserError(f"output_name: {weights} was kept from a run; rename it, or choose another output_name")


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
        saved = json.loads(text) if text.startswith("{") else None
    except ValueError:  # UserError is one
        text = ""
    if not text:
        raise UserError(
            f"output_dir: {weights} is there, and does not say with which settings it was trained; {remedy}"
        )
    if saved is None:
        if text != describe_settings(config, hidden=True):
            raise UserError(f"output_dir: {weights} was trained with other settings; {remedy}")
        return
    now = json.loads(json.dumps(lasting_settings(config)))
    for key in sorted(saved.keys() & now.keys()):
        if saved[key] != now[key]:
            raise UserError(
                f"output_dir: {weights} was trained with {key} = {json.dumps(saved[key])}, now it is "
                f"{json.dumps(now[key])}; {remedy}"
            )
