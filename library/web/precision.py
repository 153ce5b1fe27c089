"""Precision: what a LoRA loses where it is served, and the files that give it back.

A report is a job of ``tools/precision_report.py`` into its own folder; its ``report.json`` is shown here. A remedy that
makes a file is a job too, of the command that the report carries, under a name that nothing has yet.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from library.errors import UserError
from library.web.data import refuse_outside
from library.web.jobs import Job
from library.web.loras import float_of, form_of, free_name, kind_of, lora_file, model_words, run_of
from library.web.run import ahead
from library.web.run import live as unless_seen
from library.web.site import Form, Handler, Site, goto, url

RECIPES = {
    "cast": "fp8, a plain cast: no scales",
    "cast+all": "fp8, a plain cast of all layers, as many published files",
    "tensor": "fp8, scaled: one scale a layer (ComfyUI)",
    "row": "fp8, a scale a row",
    "block64": "fp8, a scale for 64 numbers",
    "int8": "int8, one scale a layer",
    "int8_row": "int8, a scale a row",
    "int8_convrot": "int8, rotated: the best of these",
    "nvfp4": "nvfp4: 4 bits (RTX 50)",
}
SERVERS = {
    "": "what usually runs such files",
    "comfyui": "ComfyUI, Load LoRA",
    "comfyui-bypass": "ComfyUI, Load LoRA (Bypass)",
    "comfyui-legacy": "ComfyUI, Load LoRA, --disable-dynamic-vram",
    "diffusers": "diffusers",
    "gguf": "ComfyUI-GGUF",
}
_TOOLS = {f"tools/{name}.py" for name in ("quantize_model", "convert_lora", "refit_lora", "precision_report")}
_LAYERS_SHOWN = 10
_REPORT = "report/report.json"  # in a job's folder


def show(site: Site, request: Request, form: Form) -> Response:
    """Show the form for a LoRA, a report, and earlier ones."""
    asked = request.query_params
    reports = [job for job in site.jobs.all() if job.kind == "report"]
    if asked.get("part") == "reports":
        return unless_seen(site, request, "precision.html", "reports", reports=reports)
    chosen = _values(site, site.jobs.get(asked["report"])) if "report" in asked else {"job": None, "asked": {}}
    values, run = form_of(site, asked.get("lora") or chosen["asked"].get("lora", ""))
    served = "cast" if not run.get("fp8_scaled") else str(run.get("fp8_granularity", "block64"))
    return site.page(
        request, "precision.html", recipes=RECIPES, servers=SERVERS, dataset=run.get("dataset_config", ""),
        recipe=served if served in RECIPES else "tensor",
        reports=reports, seen="", **values, **chosen,
    )  # fmt: skip


def live(site: Site, request: Request, form: Form) -> Response:
    """Show a report's part of the screen alone, as it is now."""
    return site.part("precision.html", "report", **_values(site, site.jobs.get(request.query_params.get("id", ""))))


def _values(site: Site, job: Job) -> dict[str, Any]:
    """Return a report as the template takes it: its job, what was measured, the one before, files that were made."""
    asked, result, every = job.read("asked.json"), job.read(_REPORT), site.jobs.all()
    made: dict[int, list[tuple[Job, list[Path]]]] = {}
    for each in sorted(every, key=lambda each: each.created):
        if each.kind == "remedy" and (own := each.read("asked.json")).get("report") == job.id:
            made.setdefault(own["remedy"], []).append((each, _made(Path(own["file"]))))
    verdicts = [("Verdict", result, job.title)]
    with suppress(UserError):
        before = site.jobs.get(asked.get("before", ""))
        if earlier := before.read(_REPORT):
            verdicts = [("Before", earlier, before.title), ("After", result, job.title)]
    texts = [each["text"] for each in result.get("remedies", [])]
    helps = next((found[1] for text in texts if (found := re.search(r"([\d.]+)% off instead of", text))), "")
    for each in result.get("remedies", []):  # what a button does needs no command
        each["text"] = re.sub(r" ?\(tools/[^)]*\)", "", each["text"]) if each["command"] else each["text"]
    layers = sorted(result.get("layers", []), key=lambda row: -(row["output_error"] or 0))[:_LAYERS_SHOWN]
    return {
        "job": job, "asked": asked, "result": result, "layers": layers, "made": made, "verdicts": verdicts,
        "helps": helps, "ahead": ahead(site, job),
        "after": [each for each in every if each.read("asked.json").get("before") == job.id],
        "busy": not job.is_over or any(not each.is_over for found in made.values() for each, _ in found),
    }  # fmt: skip


def _made(path: Path) -> list[Path]:
    """Return the files that a remedy has made so far."""
    found = [path] if path.is_file() else sorted((path / "fixes").glob("**/*.safetensors"))
    return found or ([path] if (path / "model_index.json").is_file() else [])


def start(site: Site, request: Request, form: Form) -> Response:
    """Queue a report as the form says."""
    given = {key: str(value).strip() for key, value in form.items()}
    lora = lora_file(site, given["lora"])
    run = run_of(lora)
    dataset = site.places.find(given["dataset"])
    if not dataset.is_file():
        raise UserError(f"{given['dataset']}: no such dataset; name the TOML file that the LoRA was trained on")
    refuse_outside(site, dataset)
    deploy = str(site.places.find(given["file"])) if given["served"] == "file" else given["served"]
    strength = given.get("strength") or "1"
    words = ["tools/precision_report.py", *model_words(site, lora, given), "--deploy", deploy]
    words += ["--lora", site.places.show(lora) + (f":{strength}" if float_of(strength, "strength") != 1 else "")]
    words += ["--dataset_config", given["dataset"], "--save_to", "{job}/report"]
    for key in ("server", "images", "steps", "guidance_scale", "activations", "deploy_lora"):
        words += [f"--{key}", given[key]] if given.get(key) else []
    words += ["--masked_loss"] if run.get("masked_loss") else []
    with suppress(UserError):  # a cache elsewhere is made anew, beside the images
        words += ["--cache_directory", str(site.places.find(run.get("cache_directory") or ""))]
    shown = Path(deploy).name if given["served"] == "file" else RECIPES.get(deploy, deploy)
    return _add(site, f"{lora.name} on {shown}", words, {"lora": site.places.show(lora)})


def _add(site: Site, title: str, words: list[str], asked: dict[str, str]) -> Response:
    job = site.jobs.add("report", title, words, queued=True, files={"asked.json": json.dumps(asked)})
    return goto(url("/precision", report=job.id))


def _remedy_of(site: Site, form: Form) -> tuple[Job, int, dict[str, Any]]:
    """Return the report that a form names, and the number of one of its remedies with that remedy."""
    job, number = site.jobs.get(str(form["report"])), str(form["remedy"])
    listed = job.read(_REPORT).get("remedies", [])
    if not (number.isdecimal() and int(number) < len(listed)):
        raise UserError("this report has no such remedy; open it again")
    return job, int(number), listed[int(number)]


def remedy(site: Site, request: Request, form: Form) -> Response:
    """Queue the command of a report's remedy; its file lies beside the original, or in the first output folder."""
    job, number, chosen = _remedy_of(site, form)
    if not chosen.get("command") or chosen["command"][0] not in _TOOLS:
        raise UserError("this remedy makes no file: it is a setting of the program that serves")
    words = chosen["command"]
    flag = "--model" if chosen["makes"] == "model" else "--lora"
    source = Path(words[words.index(flag) + 1]).resolve()
    inside = any(source.is_relative_to(folder) for folder in site.places.outputs)
    folder = source.parent if inside else site.places.outputs[0]
    ending = "" if chosen["makes"] == "fixes" or source.is_dir() else ".safetensors"
    others = (each.read("asked.json").get("file") for each in site.jobs.all() if each.kind == "remedy")
    name = source.name if source.is_dir() else source.stem
    file = free_name(folder / f"{name}-{chosen['name']}{ending}", [Path(other) for other in others if other])
    own = [site.places.show(file) if word == "{save_to}" else word for word in words]
    asked = {"report": job.id, "remedy": number, "file": str(file)}
    site.jobs.add("remedy", f"{file.name}", own, queued=True, files={"asked.json": json.dumps(asked)})
    return site.part("precision.html", "report", **_values(site, job))


def again(site: Site, request: Request, form: Form) -> Response:
    """Queue the report once more, on the file that a remedy made."""
    (job, _, chosen), file = _remedy_of(site, form), site.places.find(str(form["file"]))
    words = list(job.words)
    if kind_of(file) == "lora":
        first = words[words.index("--reference_lora" if "--reference_lora" in words else "--lora") + 1]
        words += ["--lora", site.places.show(file), "--reference_lora", first]
    else:
        words += ["--deploy", site.places.show(file)]
    words += [*chosen["again"], "--save_to", "{job}/report"]
    return _add(site, f"{file.name}, instead of {job.title}", words, job.read("asked.json") | {"before": job.id})


def stop(site: Site, request: Request, form: Form) -> Response:
    """Stop a report, a painting, or what makes a file; what is there stays."""
    site.jobs.stop(str(form["id"]))
    return Response(headers={"hx-refresh": "true"})


ROUTES: dict[str, Handler | tuple[Handler | None, Handler]] = {
    "/precision": (show, start),
    "/precision/report": live,
    "/precision/remedy": (None, remedy),
    "/precision/again": (None, again),
    "/job/stop": (None, stop),
}
