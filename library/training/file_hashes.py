"""The hashes by which model sites and sd-webui know a base model's file.

The whole file is read for one of them: about 15 s for 24 GB where the processor has SHA instructions. So it is done
once a run, and what was found is remembered beside the dataset's caches under the file's size and time of change.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from library.errors import UserError
from library.files import write_text


def webui_hash(path: Path) -> str:
    """Return sd-webui's old hash: 8 digits of SHA-256 over 64 KiB at offset 1 MiB (sd-scripts' ``model_hash``)."""
    with open(path, "rb") as file:
        file.seek(0x100000)
        return hashlib.sha256(file.read(0x10000)).hexdigest()[:8]


def sha256_of(path: Path, memory: Path) -> str:
    """Return the SHA-256 of a file, from ``memory`` (a JSON file) where it is known; ``memory`` learns it."""
    about = path.stat()
    key = f"{path.resolve()}|{about.st_size}|{about.st_mtime_ns}"
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
        assert isinstance(known, dict)
    except (OSError, ValueError, AssertionError):  # nothing there yet, or cut short: found out again
        known = {}
    if key not in known:
        with open(path, "rb") as file:
            known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        write_text(memory, json.dumps(known, indent=1) + "\n")
    return known[key]


def model_file_facts(name: str, path: str | None, memory: Path) -> dict[str, object]:
    """Return ``<name>_name``, and for a single file ``<name>_hash`` and ``new_<name>_hash``, as sd-scripts calls them.

    Args:
        name: "sd_model" or "vae".
        path: of the file or folder; None: nothing is returned.
        memory: where hashes are remembered.
    """
    if path is None:
        return {}
    file = Path(path).expanduser()
    facts: dict[str, object] = {f"{name}_name": file.name}
    if file.is_file():
        try:
            facts |= {f"{name}_hash": webui_hash(file), f"new_{name}_hash": sha256_of(file, memory)}
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror}); check the disk") from error
    return facts
