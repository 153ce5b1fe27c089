"""LoRA files in the places, what the run that made one says about it, and the screens on which one is chosen."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from library.config.model_types import IMAGE_MODELS, MODEL_FILE_KEYS
from library.errors import UserError
from library.training.report.run_folder import once, settings_of, text_of
from library.web.run import live
from library.web.site import Site

Values = Callable[[Site, Any], dict[str, Any]]  # of a template
_MOST_SHOWN = 400  # of files in a list
_ENDINGS = (".safetensors", ".gguf")
_HEADER_BYTES = 2**25  # of a file; the largest have a tenth of it
_LORA = re.compile(r"\.lora|lora_|hada_w|lokr_w|\boft_|dora_scale")  # in tensors' names


def weight_files(site: Site) -> tuple[list[str], list[str]]:
    """Return LoRAs and models in the places, the newest first, as a person writes their paths."""
    found: dict[Path, float] = {}
    for place in (*site.places.outputs, *site.places.folders):
        for folder, inner, names in os.walk(place):
            inner[:] = [name for name in inner if name[0] != "." and not name.endswith(("-state", "teacher"))]
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
    with open(path, "rb") as file:
        if (begin := file.read(8))[:4] == b"GGUF":
            return "model"
        head = json.loads(file.read(min(struct.unpack("<Q", begin)[0], _HEADER_BYTES)))
    if not any(_LORA.search(name) for name in head):
        return "model"
    said = json.dumps(head.get("__metadata__")) + (text_of(path.with_name("adapter_config.json")) or "")
    return "" if "CAUSAL_LM" in said else "lora"


def show_screen(site: Site, request: Request, kind: str, template: str, form: Values, result: Values) -> Response:
    """Show a screen of ``lora_screen.html``, or a part of it that may have changed.

    Args:
        site, request: as handlers are given them.
        kind: of its jobs.
        template: the screen's own.
        form: values of its form for the settings of the LoRA's run; what a job was asked comes before them.
        result: values of a job's result.
    """
    query, here = request.query_params, request.url.path
    job = site.jobs.get(query["job"]) if "job" in query else None
    values = {"here": here, "job": job, **(result(site, job) if job else {})}
    if query.get("part") == "result":
        return live(site, request, template, "result", **values)
    jobs = [each for each in site.jobs.all() if each.kind == kind]
    if query.get("part") == "earlier":
        return live(site, request, "lora_screen.html", "earlier", here=here, jobs=jobs)
    asked = job.read("asked.json").get("form", {}) if job else {}
    lora = query.get("lora") or asked.get("lora", "")
    run = settings_of(lora_file(site, lora).parent) if lora else {}
    own = {"model": run.get("pretrained_model_name_or_path", ""), "model_type": run.get("model_type", "flux")}
    fields = own | form(site, run) | asked | {"lora": lora, "asked": asked, "types": IMAGE_MODELS}
    fields["loras"], fields["models"] = weight_files(site)
    return site.page(request, template, jobs=jobs, seen="", **fields | values)


def model_words(site: Site, lora: Path, given: Mapping[str, str]) -> list[str]:
    """Return the flags of the base that a form names as model and model_type, its parts as the LoRA's run had them."""
    run = settings_of(lora.parent)
    found = {"model": given["model"], "model_type": given["model_type"]}
    found |= {key: str(run[key]) for key in MODEL_FILE_KEYS if run.get(key)}
    site.places.refuse_paths_outside(found, "model")
    return [word for key, value in found.items() for word in (f"--{key}", value)]


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
