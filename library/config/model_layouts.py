"""Published models on disk: the folders of diffusers and of the hub's cache, and networks by their tensors' names.

A network is a row of ``[[architectures]]`` in ``names.toml`` of its family's folder. A transformer's names may stand
behind a prefix, of which :data:`MODEL_PREFIXES` has those that are published.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.errors import UserError
from library.files import read_text, read_toml

INDEXES = ("model_index.json", "modular_model_index.json")  # diffusers' of a pipeline, and of a modular one
MODEL_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "", "transformer.", "model.", "module.")


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


@dataclass(frozen=True)
class Architecture:
    """One naming of one architecture.

    Attributes:
        name: for people.
        marks: regular expressions; each must match a whole tensor name.
        facts: label -> (tensor, axis): a size worth telling; axis None tells whether the tensor is there.
        model_type: of a transformer, the family's first; "" of its other parts.
    """

    name: str
    marks: tuple[str, ...]
    facts: tuple[tuple[str, str, int | None], ...] = ()
    model_type: str = ""


UNKNOWN = Architecture("unknown architecture", ())
# What tells models that no family here is, by a part of a tensor's name.
_UNSUPPORTED = {
    ".input_blocks.": "Stable Diffusion or SDXL",
    "distilled_guidance_layer": "Chroma",
    "joint_blocks.": "Stable Diffusion 3",
}


@cache
def architectures() -> tuple[Architecture, ...]:
    """Return the rows of all families, language models last: a row matches what an earlier one leaves."""
    folders = [*dict.fromkeys(MODEL_TYPES[name].family.split(".")[2] for name in IMAGE_MODELS), "llm"]
    tables = [read_toml(Path(__file__).parents[1] / "models" / folder / "names.toml")[0] for folder in folders]
    rows = [row for table in tables for row in table["architectures"]]
    facts = [tuple((*fact, None)[:3] for fact in row.get("facts", ())) for row in rows]
    return tuple(
        Architecture(**row | {"marks": tuple(row["marks"]), "facts": own}) for row, own in zip(rows, facts, strict=True)
    )


def recognise(names: Collection[str]) -> Architecture:
    """Return the first architecture all of whose marks are among the tensor ``names``, else :data:`UNKNOWN`."""
    for row in architectures():
        if all(any(re.fullmatch(mark, name) for name in names) for mark in row.marks):
            return row
    return UNKNOWN


def recognise_below(names: Collection[str]) -> tuple[str, Architecture]:
    """Return what stands before a transformer's names, of :data:`MODEL_PREFIXES`, and its architecture."""
    for prefix in MODEL_PREFIXES:
        inside = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        if inside and (found := recognise(inside)) is not UNKNOWN:
            return prefix, found
    return "", UNKNOWN


def is_lora(names: Iterable[str]) -> bool:
    """Whether the tensor names are those of a LoRA or one of its relatives (LoKr, LoHa, DoRA)."""
    return any(
        re.search(r"[._](lora(_|[12]?\.)(A|B|up|down|mid|linear_layer)|hada_w|lokr_w|dora_scale|diff(_b)?$)", name)
        for name in names
    )


def unsupported(names: Collection[str]) -> str:
    """Return which architecture without a family here has such tensor names; "": none that is known."""
    return next((what for part, what in _UNSUPPORTED.items() if any(part in name for name in names)), "")
