"""Painting at several strengths, on the command line and on the page; the report and what its remedies make."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops

pytest.importorskip("starlette", reason="the page's packages are not installed (make setup-web)")

from library.errors import UserError
from library.web import precision
from tests.web.page import ROOT, Server, Tab, expect, serve, until
from tools.generate import grid, image, parser

pytestmark = pytest.mark.slow
MODEL = str(ROOT / "assets/tiny-flux")
EVIL = "a zorbo <img src=x onerror=alert(1)>"


@pytest.fixture(scope="module", name="server")
def lora_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    with_run(folder)
    with serve(folder) as running:
        yield running


def with_run(folder: Path) -> Path:
    """Write a run with a LoRA of random weights into ``folder``; return the LoRA."""
    import torch

    from library.models.registry import lora_targets
    from networks.files.weights import LoraWeights
    from networks.files.writing import save_adapter

    (folder / "output/zorbo").mkdir(parents=True)
    (folder / "assets").mkdir()
    for name in ("tiny-flux", "demo_dataset"):
        shutil.copytree(ROOT / "assets" / name, folder / "assets" / name)
    random = torch.Generator().manual_seed(1)
    names = [f"transformer_blocks.{i}.attn.to_{part}" for i in range(2) for part in "qkv"]
    shape = json.loads((ROOT / "assets/tiny-flux/transformer/config.json").read_text())
    width = shape["num_attention_heads"] * shape["attention_head_dim"]
    weights = {
        name: LoraWeights(*(0.3 * torch.randn(size, generator=random) for size in ((4, width), (width, 4))), 4.0)
        for name in names
    }
    lora = folder / "output/zorbo/zorbo.safetensors"
    save_adapter(lora, weights, lora_targets()["flux"], "diffusers", "fp32", {})
    (folder / "output/zorbo/config.toml").write_text(
        '# Tandem 1: the settings of this run\n[model]\nmodel_type = "flux"\n'
        'pretrained_model_name_or_path = "assets/tiny-flux"\n'
        '[dataset]\ndataset_config = "assets/demo_dataset/dataset.toml"\n'
        '[sampling]\nsample_prompts = "assets/demo_dataset/prompts.txt"\n'
    )
    return lora


def test_the_prompts_of_a_run_are_offered_as_they_were_written_in_its_list_or_its_file(tmp_path: Path) -> None:
    from library.web.access import AllowedRoots
    from library.web.generate import _prompts_of
    from library.web.site import Site

    (tmp_path / "output").mkdir()
    (tmp_path / "prompts.txt").write_text("# a comment\na\u2028hat --d 3\n\na cat\n")
    site = Site.of(AllowedRoots.of([tmp_path / "output"], [tmp_path]))
    for prompts in (["a\u2028hat --d 3", "a cat"], str(tmp_path / "prompts.txt")):
        assert _prompts_of(site, {"sample_prompts": prompts}) == "a\u2028hat --d 3\na cat"
    for nothing in ({}, {"sample_prompts": []}, {"sample_prompts": "/etc/hosts"}):
        assert _prompts_of(site, nothing) == ""


def painted(*words: str) -> list[bytes]:
    flags = ["--model", MODEL, "--w", "64", "--h", "64", "--s", "2", "--g", "1", "--prompt", "a house", "a tree"]
    return [Image.open(path).tobytes() for path in image(parser().parse_args(["image", *flags, *words]))]


def text_encoder_lora(folder: Path) -> Path:
    """Write a LoRA of CLIP alone, of random weights; return it."""
    import torch
    from safetensors.torch import save_file

    random, path = torch.Generator().manual_seed(1), folder / "clip.safetensors"
    layers = [f"text_encoder.text_model.encoder.layers.{i}.self_attn.{part}_proj" for i in (0, 1) for part in "qkv"]
    names = [f"{layer}.lora_{part}.weight" for layer in layers for part in "AB"]
    shapes = {"A": (4, 64), "B": (64, 4)}
    save_file({name: torch.randn(shapes[name[-8]], generator=random) for name in names}, path)
    return path


@pytest.mark.parametrize("make", [with_run, text_encoder_lora])
def test_several_strengths_give_what_separate_runs_give(
    make: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = make(tmp_path)
    words = ["--steps", lora.name, "--strengths", "0", "0.5", "1.2", "0.50000001"]  # of one name, so one picture
    record, (found,) = grid_of(lora.parent, *words)
    assert [now for _, now in record["columns"]] == [0, 0.5, 1.2] * 2
    assert re.search(r"zorbo.*, strength 0, 0.5, 1.2\n|clip.*, strength 0, 0.5, 1.2\n", capsys.readouterr().out)
    without = painted("--save_to", str(tmp_path / "0"))
    half = painted("--lora", f"{lora}:0.5", "--save_to", str(tmp_path / "half"))
    more = painted("--lora", f"{lora}:1.2", "--save_to", str(tmp_path / "more"))
    assert found == [without[0], half[0], more[0], without[1], half[1], more[1]]
    assert len(set(found)) == 6


def with_steps(folder: Path) -> Path:
    """Write a run with two saved steps and what it ended with, all of other weights, and metrics; return its folder."""
    from safetensors.torch import load_file, save_file

    run = with_run(folder).parent
    with open(run / "config.toml", "a") as file:
        file.write('[saving]\noutput_name = "zorbo"\n')
    weights, metrics = load_file(run / "zorbo.safetensors"), []
    for step, name in ((4, "zorbo-step00000004"), (8, "zorbo-step00000008"), (12, "zorbo")):
        about = {"ss_steps": str(step), "ss_output_name": "zorbo", "modelspec.title": "zorbo"}
        save_file({key: step / 12 * each for key, each in weights.items()}, run / f"{name}.safetensors", about)
        loss = {4: 0.54321, 8: 0.41, 12: 0.46789}[step]
        metrics.append({"step": step, "val_loss": loss, "val_prior_loss": step / 1000})
        metrics += [{"step": step, "loss": 9.0}, {"step": step + 1, "val_loss": 9.0}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
    return run


def grid_of(run: Path, *words: str) -> tuple[dict[str, Any], list[list[bytes]]]:
    """Return the record of a grid of two prompts at two strengths, and its images."""
    flags = [
        "--w",
        "64",
        "--h",
        "64",
        "--s",
        "2",
        "--g",
        "1",
        "--prompt",
        "a house",
        "a tree",
        "--strengths",
        "0.5",
        "1",
    ]
    grid(parser().parse_args(["grid", "--run", str(run), "--model", MODEL, *flags, *words]))
    record = json.loads((run / "grid/grid.json").read_text())
    return record, [[Image.open(name).tobytes() for name in row] for row in record["images"]]


def test_the_grid_of_a_run_holds_what_image_makes_and_the_numbers_of_its_metrics(tmp_path: Path) -> None:
    run = with_steps(tmp_path)
    record, images = grid_of(run)
    files = ["zorbo-step00000004", "zorbo-step00000008", "zorbo"]
    for name, row in zip(files, images, strict=True):
        single = [
            painted("--lora", f"{run / name}.safetensors:{strength}", "--save_to", str(tmp_path / f"{name}{strength}"))
            for strength in (0.5, 1)
        ]
        assert row == [single[0][0], single[1][0], single[0][1], single[1][1]]
    assert len({image for row in images for image in row}) == 12
    assert record["columns"] == [["a house", 0.5], ["a house", 1.0], ["a tree", 0.5], ["a tree", 1.0]]
    assert record["steps"] == [
        ["zorbo-step00000004.safetensors", "step 4, held-out loss 0.5432, changed elsewhere 0.004000"],
        ["zorbo-step00000008.safetensors", "step 8, lowest held-out loss 0.4100, changed elsewhere 0.008000"],
        ["zorbo.safetensors", "step 12, held-out loss 0.4679, changed elsewhere 0.01200"],
    ]
    width, height = Image.open(run / "grid/grid.png").size
    assert width > 4 * 64
    assert height > 3 * 64
    with pytest.raises(UserError, match="--steps 5: is not in .*; it has 4, 8, 12"):
        grid_of(run, "--steps", "5")


def test_a_grid_that_is_killed_goes_on_and_makes_anew_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from library.training.sampling import images as saving

    run, save, saved = with_steps(tmp_path), saving.save_image, list[str]()

    def save_some(image: Image.Image, path: Path, texts: dict[str, str]) -> None:
        if len(saved) == 5:
            raise KeyboardInterrupt
        save(image, path, texts)
        saved.append(path.name)

    monkeypatch.setattr(saving, "save_image", save_some)
    with pytest.raises(KeyboardInterrupt):
        grid_of(run)
    before = {path: path.stat().st_mtime_ns for path in (run / "grid").glob("*_*.png")}
    assert len(before) == 5
    saved[:] = ["none yet"] * 6
    record, _ = grid_of(run)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    shown = {Path(name).name for row in record["images"] for name in row}
    assert {*saved[6:], *(path.name for path in before)} == shown
    assert len(saved[6:]) == 7
    for path, kept in zip(before, (0, 40), strict=False):  # a disk that filled up, or lost what it had
        path.write_bytes(path.read_bytes()[:kept])
    damaged = [path.name for path in before][:2]
    saved[:] = ["none yet"] * 6
    grid_of(run)
    assert sorted(saved[6:]) == sorted(damaged)
    shutil.copy(run / "zorbo.safetensors", run / "zorbo-step00000004.safetensors")
    saved[:] = ["none yet"] * 6
    grid_of(run, "--steps", "4", "8")
    assert [name.partition("_")[0] for name in saved[6:]] == ["zorbo-step00000004"] * 4


def test_without_prompts_a_grid_takes_the_runs_then_captions_of_held_out_images(tmp_path: Path) -> None:
    from library.config.schema import DatasetArguments
    from library.data.config import load_dataset_config
    from library.data.samples import scan

    run = with_steps(tmp_path)
    words = ["grid", "--run", str(run), "--steps", "8", "--strengths", "1", "--w", "64", "--h", "64", "--s", "1"]
    config = (run / "config.toml").read_text().replace('"assets/', f'"{ROOT}/assets/')
    for text in (config, config.replace("sample_prompts", "# ")):
        (run / "config.toml").write_text(text)
        grid(parser().parse_args([*words, "--model", MODEL]))
        columns = [prompt for prompt, _ in json.loads((run / "grid/grid.json").read_text())["columns"]]
        if text == config:
            prompts = (ROOT / "assets/demo_dataset/prompts.txt").read_text().splitlines()
            assert columns == [line.partition(" --")[0] for line in prompts if line[0] != "#"]
    toml = str(ROOT / "assets/demo_dataset/dataset.toml")
    held = scan(load_dataset_config(toml, DatasetArguments(dataset_config=toml)), 0, 16).held_out
    assert columns == [one.caption for one in held][:3]


def generate(tab: Tab) -> None:
    tab.open("/generate?lora=output/zorbo/zorbo.safetensors")
    prompts = tab.page.get_by_label("Prompts, one a line")
    expect(prompts).to_have_value(
        re.compile("^a zorbo on a blue background --w 128")
    )  # the run's own, without comments
    prompts.fill(f"{EVIL}\na house --d 5")
    tab.page.get_by_label("Strengths", exact=True).fill("0, 1")
    tab.page.get_by_label("Steps").fill("2")
    tab.page.get_by_role("button", name="Generate", exact=True).click()
    tab.page.wait_for_url("**job=*")


def test_the_grid_shows_what_was_painted(tab: Tab, server: Server, size: str) -> None:
    generate(tab)
    expect(tab.page.locator("#result .tag").first).to_have_text("done", timeout=60_000)
    cells = tab.page.locator("button.shot")
    expect(cells).to_have_count(4)
    expect(cells).to_have_text(["strength 0", "strength 1"] * 2)
    expect(tab.page.locator("#result h3").first).to_have_text(EVIL)
    job = tab.page.url.rpartition("=")[2]
    files = sorted((server.output / ".tandem/jobs" / job / "images").glob("*_strength*.png"))
    images = cells.locator("img")
    names = [re.search(r"%2F([^%]+\.png)", each.get_attribute("src"))[1] for each in images.all()]
    assert sorted(names) == [path.name for path in files]
    assert [re.search(r"strength(\S+)\.png", name)[1] for name in names] == ["0", "1", "0", "1"]
    cells.last.scroll_into_view_if_needed()
    until(lambda: tab.page.evaluate("document.querySelectorAll('.shot img')[3].complete"))
    assert tab.page.evaluate("Array.from(document.querySelectorAll('.shot img'), (i) => i.naturalWidth)") == [128] * 4
    tab.fits()
    cells.last.click()  # beside the row's first
    shown = tab.page.locator("#large img")
    assert [name in shown.nth(i).get_attribute("src") for i, name in enumerate(names[2:])] == [True, True]
    tab.page.keyboard.press("Escape")


def test_pictures_appear_while_it_paints_and_several_loras_are_one_sum(tab: Tab, server: Server) -> None:
    tab.open("/generate?lora=output/zorbo/zorbo.safetensors")
    tab.page.get_by_label("Prompts, one a line").fill("a house --d 5")
    tab.page.get_by_label("Strengths", exact=True).fill("0 1")
    tab.page.get_by_label("Steps").fill("2")
    tab.page.get_by_text("More", exact=True).click()
    shutil.copy(server.output / "zorbo/zorbo.safetensors", server.output / "zorbo/the other one.safetensors")
    further = "output/zorbo/zorbo.safetensors:-0.75\noutput/zorbo/the other one.safetensors:-0.25"
    tab.page.get_by_label("Further LoRAs").fill(further)
    tab.page.get_by_role("button", name="Generate", exact=True).click()
    tab.page.wait_for_url("**job=*")
    expect(tab.page.locator(".shot")).to_have_count(2)  # empty cells, until they are painted
    expect(tab.page.locator("#result .tag").first).to_have_text("done", timeout=60_000)
    folder = server.output / ".tandem/jobs" / tab.page.url.rpartition("=")[2]
    without, both = (Image.open(path).convert("RGB") for path in sorted((folder / "images").glob("*_strength*.png")))
    assert max(high for _, high in ImageChops.difference(without, both).getextrema()) <= 2  # one takes the other back
    expect(tab.page.get_by_label("Further LoRAs")).to_have_value(further)


def test_the_best_saved_step_is_found_kept_by_a_name_and_the_others_deleted(browser: Any, tmp_path: Path) -> None:
    run = with_steps(tmp_path)
    with serve(tmp_path) as server:
        tab = Tab(browser, server)
        tab.open("/run?path=output/zorbo")
        expect(tab.page.locator("#files")).to_contain_text(
            "step 8, lowest held-out loss 0.4100, changed elsewhere 0.0080"
        )
        tab.page.get_by_role("link", name="Which one is best?").click()
        expect(tab.page.locator("[name=saved]:checked")).to_have_count(3)
        tab.page.get_by_label("Prompts, one a line").fill("a house")
        tab.page.get_by_label("Strengths", exact=True).fill("0.5 1")
        tab.page.get_by_label("Steps", exact=True).fill("1")
        tab.page.get_by_role("button", name="Generate", exact=True).click()
        tab.page.wait_for_url("**job=*")
        expect(tab.page.locator("#result .tag").first).to_have_text("done", timeout=120_000)
        expect(tab.page.locator("#result h3")).to_have_text(["a house, strength 0.5", "a house, strength 1"])
        expect(tab.page.locator("button.shot")).to_have_count(6)
        expect(tab.page.locator("button.shot").nth(1)).to_contain_text("step 8, lowest held-out loss 0.4100")
        assert len(list((run / "grid").glob("*_strength*.png"))) == 6
        tab.fits()
        saved = tab.page.locator("#saved")
        expect(saved.locator("option:checked")).to_contain_text("zorbo-step00000008")
        name, said = saved.get_by_label("Name to keep it by"), tab.page.locator("#message")
        expect(name).to_have_value("zorbo-chosen")
        name.fill("zorbo")
        saved.get_by_role("button", name="Keep this one").click()
        expect(said).to_contain_text("'zorbo' cannot be given (it is taken)")
        name.fill("my zorbo")
        saved.get_by_role("button", name="Keep this one").click()
        place = "output/zorbo/my zorbo.safetensors"
        expect(said).to_contain_text(f"Kept: {place} (step 8, lowest held-out loss 0.4100")
        expect(said).to_contain_text("Copy it into ComfyUI's models/loras.")
        expect(name).to_have_value("zorbo-chosen")  # for the next one
        expect(saved).to_contain_text(f"{place}: copy it into ComfyUI's models/loras")
        saved.get_by_label("Saved step").select_option(index=0)
        name.fill("other zorbo")
        saved.get_by_role("button", name="Keep this one").click()
        expect(said).to_contain_text("my zorbo.safetensors was it before; that file stays.")
        tab.fits()
        tab.open("/")
        expect(tab.page.locator(".run")).to_contain_text("other zorbo.safetensors")
        expect(tab.page.locator(".run")).to_contain_text("step 4, held-out loss 0.5432")
        tab.fits()
        with tab.page.expect_download() as download:
            tab.page.get_by_role("link", name="Download other zorbo.safetensors").click()
        assert Path(download.value.path()).read_bytes() == (run / "other zorbo.safetensors").read_bytes()
        tab.open("/run?path=output/zorbo")
        files = tab.page.locator("#files b")
        expect(files).to_have_count(5)
        expect(files.first).to_have_text("other zorbo.safetensors")
        tab.fits()
        tab.page.get_by_role("button", name="Delete the other checkpoints").click()
        expect(files).to_have_count(3)
        assert sorted(path.stem for path in run.glob("*.safetensors")) == ["my zorbo", "other zorbo", "zorbo"]
        tab.page.locator("#files").get_by_label("Saved step").wait_for()
        tab.close()
    assert len(list((tmp_path / "output/.tandem/trash").glob("*/*/zorbo-step*.safetensors"))) == 2


@pytest.fixture(scope="module")
def report(browser: Any, server: Server) -> str:
    """Run a report from the form; return its address."""
    tab = Tab(browser, server)
    tab.open("/precision")
    tab.page.get_by_label("LoRA", exact=True).fill("output/zorbo/zorbo.safetensors")
    tab.page.get_by_role("button", name="Choose").click()
    tab.page.get_by_text("More", exact=True).click()
    tab.page.get_by_label("Images").fill("1")
    tab.page.get_by_label("Sampling steps").fill("2")
    tab.page.get_by_role("button", name="Run the report").click()
    tab.page.wait_for_url("**job=*")
    expect(tab.page.locator("iframe.report")).to_be_visible()
    address = tab.page.url.removeprefix(server.address)
    tab.close()
    return address


def measured(server: Server, report: str) -> dict[str, Any]:
    job = report.rpartition("=")[2]
    return json.loads((server.output / ".tandem/jobs" / job / "report/report.json").read_text())


def test_the_verdict_is_the_reports(tab: Tab, server: Server, size: str, report: str) -> None:
    tab.open(report)
    found = measured(server, report)
    shown = tab.page.frame_locator("iframe.report")
    verdict = shown.locator(".verdict")
    assert not found["verdict"]["alarm"]
    assert "alarm" not in verdict.get_attribute("class").split()
    expect(verdict).to_contain_text("Nothing is broken")
    expect(verdict).to_contain_text(f"{found['deployment']['image']:.2%}")
    expect(shown.locator("h1")).to_have_text(found["title"])
    worst = max(found["layers"], key=lambda row: row["output_error"])
    expect(shown.locator("body")).to_contain_text(worst["name"])
    expect(tab.page.locator(".remedies > li")).to_have_count(len(found["remedies"]))
    tab.fits()
    with tab.context.expect_page() as opened:
        tab.page.get_by_role("link", name="Open in a new tab").click()
    expect(opened.value.locator("h1")).to_have_text(found["title"])


def test_a_remedy_makes_a_new_file_each_time_and_is_measured(tab: Tab, server: Server, report: str) -> None:
    tab.open(report)
    number = next(i for i, each in enumerate(measured(server, report)["remedies"]) if each["name"] == "refitted")
    remedy = tab.page.locator(".remedies > li").nth(number)
    original = (server.output / "zorbo/zorbo.safetensors").read_bytes()
    for number in (1, 2):
        remedy.get_by_role("button", name="Refit the LoRA").click()
        expect(remedy.locator(".made > b")).to_have_count(number)
    made = ["zorbo-refitted.safetensors", "zorbo-refitted-2.safetensors"]
    assert remedy.locator(".made > b").all_inner_texts() == made
    remedy.get_by_role("button", name="Stop").last.click()
    expect(remedy.locator("code")).to_have_text(["output/zorbo/zorbo-refitted.safetensors"])
    assert (server.output / "zorbo/zorbo.safetensors").read_bytes() == original
    words = [sys.executable, str(ROOT / "tools/inspect_model.py"), str(server.output / "zorbo" / made[0])]
    read = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    assert "LoRA" in read.stdout
    remedy.get_by_role("button", name="Measure again with it").first.click()
    before, result = measured(server, report), tab.page.locator("#result")
    expect(result).to_contain_text(f"before, it was {100 * before['deployment']['image']:.2f} %")
    after = measured(server, tab.page.url)
    expect(result).to_contain_text(f"{100 * after['deployment']['image']:.2f} %")
    assert after["deployment"]["image"] < before["deployment"]["image"]


def test_what_a_remedy_made_is_found_among_what_it_needed(tmp_path: Path) -> None:
    from library.web.precision import _made

    for name in ("fix/fixes/refitted.safetensors", "fix/fixes/corrected.safetensors", "int8/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in _made(tmp_path / "fix")] == ["corrected.safetensors", "refitted.safetensors"]
    assert _made(tmp_path / "int8") == [tmp_path / "int8"]
    assert _made(tmp_path / "not_there") == []


def test_loras_of_language_models_are_left_out(tmp_path: Path) -> None:
    from library.web.access import AllowedRoots
    from library.web.loras import weights_in
    from library.web.site import Site

    def write(name: str, header: dict[str, Any]) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = json.dumps(header).encode()
        (tmp_path / name).write_bytes(struct.pack("<Q", len(text)) + text)

    key = {"model.layers.0.q_proj.lora_A.weight": {}}
    write("output/flux.safetensors", {"blocks.0.lora_A.weight": {}, "__metadata__": {"ss_network_dim": "4"}})
    write("output/base.safetensors", {"blocks.0.weight": {}})
    write("output/stated.safetensors", key | {"__metadata__": {"config": json.dumps({"task_type": "CAUSAL_LM"})}})
    write("peft/adapter_model.safetensors", key)
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps({"task_type": "CAUSAL_LM"}))
    found = weights_in(Site.of(AllowedRoots.of([tmp_path / "output"], [tmp_path / "peft"])))
    assert [Path(path).name for path in found["lora"]] == ["flux.safetensors"]
    assert [Path(path).name for path in found["model"]] == ["base.safetensors"]


def test_a_report_samples_at_the_sampling_guidance_whatever_the_run_trained_with() -> None:
    """A16: an empty field is the model's own, of Fill 30; the built-in models are made for 1."""
    run = {"guidance_scale": 1.0, "model_type": "flux_fill", "pretrained_model_name_or_path": "models/fill"}
    site: Any = None
    assert precision._form(site, run)["guidance_scale"] == ""
    assert precision._form(site, run | {"pretrained_model_name_or_path": "assets/tiny-flux"})["guidance_scale"] == "1"


def test_the_form_of_a_sliders_run_has_strengths_on_both_sides_of_0() -> None:
    from library.web.generate import _form

    site: Any = None  # of a run without sample prompts nothing is asked
    assert _form(site, {"train_on": "slider"})["strengths"] == "-2 -1 0 1 2"
    assert _form(site, {"train_on": "images"})["strengths"].startswith("0 ")
