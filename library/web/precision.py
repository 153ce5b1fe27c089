"""Precision: what a LoRA loses where it is served, and the files that give it back.

A report is a job of ``tools/precision_report.py`` into its own folder, whose ``report.html`` is shown here. A remedy
that makes a file is a job too, of the command that the report carries, under a name that nothing has yet.
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
from library.files import read_toml
from library.training.report.run_folder import free_name, settings_of
from library.web.data import refuse_outside
from library.web.jobs import Job
from library.web.loras import float_of, kind_of, lora_file, model_words, show_screen
from library.web.run import ahead
from library.web.site import Form, Given, Routes, Site, goto, tell_changed, url

RECIPES = {
    "file": "a file that you have",
    "cast": "fp8: 8 bits, simply rounded",
    "cast+all": "fp8, simply rounded, every layer",
    "tensor": "fp8 scaled: 8 bits",
    "int8_row": "int8: 8 bits, scaled by row",
    "int8_convrot": "int8 ConvRot: 8 bits, the closest to the original",
    "nvfp4": "nvfp4: 4 bits, for RTX 50",
    "distilled": "no rounding: is the LoRA as strong on the distilled (turbo) model?",
}
_TOOLS = {
    f"tools/{name}.py" for name in ("quantize_model", "convert_lora", "merge_lora", "refit_lora", "precision_report")
}
_REPORT = "report/report.json"  # in a job's folder


def show(site: Site, request: Request, form: Form) -> Response:
    """Show the form for a LoRA, a report, and earlier ones."""
    return show_screen(site, request, "report", "precision.html", _form, _result)


def _form(site: Site, run: dict[str, Any]) -> dict[str, Any]:
    """Return what the form says before anybody has changed it."""
    usual = "1" if "tiny-" in str(run.get("pretrained_model_name_or_path")) else ""  # built in, made for 1
    return {
        "recipes": RECIPES,
        "served": "tensor" if run.get("fp8_scaled") else "cast",
        "dataset": run.get("dataset_config", ""),
        "guidance_scale": usual,  # of sampling, not that of the run, which is of training
    }


def _result(site: Site, job: Job) -> dict[str, Any]:
    """Return a report as the template takes it: its remedies, and the files that they made since."""
    result, every = job.read(_REPORT), sorted(site.jobs.all(), key=lambda each: each.created)
    made = [
        (record["remedy"], each, _made(Path(record["file"])))
        for each in every
        if each.kind == "remedy" and (record := each.read("asked.json")).get("report") == job.id
    ]
    for each in (each for each in result.get("remedies", []) if each["command"]):  # a button needs no command in words
        each["text"] = re.sub(r" ?\(tools/[^)]*\)", "", each["text"])
    return {
        "result": result,
        "made": made,
        "was": job.read("asked.json").get("was"),
        "kind_of": kind_of,
        "is_busy": not all(one.is_over for one in (job, *(one for _, one, _ in made))),
        "waits_for": ahead(site, job),
    }


def _made(path: Path) -> list[Path]:
    """Return the files that a remedy has made so far."""
    if path.is_file() or (path / "config.json").is_file():  # a model may be a folder
        return [path]
    return sorted(path.glob("fixes/*.safetensors"))


def start(site: Site, request: Request, form: Form) -> Response:
    """Queue a report as the form says."""
    given = Given(form)
    lora, deploy = lora_file(site, given["lora"]), given["served"]
    if (shown := RECIPES.get(deploy)) is None:
        raise UserError(f"served {deploy!r}: is none of {', '.join(RECIPES)}; reload the screen")
    run, dataset = settings_of(lora.parent), site.roots.find(given["dataset"])
    refuse_outside(site, dataset, read_toml(dataset)[0])
    flag = "--distilled" if deploy == "distilled" else "--deploy"
    if deploy in ("file", "distilled"):
        deploy = str(site.roots.find(given["file"]))
        shown = Path(deploy).name
    strength = given.get("strength") or "1"
    words = ["tools/precision_report.py", *model_words(site, lora, given), flag, deploy]
    words += ["--lora", site.roots.show(lora) + (f":{strength}" if float_of(strength, "strength") != 1 else "")]
    words += ["--dataset_config", given["dataset"], "--save_to", "{job}/report"]
    for key in (*(("server",) if flag == "--deploy" else ()), "images", "steps", "guidance_scale"):
        words += [f"--{key}", given[key]] if given.get(key) else []
    words += ["--masked_loss"] if run.get("masked_loss") else []
    with suppress(UserError):  # a cache elsewhere is made anew, beside the images
        words += ["--cache_directory", str(site.roots.find(str(run.get("cache_directory") or "")))]
    return _add(site, f"{lora.name} on {shown}", words, {"form": given})


def _add(site: Site, title: str, words: list[str], request: dict[str, Any]) -> Response:
    job = site.jobs.add("report", title, words, queued=True, files={"asked.json": json.dumps(request)})
    return goto(url("/precision", job=job.id))


def _remedy_of(site: Site, form: Form) -> tuple[Job, int, dict[str, Any]]:
    """Return the report that a form names, and the number of one of its remedies with that remedy."""
    job, number = site.jobs.get(str(form["report"])), str(form["remedy"])
    listed = job.read(_REPORT).get("remedies", [])
    is_one = isinstance(listed, list) and number.isdecimal() and len(number) < 6 and int(number) < len(listed)
    if not (is_one and isinstance(listed[int(number)], dict)):
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
    is_in_outputs = any(source.is_relative_to(folder) for folder in site.roots.outputs)
    ending = "" if chosen["makes"] == "fixes" or source.is_dir() else ".safetensors"
    taken = [Path(each.read("asked.json").get("file", "")) for each in site.jobs.all()]
    name = f"{source.name if source.is_dir() else source.stem}-{chosen['name']}{ending}"
    file = free_name((source.parent if is_in_outputs else site.roots.outputs[0]) / name, taken)
    command = [site.roots.show(file) if word == "{save_to}" else word for word in words]
    files = {"asked.json": json.dumps({"report": job.id, "remedy": number, "file": str(file)})}
    site.jobs.add(
        "remedy",
        file.name,
        command,
        queued=words[0] not in ("tools/convert_lora.py", "tools/merge_lora.py"),
        files=files,
    )
    return tell_changed()


def again(site: Site, request: Request, form: Form) -> Response:
    """Queue the report once more, on the file that a remedy made."""
    (job, _, chosen), file = _remedy_of(site, form), site.roots.find(str(form["file"]))
    words = list(job.words)
    if "--distilled" in words:
        words += ["--distilled_lora", site.roots.show(file)]
    elif kind_of(file) == "lora":
        first = words[words.index("--reference_lora" if "--reference_lora" in words else "--lora") + 1]
        words += ["--lora", site.roots.show(file), "--reference_lora", first]
    else:
        words += ["--deploy", site.roots.show(file)]
    words += [*chosen["again"], "--save_to", "{job}/report"]
    off = job.read(_REPORT).get("deployment")
    record = job.read("asked.json") | ({"was": off["image"] or off["velocity"]} if off else {})
    return _add(site, f"{file.name}, instead of {job.title}", words, record)


def stop(site: Site, request: Request, form: Form) -> Response:
    """Stop a report, images that are generated, or what makes a file; what is there stays."""
    site.jobs.stop(str(form["id"]))
    return tell_changed()


ROUTES: Routes = {
    "/precision": (show, start),
    "/precision/remedy": (None, remedy),
    "/precision/again": (None, again),
    "/job/stop": (None, stop),
}
