"""Folders of models as diffusers and the hub's cache keep them."""

from __future__ import annotations

from pathlib import Path

from library.errors import UserError
from library.files import read_text

INDEXES = ("model_index.json", "modular_model_index.json")  # diffusers' of a pipeline, and of a modular one


def pipeline_index(folder: Path) -> Path | None:
    """Return the file that tells of the parts of the pipeline in ``folder``; None: there is no pipeline."""
    return next((folder / name for name in INDEXES if (folder / name).is_file()), None)


def pipeline_of(path: Path) -> Path | None:
    """Return the pipeline's folder that ``path`` is, or whose ``transformer`` it is; None: there is no pipeline."""
    folders = (path, path.parent) if path.name == "transformer" else (path,)
    return next((folder for folder in folders if path.is_dir() and pipeline_index(folder)), None)


def snapshot_of(path: Path, option: str = "") -> Path:
    """Return the snapshot in a folder of the hub's cache (``models--owner--name``); any other path as it is.

    Raises:
        UserError: there are several, and ``refs/main`` names none of them.
    """
    folder = path.parent if path.name == "snapshots" else path
    if not (folder / "snapshots").is_dir() or (path / "config.json").is_file() or pipeline_index(path):
        return path
    main, found = folder / "refs" / "main", sorted((folder / "snapshots").iterdir())
    if main.is_file():
        found = [each for each in found if each.name == read_text(main).strip()]
    if len(found) != 1:
        where = f"{option} {path}".lstrip()
        raise UserError(f"{where}: no snapshot that refs/main names; give one of {folder / 'snapshots'}")
    return found[0]
