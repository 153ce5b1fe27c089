"""All runs and the queue, live; and runs beside each other."""

from __future__ import annotations

import sys
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from library.errors import UserError
from library.training.report.run_folder import defaults_of, find_runs, samples_of, script_of, settings_of
from library.web import run
from library.web.jobs import Job
from library.web.run import RunStatus, address, called, fragment, run_status
from library.web.site import Form, Routes, Site, goto, tell_changed, url

_MOST = 6  # runs beside each other: as many as there are colours


def all_runs(site: Site, jobs: list[Job]) -> list[RunStatus]:
    """Return all runs, those that go on or wait first, in their order, then the newest."""
    roots, runs = site.roots.outputs, []
    of_folder = {Path(job.output): job for job in reversed(jobs) if job.output}
    for folder in dict.fromkeys([*of_folder, *(found for place in roots for found in find_runs(place))]):
        try:
            if any(folder.is_relative_to(place) for place in roots):
                runs.append(run_status(site, folder, of_folder.get(folder)))
        except Exception as error:  # one folder that nobody understands hides no other
            print(f"warning: {folder}: left out ({type(error).__name__}: {error})", file=sys.stderr)
    place = {"running": 0, "waiting": 1}
    return sorted(runs, key=lambda run: (place.get(run.state, 2), run.when if run.state == "waiting" else -run.when))


def show(site: Site, request: Request, form: Form) -> Response:
    """Show the runs whose name holds ``q``, and the queue; or what has changed of them."""
    jobs, wanted = site.jobs.all(), request.query_params.get("q", "").strip()
    site.jobs.go_on(jobs)
    runs = all_runs(site, jobs)
    others = [job for job in jobs if not job.queued and job.state == "running"]
    queue = site.jobs.queue(jobs)
    values: dict[str, Any] = {
        "runs": [run for run in runs if wanted.lower() in run.name.lower()],
        "count": len(runs),
        "q": wanted,
        "queue": queue + others,
        "waiting": [job for job in queue if job.state == "waiting"],
        "called": partial(called, site),
        "address": _address,
    }
    if request.query_params.get("part"):
        return fragment(site, request, "runs.html", "list", **values)
    return site.page(request, "runs.html", seen="", **values)


def gpus(site: Site, request: Request, form: Form) -> Response:
    """Show what the GPUs do, all or the one that is asked for."""
    return site.part("runs.html", "gpus", only=request.query_params.get("only", ""))


def _address(job: Job) -> str:
    """Return where what a job does is shown."""
    report = job.read("asked.json").get("report") if job.kind == "remedy" else job.id
    screen = {"report": "/precision", "remedy": "/precision", "generate": "/generate"}.get(job.kind)
    if job.kind in ("data", "captions") and job.words[1:]:
        return url("/data", dataset=job.words[1])
    return url("/run", path=job.output) if job.output else url(screen, job=report) if screen else "/new"


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
    return tell_changed()


def compare(site: Site, request: Request, form: Form) -> Response:
    """Show runs over each other: curves, samples of the same prompts, settings that differ."""
    paths = [site.roots.find(path, output=True) for path in request.query_params.getlist("path")]
    if not 2 <= len(paths) <= _MOST:
        raise UserError(f"comparing takes two to {_MOST} runs, not {len(paths)}; choose them on the screen Runs")
    jobs = [site.jobs.of_output(path) for path in paths]
    runs = [run_status(site, path, job) for path, job in zip(paths, jobs, strict=True)]
    painted: dict[tuple[str, str], list[tuple[int, str, Path]]] = {}  # of kind and prompt: step, run, file
    for one in runs:
        for kind, prompt, files in samples_of(one.path):
            painted.setdefault((kind, prompt), []).extend((step, one.name, files[step]) for step in files)
    pictures = [
        (row, [(f"{name}, step {step}", address(file)) for step, name, file in sorted(cells, key=itemgetter(0))])
        for row, cells in painted.items()
    ]
    settings = [settings_of(path, job.folder if job else None) for path, job in zip(paths, jobs, strict=True)]
    return site.page(request, "compare.html", runs=runs, pictures=pictures, differences=_differences(settings))


def _differences(settings: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return option -> each run's value, of those that differ."""
    keys = dict.fromkeys(key for one in settings for key in one if key not in ("output_dir", "output_name"))
    whole = [defaults_of(script_of(one)) | one if one else {} for one in settings]  # nothing of one that has not begun
    rows = {key: [_shown(one.get(key)) for one in whole] for key in keys}
    return {key: cells for key, cells in rows.items() if len(set(cells)) > 1}


def _shown(value: Any) -> str:
    return "–" if value is None else ("off", "on")[value] if isinstance(value, bool) else str(value)


ROUTES: Routes = {"/": show, "/gpus": gpus, "/queue": (None, change_queue), "/compare": compare, **run.ROUTES}
