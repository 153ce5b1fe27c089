"""What a request must not bring about: a program that runs, a file read or written elsewhere, a screen that fails."""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the page's packages are not installed (make setup-web)")

from PIL import Image

from library.data.images import decode
from library.errors import UserError
from library.web.jobs import ROOT, Jobs
from tests.forked import run_script
from tests.web.page import Server, get, post, request, serve

CONFIG = """# Tandem 0.1.0: the settings of this run
{top}
[model]
pretrained_model_name_or_path = "models/tiny"
[dataset]
dataset_config = "{dataset}"
[saving]
output_dir = "output/run"
[optimizer]
{optimizer}
"""
SCREENS = ("/", "/run?path=output/odd", "/precision", "/generate", "/chat", "/data", "/new")


def write_work(folder: Path) -> Path:
    """Write a working directory with a dataset inside and one outside, in ``folder``; return it."""
    work = folder / "work"
    for name in ("output/run", "datasets/one", "models/tiny"):
        (work / name).mkdir(parents=True)
    for images in (folder / "outside", work / "datasets/one"):
        images.mkdir(exist_ok=True)
        Image.new("RGB", (64, 64)).save(images / "a.png")
    for name, place in (("inside", "one"), ("outside", str(folder / "outside"))):
        text = f'[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = "{place}"\n'
        (work / f"datasets/{name}.toml").write_text(text)
    return work


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A page whose queue nobody works off."""
    with serve(write_work(tmp_path)) as running:
        yield running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Such a page for requests that change nothing."""
    folder = tmp_path_factory.mktemp("attacked")
    work = write_work(folder)
    (folder / "secret.toml").write_text("secret = 1\n")
    (work / "datasets/k.toml").write_text(f'dataset_config = "{folder / "secret.toml"}"\n')
    (work / "datasets/link.toml").symlink_to(folder / "secret.toml")
    with serve(work) as running:
        yield running


@pytest.mark.parametrize(
    ("top", "optimizer", "dataset", "said"),
    [
        ("", 'trust_class_paths = true\noptimizer_type = "subprocess.Popen"', "datasets/inside.toml", "runs a program"),
        ('cache_directory = "/elsewhere"', "", "datasets/inside.toml", "lies outside"),
        ("", "", "datasets/outside.toml", "lies outside"),
        ('dataset_args = ["cache_directory=/elsewhere"]', "", "datasets/inside.toml", "lies outside"),
        ('dataset_args = ["reg_data_dir=/elsewhere"]', "", "datasets", "lies outside"),
        (f'resume = "/elsewhere/{"./" * 2100}state"', "", "datasets/inside.toml", "lies outside"),
        ('caption_command = "touch /tmp/x {image}"', "", "datasets/inside.toml", "runs a program"),
        ('network_weights = "../secret.safetensors"', "", "datasets/inside.toml", "lies outside"),
        ('logging_dir = "/var"\nlog_with = "tensorboard"', "", "datasets/inside.toml", "lies outside"),
    ],
)
def test_nothing_is_begun_that_runs_programs_or_leads_out(
    shared: Server, top: str, optimizer: str, dataset: str, said: str
) -> None:
    text = CONFIG.format(top=top, optimizer=optimizer, dataset=dataset)
    for _ in range(2):  # as it is written in the form, and as it lies in a run's folder
        status, answer = post(shared, "/new/start", text=text)
        assert status in (403, 422)
        assert said in answer
        (shared.output / "run/config.toml").write_text(text)
        status, answer = post(shared, "/run/again", path="output/run")
        assert status in (403, 422)
        assert said in answer
    assert Jobs(shared.output / ".tandem").all() == []


def test_screens_of_loras_and_runs_read_nothing_outside(shared: Server) -> None:
    (shared.output / "run/a.safetensors").write_bytes(b"")
    lora = {"lora": "output/run/a.safetensors", "model": "models/tiny", "model_type": "flux"}
    fields = {"prompts": "a", "strengths": "1", "width": "64", "height": "64", "steps": "1", "seed": "0"}
    served = {"served": "cast", "dataset": "datasets/inside.toml"}
    for path, form, change in (
        ("/generate", fields, {"lora": "/etc/passwd"}),
        ("/generate", fields, {"model": "/etc"}),
        ("/generate", fields, {"prompts": "a --ci /etc/passwd"}),
        ("/generate", fields, {"more": "/etc/x.safetensors:1"}),
        ("/precision", served, {"lora": "../x.safetensors"}),
        ("/precision", served, {"served": "file", "file": "/etc/passwd"}),
        ("/precision", served, {"dataset": "/etc/x"}),
    ):
        status, answer = post(shared, path, **lora | {"guidance": "1"} | form | change)
        assert (status, "lies outside" in answer) == (403, True), change
    assert "is none of file, cast" in post(shared, "/precision", **lora, **served | {"served": "/etc/passwd"})[1]
    for path in ("/run?path=..", "/run/curves?path=/etc", "/compare?path=/etc&path=output/run", "/run?path=models"):
        assert get(shared, path)[0] == 403, path
    for path, status in {"/run?path=output/none": 422, "/compare?path=output/run": 422, "/run/ask": 405}.items():
        assert get(shared, path)[0] == status, path
    assert post(shared, "/run/ask", path="output/run", what="STOP")[0] == 422
    assert not (shared.output / "run/STOP").exists()


@pytest.mark.parametrize(
    "said",
    [
        "--config_file datasets/k.toml",
        "--config_file=datasets/link",
        "--dataset_config datasets/outside.toml",
        "--dataset_config /etc/hosts",
        "--train_data_dir=../..",
    ],
)
def test_a_translation_reads_nothing_outside_by_a_second_step(shared: Server, said: str) -> None:
    status, answer = post(shared, "/new/job", job="migrate", command=f"flux_train_network.py {said}")
    assert status == 403
    assert "lies outside" in answer
    assert Jobs(shared.output / ".tandem").all() == []


def test_a_dataset_that_leads_out_is_not_written(server: Server, tmp_path: Path) -> None:
    path = server.folder / "datasets/inside.toml"
    before = path.read_text()
    found = re.search(r'"hash": "(\w+)"', html.unescape(get(server, "/data?dataset=datasets/inside.toml")[1]))
    assert found
    text = before.replace('"one"', f'"{tmp_path / "outside"}"')
    assert post(server, "/data/toml", dataset="datasets/inside.toml", hash=found[1], text=text)[0] == 403
    assert path.read_text() == before


def test_samples_that_are_a_link_are_not_shown(server: Server, tmp_path: Path) -> None:
    (server.output / "run/metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    (tmp_path / "outside/notes.txt").write_text("the secret")
    (server.output / "run/samples").symlink_to(tmp_path / "outside")
    status, text = get(server, "/run?path=output/run")
    assert status == 200
    assert "the secret" not in text


def test_a_page_that_a_download_brought_is_not_opened_here(shared: Server) -> None:
    """Its scripts could send the browser elsewhere, which no policy forbids."""
    (shared.folder / "datasets/one/read_me.html").write_text("<script>location = 'http://elsewhere.example'</script>")
    _, headers, _ = request(shared, "GET", "/file?path=datasets/one/read_me.html")
    assert headers["content-disposition"].startswith("attachment")


def test_odd_numbers_of_a_run_that_goes_on_take_down_no_screen(server: Server) -> None:
    run = server.output / "run"
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1, "s_per_it": 1e400}\n')
    (run / "config.toml").write_text(f"# Tandem 1: the settings of this run\nmax_train_steps = {'1' * 400}\n")
    jobs = Jobs(server.output / ".tandem")
    job = jobs.add("train", "run", ["-c", "import time; time.sleep(60)"], queued=True, output=str(run))
    while jobs.get(job.id).state == "waiting":
        time.sleep(0.1)
    (run / "metrics.jsonl").touch()
    for path in ("/", "/?part=list", "/run?path=output/run"):
        assert get(server, path)[0] == 200


def test_a_job_that_goes_on_is_found_whatever_the_clock_said(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    for name, code in (("20300101-000000-aaa", 0), ("20200101-000000-bbb", None), ("20250101-000000-ccc", 1)):
        record = {"kind": "train", "title": "x", "words": ["-c", "pass"], "queued": True, "output": "/o",
                  "created": 1.0, "cwd": "/"}  # fmt: skip
        files = {"job.json": json.dumps(record), "place": "1"}
        if code is not None:
            files |= {"running.json": '{"at": 1}', "ended.json": json.dumps({"code": code, "at": 2})}
        (jobs.folder / name).mkdir(parents=True)
        for file, text in files.items():
            (jobs.folder / name / file).write_text(text)
    found = jobs.of_output(Path("/o"))
    assert found is not None
    assert found.id == "20200101-000000-bbb"
    jobs.stop(found.id)
    found = jobs.of_output(Path("/o"))
    assert found is not None
    assert found.id == "20300101-000000-aaa"


def test_the_pages_own_folder_is_nobodys_to_write_to(server: Server) -> None:
    own = server.output / ".tandem/jobs/20260101-000000-abc"
    own.mkdir(parents=True)
    (own / "job.json").write_text("{}")
    for folder, said in {
        "output/.tandem/jobs/20260101-000000-abc": "belongs to the page itself",
        "output/run/../.tandem/x": "belongs to the page itself",
        "/tmp/elsewhere": "lies outside",
        "datasets/run": "the output folders",
    }.items():
        text = CONFIG.format(top="", optimizer="", dataset="datasets/inside.toml").replace("output/run", folder)
        status, answer = post(server, "/new/start", text=text)
        assert status == 422
        assert said in answer
    prompts = 'sample_prompts = "output/.tandem/jobs/20260101-000000-abc/job.json"'  # nor to read from
    text = CONFIG.format(top=prompts, optimizer="", dataset="datasets/inside.toml")
    assert "belongs to the page itself" in post(server, "/new/start", text=text)[1]
    assert get(server, "/data?dataset=output/.tandem/jobs/20260101-000000-abc/config.toml")[0] == 403
    assert [path.name for path in own.iterdir()] == ["job.json"]


def test_a_configuration_that_is_a_link_outside_is_not_shown(server: Server, tmp_path: Path) -> None:
    (tmp_path / "secret.toml").write_text('# Tandem\npretrained_model_name_or_path = "the secret"\n')
    (server.output / "run/config.toml").symlink_to(tmp_path / "secret.toml")
    (server.output / "run/a.safetensors").write_bytes(b"")
    for path in ("/new?config=output/run", "/run?path=output/run", "/precision?lora=output/run/a.safetensors",
                 "/generate?lora=output/run/a.safetensors"):  # fmt: skip
        assert "the secret" not in get(server, path)[1]


def test_odd_files_take_down_no_screen(server: Server) -> None:
    odd = server.output / "odd"
    (odd / "samples").mkdir(parents=True)
    (odd / "config.toml").write_text(
        "# Tandem 0.1.0: the settings of this run\n"
        'output_name = "a\\u0000b"\nmax_train_epochs = 3\nguidance_scale = "x"\n'
    )
    (odd / "metrics.jsonl").write_text('{"step": 1, "epoch": -0.5, "loss": 1, "\\ud800": 2}\n{"step": 1e400}\n[[[\n')
    header = b"\xff" * 8 + b"100000x100000"
    (odd / "samples/step000001_00.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header)
    for name, text in {
        "a": "[1]",
        "b": "[" * 100_000,
        "c": '{"__metadata__": [1], "x.lora_A": 3}',
        "d": "null",
    }.items():
        (odd / f"{name}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode())
    os.mkfifo(odd / "fifo.safetensors")
    for place in (server.output, server.folder / "datasets", server.folder / "models", odd / "samples"):
        with open(os.fsencode(place) + b"/\xff.png", "wb"):
            pass
        Path(os.fsdecode(os.fsencode(place) + b"/\xfe")).mkdir()
        with open(os.fsencode(place) + b"/\xfe/metrics.jsonl", "w") as file:
            file.write('{"step": 1, "loss": 1}\n')
    jobs = Jobs(server.output / ".tandem")
    damaged = [{"running.json": "[1]"}, {"running.json": '{"at": "x"}'}, {"running.json": "[" * 9999}]
    damaged += [{"running.json": "{}", "ended.json": '{"code": [], "at": 1}'}]
    for number, files in enumerate(damaged):
        folder = jobs.folder / f"20260101-00000{number}-abc"
        folder.mkdir(parents=True)
        record = {"kind": "paint", "title": "x", "words": ["-c", "pass"], "queued": True, "output": str(odd),
                  "created": 1.0, "cwd": str(server.folder)}  # fmt: skip
        for name, text in {"job.json": json.dumps(record), "place": "1", **files}.items():
            (folder / name).write_text(text)
    for path in (*SCREENS, "/run/curves?path=output/odd", "/generate?lora=output/odd/c.safetensors"):
        status, text = get(server, path)
        assert status < 500, (path, text[-600:])


def test_a_claim_that_was_cut_off_does_not_hold_up_the_queue(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    for name, text in {"a": "", "b": json.dumps({"at": time.time() + 9e4})}.items():
        folder = jobs.folder / f"20260101-000000-{name}"
        folder.mkdir(parents=True)
        record = {"kind": "train", "title": name, "words": ["-c", "pass"], "queued": True, "output": "", "created": 1.0,
                  "cwd": str(tmp_path)}  # fmt: skip
        for file, content in {"job.json": json.dumps(record), "place": "1", "running.json": text}.items():
            (folder / file).write_text(content)
        os.utime(folder / "running.json", (1e9, 1e9))
    assert [job.state for job in jobs.all()] == ["lost", "lost"]
    assert jobs.queue() == []
    later = jobs.add("train", "later", ["-c", "pass"], queued=True)
    end = time.monotonic() + 30
    while jobs.get(later.id).state != "done":
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/generate", {}), ("/precision", {}), ("/precision/remedy", {}), ("/precision/again", {}),
        ("/data/caption", {}), ("/data/bulk", {}), ("/data/step", {}),
        ("/new/edit", {"text": "a = " + "[" * 100_000}), ("/new/edit", {"text": "x" * 3_000_000}),
        ("/new/edit", {"changes": "["}), ("/new/edit", {"changes": "[1]"}), ("/queue", {"id": "../.."}),
        ("/run/ask", {"path": "output/run", "what": "../x"}), ("/data/new", {"name": "", "images": ""}),
    ],
)  # fmt: skip
def test_a_request_that_lacks_or_overdoes_something_gets_a_line(
    shared: Server, path: str, form: dict[str, str]
) -> None:
    status, text = post(shared, path, **form)
    assert 200 <= status < 500, text[-400:]


def test_a_body_without_end_is_refused(shared: Server) -> None:
    assert request(shared, "POST", "/new/edit", "text=" + "x" * 5_000_000)[0] == 413


def test_a_picture_runs_no_program(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow hands PostScript to Ghostscript, whatever the file is called."""
    ran = tmp_path / "ran"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gs").write_text(f"#!/bin/sh\ntouch {ran}\n")
    (tmp_path / "bin/gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    image = server.folder / "datasets/one/evil.png"
    image.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\n")
    words = [str(server.folder / "datasets/inside.toml"), "--json", str(tmp_path / "x.json")]
    done = run_script(ROOT / "tools/check_dataset.py", [*words, "--thumbnails", str(tmp_path / "small")], ROOT)
    assert "evil.png" in done.stdout + done.stderr
    assert not ran.exists()
    with pytest.raises(UserError, match="not an image that can be read"):
        decode(image.read_bytes(), str(image))


def test_what_is_no_file_holds_up_no_screen(server: Server, tmp_path: Path) -> None:
    (tmp_path / "secret.toml").write_text("#:schema x\n# THE SECRET\n")
    configs = server.folder / "configs"
    for folder in (configs / "folder.toml", server.output / "z"):
        folder.mkdir(parents=True)
    os.mkfifo(configs / "pipe.toml")
    os.mkfifo(server.output / "z/config.json")
    (configs / "link.toml").symlink_to(tmp_path / "secret.toml")
    (configs / "nowhere.toml").symlink_to(tmp_path / "nowhere")
    with serve(server.folder, "--port", "0") as other:  # which takes configs
        for path in ("/new", "/chat", "/data", "/precision"):
            status, text = get(other, path)
            assert status == 200
            assert "SECRET" not in text


def test_a_long_text_holds_up_nobody(server: Server) -> None:
    (server.folder / "datasets/long.toml").write_text("\n" * 60_000)
    began = time.monotonic()
    post(server, "/new/edit", text="\n" * 60_000 + "x.a = 1\n")
    post(server, "/new/edit", text="".join(f"unknown_{n} = 1\n" for n in range(3500)))
    for command in ("train" * 8000, "a=" + " " * 40_000 + "x"):
        post(server, "/new/job", job="migrate", command=command)
    (server.output / "run/metrics.jsonl").write_text(json.dumps({"step": 1} | {f"lr/{n}": n for n in range(4000)}))
    get(server, "/run/curves?path=output/run")
    get(server, "/data")
    assert time.monotonic() - began < 15  # it took minutes


def test_of_two_who_save_a_dataset_at_once_one_is_told(server: Server) -> None:
    path = "datasets/inside.toml"
    text = (server.folder / path).read_text()
    found = re.search(r'"hash": "(\w+)"', html.unescape(get(server, f"/data?dataset={path}")[1]))
    assert found
    with ThreadPoolExecutor(4) as pool:
        texts = [f"# {n}\n{text}" for n in range(4)]
        answers = list(pool.map(lambda new: post(server, "/data/toml", dataset=path, hash=found[1], text=new), texts))
    assert sorted(status // 100 for status, _ in answers) == [2, 4, 4, 4]
    assert (server.folder / path).read_text().strip() in [each.strip() for each in texts]


def test_odd_reports_and_jobs_get_a_line(server: Server) -> None:
    jobs = Jobs(server.output / ".tandem")
    reports = [{}, {"verdict": 3}, {"verdict": {"words": []}, "deployment": {}}, {"remedies": [1]},
               {"verdict": {"words": [], "alarm": 1}, "deployment": {"image": "x", "velocity": []}}]  # fmt: skip
    askings: list[dict[str, object]] = [{}, {"form": 3, "was": "x", "number": 5}, {"form": {"lora": 7}, "number": "x"}]
    pairs = [*zip(reports, cycle(askings)), *zip(reports[1:], cycle(askings))]
    for kind, screen in (("report", "/precision"), ("generate", "/generate")):
        for report, asked in pairs:
            job = jobs.add(kind, "odd", ["-c", "pass"], queued=True,
                           files={"asked.json": json.dumps(asked), "place": "1"})  # fmt: skip
            for name, value in (("report/report.json", report), ("grid.json", report | {"steps": 3})):
                (job.folder / name).parent.mkdir(exist_ok=True)
                (job.folder / name).write_text(json.dumps(value))
            status, text = get(server, f"{screen}?job={job.id}")
            assert status in (200, 422), (screen, report, asked)
            assert "bug of the page" not in text
    for screen in SCREENS[2:]:
        assert get(server, screen)[0] == 200


def test_of_the_pages_own_files_only_what_is_looked_at_is_sent(server: Server) -> None:
    own = server.output / ".tandem"
    job = "jobs/1-a"
    for name in ("thumbs/x/a.jpg", "undo/x.json", f"{job}/result.json", f"{job}/previews/0.jpg", f"{job}/job.json"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("{}")
        assert get(server, f"/file?path=output/.tandem/{name}")[0] == 403
    for name in (f"{job}/report/a.png", f"{job}/images/a.png", f"{job}/log.txt"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("{}")
        assert get(server, f"/file?path=output/.tandem/{name}")[0] == 200


def test_a_journal_that_cannot_be_read_begins_anew(server: Server) -> None:
    path = "datasets/inside.toml"
    name = hashlib.sha256(os.fsencode(server.folder / path)).hexdigest()[:16]
    journal = server.output / f".tandem/undo/{name}.json"
    journal.parent.mkdir(parents=True)
    for n, content in enumerate(("{", "[]", '{"done": 1}', '{"done": [{"what": 1}], "undone": []}', "\0" * 9)):
        journal.write_text(content)
        status, page = get(server, f"/data?dataset={path}")
        found = re.search(r'"hash": "(\w+)"', html.unescape(page))
        assert (status, journal.read_text()) == (200, content)
        assert found
        text = f"# {n}\n[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'one'\n"
        assert post(server, "/data/toml", dataset=path, hash=found[1], text=text)[0] // 100 == 2
        assert len(json.loads(journal.read_text())["done"]) == 1
        assert journal.with_suffix(".broken").read_text() == content


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://["}, 403),
        ({"origin": "http://[::1"}, 403),
        ({"content-type": "multipart/form-data; boundary=x; charset=punycode"}, 415),
        ({"content-type": "application/x-www-form-urlencoded; charset=unicode_escape"}, 415),
        ({"content-type": "multipart/form-data"}, 422),
    ],
)
def test_odd_headers_are_refused(shared: Server, headers: dict[str, str], status: int) -> None:
    assert request(shared, "POST", "/new/edit", "--x\r\n", {"hx-request": "true"} | headers)[0] == status
