"""Jobs as files: their order, their ends, and that they outlive whoever began them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from library.errors import UserError
from library.web.jobs import ROOT, Job, Jobs, job_is_gone, run_job

SLEEP = "import time, pathlib, sys; time.sleep(float(sys.argv[1])); pathlib.Path(sys.argv[2]).write_text('done')"


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    found = Jobs(tmp_path / "state")
    yield found
    for job in found.all():
        if job.state == "running" and job.pid:
            with suppress(ProcessLookupError):  # over meanwhile
                os.killpg(job.pid, signal.SIGKILL)


def until(true: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def waiting(jobs: Jobs, title: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> Job:
    """Add a queued job that nobody begins yet."""
    with monkeypatch.context() as patched:
        patched.setattr(Jobs, "begin", lambda self, name=None: None)
        return jobs.add("train", title, words or ("-c", "pass"), queued=True)


def test_a_job_ends_as_its_command_did(jobs: Jobs) -> None:
    codes = {0: "done", 2: "failed", 3: "stopped", 130: "stopped", 1: "failed"}
    added = {code: jobs.add("check", "x", ["-c", f"print('said'); raise SystemExit({code})"]) for code in codes}
    for code, state in codes.items():
        until(lambda code=code: jobs.get(added[code].id).is_over)
        job = jobs.get(added[code].id)
        assert (job.state, job.code, job.log) == (state, code, "said\n")
        assert job.began is not None
        assert job.ended is not None
        assert job.began <= job.ended


def test_an_error_is_found_in_the_log(jobs: Jobs, tmp_path: Path) -> None:
    log = "step 1\rstep 2\nerror: a.png: broken\nerror: dataset.toml:3: unknown key\nerror: and more\n"
    job = jobs.add("train", "x", ["-c", f"import sys; sys.stderr.write({log!r}); sys.exit(2)"])
    until(lambda: jobs.get(job.id).is_over)
    assert jobs.get(job.id).log.startswith("step 2\nerror: a.png")
    assert jobs.get(job.id).error == "error: and more"
    raised = jobs.add("train", "x", ["-c", "raise ValueError('why')"])
    until(lambda: jobs.get(raised.id).is_over)
    assert jobs.get(raised.id).error == "ValueError: why"


def test_the_queue_runs_one_at_a_time_in_the_order_that_was_chosen(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    script = (
        "import sys, time; f = open(sys.argv[1], 'a', buffering=1); f.write(f'begin {sys.argv[2]}\\n'); "
        "time.sleep(0.2); f.write(f'end {sys.argv[2]}\\n')"
    )
    added = [waiting(jobs, name, monkeypatch, "-c", script, str(log), name) for name in "abcd"]
    jobs.move(added[3].id, -1)
    jobs.move(added[3].id, -1)  # a d b c
    jobs.move(added[0].id, -1)  # is first already
    jobs.stop(added[1].id)  # out of the queue
    assert [job.title for job in jobs.queue()] == ["a", "d", "c"]
    assert [job.title for job in Jobs(jobs.folder.parent).queue()] == ["a", "d", "c"]  # another page, or a later one
    for _ in range(3):  # of which one does it
        jobs.begin()
    until(lambda: not jobs.queue())
    assert log.read_text().split() == ["begin", "a", "end", "a", "begin", "d", "end", "d", "begin", "c", "end", "c"]
    assert jobs.get(added[1].id).state == "stopped"


def test_a_job_goes_on_when_everybody_who_began_it_is_killed(jobs: Jobs, tmp_path: Path) -> None:
    made, later = tmp_path / "made", tmp_path / "later"
    code = (
        "import sys; from pathlib import Path; from library.web.jobs import Jobs; jobs = Jobs(Path(sys.argv[1]));"
        f"jobs.add('train', 'one', ['-c', {SLEEP!r}, '2', {str(made)!r}], queued=True);"
        f"jobs.add('train', 'two', ['-c', {SLEEP!r}, '0', {str(later)!r}], queued=True);"
        "import time; time.sleep(60)"
    )
    page = subprocess.Popen([sys.executable, "-c", code, str(jobs.folder.parent)], cwd=ROOT, start_new_session=True)
    until(lambda: any(job.state == "running" and job.pid for job in jobs.all()))
    os.killpg(page.pid, signal.SIGKILL)
    page.wait()
    runners = subprocess.run(["pgrep", "-f", f"library.web.jobs {jobs.folder}"], capture_output=True, text=True).stdout
    for pid in map(int, runners.split()):
        os.kill(pid, signal.SIGKILL)
    until(made.exists)  # the job itself has outlived both
    (one,) = (job for job in jobs.all() if job.title == "one")
    until(lambda: jobs.get(one.id).state == "lost")  # nobody was there to see how it ended
    assert not later.exists()
    jobs.begin()  # as a page does that is started again
    until(later.exists)


def test_a_running_job_is_interrupted_and_then_killed(jobs: Jobs) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGINT, lambda *a: print('heard', flush=True)); "
        "print('on', flush=True); time.sleep(60)"
    )
    job = jobs.add("paint", "x", ["-c", stubborn])
    until(lambda: "on" in jobs.get(job.id).log)
    jobs.stop(job.id)
    until(lambda: "heard" in jobs.get(job.id).log)
    assert jobs.get(job.id).state == "running"
    jobs.stop(job.id, again=True)
    until(lambda: jobs.get(job.id).is_over)
    assert jobs.get(job.id).state == "stopped"


def test_a_job_that_was_stopped_while_it_imported_did_not_fail(jobs: Jobs) -> None:
    code = (
        "import time\ntry: print('on', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: raise ImportError('half')"
    )
    job = jobs.add("train", "x", ["-c", code])
    until(lambda: "on" in jobs.get(job.id).log)
    jobs.stop(job.id)
    until(lambda: jobs.get(job.id).is_over)
    assert (jobs.get(job.id).state, jobs.get(job.id).code) == ("stopped", 1)


def test_a_job_is_run_once_whoever_begins_it(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    job = waiting(jobs, "x", monkeypatch, "-c", f"open({str(made)!r}, 'a').write('once')")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: run_job(Jobs(jobs.folder.parent), job.id), range(4)))
    assert (made.read_text(), jobs.get(job.id).state) == ("once", "done")


def test_a_job_that_cannot_be_begun_says_so_and_does_not_hold_up_the_queue(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    with monkeypatch.context() as patched:
        patched.chdir(here)
        job = waiting(jobs, "x", monkeypatch)
    here.rmdir()
    jobs.begin()
    until(lambda: jobs.get(job.id).state == "failed")
    assert str(here) in jobs.get(job.id).error
    later = jobs.add("train", "later", ["-c", "pass"], queued=True)
    until(lambda: jobs.get(later.id).state == "done")


def test_a_worker_that_is_killed_while_it_begins_a_job_leaves_none_that_nobody_knows(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = random.Random(1)
    for _ in range(8):
        job = waiting(jobs, "x", monkeypatch, "-c", "import time; time.sleep(60)")
        worker = subprocess.Popen([sys.executable, "-m", "library.web.jobs", str(jobs.folder), job.id], cwd=ROOT)
        until((job.folder / "log.txt").exists)  # it is about to begin it
        time.sleep(pause.uniform(0, 0.012))
        worker.kill()
        worker.wait()
        until(lambda job=job: jobs.get(job.id).state == "running" or not processes_of(job))
        for process in processes_of(job):  # one that was forked meanwhile has yet to note it
            until(lambda job=job, pid=process.pid: (jobs.get(job.id).state, jobs.get(job.id).pid) == ("running", pid))
            process.kill()


def processes_of(job: Job) -> list[psutil.Process]:
    return [one for one in psutil.process_iter() if is_in(job.folder / "log.txt", one)]


def is_in(log: Path, process: psutil.Process) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process.pid}/fd/1").readlink() == log
    return False


def test_two_who_move_jobs_at_once_lose_none(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    added = [waiting(jobs, str(n), monkeypatch).id for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: jobs.move(added[n % 4], 1 if n % 3 else -1), range(40)))
    assert sorted(job.id for job in jobs.queue()) == sorted(added)
    assert len({job.place for job in jobs.queue()}) == 4


def test_a_process_number_that_was_given_away_again_is_not_the_job(jobs: Jobs) -> None:
    assert job_is_gone({"pid": os.getpid(), "process_began": 1, "at": time.time()})


def test_damaged_and_foreign_folders_are_passed_over(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    good = waiting(jobs, "good", monkeypatch)
    for name, text in {
        "20260101-a": "{",
        "20260101-b": "[]",
        "20260101-c": json.dumps({"kind": "x"}),
        "20260101-d": (good.folder / "job.json").read_text().replace('"output": ""', '"output": 5'),
        "20260101-e": re.sub(r'"created": [0-9.]+', '"created": NaN', (good.folder / "job.json").read_text()),
    }.items():
        (jobs.folder / name).mkdir()
        (jobs.folder / name / "job.json").write_text(text)
        (jobs.folder / name / "place").write_text("1")
    (jobs.folder / "file").write_text("")
    assert [job.id for job in jobs.all()] == [good.id]
    for name in ("..", "../..", "a/b", "", "."):
        with pytest.raises(ValueError, match="no such job"):
            jobs.get(name)


def test_of_pages_that_begin_the_same_run_at_once_one_may(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Jobs, "begin", lambda self, name=None: None)

    def begin(output: str) -> str:
        try:
            return Jobs(jobs.folder.parent).add("train", "x", ["-c", "pass"], queued=True, output=output).state
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(begin, ["one", "two"] * 8))
    assert answers.count("waiting") == 2
    assert sum("uses this folder" in answer for answer in answers) == 14
    assert sorted(job.output for job in jobs.all()) == ["one", "two"]
    assert {entry.name for entry in jobs.folder.iterdir()} == {job.id for job in jobs.all()}  # no rest of the refused


def test_a_jobs_form_and_pictures_follow_a_folder_that_is_renamed(tmp_path: Path) -> None:
    jobs, old, new = Jobs(tmp_path / ".tandem"), tmp_path / "runs/anna", tmp_path / "runs/bo"
    form = {
        "lora": f"{old}/a.safetensors",
        "prompts": "anna",
        "of another": f"{old}-2/a.safetensors",
        "steps": [1, None],
    }
    files = {"asked.json": json.dumps({"form": form}), "grid.json": json.dumps({"images": [[f"{old}/grid/a.png"]]})}
    added = jobs.add("generate", "anna", ["-c", "pass", str(old)], files=files)
    jobs.rename(old, new)
    job = jobs.get(added.id)
    assert (job.title, job.words[-1]) == ("anna", str(new))
    assert job.read("asked.json") == {"form": form | {"lora": f"{new}/a.safetensors"}}
    assert job.read("grid.json") == {"images": [[f"{new}/grid/a.png"]]}
