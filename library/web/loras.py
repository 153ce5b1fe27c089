"""LoRA and model files in the places, and what the run that made a LoRA says about it."""

from __future__ import annotations

import json
import os
import struct
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from library.config.model_types import IMAGE_MODELS, MODEL_FILE_KEYS
from library.errors import UserError
from library.web.run import once, text_of
from library.web.site import Site

_MOST_SHOWN = 400  # of files in a list
_ENDINGS = (".safetensors", ".gguf")


def weight_files(site: Site) -> tuple[list[str], list[str]]:
    """Return LoRAs and models in the places, the newest first, as a person writes their paths."""
    found: dict[Path, float] = {}
    for place in (*site.places.outputs, *site.places.folders):
        for folder, inner, names in os.walk(place):
            inner[:] = [name for name in inner if name[0] != "." and not name.endswith("-state")]
            if "model_index.json" in names:  # a whole pipeline is one model
                found[Path(folder)], inner[:] = 0.0, []
            for path in (Path(folder, name) for name in names if name.endswith(_ENDINGS)):
                with suppress(OSError, UserError):  # a link may lead out
                    found[site.places.find(str(path))] = path.stat().st_mtime
    lists: dict[str, list[str]] = {"lora": [], "model": [], "": []}
    for path in sorted(found, key=lambda path: -found[path]):
        lists[kind_of(path) or ("model" if path.is_dir() else "")].append(site.places.show(path))
    return lists["lora"][:_MOST_SHOWN], lists["model"][:_MOST_SHOWN]


@once
def kind_of(path: Path) -> Literal["lora", "model", ""]:
    """Return what a file is: "lora" by its tensors' names, "" where that is one of a language model, else "model"."""
    head: dict[str, Any] = {}
    with suppress(ValueError, struct.error, RecursionError), open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        read = json.loads(file.read(length)) if length < 2**25 else {}
        head = read if isinstance(read, dict) else {}
    if not any(".lora" in key or "lora_" in key for key in head):
        return "model"
    said = json.dumps(head.get("__metadata__"))
    with suppress(OSError, ValueError):
        said += path.with_name("adapter_config.json").read_text(encoding="utf-8")
    return "" if "CAUSAL_LM" in said else "lora"


def form_of(site: Site, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a form's lists and values for a LoRA, as its run has them; and that run's options."""
    run = run_of(lora_file(site, text)) if text else {}
    loras, models = weight_files(site)
    return {
        "loras": loras, "models": models, "types": IMAGE_MODELS, "lora": text,
        "model": run.get("pretrained_model_name_or_path", ""), "model_type": run.get("model_type", "flux"),
        "guidance": guidance_of(run),
    }, run  # fmt: skip


def run_of(lora: Path) -> dict[str, Any]:
    """Return option -> value of the run that wrote a LoRA; nothing where no config.toml lies beside it."""
    tables: dict[str, Any] = {}
    with suppress(ValueError):
        tables = tomllib.loads(text_of(lora.parent / "config.toml") or "")
    flat = {key: value for table in tables.values() if isinstance(table, dict) for key, value in table.items()}
    return tables | flat


def model_words(site: Site, lora: Path, given: Mapping[str, str]) -> list[str]:
    """Return the flags of the base that a form names as model and model_type, its parts as the LoRA's run had them."""
    if not given["model"]:
        raise UserError("model: is empty; name the model that the LoRA was trained on, a folder or a file")
    run = run_of(lora)
    found = {"model": given["model"], "model_type": given["model_type"]}
    found |= {key: str(run[key]) for key in MODEL_FILE_KEYS if run.get(key)}
    site.places.refuse_paths_outside(found, "model")
    return [word for key, value in found.items() for word in (f"--{key}", value)]


def guidance_of(run: dict[str, Any]) -> str:
    """Return the guidance that a run trained with; of the built-in tiny models 1, which they were made with."""
    tiny = "tiny-" in str(run.get("pretrained_model_name_or_path", ""))
    said = run.get("guidance_scale")
    return f"{said:g}" if isinstance(said, int | float) else "1" if tiny else ""


def lora_file(site: Site, text: str) -> Path:
    """Return a LoRA that a request names; raises a UserError if there is none."""
    path = site.places.find(text)
    if path.suffix != ".safetensors" or not path.is_file():
        raise UserError(f"{site.places.show(path)}: no such LoRA; choose a .safetensors file from the list")
    return path


def free_name(path: Path, taken: Sequence[Path] = ()) -> Path:
    """Return ``path``, or with the first number behind its name that nothing has."""
    ending = ".safetensors" if path.suffix == ".safetensors" else ""
    stem = path.name.removesuffix(ending)
    tries = (path if n == 1 else path.with_name(f"{stem}-{n}{ending}") for n in range(1, 10_000))
    return next(each for each in tries if not each.exists() and each not in taken)


def float_of(text: str, what: str) -> float:
    """Return a number of a form; raises a UserError that names it."""
    with suppress(ValueError):
        return float(text)
    raise UserError(f"{what}: {text[:40]!r} is no number; write 0.8")
