"""LoRA files in the allowed folders, what the runs that made them say, and the screens on which one is chosen."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from starlette.requests import Request
from starlette.responses import Response

from library.config.model_layouts import INDEXES
from library.config.model_types import IMAGE_MODELS, LANGUAGE_MODEL_KINDS, MODEL_FILE_KEYS
from library.errors import UserError
from library.gguf_header import has_language_model
from library.training.report.run_folder import cached_by_mtime, checkpoints_of, header_of, mtime, object_in, settings_of
from library.web.run import fragment
from library.web.site import Site

Values = Callable[[Site, Any], dict[str, Any]]  # of a template
_MOST_SHOWN = 400  # of files in a list
_ENDINGS = (".safetensors", ".gguf")
_LORA = re.compile(r"\.lora|lora_|_lora\d?\.|\.diff(_b)?$|hada_w|lokr_w|dora_scale|\boft_")  # in tensors' names


def weights_in(site: Site) -> dict[str, list[str]]:
    """Return the weights in the allowed folders by kind, the newest first, as a person writes their paths.

    Kinds are "lora" and "model" of images, files or whole pipelines, "language_lora" and "captioner", folders, and
    "language_model", folders or GGUF files.
    """
    found: dict[Path, tuple[float, str]] = {}
    for place in (*site.roots.outputs, *site.roots.folders):
        for name, inner, files in os.walk(place):
            folder = Path(name)
            inner[:] = [each for each in inner if each[0] != "." and not each.endswith(("-state", "teacher"))]
            if kind := _kind_of_folder(folder, files):
                found[folder] = mtime(folder), kind
            if kind == "model":  # what is in a pipeline is no model of its own
                inner[:] = files = []
            for path in (folder / file for file in files if file.endswith(_ENDINGS)):
                with suppress(OSError, UserError):
                    path = site.roots.find(str(path))
                    found[path] = path.stat().st_mtime, kind_of(path) or ""
    kinds = ("lora", "model", "language_lora", "language_model", "captioner", "")
    lists: dict[str, list[str]] = {kind: [] for kind in kinds}
    for path, (_, kind) in sorted(found.items(), key=lambda item: -item[1][0]):
        lists[kind].append(site.roots.show(path))
    return {kind: paths[:_MOST_SHOWN] for kind, paths in lists.items()}


def _kind_of_folder(folder: Path, files: Sequence[str]) -> str:
    """Return what a whole folder is, by the files that tell; "" if it is none."""
    if any(index in files for index in INDEXES):
        return "model"
    if "adapter_config.json" in files:
        adapter = object_in(folder / "adapter_config.json") or {}
        return "language_lora" if adapter.get("task_type") in ("CAUSAL_LM", None) else ""
    is_old = "params.json" in files or any(file.endswith(".ckpt.index") for file in files)
    config = object_in(folder / "config.json") or {}
    if "vision_config" in config and {"preprocessor_config.json", "processor_config.json"}.intersection(files):
        return "captioner"
    return "language_model" if is_old or config.get("model_type") in LANGUAGE_MODEL_KINDS else ""


@cached_by_mtime
def kind_of(path: Path) -> str:
    """Return what a file is: "lora" by its tensors' names, "" where that is one of a language model, else "model".

    A GGUF file may be a "language_model".
    """
    with open(path, "rb") as file:
        if file.read(4) == b"GGUF":
            return "language_model" if has_language_model(path) else "model"
    if (head := header_of(path)) is None:
        raise ValueError(f"{path}: cannot be read")
    if not any(_LORA.search(name) for name in head):
        return "model"
    said = head.get("__metadata__"), object_in(path.with_name("adapter_config.json"))
    return "" if "CAUSAL_LM" in json.dumps(said) else "lora"


def show_screen(site: Site, request: Request, kind: str, template: str, form: Values, result: Values) -> Response:
    """Show a screen of ``lora_screen.html``, or a part of it that may have changed.

    Args:
        site, request: as handlers are given them.
        kind: of its jobs.
        template: the screen's own.
        form: values of its form for the settings of the LoRA's run; what a job was asked comes before them.
        result: values of a job's result.

    Raises:
        UserError: there is no such job, or what it wrote is no result of this version's.
    """
    query, here = request.query_params, request.url.path
    job = site.jobs.get(query["job"]) if "job" in query else None
    site.jobs.go_on([job] if job else [])
    try:
        values = {"here": here, "job": job, "query": query, **(result(site, job) if job else {})}
        if query.get("part") == "result":
            return fragment(site, request, template, "result", **values)
        jobs = [each for each in site.jobs.all() if each.kind == kind]
        asked = job.read("asked.json").get("form", {}) if job else {}
        lora = asked.get("lora", "")
        lora = query.get("lora") or (lora if Path(lora).is_file() else "")  # it may have another name by now
        file = lora_file(site, lora) if lora else None
        run = settings_of(file.parent) if file else {}
        base = {"model": run.get("pretrained_model_name_or_path", ""), "model_type": run.get("model_type", "flux")}
        fields = base | form(site, run) | asked | {"lora": lora, "asked": asked, "types": IMAGE_MODELS}
        found = weights_in(site)
        steps = checkpoints_of(file.parent) if file else []
        fields |= {"loras": found["lora"], "models": found["model"], "jobs": jobs, "seen": ""}
        fields |= {"steps": steps, "file": file}
        return site.page(request, template, **fields | values)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        if job is None or isinstance(error, UserError):
            raise
        why = f"its files cannot be read ({error}); they are another version's, make it anew"
        raise UserError(f"{job.title}: {why}") from error


def model_words(site: Site, lora: Path, given: Mapping[str, str]) -> list[str]:
    """Return the flags of the base that a form names as model and model_type, its parts as the LoRA's run had them."""
    run = settings_of(lora.parent)
    found = {"model": given["model"], "model_type": given["model_type"]}
    found |= {key: str(run[key]) for key in MODEL_FILE_KEYS if run.get(key)}
    site.roots.refuse_paths_outside(found, "model")
    return [word for key, value in found.items() for word in (f"--{key}", value)]


def lora_file(site: Site, text: str) -> Path:
    """Return a LoRA that a request names; raises a UserError if there is none."""
    path = site.roots.find(text)
    if path.suffix != ".safetensors" or not path.is_file():
        raise UserError(f"{site.roots.show(path)}: no such LoRA; choose a .safetensors file from the list")
    return path


def float_of(text: str, what: str) -> float:
    """Return a number of a form; raises a UserError that names it."""
    with suppress(ValueError):
        if isfinite(number := float(text)):
            return number
    raise UserError(f"{what}: {text[:40]!r} is no number; write 0.8")
