"""Generate: each prompt painted at several strengths of a LoRA, side by side.

One job of ``tools/generate.py image --strengths`` loads the model once and writes a line into ``images.jsonl`` for each
picture, so that the grid fills while it paints. Pictures lie in the job's folder.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from library.errors import UserError
from library.files import read_text
from library.training.sampling.prompts import SamplePrompt, parse_prompt, read_prompts
from library.web.jobs import Job
from library.web.loras import float_of, form_of, lora_file, model_words
from library.web.run import ahead
from library.web.run import live as unless_seen
from library.web.site import Form, Handler, Site, goto, url

STRENGTHS = ["0", "0.5", "0.8", "1", "1.2"]
_MOST_PICTURES = 400


def show(site: Site, request: Request, form: Form) -> Response:
    """Show the form for a LoRA, a painting, and earlier ones."""
    asked = request.query_params
    paintings = [(job, ahead(site, job)) for job in site.jobs.all() if job.kind == "generate"]
    if asked.get("part") == "before":
        return unless_seen(site, request, "generate.html", "before", paintings=paintings)
    chosen = _values(site, site.jobs.get(asked["job"])) if "job" in asked else {"job": None}
    before = chosen["job"].read("asked.json").get("form", {}) if chosen["job"] else {}
    values, run = form_of(site, asked.get("lora") or before.get("lora", ""))
    tiny = values["guidance"] == "1" and "tiny-" in str(values["model"])
    side = "128" if tiny else "1024"
    values |= {
        "usual": STRENGTHS, "strengths": STRENGTHS, "more": "", "prompts": _prompts_of(site, run), "width": side,
        "height": side, "steps": "20", "seed": "0", "guidance": values["guidance"] if tiny else "",
        "paintings": paintings, "seen": "",
    }  # fmt: skip
    return site.page(request, "generate.html", **values | before | chosen)


def _prompts_of(site: Site, run: dict[str, Any]) -> str:
    """Return the prompts that a run samples with, one a line."""
    with suppress(UserError):
        path = site.places.find(str(run.get("sample_prompts") or ""), own=True)
        lines = [prompt.line() for prompt in read_prompts(path, 0, 1)]
        if path.suffix == ".txt" and not any(" --ci " in line for line in lines):  # as they were written
            lines = [line for line in read_text(path).splitlines() if line.strip() and not line.startswith("#")]
        return "\n".join(lines)
    return ""


def start(site: Site, request: Request, form: Form) -> Response:
    """Queue a painting as the form says; ``again``: that of a job, with other seeds."""
    given: dict[str, Any] = {key: str(value).strip() for key, value in form.items()}
    given["strengths"] = [*map(str, form.getlist("strength")), *given.get("others", "").replace(",", " ").split()]
    if "again" in given:
        given = site.jobs.get(given["again"]).read("asked.json")["form"] | {"seed": str(secrets.randbelow(2**31))}
        given["prompts"] = re.sub(r"\s--d[\s=]+\d+", "", given["prompts"])
    lora, more = lora_file(site, given["lora"]), given.get("more", "").split()
    strengths = list(dict.fromkeys(float_of(word, "strengths") for word in given["strengths"]))
    lines = [line for line in given["prompts"].splitlines() if line.strip() and not line.startswith("#")]
    prompts = [parse_prompt(line, SamplePrompt(""), 1, f"prompt {i}") for i, line in enumerate(lines, 1)]
    if not 0 < (number := len(prompts) * len(strengths)) <= _MOST_PICTURES:
        raise UserError(f"{number} pictures: write prompts and strengths for 1 to {_MOST_PICTURES} in all")
    for path in (path for prompt in prompts for path in (*prompt.control_images, prompt.mask_image) if path):
        site.places.find(path)
    for text in more:
        lora_file(site, text if Path(text).exists() else text.rpartition(":")[0])
    words = ["tools/generate.py", "image", *model_words(site, lora, given)]
    words += ["--lora", site.places.show(lora), *more, "--strengths", *(f"{each:g}" for each in strengths)]
    words += ["--from_file", "{job}/prompts.txt", "--save_to", "{job}/images"]
    for flag, key in {"w": "width", "h": "height", "s": "steps", "d": "seed", "g": "guidance"}.items():
        words += [f"--{flag}", given[key]] if given[key] else []
    asked = {"form": given, "strengths": strengths, "prompts": [prompt.prompt for prompt in prompts]}
    files = {"asked.json": json.dumps(asked), "prompts.txt": "\n".join(lines)}
    title = f"{lora.stem}: {prompts[0].prompt[:60]}"
    job = site.jobs.add("generate", title, words, queued=True, files=files)
    return goto(url("/generate", job=job.id))


def _values(site: Site, job: Job) -> dict[str, Any]:
    """Return a painting as the template takes it: a row a prompt, a cell a strength, None where none is yet."""
    asked = job.read("asked.json")
    cells: dict[tuple[int, float], str] = {}
    with suppress(OSError, ValueError):
        for line in (job.folder / "images/images.jsonl").read_text(encoding="utf-8").splitlines():
            made = json.loads(line)
            cells[made["row"], made["strength"]] = url("/file", path=job.folder / "images" / made["file"], v=job.id)
    strengths: Sequence[float] = asked.get("strengths", [])
    rows = [(text, [cells.get((i, each)) for each in strengths]) for i, text in enumerate(asked.get("prompts", []))]
    return {"job": job, "shown": strengths, "rows": rows, "done": len(cells), "all": len(rows) * len(strengths),
            "ahead": ahead(site, job)}  # fmt: skip


def live(site: Site, request: Request, form: Form) -> Response:
    """Show a painting alone, as far as it is."""
    return site.part("generate.html", "painting", **_values(site, site.jobs.get(request.query_params.get("id", ""))))


ROUTES: dict[str, Handler | tuple[Handler | None, Handler]] = {
    "/generate": (show, start),
    "/generate/painting": live,
}
