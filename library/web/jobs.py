"""Jobs that the page starts, as files; nothing of them is in the page's memory, so they outlive it.

A job is a folder ``<state>/jobs/<id>/`` with ``job.json`` (what to run), ``place`` (its turn in the queue),
``log.txt``, ``running.json`` once it was begun and ``ended.json`` with its exit code. Who adds, begins or stops one has
the lock ``<state>/jobs.lock`` meanwhile. Runs and reports wait for each other in one queue, since they share the card;
what needs none of it (counting memory, looking a dataset over) is run at once. Either is done by a process of its own,
``python -m library.web.jobs FOLDER [ID]``, which ends with the queue and takes nothing down with it: a closed browser
stops no job, nor does the page's end, nor this process's, since a job has a session of its own.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import psutil
from pydantic import Field, TypeAdapter

from library.errors import UserError
from library.files import discard, process_began, write_text
from library.folder_lock import hold

ROOT = Path(__file__).resolve().parents[2]
Seconds = Annotated[float, Field(ge=0, le=1e11)]  # since 1970: a date that can be shown
State = Literal["waiting", "running", "done", "stopped", "failed", "lost"]
_STOPPED = {3, 129, 130, 143, -2, -9, -15}  # exit codes: by STOP; by signals, as a trainer or a shell has it
# Apart from this terminal; on Windows in a group of its own (CREATE_NEW_PROCESS_GROUP), which takes Ctrl-Break.
APART: dict[str, Any] = {"creationflags": 0x200} if sys.platform == "win32" else {"start_new_session": True}
_LOG_BYTES = 256 * 1024  # of the end of a log


@dataclass(frozen=True)
class Job:
    """A command to run, and what became of it.

    Attributes:
        id: sorts by time. kind: "train", "report", "memory" ... title: for people.
        words: the command after the interpreter; ``{job}`` in them stands for the job's folder. cwd: where it runs.
        queued: waits for its turn; else it begins at once.
        output: the folder of the run that it writes, or "". card: the GPU that it sees, by number; "": all.
        folder: its own. place: its turn. began, ended: seconds since 1970. code: its exit code. pid: its process.
        stop_requested: whether somebody stopped it; it may take a moment to end.
    """

    id: str
    kind: str
    title: str
    words: tuple[str, ...]
    queued: bool
    output: str
    created: Seconds
    cwd: str
    folder: Path
    place: Seconds = 0.0
    card: str = ""
    pid: int = 0
    began: Seconds | None = None
    ended: Seconds | None = None
    code: int | None = None
    stop_requested: bool = False
    state: State = "waiting"

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state in ("done", "stopped", "failed", "lost")

    @property
    def log(self) -> str:
        """The end of what it printed; of a line that was drawn over, what it says last."""
        with suppress(OSError), open(self.folder / "log.txt", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            lines = file.read().decode("utf-8", errors="replace").split("\n")
            return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
        return ""

    @property
    def error(self) -> str:
        """The last message of an error in its log, of as many lines as it has; or nothing."""
        lines = self.log.splitlines()
        begins = [i for i, line in enumerate(lines) if line.startswith(("error:", "Traceback (most recent call last)"))]
        if not begins:
            return ""
        found = lines[begins[-1] :]
        return found[-1] if found[0].startswith("Traceback") else "\n".join(found).strip()

    def read(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file of its folder; an empty one where there is none."""
        return read_object(self.folder / name) or {}


_JOB = TypeAdapter(Job)


class Jobs:
    """The jobs below a folder, which several pages may have open."""

    def __init__(self, state: Path) -> None:
        self.folder = state / "jobs"
        self.queue_lock = state / "queue.lock"  # whose process works the queue off

    def add(
        self,
        kind: str,
        title: str,
        words: Sequence[str],
        *,
        queued: bool = False,
        output: str = "",
        card: str = "",
        files: Mapping[str, str] = MappingProxyType({}),
    ) -> Job:
        """Write a job and see to it that it is begun; ``files`` are written into its folder, by name.

        Raises:
            UserError: a job that writes into ``output`` waits or runs.
        """
        folder = self.folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        script = str(ROOT / words[0]) if (ROOT / words[0]).is_file() else words[0]
        record = {
            "kind": kind,
            "title": title,
            "words": [word.replace("{job}", str(folder)) for word in (script, *words[1:])],
            "queued": queued,
            "output": output,
            "card": card,
            "created": time.time(),
            "cwd": str(Path.cwd()),
        }
        with self.alone():
            if output and any(job.output == output and not job.is_over for job in self.all()):
                raise UserError(f"{output}: a running or waiting run uses this folder; see it under Runs")
            folder.mkdir(parents=True)
            for file, text in (*files.items(), ("place", str(time.time())), ("job.json", json.dumps(record))):
                write_text(folder / file, text)  # a job once all are there
        self.begin(None if queued else folder.name)
        return self.get(folder.name)

    def alone(self) -> AbstractContextManager[None]:
        """Return the right to add, begin or stop a job, which one process has at a time."""
        return hold(self.folder.parent / "jobs.lock")

    def begin(self, name: str | None = None) -> None:
        """Start the process that runs the job called ``name``, or the queue; one that is there already is enough."""
        command = [sys.executable, "-m", "library.web.jobs", str(self.folder), *([name] if name else [])]
        quiet = subprocess.DEVNULL
        subprocess.Popen(command, cwd=ROOT, stdin=quiet, stdout=quiet, stderr=quiet, **APART)

    def all(self) -> list[Job]:
        """Return all jobs, those that wait or run first, whatever the clock said; then the newest."""
        names = sorted((path.name for path in self.folder.glob("[!.]*")), reverse=True)
        jobs = [job for name in names if (job := self._read(name)) is not None]
        return sorted(jobs, key=lambda job: job.is_over)

    def queue(self, jobs: Iterable[Job] | None = None) -> list[Job]:
        """Return the queued jobs that are not over, of all or of ``jobs``, in their order."""
        found = [job for job in (self.all() if jobs is None else jobs) if job.queued and not job.is_over]
        return sorted(found, key=lambda job: (job.state != "running", job.place))

    def go_on(self, jobs: Iterable[Job]) -> None:
        """See to it that somebody works off what waits, whatever became of who did."""
        waiting = [job for job in jobs if job.state == "waiting"]
        if any(job.queued for job in waiting):
            with suppress(UserError), hold(self.queue_lock, seconds=0):
                self.begin()
        for job in waiting:
            if not job.queued and time.time() - job.created > 10:
                self.begin(job.id)

    def get(self, name: str) -> Job:
        """Return a job; raises a UserError if there is none."""
        if (job := self._read(name)) is None:
            raise UserError("there is no such job; it may have been removed")
        return job

    def of_output(self, folder: Path, jobs: Iterable[Job] | None = None) -> Job | None:
        """Return the first job, of all or of ``jobs``, that writes into ``folder``: the one that counts."""
        return next((job for job in (self.all() if jobs is None else jobs) if job.output == str(folder)), None)

    def move(self, name: str, by: int) -> None:
        """Let a waiting job change places with the one before (-1) or after it (1)."""
        with self.alone():
            waiting = [job for job in self.queue() if job.state == "waiting"]
            at = next((i for i, job in enumerate(waiting) if job.id == name), None)
            if at is not None and 0 <= at + by < len(waiting):
                waiting.insert(at + by, waiting.pop(at))
                for place, job in enumerate(waiting):
                    write_text(job.folder / "place", str(place))

    def stop(self, name: str, again: bool = False) -> None:
        """Take a waiting job out of the queue; ask a running one to end, as Ctrl-C does, or ``again`` end it now."""
        with self.alone():
            job = self.get(name)
            if job.state == "waiting":
                _note(job.folder / "running.json")
                _note(job.folder / "ended.json", code=130)
            elif job.state == "running" and job.pid and (again or not job.stop_requested):
                (job.folder / "asked").touch()  # once: a trainer ends at the second one without saving
                end_group(job.pid, at_once=again)

    def remove(self, name: str) -> None:
        """Delete a job that is over, with its log; what it made elsewhere stays."""
        if (job := self.get(name)).is_over:
            discard(job.folder)

    def rename(self, old: Path, new: Path) -> None:
        """Have the jobs that name a path, or one below it, name another one instead; so do their forms and pictures."""

        def renamed(value: Any, cwd: str) -> Any:
            if isinstance(value, dict):
                return {key: renamed(each, cwd) for key, each in value.items()}
            if isinstance(value, list):
                return [renamed(each, cwd) for each in value]
            path = Path(cwd, value) if isinstance(value, str) and len(Path(value).parts) > 1 else Path()  # no word
            return str(new / path.relative_to(old)) if path.is_relative_to(old) else value

        for job in self.all():
            for name in ("job.json", "asked.json", "grid.json"):
                record = job.read(name)
                if record != (changed := renamed(record, job.cwd)):
                    write_text(job.folder / name, json.dumps(changed))

    def _read(self, name: str) -> Job | None:
        with suppress(OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return self._as_it_is(self.folder / name) if name.replace("-", "").isalnum() else None
        return None  # no job, or one that somebody has damaged

    def _as_it_is(self, folder: Path) -> Job:
        record = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        record |= {"id": folder.name, "folder": folder, "place": (folder / "place").read_text()}
        if (folder / "running.json").exists():  # one that cannot be read was begun, too
            running = read_object(folder / "running.json") or {}
            gone = job_is_gone(running)
            ended = read_object(folder / "ended.json")  # read after that: a job's end is noted before it is gone
            stop_requested = (folder / "asked").exists()
            record |= {"began": running.get("at"), "pid": running.get("pid", 0), "stop_requested": stop_requested}
            record["state"] = "lost" if gone else "running"
            if ended is not None:
                code = ended["code"]
                stopped = code in _STOPPED or (stop_requested and code != 2)  # 2: an error that is said in a line
                state: State = "done" if code == 0 else "stopped" if stopped else "failed"
                record |= {"ended": ended["at"], "code": code, "state": state}
        return _JOB.validate_python(record)


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is none."""
    with suppress(OSError, ValueError):
        read = json.loads(path.read_text(encoding="utf-8") or "{}")
        return read if isinstance(read, dict) else None
    return None


def _note(path: Path, **values: float) -> None:
    write_text(path, json.dumps(values | {"at": time.time()}))


def _note_start(job: Job, pid: int, runner: int) -> None:
    began = process_began(pid), process_began(runner)
    _note(job.folder / "running.json", pid=pid, process_began=began[0], runner=runner, runner_began=began[1])


def job_is_gone(running: Mapping[str, float]) -> bool:
    """Return whether neither a job's process is there any more nor the one that waits for it to note its end."""
    both = ("pid", "process_began"), ("runner", "runner_began")
    return not any(running.get(began) and process_began(int(running[pid])) == running[began] for pid, began in both)


def end_group(pid: int, at_once: bool) -> None:
    """Interrupt a process that was begun :data:`APART` with its children, or kill them ``at_once``."""
    with suppress(OSError, psutil.NoSuchProcess):
        if at_once:
            process = psutil.Process(pid)
            for each in (*process.children(recursive=True), process):
                each.kill()
        elif sys.platform == "win32":
            os.kill(pid, signal.CTRL_BREAK_EVENT)
        else:
            os.killpg(pid, signal.SIGINT)


def run_job(jobs: Jobs, name: str) -> None:
    """Run a job that waits to its end, and note its exit code."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "110", "TERM": "dumb"}
    with jobs.alone(), open(jobs.folder / name / "log.txt", "ab") as log:
        job = jobs.get(name)
        if job.state != "waiting":
            return
        if job.card:  # numbered as nvidia-smi does
            environment |= {"CUDA_VISIBLE_DEVICES": job.card, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

        def note_start() -> None:  # the child itself does: whoever is killed when, it is known once it runs
            if (job.folder / "running.json").exists():
                raise FileExistsError  # by one whose runner was killed
            _note_start(job, os.getpid(), os.getppid())

        hook: dict[str, Any] = {} if sys.platform == "win32" else {"preexec_fn": note_start}
        try:
            child = subprocess.Popen(
                [sys.executable, *job.words],
                cwd=job.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                **APART,
                **hook,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:  # its folder is gone, a word is none ...
            if not jobs.get(name).pid:
                log.write(f"error: the program cannot be started: {error}\n".encode())
                _note(job.folder / "running.json")
                _note(job.folder / "ended.json", code=2)
            return
        if sys.platform == "win32":
            _note_start(job, child.pid, os.getpid())
    _note(job.folder / "ended.json", code=child.wait())


def run_queue(jobs: Jobs) -> None:
    """Run the queued jobs one after the other until none is left; nothing if another process does."""
    with suppress(UserError, OSError):  # a disk that is full: whoever looks at the queue next begins it again
        while jobs.queue():  # also one that was added while the lock was given back
            with hold(jobs.queue_lock, seconds=1):
                while queue := jobs.queue():
                    if queue[0].state == "running":  # of a process that was killed; its job goes on
                        time.sleep(0.3)
                    else:
                        with suppress(UserError, FileNotFoundError):  # it was taken away meanwhile
                            run_job(jobs, queue[0].id)


if __name__ == "__main__":
    all_jobs = Jobs(Path(sys.argv[1]).parent)
    run_job(all_jobs, sys.argv[2]) if sys.argv[2:] else run_queue(all_jobs)
