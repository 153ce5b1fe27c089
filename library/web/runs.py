"""All runs and the queue, live; and runs beside each other."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from library.errors import UserError
from library.web import run
from library.web.jobs import Job
from library.web.run import Seen, called, defaults_of, is_run, live, look, samples, script_of, settings_of
from library.web.site import Form, Handler, Site, goto

_DEPTH = 4  # folders below an output folder
_NO_RUNS = re.compile(r"\..*|samples|.*-state")  # in folders that are called so
_NEWS_SECONDS = 3600  # for which a job that is over stays below the queue
_MOST = 6  # runs beside each other: as many as there are colours


def find_runs(folder: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Yield the folders of runs in ``folder`` and below."""
    with suppress(OSError):
        if is_run(folder):
            yield folder
        for entry in os.scandir(folder) if depth else ():
            if entry.is_dir(follow_symlinks=False) and not _NO_RUNS.fullmatch(entry.name):
                yield from find_runs(folder / entry.name, depth - 1)


def all_runs(site: Site, jobs: list[Job]) -> list[Seen]:
    """Return all runs, those that go on or wait first, then the newest."""
    of_folder = {Path(job.output): job for job in reversed(jobs) if job.output}
    folders = dict.fromkeys([*of_folder, *(run for place in site.places.outputs for run in find_runs(place))])
    inside = [f for f in folders if any(f.is_relative_to(place) for place in site.places.outputs)]
    runs = []
    for folder in inside:
        try:
            runs.append(look(site, folder, of_folder.get(folder)))
        except Exception as error:  # one folder that nobody understands hides no other
            print(f"warning: {folder}: left out ({type(error).__name__}: {error})", file=sys.stderr)
    return sorted(runs, key=lambda run: ({"running": 0, "waiting": 1}.get(run.state, 2), -run.when))


def show(site: Site, request: Request, form: Form) -> Response:
    """Show the runs whose name holds ``q``, and the queue; or what has changed of them."""
    jobs, asked = site.jobs.all(), request.query_params.get("q", "").strip()
    site.jobs.go_on(jobs)
    runs = all_runs(site, jobs)
    others = [job for job in jobs if not job.output and not job.queued and job.state == "running"]
    news = [job for job in jobs if not job.output and job.is_over and time.time() - (job.ended or 0) < _NEWS_SECONDS]
    values: dict[str, Any] = {
        "runs": [run for run in runs if asked.lower() in run.name.lower()], "count": len(runs), "q": asked,
        "queue": [*site.jobs.queue(jobs), *others], "news": news[:9],
        "called": partial(called, site),
        "demo": next((at / "demo.toml" for at in site.places.folders if (at / "demo.toml").is_file()), None),
    }  # fmt: skip
    if request.query_params.get("part"):
        return live(site, request, "runs.html", "list", **values)
    return site.page(request, "runs.html", seen="", **values)


def change_queue(site: Site, request: Request, form: Form) -> Response:
    """Move a waiting job up or down, take it out, end another one, or clear away one that is over."""
    job, what = site.jobs.get(str(form.get("id", ""))), form.get("what")
    if what in ("up", "down"):
        site.jobs.move(job.id, -1 if what == "up" else 1)
    else:
        site.jobs.stop(job.id)
        if job.state != "running":
            site.jobs.remove(job.id)
    if what == "cancel":  # what was to be a run may have no folder yet
        return goto("/")
    return Response(status_code=204, headers={"hx-trigger": "changed"})


def compare(site: Site, request: Request, form: Form) -> Response:
    """Show runs over each other: curves, samples of one step, settings that differ."""
    paths = [site.places.find(path, output=True) for path in request.query_params.getlist("path")]
    if not 2 <= len(paths) <= _MOST:
        raise UserError(f"comparing takes two to {_MOST} runs, not {len(paths)}; choose them on the screen Runs")
    jobs = [site.jobs.of_output(path) for path in paths]
    runs = [look(site, path, job) for path, job in zip(paths, jobs, strict=True)]
    said = [settings_of(path, job) for path, job in zip(paths, jobs, strict=True)]
    shown = [{(row["kind"], row["prompt"]): row["shots"] for row in samples(path)} for path in paths]
    prompts = [key for key in shown[0] if any(key in other for other in shown[1:])]
    steps = sorted({step for rows in shown for key in prompts for step in rows.get(key, ())})
    asked = request.query_params.get("step", "")
    step = int(asked) if asked.isdigit() and int(asked) in steps else max(steps, default=0)
    pictures = [(prompt, [_newest(rows.get((kind, prompt), {}), step) for rows in shown]) for kind, prompt in prompts]
    values = {"runs": runs, "steps": steps, "step": step, "pictures": pictures, "differences": _differences(said)}
    return site.page(request, "compare.html", **values)


def _newest(shots: dict[int, tuple[Path, float]], step: int) -> tuple[int, Path, float] | None:
    at = max((known for known in shots if known <= step), default=None)
    return None if at is None else (at, *shots[at])


def _differences(said: list[dict[str, Any]]) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Return option -> each run's value, and whether the run itself says so; of those that differ."""
    keys = dict.fromkeys(key for one in said for key in one if key not in ("output_dir", "output_name"))
    pairs = [(one, defaults_of(script_of(one))) for one in said]
    rows = [(key, [(_shown(own.get(key, usual.get(key))) if own else "not begun", key in own) for own, usual in pairs])
            for key in keys]  # fmt: skip
    return [(key, cells) for key, cells in rows if len({text for text, _ in cells}) > 1]


def _shown(value: Any) -> str:
    return "–" if value is None else ("off", "on")[value] if isinstance(value, bool) else str(value)


ROUTES: dict[str, Handler | tuple[Handler | None, Handler]] = {
    "/": show, "/queue": (None, change_queue), "/compare": compare, **run.ROUTES,
}  # fmt: skip
