"""Generate: each prompt at several strengths of a LoRA, or with several saved steps of its run, side by side.

One job of ``tools/generate.py grid`` loads the model once and writes which picture is which into ``grid.json`` before
the first, so that the screen fills as they come. Those of several steps lie in the run's folder, where the next job
finds what was made already; others in the job's.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from library.config.family_defaults import family_defaults
from library.config.model_types import IMAGE_MODELS
from library.errors import UserError
from library.files import read_text
from library.training.report.run_folder import checkpoints_of, mtime, settings_of
from library.training.sampling.prompts import SamplePrompt, parse_prompt, read_prompts
from library.web.jobs import Job
from library.web.loras import float_of, lora_file, model_words, show_screen
from library.web.run import ahead
from library.web.site import Form, Given, Routes, Site, goto, url

_MOST_PICTURES = 400


def show(site: Site, request: Request, form: Form) -> Response:
    """Show the form for a LoRA, its images, and earlier ones."""
    return show_screen(site, request, "generate", "generate.html", _form, _result)


def _form(site: Site, run: dict[str, Any]) -> dict[str, Any]:
    """Return what the form says before anybody has changed it."""
    model = str(run.get("pretrained_model_name_or_path"))  # built in: made for 128 pixels, and to fill for guidance 1
    is_tiny, guidance = "tiny-" in model, "1" if "tiny-flux-fill" in model else ""
    model_type = run.get("model_type", "flux")
    usual = family_defaults(model_type if model_type in IMAGE_MODELS else "flux")
    sizes = dict.fromkeys(("width", "height"), "128" if is_tiny else str(usual["sample_size"]))
    strengths = "-2 -1 0 1 2" if run.get("train_on") == "slider" else "0 0.5 0.8 1 1.2"
    values = {"strengths": strengths, "prompts": _prompts_of(site, run), "guidance": guidance}
    return values | sizes


def _prompts_of(site: Site, run: dict[str, Any]) -> str:
    """Return the prompts that a run samples with, one a line."""
    prompts = run.get("sample_prompts") or ""
    if isinstance(prompts, list) or not prompts:
        return "\n".join(map(str, prompts))
    with suppress(UserError):
        path = site.roots.find(str(prompts), own=True)
        lines = [prompt.line() for prompt in read_prompts(path, 0, 1)]
        if path.suffix == ".txt" and not any(" --ci " in line for line in lines):  # as they were written
            lines = [line for line in read_text(path).split("\n") if line.strip() and not line.startswith("#")]
        return "\n".join(lines)
    return ""


def start(site: Site, request: Request, form: Form) -> Response:
    """Queue the pictures that the form asks for."""
    given = Given(form)
    lora = lora_file(site, given["lora"])
    saved = [lora_file(site, str(lora.parent / str(name))).name for name in form.getlist("saved")] or [lora.name]
    more = [line.strip() for line in given.get("more", "").split("\n") if line.strip()]
    words = given["strengths"].replace(",", " ").split()
    strengths = [float(text) for text in dict.fromkeys(f"{float_of(word, 'strengths'):g}" for word in words)]
    written = map(str.strip, given["prompts"].split("\n"))
    lines = [line for line in written if line and not line.startswith("#")]
    prompts = [parse_prompt(line, SamplePrompt(""), 1, f"prompt {i}") for i, line in enumerate(lines, 1)]
    count = len(prompts) or 3 * bool(settings_of(lora.parent).get("dataset_config"))  # else captions
    if not 0 < (number := count * len(strengths) * len(saved)) <= _MOST_PICTURES:
        raise UserError(f"{number} images: write prompts and strengths for 1 to {_MOST_PICTURES} in all")
    for path in (path for prompt in prompts for path in (*prompt.control_images, prompt.mask_image) if path):
        site.roots.find(path)
    for text in more:
        lora_file(site, text if Path(text).exists() else text.rpartition(":")[0])
    words = ["tools/generate.py", "grid", "--run", site.roots.show(lora.parent), *model_words(site, lora, given)]
    words += ["--steps", *saved, *(["--lora", *more] if more else []), "--record", "{job}/grid.json"]
    words += ["--strengths", *(f"{each:g}" for each in strengths)]
    words += ["--from_file", "{job}/prompts.txt"] if prompts else []
    is_run = len(saved) > 1 and any(lora.is_relative_to(folder) for folder in site.roots.outputs)
    words += [] if is_run else ["--save_to", "{job}/images"]
    for flag, key in {"w": "width", "h": "height", "s": "steps", "d": "seed", "g": "guidance"}.items():
        words += [f"--{flag}", given[key]] if given[key] else []
    record = {"form": {**given, "saved": saved}, "number": number}
    files = {"asked.json": json.dumps(record), "prompts.txt": "\n".join(lines)}
    title = f"{lora.stem}: {prompts[0].prompt[:60] if prompts else 'captions of its images'}"
    job = site.jobs.add("generate", title, words, queued=True, files=files)
    return goto(url("/generate", job=job.id))


def _result(site: Site, job: Job) -> dict[str, Any]:
    """Return a job's pictures as the template takes them, the time that is left, and the run's saved steps."""
    asked, record, rows = job.read("asked.json"), job.read("grid.json"), dict[str, list[tuple[str, str | None]]]()
    number = sum(map(len, record["images"])) if record else asked["number"]
    steps, done, new = record.get("steps", ()), 0, 0
    for column, (prompt, strength) in enumerate(record.get("columns", ())):
        for (_, about), files in zip(steps, record["images"], strict=True):
            path, at = Path(files[column]), f"strength {strength:g}"
            text, label = (f"{prompt}, {at}", about) if len(steps) > 1 else (prompt, at)
            rows.setdefault(text, []).append((label, url("/file", path=path, v=job.id) if path.is_file() else None))
            done, new = done + path.is_file(), new + (mtime(path) > (job.began or inf))
    left = (number - done) / new * (time.time() - job.began) if new and job.began and not job.is_over else None
    folder = site.roots.find(asked["form"]["lora"]).parent
    saved = checkpoints_of(folder) if len(steps) > 1 else []
    kept = len(list(folder.glob("*.safetensors"))) > len(saved)  # one has a name of its own
    shown = {"rows": rows, "done": done, "all": number, "left": left, "waits_for": ahead(site, job)}
    return shown | {"saved": saved, "kept": kept}


ROUTES: Routes = {"/generate": (show, start)}
