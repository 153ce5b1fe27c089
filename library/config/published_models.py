"""Published models by name: what each is, where its files are, and which settings train it on which card.

``models.toml`` explains its rows; memory is counted in ``presets.toml``. A model is found by its name on the hub, in
any case, by the last part of that name alone, or by the name of its file. The page's picker, ``docs/models.md``, error
messages and the choice of ``model_type`` read this table. Nothing here needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from library.config.family_defaults import tables
from library.config.model_types import MODEL_TYPES
from library.files import read_toml

CARDS = (8, 12, 16, 24, 48)  # GiB of memory that cards have
MODEL = "pretrained_model_name_or_path"
FILE_ENDINGS = (".safetensors", ".sft", ".gguf")
# GiB besides what is counted: the CUDA context, cuBLAS' workspaces, what the allocator loses between blocks. 0.5 to 0.9
# on an H100 (bench/gpu.py: allocated and reserved).
FOR_CUDA = 1.0


@dataclass(frozen=True)
class PublishedModel:
    """A row of ``models.toml``, which explains the fields.

    Attributes:
        parts: option -> OWNER/NAME/PATH of what the single file ``file`` needs beside it.
    """

    label: str
    hub: str
    model_types: tuple[str, ...]
    licence: str
    file: str
    parts: Mapping[str, str]
    gated: bool | None = None
    gigabytes: float | None = None
    size: str = ""
    also: tuple[str, ...] = ()
    sample_model: str = ""
    train_on: str = ""
    adapter: str = ""
    has_own_layers: bool = False
    is_distilled: bool = False

    @property
    def name(self) -> str:
        """Return the last part of its name on the hub."""
        return PurePath(self.hub).name

    @property
    def files(self) -> dict[str, str]:
        """Return option -> OWNER/NAME/PATH of its single files."""
        return {MODEL: self.file, **self.parts}


@dataclass(frozen=True)
class Fit:
    """Settings with which a model is trained on a card.

    Attributes:
        settings: option -> value; none on a CPU.
        gib: counted memory at 1024 x 1024 and batch size 1. samples: what samples take besides, at most.
        count: the ready configuration, and the flags that it is counted with.
        lokr: what the family's LoKr takes beyond the LoRA of ``gib``; 0 of a LoRA.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    gib: float = 0.0
    samples: float = 0.0
    count: str = ""
    lokr: float = 0.0

    @property
    def config(self) -> str:
        """Return the ready configuration."""
        return self.count.partition(" ")[0]

    @property
    def needs(self) -> float:
        """Return the GiB that a card must have."""
        return self.gib + self.lokr + self.samples + FOR_CUDA

    def describe(self) -> str:
        """Return where the settings are from."""
        lokr = f", the LoKr {self.lokr} more (a larger factor takes less)" if self.lokr else ""
        more = f", samples up to {self.samples} more" if self.samples else ""
        counted = (
            f"counted: {self.gib} GiB at 1024 x 1024, batch size 1{lokr}{more} (tools/plan_memory.py {self.count})"
        )
        return counted if self.count else "no card"


@cache
def published_models() -> tuple[PublishedModel, ...]:
    """Return all rows, as they stand."""
    table = read_toml(Path(__file__).with_name("models.toml"), "restore it")[0]
    rows = [{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()} for row in table["models"]]
    return tuple(PublishedModel(**row | {"parts": table["parts"][row["parts"]]}) for row in rows)


def find_published(given: str) -> PublishedModel | None:
    """Return the model that is called so on the hub, or whose file or folder has such a name."""
    path = PurePath(given)
    if path.name == "transformer" or path.parent.name == "snapshots":
        path = path.parent if path.name == "transformer" else path.parent.parent
    name = _letters(path.name.rpartition("--")[2])  # the hub's cache has models--owner--name
    names = {_letters(each): row for row in published_models() for each in (row.name, *row.also)}
    if not path.name.endswith(FILE_ENDINGS):
        return names.get(name)
    return names.get(max((one for one in names if name.startswith(one)), key=len, default=""))


def named_distilled(given: str) -> bool:
    """Whether a model is distilled, as far as its name tells: to few steps, and mostly without a negative text."""
    model = find_published(given)
    return "turbo" in PurePath(given).name.lower() if model is None else bool(model.train_on) or model.is_distilled


def link(place: str) -> str:
    """Return the page of ``OWNER/NAME`` or of a file ``OWNER/NAME/PATH`` on the hub."""
    owner, name, *path = place.split("/")
    return "/".join(("https://huggingface.co", owner, name, *(["blob/main", *path] if path else ())))


def fits(model_type: str, size: str = "", network_type: str = "lora") -> list[Fit]:
    """Return the settings that are counted for a family, the most memory first.

    Args:
        model_type: of the family.
        size: of its model, where the family has several (``PublishedModel.size``).
    """
    title = MODEL_TYPES[model_type].title
    samples, more = tables()["samples"][title], tables()["lokr_more"] if network_type == "lokr" else {}
    rows = [row for row in tables()["memory"] if model_type in row["models"] and row.get("size", size) == size]
    lokr = [more.get(" ".join(filter(None, (title, row.get("size")))), 0.0) for row in rows]
    return [Fit(r["settings"], r["gib"], samples, r["count"], each) for r, each in zip(rows, lokr, strict=True)]


def fit(model_type: str, size: str, card: float, network_type: str = "lora") -> Fit | None:
    """Return the settings with the most memory that fit into a card of ``card`` GiB; None: none does."""
    return next((each for each in fits(model_type, size, network_type) if each.needs <= card), None)


def changes_for(model: PublishedModel, model_type: str, chosen: Fit) -> dict[str, Any]:
    """Return option -> value that make the ready configuration of ``chosen`` train ``model`` by its name on the hub.

    An empty value removes the option.

    Args:
        model_type: one of the model's.
        chosen: of :func:`fit` for it.
    """
    words = [word.partition(" ") for word in f" {chosen.count.partition(' ')[2]}".split(" --")[1:]]
    flags = {key: value or "true" for key, _, value in words}
    return {**hub_instead(model), **flags, "model_type": model_type}


def hub_instead(model: PublishedModel) -> dict[str, Any]:
    """Return option -> value that give a model by its name on the hub instead of files; empty: remove the option."""
    return {MODEL: model.hub} | dict.fromkeys(model.parts, "")


def download_instead(given: str, option: str) -> str:
    """Return what a message adds on a missing file: where it is had, and the name on the hub to set instead of it."""
    places = {PurePath(place).name: place for row in published_models() for place in row.files.values()}
    where = f"; the file: {link(place)}" if (place := places.get(PurePath(given).name)) else ""
    if option != MODEL or (model := find_published(given)) is None:
        return where
    size = f" ({model.gigabytes:g} GB)" if model.gigabytes else ""
    return f"; or set it to {model.hub}, which is downloaded{size}, and leave out {', '.join(model.parts)}{where}"


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
