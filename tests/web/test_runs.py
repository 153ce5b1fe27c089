"""Runs in the browser: numbers against the file and the trainer's own reading, a real run from its job to its end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from library.console import Console
from library.folder_lock import FolderLock
from library.training.report.metrics_file import MetricsReader, average, read_run, thin
from library.training.report.progress import Preparation
from library.web.jobs import Job, Jobs
from tests.web.page import ROOT, WAIT, Server, Tab, expect, serve, until

pytestmark = pytest.mark.slow
expect.set_options(timeout=WAIT)
EVIL = "<img src=x onerror=alert(1)>"
DATASET = """[general]
caption_extension = ".txt"
[[datasets]]
resolution = 64
[[datasets.subsets]]
image_dir = "images"
"""
CONFIG = """# Tandem 0.1.0: the settings of this run
[model]
model_type = "flux"
pretrained_model_name_or_path = "{base}"
[dataset]
dataset_config = "{data}"
[network]
network_dim = 4
[optimizer]
learning_rate = {rate}
[training]
max_train_steps = {steps}
[saving]
output_dir = "{output}"
output_name = "tiny"
save_state = true
overwrite = true
[sampling]
sample_prompts = "{prompts}"
"""


def write_metrics(
    folder: Path, steps: int, first: int = 1, more: dict[str, float] | None = None
) -> list[dict[str, float]]:
    """Write a run's metrics with loss 1 / step; return its lines."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, float]] = []
    for step in range(first, first + steps):
        loss = 1 / step
        ema = loss if not lines else 0.95 * lines[-1]["loss_ema"] + 0.05 * loss
        lines.append({"step": step, "epoch": step // 10, "loss": loss, "loss_ema": ema, "s_per_it": 0.5,
                      "lr/lora": 1e-4, "grad_norm": 0.5, "peak_mem_bytes": 3 * 2**30} | (more or {}))  # fmt: skip
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return lines


def test_a_file_that_grows_is_read_as_if_it_were_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    write_metrics(tmp_path, 50)
    reader = MetricsReader(file)

    def same() -> dict[str, tuple[Any, Any]]:
        columns, fresh = reader.read(), read_run(tmp_path).columns
        assert columns.keys() == fresh.keys()
        for key, series in fresh.items():
            np.testing.assert_array_equal(columns[key], series)
        return columns

    assert same()["loss"][0][-1] == 50
    with open(file, "a") as opened:
        opened.write('{"step": 51, "lo')
    assert same()["loss"][0][-1] == 50  # half a line
    with open(file, "a") as opened:
        opened.write('ss": 7.0}\n{"step": 51, "val_loss": 3.0}\n')
    columns = same()
    assert columns["loss"][1][-1] == 7
    assert columns["val_loss"][0].tolist() == [51]
    write_metrics(tmp_path, 5, first=40)  # resumed at 40
    columns = same()
    assert columns["loss"][0].tolist() == list(range(1, 45))
    assert "val_loss" not in columns
    kept = file.read_text().splitlines(keepends=True)[:20]
    file.write_text("".join(kept) + '{"step": 21, "loss": 9.0}\n')  # cut and written on, in place
    assert same()["loss"][1][-1] == 9


def test_a_long_file_is_read_in_pieces(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": step / 7, "note": "x" * (step % 97)}) for step in range(1, 60_001)]
    text = "\n".join(lines)
    assert len(text) > 5 * 2**20
    file = tmp_path / "metrics.jsonl"
    file.write_text(text[: len(text) // 2])
    reader = MetricsReader(file)
    reader.read()
    with open(file, "a") as opened:
        opened.write(text[len(text) // 2 :])
    steps, losses = reader.read()["loss"]
    np.testing.assert_array_equal(steps, np.arange(1, 60_001))
    np.testing.assert_array_equal(losses, np.arange(1, 60_001) / 7)


def test_thinning_keeps_extremes_ends_and_gaps() -> None:
    steps, values = np.arange(30_000.0), np.full(30_000, 0.5)
    values[12_345], values[20_001], values[7] = 40, -3, np.nan
    values[25_000:25_400] = np.nan
    xs, ys = thin((steps, values), 1000)
    assert (np.nanmin(ys), np.nanmax(ys)) == (-3, 40)
    assert {0, 29_999, 12_345, 20_001} <= set(xs.tolist())
    assert len(xs) <= 1002
    assert (np.diff(xs) > 0).all()
    assert np.isnan(ys).any()


def test_smoothing_in_its_middle_is_the_trainers_own_average(tmp_path: Path) -> None:
    lines = write_metrics(tmp_path, 200)
    expected = [line["loss_ema"] for line in lines]
    np.testing.assert_allclose(average(np.array([line["loss"] for line in lines]), 0.95), expected, rtol=1e-12)


def test_how_a_run_ended_is_told_from_its_files(tmp_path: Path) -> None:
    from library.web.access import AllowedRoots
    from library.web.run import RunStatus, run_status
    from library.web.runs import all_runs
    from library.web.site import Site

    site = Site.of(AllowedRoots.of([tmp_path / "output"], []))
    run, outside = tmp_path / "output/deep/run", tmp_path / "secret.toml"
    write_metrics(run, 20)
    outside.write_text("# Tandem: a secret\n[training]\nmax_train_steps = 7\n")
    (run / "config.toml").symlink_to(outside)  # leads out of the folders that the page was given
    (run / "samples").mkdir()
    shutil.copy(run / "metrics.jsonl", run / "samples")  # no run

    def seen() -> RunStatus:
        (found,) = all_runs(site, site.jobs.all())
        return found

    assert (seen().name, seen().state, seen().step, seen().total) == ("deep/run", "stopped", 20, None)
    (run / "config.toml").unlink()
    (run / "config.toml").write_text(
        "# Tandem: of a run\n[training]\nmax_train_epochs = 4\n[saving]\noutput_name = 'x'\n"
    )
    assert seen().total == 32  # 20 steps were two epochs and about a half
    lock = FolderLock(run, "run")
    lock.acquire()
    assert (seen().state, seen().eta) == ("running", 12 * 0.5)
    preparation = Preparation()
    preparation.folder = run
    preparation.plan({"encoding images": "8 new, 0 cached", "the first step": ""}, Console(quiet=True))
    preparation.begin("encoding images", 8)
    assert "encoding images" in site.templates.get_template("parts.html").module.progress(seen())
    preparation.end()
    assert seen().preparing is None
    lock.release()
    code = "import os; from pathlib import Path; from library.folder_lock import FolderLock as L; "
    code += f"L(Path({str(run)!r}), 'run').acquire(); os._exit(9)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert seen().state == "lost"  # its process was killed
    (run / ".holder").unlink()
    (run / "x.safetensors").write_bytes(b"")
    assert seen().state == "done"
    log = tmp_path / "job/log.txt"
    log.parent.mkdir()
    job = Job("x", "train", "x", (), True, str(run), 1.0, "", log.parent, began=1.0, state="lost")  # nobody saw its end
    assert run_status(site, run, job).state == "done"
    (run / "x.safetensors").unlink()
    assert run_status(site, run, job).state == "stopped"
    log.write_text("error: no room\n")
    failed = run_status(site, run, replace(job, id="y"))
    assert (failed.state, failed.error) == ("lost", "error: no room")
    for name, head in (("first", "# Tandem suggests this."), ("begun", "# Tandem 0.1.0: the settings of this run")):
        (tmp_path / "output" / name).mkdir()  # a suggestion is no run; what a trainer began with is
        (tmp_path / "output" / name / "config.toml").write_text(f"{head}\n[training]\nmax_train_steps = 7\n")
    assert {found.name for found in all_runs(site, [])} == {"deep/run", "begun"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "assets").symlink_to(ROOT / "assets")
    for name, rate in (("plain", 1e-4), (EVIL, 2e-4)):
        run = folder / "output" / name
        write_metrics(run, 3000, more={"loss/sigma_0.2-0.4": 0.1, "d/lora": 1e-6, "d*lr/lora": 2e-6})
        text = CONFIG.format(base="assets/tiny-flux", data="d.toml", rate=rate, steps=4000, output=run, prompts="p.txt")
        (run / "config.toml").write_text(text)
        (run / "samples").mkdir()
        source = ROOT / "assets/demo_dataset"
        pictures = sorted(source.rglob("*.png"))[:3]
        for step, picture in enumerate(pictures):
            shutil.copy(picture, run / f"samples/step{step * 100:06d}_00.png")
    with serve(folder) as running:
        yield running


def test_the_list_says_what_the_files_say(server: Server, tab: Tab, size: str) -> None:
    tab.open("/")
    last = json.loads((server.output / EVIL / "metrics.jsonl").read_text().splitlines()[-1])
    run = tab.page.locator(".run", has_text=EVIL)
    expect(run).to_contain_text("3000 of 4000 steps")
    expect(run).to_contain_text("stopped")
    expect(run).to_contain_text(f"loss {last['loss_ema']:.3g}")
    expect(run).to_contain_text("d·lr 2e-06")
    expect(run).to_contain_text("3.0 GiB")
    for link in tab.page.locator("nav a:not(.brand)").all():  # all screens are in sight
        box = link.bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= tab.page.viewport_size["width"]
    tab.fits()
    tab.page.get_by_role("searchbox").fill("plai")
    expect(tab.page.locator(".run")).to_have_count(1)
    tab.page.get_by_role("searchbox").fill("")
    expect(tab.page.locator(".run")).to_have_count(2)
    for box in tab.page.locator(".run input[type=checkbox]").all():
        box.check()
    tab.page.wait_for_timeout(2500)  # a morph in between leaves the boxes as they are
    tab.page.get_by_role("button", name="Compare chosen").click()
    row = tab.page.locator("#differences tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("learning_rate")
    expect(tab.page.locator("#charts .uplot").first).to_be_visible()
    pictures = tab.page.locator("#samples .shots button.shot")  # of each step, run beside run
    expect(pictures.last).to_have_text("plain, step 200")
    assert pictures.count() == 6
    tab.fits()


def test_a_run_shows_its_curves_and_samples(server: Server, tab: Tab, size: str) -> None:
    tab.open(f"/run?path=output/{EVIL}")
    expect(tab.page.get_by_role("heading", level=1)).to_have_text(EVIL)
    expect(tab.page.locator("#charts .uplot").first).to_be_visible()
    titles = tab.page.locator(".u-title").all_text_contents()
    assert titles[:3] == ["Loss", "Learning rate", "Step size d · lr"]
    assert "Loss by noise level σ" in titles
    answer = tab.page.request.get(f"{server.address}/run/curves", params={"path": f"output/{EVIL}", "smooth": "0"})
    loss = answer.json()["charts"][0]["lines"][0]
    steps, values = read_run(server.output / EVIL).columns["loss"]
    assert len(loss["steps"]) <= 1002
    assert max(loss["values"]) == values.max()
    shown = dict(zip(steps.tolist(), values.tolist(), strict=True))
    assert loss["values"] == pytest.approx([shown[step] for step in loss["steps"]], rel=1e-5)
    # before and after: the picture that is clicked over the first one, divided where the slider is
    row = tab.page.locator("#samples .shots").first
    expect(row.locator(".shot")).to_have_text(["0", "100", "200"])
    row.locator(".shot").last.click()
    large = tab.page.locator("#large")
    assert "step000000_00" in large.locator("img").first.get_attribute("src")
    assert "step000200_00" in large.locator("img.over").get_attribute("src")
    large.locator("select").last.select_option(label="100")
    assert "step000100_00" in large.locator("img.over").get_attribute("src")
    large.locator("input[type=range]").focus()
    before = large.locator("img.over").evaluate("e => getComputedStyle(e).clipPath")
    tab.page.keyboard.press("Home")
    assert large.locator("img.over").evaluate("e => getComputedStyle(e).clipPath") != before
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("t")  # curves take the other theme's colours
    expect(tab.page.locator("#charts .uplot").first).to_be_visible()
    expect(tab.page.locator("#log")).to_contain_text("started in a terminal")
    tab.fits()


def test_what_a_run_does_before_its_first_step_is_shown_live(server: Server, tab: Tab, size: str) -> None:
    folder = server.output / "begins"
    folder.mkdir()
    lock, preparation = FolderLock(folder, "begins"), Preparation()
    lock.acquire()
    try:  # as a run in a terminal does
        preparation.folder = folder
        advance = preparation.begin("checking images", 40)
        advance(40)
        words = {
            "generating images from prompts": "24 images of 512 x 512",
            "encoding images": "64 new, 0 cached",
        }
        preparation.plan({**words, "the first step": "like every other step"}, Console(quiet=True))
        advance = preparation.begin("generating images from prompts", 24)
        tab.open("/run?path=output/begins")
        steps = tab.page.get_by_role("list", name="Before the first step").get_by_role("listitem")
        expect(steps).to_have_count(4)
        expect(steps.nth(0)).to_have_class("done")
        expect(steps.nth(1)).to_have_class("running")
        expect(steps.nth(2)).to_have_class("waiting")
        expect(steps.nth(2)).to_contain_text("64 new, 0 cached")
        expect(tab.page.locator("#overview")).not_to_contain_text("steps")
        time.sleep(1.1)
        advance(3)
        expect(steps.nth(1)).to_contain_text("3 of 24, about")
        expect(steps.nth(1).get_by_role("progressbar")).to_have_attribute("value", "3")
        tab.fits()
        tab.open("/")
        expect(tab.page.locator(".run", has_text="begins")).to_contain_text(
            "generating images from prompts: 3 of 24, about"
        )
        tab.open("/run?path=output/begins")
        write_metrics(folder, 1)
        preparation.end()
        expect(tab.page.locator("#overview")).to_contain_text("1 steps")
        expect(steps).to_have_count(0)
        with preparation.between_steps("sampling", folder):
            expect(tab.page.locator("#overview")).to_contain_text("1 steps; now sampling")
        expect(tab.page.locator("#overview")).not_to_contain_text("sampling")
    finally:
        lock.release()
        shutil.rmtree(folder)


def add_run(server: Server, folder: Path, name: str, steps: int) -> str:
    """Queue a run of the tiny model on two small images; return its job's name."""
    data = folder / "data"
    (data / "images").mkdir(parents=True, exist_ok=True)
    for i in range(2):
        Image.new("RGB", (64, 64), ("red", "blue")[i]).save(data / f"images/{i}.png")
        (data / f"images/{i}.txt").write_text("a plain colour")
    (data / "dataset.toml").write_text(DATASET)
    (data / "prompts.txt").write_text(f"{EVIL} in red --w 64 --h 64 --s 2 --d 1\n")
    output = server.output / name
    text = CONFIG.format(base=ROOT / "assets/tiny-flux", data=data / "dataset.toml", rate=1e-4, steps=steps,
                         output=output, prompts=data / "prompts.txt")  # fmt: skip
    jobs = Jobs(server.output / ".tandem")
    words = ["train_lora.py", "--config_file", "{job}/config.toml"]
    return jobs.add("train", name, words, queued=True, output=str(output), files={"config.toml": text}).id


def last_step(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return json.loads(file.read_text().splitlines()[-1])["step"] if file.is_file() and file.stat().st_size else 0


def test_a_run_from_its_job_to_its_end(tmp_path: Path, browser: Any) -> None:
    with serve(tmp_path, "--folders", str(tmp_path), str(ROOT / "assets")) as server:
        run, jobs = server.output / "tiny", Jobs(server.output / ".tandem")
        add_run(server, tmp_path, "tiny", steps=100_000)
        tab = Tab(browser, server)
        tab.open(f"/run?path={run}")
        overview = tab.page.locator("#overview")
        expect(overview).to_contain_text("of 100000 steps")
        shown = int(str(overview.inner_text()).split(" of 100000")[0].split()[-1])
        assert until(lambda: last_step(run) > shown)
        expect(tab.page.locator(".u-title").first).to_have_text("Loss")
        tab.page.get_by_role("button", name="Sample").click()
        expect(tab.page.locator(".shot")).to_have_count(1)
        expect(tab.page.locator("#samples h3")).to_have_text(f"{EVIL} in red")
        tab.page.get_by_role("button", name="Save").click()
        expect(tab.page.locator("#files b")).to_contain_text("tiny-step")
        assert len(list(run.glob("*-state"))) == 1
        server.kill()
        server.process.wait()
        tab.context.close()  # it said that the page does not answer
        with serve(tmp_path, "--folders", str(tmp_path), str(ROOT / "assets")) as other:
            one, two = Tab(browser, other), Tab(browser, other, "phone")
            at = last_step(run)
            for tab in (one, two):
                tab.open()
                expect(tab.page.locator(".run")).to_contain_text("running")
            assert until(lambda: last_step(run) > at)  # it went on without the page
            stops = [tab.page.get_by_role("button", name="Stop") for tab in (one, two)]
            address = f"{other.address}/run/ask"
            stops[0].click()
            two.page.request.post(address, form={"path": str(run), "what": "STOP"})  # what the other tab's button sends
            for tab in (one, two):
                expect(tab.page.locator(".run .who .tag")).to_have_text("stopped")
            assert (jobs.of_output(run) or jobs.all()[-1]).code == 3  # of STOP, after it was saved
            stopped, before = last_step(run), (run / "metrics.jsonl").read_text().splitlines()
            assert (run / f"tiny-step{stopped:08d}-state").is_dir()
            one.open(f"/run?path={run}")
            expect(one.page.locator("select[name=state]")).to_have_value(f"tiny-step{stopped:08d}-state")
            one.page.get_by_role("button", name="Continue from").click()
            expect(one.page.locator("#overview .tag").first).to_have_text("running")
            until(lambda: last_step(run) > stopped)
            lines = (run / "metrics.jsonl").read_text().splitlines()
            assert lines[: len(before)] == before  # with the times that they took: not trained again
            steps = [row["step"] for row in map(json.loads, lines) if "loss" in row]  # at saves norms alone
            assert steps == list(range(1, len(steps) + 1))
            expect(one.page.locator("#log pre")).to_contain_text("LoRA on flux: 52 modules")
            one.fits()
            one.page.get_by_role("button", name="Stop").click()
            expect(one.page.locator("#overview .tag").first).to_have_text("stopped")
            before = last_step(run)
            one.page.get_by_role("button", name="Start over").click()
            until(lambda: 0 < last_step(run) < before)  # from step 1, although there are states
            lines = (run / "metrics.jsonl").read_text().splitlines()
            assert json.loads(lines[0])["step"] == 1
            one.page.get_by_role("button", name="Stop").click()
            expect(one.page.locator("#overview .tag").first).to_have_text("stopped")
            for tab in (one, two):
                tab.close()


def test_a_second_stop_asks_and_ends_the_run_before_its_first_step(tmp_path: Path, browser: Any) -> None:
    with serve(tmp_path) as server:
        jobs = Jobs(server.output / ".tandem")
        code = (
            "import signal, time; signal.signal(2, lambda *_: print('not now', flush=True))\n"
            "print('on', flush=True)\n"
            "for _ in range(99): time.sleep(1)"
        )
        job = jobs.add("train", "deaf", ["-c", code], queued=True, output=str(server.output / "deaf"))
        until(lambda: "on" in job.log)
        tabs = [Tab(browser, server), Tab(browser, server)]
        for tab in tabs:
            tab.open()
        for tab in tabs:  # both see Stop, both press it
            tab.page.evaluate("document.getElementById('list').removeAttribute('hx-get')")
            tab.page.get_by_role("button", name="Stop").click()
        until(lambda: "not now" in job.log)
        time.sleep(0.5)
        assert job.log.count("not now") == 1  # a trainer ends without saving at a second one
        tabs[0].open()
        tabs[0].agrees = False
        tabs[0].page.get_by_role("button", name="End now").click()
        assert jobs.get(job.id).state == "running"
        tabs[0].agrees = True
        tabs[0].page.get_by_role("button", name="End now").click()
        expect(tabs[0].page.locator(".run .who .tag")).to_have_text("stopped")
        for tab in tabs:
            tab.close()


def test_the_queue_is_ordered_by_hand_and_kept(tmp_path: Path, browser: Any) -> None:
    with serve(tmp_path) as server:
        jobs = Jobs(server.output / ".tandem")
        sleeps = ["-c", "import time; print('error: <b>no</b> room', flush=True); time.sleep(99)"]
        ids = [jobs.add("report", title, sleeps, queued=True).id for title in ("first", "second", EVIL, "fourth")]
        tab = Tab(browser, server)
        tab.open()
        rows = tab.page.locator(".queue a")
        expect(rows).to_have_text(["first", "second", EVIL, "fourth"])
        expect(tab.page.get_by_role("button", name="Earlier: second")).to_have_count(0)  # the first that waits
        expect(tab.page.get_by_role("button", name="Later: fourth")).to_have_count(0)
        tab.page.get_by_role("button", name="Later: second").click()
        expect(rows).to_have_text(["first", EVIL, "second", "fourth"])
        tab.page.get_by_role("button", name="Remove: fourth").click()
        expect(rows).to_have_text(["first", EVIL, "second"])
        tab.page.get_by_role("link", name="first", exact=True).click()
        expect(tab.page.locator(".message.bad")).to_have_text("error: <b>no</b> room")
        server.kill()
        tab.context.close()
        with serve(tmp_path) as other:
            tab = Tab(browser, other, "phone")
            tab.open()
            expect(tab.page.locator(".queue a")).to_have_text(["first", EVIL, "second"])
            tab.fits()
            jobs.stop(ids[0])
            expect(tab.page.locator(".queue .tag.running + a")).to_have_text(EVIL)  # the next one's turn
            tab.close()
