"""Generate: each prompt painted at several strengths of a LoRA, side by side.

One job of ``tools/generate.py image --strengths`` loads the model once and writes a line into ``images.jsonl`` for each
picture, so that the grid fills while it paints. Pictures lie in the job's folder.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from library.config.family_defaults import family_defaults
from library.config.model_types import IMAGE_MODELS
from library.errors import UserError
from library.files import read_text
from library.training.sampling.prompts import SamplePrompt, parse_prompt, read_prompts
from library.web.jobs import Job
from library.web.loras import float_of, lora_file, model_words, show_screen
from library.web.run import ahead
from library.web.site import Form, Given, Routes, Site, goto, url

_MOST_PICTURES = 400


def show(site: Site, request: Request, form: Form) -> Response:
    """Show the form for a LoRA, a painting, and earlier ones."""
    return show_screen(site, request, "generate", "generate.html", _form, _result)


def _form(site: Site, run: dict[str, Any]) -> dict[str, Any]:
    """Return what the form says before anybody has changed it."""
    is_tiny = "tiny-" in str(run.get("pretrained_model_name_or_path"))  # built in: made for guidance 1 and 128 pixels
    model_type = run.get("model_type", "flux")
    usual = family_defaults(model_type if model_type in IMAGE_MODELS else "flux")
    side, guidance = ("128", "1") if is_tiny else (str(usual["sample_size"]), "")
    return {
        "strengths": "0 0.5 0.8 1 1.2",
        "prompts": _prompts_of(site, run),
        "width": side,
        "height": side,
        "guidance": guidance,
    }


def _prompts_of(site: Site, run: dict[str, Any]) -> str:
    """Return the prompts that a run samples with, one a line."""
    prompts = run.get("sample_prompts") or ""
    if isinstance(prompts, list):
        return "\n".join(map(str, prompts))
    with suppress(UserError):
        path = site.roots.find(str(prompts), own=True)
        lines = [prompt.line() for prompt in read_prompts(path, 0, 1)]
        if path.suffix == ".txt" and not any(" --ci " in line for line in lines):  # as they were written
            lines = [line for line in read_text(path).split("\n") if line.strip() and not line.startswith("#")]
        return "\n".join(lines)
    return ""


def start(site: Site, request: Request, form: Form) -> Response:
    """Queue a painting as the form says."""
    given = Given(form)
    lora = lora_file(site, given["lora"])
    more = [line.strip() for line in given.get("more", "").split("\n") if line.strip()]
    words = given["strengths"].replace(",", " ").split()
    strengths = [float(text) for text in dict.fromkeys(f"{float_of(word, 'strengths'):g}" for word in words)]
    written = map(str.strip, given["prompts"].split("\n"))
    lines = [line for line in written if line and not line.startswith("#")]
    prompts = [parse_prompt(line, SamplePrompt(""), 1, f"prompt {i}") for i, line in enumerate(lines, 1)]
    if not 0 < (number := len(prompts) * len(strengths)) <= _MOST_PICTURES:
        raise UserError(f"{number} pictures: write prompts and strengths for 1 to {_MOST_PICTURES} in all")
    for path in (path for prompt in prompts for path in (*prompt.control_images, prompt.mask_image) if path):
        site.roots.find(path)
    for text in more:
        lora_file(site, text if Path(text).exists() else text.rpartition(":")[0])
    words = ["tools/generate.py", "image", *model_words(site, lora, given)]
    words += ["--lora", site.roots.show(lora), *more, "--strengths", *(f"{each:g}" for each in strengths)]
    words += ["--from_file", "{job}/prompts.txt", "--save_to", "{job}/images"]
    for flag, key in {"w": "width", "h": "height", "s": "steps", "d": "seed", "g": "guidance"}.items():
        words += [f"--{flag}", given[key]] if given[key] else []
    record = {"form": given, "strengths": strengths, "prompts": [prompt.prompt for prompt in prompts]}
    files = {"asked.json": json.dumps(record), "prompts.txt": "\n".join(lines)}
    title = f"{lora.stem}: {prompts[0].prompt[:60]}"
    job = site.jobs.add("generate", title, words, queued=True, files=files)
    return goto(url("/generate", job=job.id))


def _result(site: Site, job: Job) -> dict[str, Any]:
    """Return a painting as the template takes it: a row a prompt, in it each strength and its picture."""
    request, made = job.read("asked.json"), dict[tuple[int, float], str]()
    with suppress(OSError, ValueError):
        for line in (job.folder / "images/images.jsonl").read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            made[one["row"], one["strength"]] = url("/file", path=job.folder / "images" / one["file"], v=job.id)
    strengths = request.get("strengths", [])
    rows = [
        (text, [(f"strength {each:g}", made.get((row, each))) for each in strengths])
        for row, text in enumerate(request.get("prompts", []))
    ]
    return {"rows": rows, "done": len(made), "all": len(rows) * len(strengths), "waits_for": ahead(site, job)}


ROUTES: Routes = {"/generate": (show, start)}
