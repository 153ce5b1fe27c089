"""A run's screen: where it stands, its curves, samples, log and files; and what it can be asked.

What the page began says by its job how it ended; else the folder's lock and files do. Curves are read on from where
they were read up to, and thinned before they are sent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache, partial
from math import isfinite, nan
from pathlib import Path
from threading import Lock
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from library.config.markers import MOST
from library.errors import UserError
from library.files import write_text
from library.folder_lock import HOLDER, is_held
from library.training.report.metrics_file import MetricsReader, Run, Series, charts_of
from library.training.report.progress import PREPARING
from library.training.report.run_folder import (
    checkpoints_of,
    chosen_of,
    defaults_of,
    mtime,
    newest_metrics,
    object_in,
    output_name,
    samples_of,
    script_of,
    settings_of,
    states_of,
    text_of,
    texts_of,
)
from library.web.jobs import Job
from library.web.site import Form, Routes, Site, tell_changed, url

REQUESTS = ("STOP", "SAVE", "SAMPLE")  # files of docs/reliability.md
_OPEN = 8  # metrics files that are kept in memory, of about 4 MB for 10,000 steps
_LOADS_IN = re.compile(r"^ *loads in .*(?:\n.*\S.*)+", re.M)


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands; ``job`` is the page's that writes it, if the newest to do so is one."""

    path: Path
    name: str
    state: str
    step: int
    total: int | None
    eta: float | None
    newest: dict[str, float]
    when: float
    job: Job | None
    requests: frozenset[str]
    error: str
    preparing: dict[str, Any] | None = None  # until it has taken a step

    @property
    def rate(self) -> tuple[str, float | None]:
        """The largest d·lr of its groups where there is a d, else learning rate; and which of the two it is."""
        prefix = "d*lr/" if any(key.startswith("d/") for key in self.newest) else "lr/"
        values = [value for key, value in self.newest.items() if key.startswith(prefix)]
        return "d·lr" if prefix[0] == "d" else "lr", max(values, default=None)


def run_status(site: Site, folder: Path, job: Job | None) -> RunStatus:
    """Return where the run in ``folder`` stands; ``job``: the newest that writes there."""
    newest, wrote = newest_metrics(folder / "metrics.jsonl") or {}, mtime(folder / "metrics.jsonl")
    settings, step = settings_of(folder, job.folder if job else None), int(newest.get("step", 0))
    is_locked = is_held(folder)
    if job and job.state != "running" and (is_locked or (job.is_over and wrote > (job.ended or wrote) + 5)):
        job = None  # a terminal's run came after it
    total = _total(settings, newest, step, job)
    error = _error(job) if job else ""
    if is_locked:
        state = "running"
    elif job and job.state != "lost":
        state = job.state
    elif (folder / HOLDER).exists() or error:  # killed, or nobody has seen how its job ended
        state, error = "lost", error or "It was killed, or the machine went down."
    else:
        name = output_name(folder)
        made = max(mtime(folder / f"{name}.safetensors"), mtime(folder / name))
        state = "done" if (made and made >= wrote - 5) or (total and step >= total) else "stopped"
    requests = {
        name for name in REQUESTS if (folder / name).exists() or (name == "STOP" and job and job.stop_requested)
    }
    goes_on, per_step = state == "running", newest.get("s_per_it", nan)
    return RunStatus(
        folder,
        _name(site, folder),
        state,
        step,
        total,
        newest=newest,
        job=job,
        eta=max(0, total - step) * per_step if goes_on and total and isfinite(per_step) else None,
        when=max(wrote, job.ended or job.began or job.created if job else mtime(folder / "config.toml")),
        requests=frozenset(requests if goes_on else ()),
        error=error if state in ("failed", "lost") else "",
        preparing=object_in(folder / PREPARING) if is_locked else None,
    )


def _name(site: Site, folder: Path) -> str:
    inside = (folder.relative_to(place) for place in site.roots.outputs if place in folder.parents)
    return str(next(inside, folder.name))


def called(site: Site, job: Job) -> str:
    """Return what people call a job: a run by its folder, another one by what it does."""
    return _name(site, Path(job.output)) if job.output else job.title


def ahead(site: Site, job: Job | None) -> list[str]:
    """Return what a job waits for, by name, in the queue's order; nothing if it does not wait."""
    queue = site.jobs.queue()
    return [called(site, each) for each in queue[: queue.index(job)]] if job in queue else []


def _total(settings: dict[str, Any], newest: dict[str, float], step: int, job: Job | None) -> int | None:
    """Return the steps in all; of epochs what the log says, else what those that are over come to."""
    epochs, epoch = settings.get("max_train_epochs"), newest.get("epoch", 0)
    if not isinstance(epochs, int) or epochs > MOST:
        steps = (defaults_of(script_of(settings)) | settings)["max_train_steps"]
        return steps if isinstance(steps, int) and steps <= MOST and settings else None
    if counts := re.findall(r"^[\d: -]*step \d+/(\d{1,15})", job.log if job else "", re.M):
        return int(counts[-1])
    return max(step, round(step * epochs / (epoch + 0.5))) if epoch > 0 else None


_error = lru_cache(maxsize=500)(lambda job: job.error)
_reader, _reading = lru_cache(maxsize=_OPEN)(MetricsReader), Lock()


def _columns(file: Path) -> dict[str, Series]:
    with _reading:
        return _reader(file).read() if file.is_file() and not file.is_symlink() else {}


def curves(site: Site, request: Request, form: Form) -> Response:
    """Answer what charts are drawn of, of one run or several; 204 if nothing is new since ``have``."""
    query = request.query_params
    paths = [site.roots.find(path, output=True) for path in query.getlist("path")[:_OPEN]]
    smoothing = query.get("smooth", "")
    decay = min(float(smoothing), 0.999) if re.fullmatch(r"[01](\.\d{1,9})?", smoothing) else 0.95
    files = [path / "metrics.jsonl" for path in paths]
    tag = " ".join([smoothing, *(f"{file.stat().st_size}.{mtime(file)}" for file in files if file.is_file())])
    if tag == query.get("have"):
        return Response(status_code=204)
    runs = [Run(file.parent.name, _columns(file)) for file in files]
    return JSONResponse({"tag": tag, "charts": charts_of(runs, decay)})


def _loras(folder: Path, job: Job | None, jobs: list[Job]) -> list[dict[str, Any]]:
    """Return the LoRA files of a run, the chosen one first, then the newest, and what is known of where they load."""
    found, chosen = [], chosen_of(folder)
    files = filter(Path.is_file, folder.glob("*.safetensors"))
    for path in sorted(files, key=lambda path: (chosen is None or path != chosen.path, -mtime(path))):
        inspections = [each for each in jobs if each.kind == "inspect" and each.words[-1] == str(path)]
        checks = [each for each in inspections if each.created > mtime(path)]
        ended = [job] if job and job.state == "done" and "-step" not in path.name else []
        tables = [table for each in (*checks, *ended) for table in _LOADS_IN.findall(each.log)]
        found.append({"path": path, "check": checks[0] if checks else None, "loads": tables[0] if tables else ""})
    return found


def fragment(site: Site, request: Request, template: str, block: str, **values: Any) -> Response:
    """Return a block that is asked for again and again: nothing (204) while it is as it was ``seen``."""
    body = bytes(site.part(template, block, seen="\0", **values).body)
    tag = str(hash(body))
    if request.query_params.get("seen") == tag:
        return Response(status_code=204)
    return Response(body.replace(b"\0", tag.encode()), media_type="text/html")


def show_run(site: Site, request: Request, form: Form) -> Response:
    """Show a run, or the part of it that has changed."""
    folder, jobs = site.roots.find(request.query_params.get("path", ""), output=True), site.jobs.all()
    job = site.jobs.of_output(folder, jobs)
    site.jobs.go_on([job] if job else [])
    if not folder.is_dir() and job is None:
        raise UserError(f"{site.roots.show(folder)}: no such run; it may have been moved or deleted")
    run = run_status(site, folder, job)
    values = {  # what a part has to look up, it calls
        "run": run,
        "runs": [run],
        "job": run.job,
        "own": url("/run", path=folder),
        "rows": partial(_pictures, folder),
        "states": partial(states_of, folder),
        "waits_for": partial(ahead, site, run.job),
        "texts": partial(texts_of, folder),
        "loras": partial(_loras, folder, run.job, jobs),
        "saved_steps": partial(checkpoints_of, folder),
    }
    if (part := request.query_params.get("part")) in ("overview", "samples", "files", "log"):
        return fragment(site, request, "run.html", part, **values)
    configs = (text_of(at / "config.toml") for at in (folder, run.job and run.job.folder) if at)
    return site.page(request, "run.html", seen="", settings=next(filter(None, configs), ""), **values)


def _pictures(folder: Path) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return rows of kind, prompt and pictures by step."""
    return [
        (kind, prompt, [(str(step), address(file)) for step, file in files.items()])
        for kind, prompt, files in samples_of(folder)
    ]


def address(picture: Path) -> str:
    """Return the address of a picture, which changes with it."""
    return url("/file", path=picture, v=mtime(picture))


def ask(site: Site, request: Request, form: Form) -> Response:
    """Ask a run to stop, save or sample, by file as a person would; KILL ends its process."""
    folder, what = site.roots.find(str(form.get("path", "")), output=True), str(form.get("what"))
    run = run_status(site, folder, site.jobs.of_output(folder))
    if run.state != "running" or what not in (*REQUESTS, "KILL"):
        raise UserError(f"{run.name}: is not running; start it again first")
    has_started = run.step > 0 and mtime(folder / "metrics.jsonl") > (run.job.began or 0 if run.job else 0)
    if run.job and (what == "KILL" or (what == "STOP" and not has_started)):
        site.jobs.stop(run.job.id, again=what == "KILL")  # before the first step nobody looks for files
    elif what == "KILL":
        raise UserError(f"{run.name}: was started in a terminal; press Ctrl-C twice there to end it without saving")
    else:
        write_text(folder / what, "")
    return tell_changed()


def check(site: Site, request: Request, form: Form) -> Response:
    """Find out which programs load a LoRA file, as a job."""
    path = site.roots.find(str(form.get("path", "")), output=True)
    site.jobs.add("inspect", f"Which programs load {path.name}", ["tools/inspect_model.py", str(path)])
    return tell_changed()


ROUTES: Routes = {"/run": show_run, "/run/curves": curves, "/run/ask": (None, ask), "/run/check": (None, check)}
