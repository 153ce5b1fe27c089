"""What is known of a run, from its folder alone: where it stands, its curves, samples, log and files; and its screen.

A folder with ``metrics.jsonl``, or with the ``config.toml`` that a trainer wrote, is a run, whoever began it. If the
page did, its job says how it ended; else the folder's lock and files do. Of ``metrics.jsonl`` only the end is read to
say where a run stands. Curves are read on from where they were read up to, and thinned before they are sent.
"""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any, TypeVar

from PIL import Image
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from library.config.model_types import LANGUAGE_MODELS
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, Script, fields
from library.errors import UserError
from library.files import write_text
from library.folder_lock import LOCK, is_held
from library.training.report.metrics_file import MetricsReader, Run, Series, average, parse_line, thin
from library.web.jobs import Job
from library.web.site import Form, Routes, Site, tell_changed, url

Read = TypeVar("Read")
ASKS = ("STOP", "SAVE", "SAMPLE")  # files of docs/reliability.md
_POINTS = 1000  # of a curve, about what a screen has pixels
_OPEN = 8  # metrics files that are kept in memory, of about 4 MB for 10,000 steps
_END_BYTES = (2**12, 2**17)  # of metrics: about 8 lines; of a hundred processes a line is longer
_SHOT = re.compile(r"step(\d{6,})_(\d{2,})\.png")
_STATE = re.compile(r"step(\d+)-state")
_BEGUN = re.compile(r"# Tandem .*: the settings of this run")
_CALLED = {"memory": "memory count", "dataset": "look at a dataset", "migrate": "translation of kohya's settings"}
_LOADS_IN = re.compile(r"^ *loads in .*(?:\n.*\S.*)+", re.M)
# title, keys (those that end in / or _ begin so), how it is drawn, logarithmic: "loss" as chosen, "auto" over a decade
_CHARTS = (
    ("Loss", ("loss",), "noisy", "loss"),
    ("Held-out loss", ("val_loss", "val_prior_loss"), "points", "loss"),
    ("Learning rate", ("lr/",), "line", "auto"),
    ("Step size d · lr", ("d*lr/",), "line", "auto"),
    ("Distance estimate d", ("d/",), "line", "auto"),
    ("Gradient norm", ("grad_norm",), "noisy", "auto"),
    ("Loss by noise level σ", ("loss/sigma_",), "smooth", "loss"),
    ("Held-out loss by noise level σ", ("val_loss/sigma_",), "points", "loss"),
    ("Peak memory, GiB", ("peak_mem_bytes",), "line", ""),
    ("Seconds a step", ("s_per_it", "data_wait_s"), "smooth", ""),
)


@dataclass(frozen=True)
class Seen:
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
    asked: frozenset[str]
    error: str

    @property
    def rate(self) -> tuple[str, float | None]:
        """The largest d·lr of its groups where there is a d, else learning rate; and which of the two it is."""
        prefix = "d*lr/" if any(key.startswith("d/") for key in self.newest) else "lr/"
        values = [value for key, value in self.newest.items() if key.startswith(prefix)]
        return "d·lr" if prefix[0] == "d" else "lr", max(values, default=None)


def look(site: Site, folder: Path, job: Job | None) -> Seen:
    """Return where the run in ``folder`` stands; ``job``: the newest that writes there."""
    newest, changed = end_of(folder / "metrics.jsonl") or {}, _changed(folder / "metrics.jsonl")
    settings, step, held = settings_of(folder, job), int(newest.get("step", 0)), is_held(folder)
    if job and job.state != "running" and (held or (job.is_over and changed > (job.ended or changed) + 5)):
        job = None  # a terminal's run came after it
    total = _total(settings, newest, step, job)
    name = str(settings.get("output_name", "lora"))
    made = max(_changed(folder / f"{name}.safetensors"), _changed(folder / name))
    if held:
        state = "running"
    elif job and job.state != "lost":
        state = job.state
    elif (folder / LOCK).exists() or (job and _error(job)):  # killed, or nobody has seen how its job ended
        state = "lost"
    else:
        state = "done" if (made and made >= changed - 5) or (total and step >= total) else "stopped"
    goes_on = state == "running"
    asked = {name for name in ASKS if (folder / name).exists() or (name == "STOP" and job and job.asked)}
    error = (job and _error(job)) or "It was killed, or the machine went down."
    return Seen(
        folder, _name(site, folder), state, step, total,
        max(0, total - step) * newest["s_per_it"] if goes_on and total and "s_per_it" in newest else None, newest,
        max(changed, job.ended or job.began or job.created if job else _changed(folder / "config.toml")), job,
        frozenset(asked if goes_on else ()), error if state in ("failed", "lost") else "",
    )  # fmt: skip


def _name(site: Site, folder: Path) -> str:
    inside = (folder.relative_to(place) for place in site.places.outputs if place in folder.parents)
    return str(next(inside, folder.name))


def called(site: Site, job: Job) -> str:
    """Return what people call a job: a run by its folder, another one by what it does."""
    return _name(site, Path(job.output)) if job.output else _CALLED.get(job.kind, job.title)


def ahead(site: Site, job: Job) -> list[str]:
    """Return what a waiting job waits for, by name, in the queue's order."""
    queue = site.jobs.queue()
    return [called(site, each) for each in queue[: [each.id for each in queue].index(job.id)]] if job in queue else []


def _changed(path: Path) -> float:
    with suppress(OSError, ValueError):
        return path.stat().st_mtime
    return 0.0


def _total(settings: dict[str, Any], newest: dict[str, float], step: int, job: Job | None) -> int | None:
    """Return the steps in all; of epochs what the log says, else what those that are over come to."""
    epochs, epoch = settings.get("max_train_epochs"), newest.get("epoch", 0)
    if not isinstance(epochs, int):
        steps = (defaults_of(script_of(settings)) | settings)["max_train_steps"]
        return steps if isinstance(steps, int) and settings else None
    if said := re.findall(r"^[\d: -]*step \d+/(\d+)", job.log if job else "", re.M):
        return int(said[-1])
    return max(step, round(step * epochs / (epoch + 0.5))) if epoch > 0 else None


_error = lru_cache(maxsize=500)(lambda job: job.error)


def once(read: Callable[[Path], Read]) -> Callable[[Path], Read | None]:
    """Have a file read once for each of its versions; None of one that cannot be read, is a link or no file."""
    kept = lru_cache(maxsize=4000)(lambda path, *version: read(path))

    def read_once(path: Path) -> Read | None:
        with suppress(Exception):  # whatever a file of somebody else's makes its reader do
            about = path.lstat()
            if stat.S_ISREG(about.st_mode):
                return kept(path, about.st_ino, about.st_size, about.st_mtime_ns)
        return None

    return read_once


@once
def end_of(file: Path) -> dict[str, float]:
    """Return a run's newest metrics, ``s_per_it`` as the median of its last lines."""
    for most in _END_BYTES:
        with open(file, "rb") as opened:
            begin = opened.seek(max(0, file.stat().st_size - most))
            records = [record for line in opened.read(most).split(b"\n")[begin > 0 :] if (record := parse_line(line))]
        if any("loss" in record for record in records):
            break
    newest = {key: value for record in records for key, value in record.items()}
    if speeds := [record["s_per_it"] for record in records if "s_per_it" in record]:
        newest["s_per_it"] = median(speeds)
    return newest


@once
def text_of(file: Path) -> str:
    """Return a configuration as it is."""
    with open(file, "rb") as opened:
        return opened.read(2**20).decode("utf-8", "replace")


@once
def _settings(file: Path) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tomllib.loads(text_of(file) or "").items():
        flat |= value if isinstance(value, dict) else {key: value}
    return flat


def settings_of(folder: Path, job: Job | None = None) -> dict[str, Any]:
    """Return option -> value of the ``config.toml`` in a run's folder, else of the one that ``job`` has."""
    return _settings(folder / "config.toml") or (_settings(job.folder / "config.toml") if job else None) or {}


def script_of(settings: dict[str, Any]) -> Script[Any]:
    """Return the script that settings are for."""
    return LLM if "data_dir" in settings else LANGUAGE_LORA if settings.get("model_type") in LANGUAGE_MODELS else LORA


def is_run(folder: Path) -> bool:
    """Return whether a trainer wrote there: metrics, or the settings that it began with; a suggestion is no run."""
    return _changed(folder / "metrics.jsonl") > 0 or _BEGUN.match(text_of(folder / "config.toml") or "") is not None


@cache
def defaults_of(script: Script[Any]) -> dict[str, Any]:
    """Return what is meant where a configuration says nothing."""
    return {key: None if field.is_required() else field.default for key, (_, field) in fields(script).items()}


_reader, _reading = lru_cache(maxsize=_OPEN)(MetricsReader), Lock()


def _columns(file: Path) -> dict[str, Series]:
    with _reading:
        return _reader(file).read() if file.is_file() and not file.is_symlink() else {}


def curves(site: Site, request: Request, form: Form) -> Response:
    """Answer what charts are drawn of, of one run or several; 204 if nothing is new since ``have``."""
    query = request.query_params
    paths = [site.places.find(path, output=True) for path in query.getlist("path")[:_OPEN]]
    said = query.get("smooth", "")
    decay = min(float(said), 0.999) if re.fullmatch(r"[01](\.\d{1,9})?", said) else 0.95
    files = [path / "metrics.jsonl" for path in paths]
    tag = " ".join([said, *(f"{file.stat().st_size}.{_changed(file)}" for file in files if file.is_file())])
    if tag == query.get("have"):
        return Response(status_code=204)
    runs = [Run(file.parent.name, _columns(file)) for file in files]
    charts = [chart for row in _CHARTS if (chart := _chart(runs, decay, *row))["lines"]]
    return JSONResponse({"tag": tag, "charts": charts})


def _chart(runs: list[Run], decay: float, title: str, keys: tuple[str, ...], look: str, log: str) -> dict[str, Any]:
    lines = []
    for number, run in enumerate(runs):
        columns: dict[str, Series] = {key: run.columns[key] for key in keys if key in run.columns}
        if keys[0][-1] in "/_":
            columns = {", ".join(names): series for names, series in run.groups(keys[0]).items()}
        for kind, (label, (steps, values)) in enumerate(sorted(columns.items())):
            values = values / 2**30 if "bytes" in label else values
            shown = [(label, average(values, decay) if look in ("noisy", "smooth") else values, False)]
            if look == "noisy" and decay > 0 and len(runs) == 1:
                shown.insert(0, (f"{label}, each", values, True))  # behind it, each step's
            for text, column, faint in shown:
                xs, ys = thin((steps, column), _POINTS)
                numbers = [float(f"{y:.6g}") if y == y else None for y in ys.tolist()]
                lines.append({"run": number, "kind": kind, "label": text, "faint": faint,
                              "steps": xs.astype(int).tolist(), "values": numbers})  # fmt: skip
    seen = [y for line in lines for y in line["values"] if y]
    is_wide = log == "auto" and bool(seen) and min(seen) > 0 and max(seen) > 10 * min(seen)
    return {"title": title, "lines": lines, "points": look == "points", "log": is_wide, "loss": log == "loss"}


def samples(folder: Path) -> list[tuple[str, str, dict[int, str]]]:
    """Return a run's samples: of each prompt its kind ("samples" or "general"), its text, and step -> address."""
    found: dict[tuple[str, str], dict[int, Path]] = {}
    for place in (folder / "samples", folder / "samples/general"):
        for path in sorted(place.glob("step*_*.png"), key=lambda path: (len(path.name), path.name)):
            if match := _SHOT.fullmatch(path.name):
                found.setdefault((place.name, match[2]), {})[int(match[1])] = path
    return [(kind, _prompt(shots[max(shots)]) or f"Prompt {number}", {step: _address(shots[step]) for step in shots})
            for (kind, number), shots in found.items()]  # fmt: skip


def _address(picture: Path) -> str:
    return url("/file", path=picture, v=_changed(picture))


@once
def _prompt(path: Path) -> str:
    with Image.open(path) as image:
        return str(image.info.get("prompt", "")).partition(" --")[0]


def texts(folder: Path) -> list[tuple[int, str]]:
    """Return what a language model wrote at steps, the newest first."""
    found = sorted((folder / "samples").glob("*.txt"), reverse=True)[:20]
    return [(int("0" + re.sub(r"\D", "", path.stem)), (text_of(path) or "")[:20_000]) for path in found]


def loras(folder: Path, job: Job | None, jobs: list[Job]) -> list[dict[str, Any]]:
    """Return the LoRA files of a run, the newest first, and what is known of where they load."""
    found = []
    for path in sorted(filter(Path.is_file, folder.glob("*.safetensors")), key=_changed, reverse=True):
        own = [each for each in jobs if each.kind == "inspect" and each.words[-1] == str(path)]
        checks = [each for each in own if each.created > _changed(path)]
        ended = [job] if job and job.state == "done" and "-step" not in path.name else []
        said = [table for each in (*checks, *ended) for table in _LOADS_IN.findall(each.log)]
        found.append({"path": path, "check": checks[0] if checks else None, "loads": said[0] if said else ""})
    return found


def live(site: Site, request: Request, template: str, block: str, **values: Any) -> Response:
    """Return a block that is asked for again and again: nothing (204) while it is as it was ``seen``."""
    body = bytes(site.part(template, block, seen="\0", **values).body)
    tag = str(hash(body))
    if request.query_params.get("seen") == tag:
        return Response(status_code=204)
    return Response(body.replace(b"\0", tag.encode()), media_type="text/html")


def _states(folder: Path) -> list[tuple[str, str]]:
    """Return a run's states, the newest first: the folder's name, and the step that it is of."""
    found = sorted(folder.glob("*-state"), key=_changed, reverse=True)
    return [(f.name, f"step {int(at[1])}" if (at := _STATE.search(f.name)) else "the end") for f in found]


def show_run(site: Site, request: Request, form: Form) -> Response:
    """Show a run, or the part of it that has changed."""
    folder, jobs = site.places.find(request.query_params.get("path", ""), output=True), site.jobs.all()
    job = next((job for job in jobs if job.output == str(folder)), None)
    if not folder.is_dir() and job is None:
        raise UserError(f"{site.places.show(folder)}: no such run; it may have been moved or deleted")
    run = look(site, folder, job)
    plots = {path.name: _address(path) for path in (*folder.glob("*.png"), *folder.glob("samples/[!s]*.png"))}
    values = {
        "run": run, "runs": [run], "job": run.job, "states": _states(folder), "own": url("/run", path=folder),
        "waits": len(ahead(site, run.job)) + 1 if run.job and run.state == "waiting" else 0,
        "rows": samples(folder) + ([("", "Plots of the run", plots)] if plots else []), "texts": texts(folder),
        "loras": loras(folder, run.job, jobs),
    }  # fmt: skip
    if (part := request.query_params.get("part")) in ("overview", "samples", "files", "log"):
        return live(site, request, "run.html", part, **values)
    configs = [at / "config.toml" for at in (folder, run.job and run.job.folder) if at]
    config = next(filter(text_of, configs), configs[0])
    return site.page(request, "run.html", seen="", config=config, settings=text_of(config), **values)


def show_job(site: Site, request: Request, form: Form) -> Response:
    """Show the log of a job that is no run, or what has changed of it."""
    job = site.jobs.get(request.query_params.get("id", ""))
    values = {"run": None, "job": job, "title": called(site, job), "own": url("/job", id=job.id)}
    if request.query_params.get("part"):
        return live(site, request, "run.html", "log", **values)
    return site.page(request, "run.html", seen="", **values)


def ask(site: Site, request: Request, form: Form) -> Response:
    """Ask a run to stop, save or sample, by file as a person would; KILL ends its process."""
    folder, what = site.places.find(str(form.get("path", "")), output=True), str(form.get("what"))
    run = look(site, folder, site.jobs.of_output(folder))
    if run.state != "running" or what not in (*ASKS, "KILL"):
        raise UserError(f"{run.name}: is not running; start it again first")
    has_begun = run.step > 0 and _changed(folder / "metrics.jsonl") > (run.job.began or 0 if run.job else 0)
    if run.job and (what == "KILL" or (what == "STOP" and not has_begun)):
        site.jobs.stop(run.job.id, again=what == "KILL")  # before the first step nobody looks for files
    elif what == "KILL":
        raise UserError(f"{run.name}: was begun in a terminal; press Ctrl-C twice there to end it without saving")
    else:
        write_text(folder / what, "")
    return tell_changed()


def check(site: Site, request: Request, form: Form) -> Response:
    """Find out which programs load a LoRA file, as a job."""
    path = site.places.find(str(form.get("path", "")), output=True)
    site.jobs.add("inspect", f"Which programs load {path.name}", ["tools/inspect_model.py", str(path)])
    return tell_changed()


ROUTES: Routes = {
    "/run": show_run, "/run/curves": curves, "/run/ask": (None, ask), "/run/check": (None, check), "/job": show_job,
}  # fmt: skip
