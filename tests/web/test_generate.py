"""Painting at several strengths, on the command line and on the page."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from tests.web.page import ROOT, Server, Tab, expect, serve
from tools.generate import image, parser

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
    (tmp_path / "prompts.txt").write_text("# a comment\na hat --d 3\n\na cat\n")
    site = Site.of(AllowedRoots.of([tmp_path / "output"], [tmp_path]))
    for prompts in (["a hat --d 3", "a cat"], str(tmp_path / "prompts.txt")):
        assert _prompts_of(site, {"sample_prompts": prompts}) == "a hat --d 3\na cat"
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
def test_several_strengths_paint_what_separate_runs_paint(make: Callable[[Path], Path], tmp_path: Path) -> None:
    lora = make(tmp_path)
    found = painted("--lora", str(lora), "--strengths", "0", "0.5", "1.2", "--save_to", str(tmp_path / "all"))
    without = painted("--save_to", str(tmp_path / "0"))
    half = painted("--lora", f"{lora}:0.5", "--save_to", str(tmp_path / "half"))
    more = painted("--lora", f"{lora}:1.2", "--save_to", str(tmp_path / "more"))
    assert found == [without[0], half[0], more[0], without[1], half[1], more[1]]
    assert len(set(found)) == 6
    lines = [json.loads(line) for line in (tmp_path / "all/images.jsonl").read_text().splitlines()]
    assert [(line["row"], line["strength"]) for line in lines] == [(r, s) for r in (0, 1) for s in (0, 0.5, 1.2)]


def paint(tab: Tab) -> None:
    tab.open("/generate?lora=output/zorbo/zorbo.safetensors")
    prompts = tab.page.get_by_label("Prompts, one a line")
    expect(prompts).to_have_value(
        re.compile("^a zorbo on a blue background --w 128")
    )  # the run's own, without comments
    prompts.fill(f"{EVIL}\na house --d 5")
    tab.page.get_by_label("Strengths", exact=True).fill("0, 1")
    tab.page.get_by_label("Steps").fill("2")
    tab.page.get_by_role("button", name="Paint").click()
    tab.page.wait_for_url("**job=*")


def test_the_grid_shows_what_was_painted(tab: Tab, server: Server, size: str) -> None:
    paint(tab)
    expect(tab.page.locator("#result .tag").first).to_have_text("done", timeout=60_000)
    cells = tab.page.locator("button.shot")
    expect(cells).to_have_count(4)
    expect(cells).to_have_text(["strength 0", "strength 1"] * 2)
    expect(tab.page.locator("#result h3").first).to_have_text(EVIL)
    job = tab.page.url.rpartition("=")[2]
    files = sorted((server.output / ".tandem/jobs" / job / "images").glob("*.png"))
    images = cells.locator("img")
    names = [re.search(r"%2F([^%]+\.png)", each.get_attribute("src"))[1] for each in images.all()]
    assert sorted(names) == [path.name for path in files]
    assert [re.search(r"strength(\S+)\.png", name)[1] for name in names] == ["0", "1", "0", "1"]
    cells.last.scroll_into_view_if_needed()
    tab.page.wait_for_function("document.querySelectorAll('.shot img')[3].complete")
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
    tab.page.get_by_role("button", name="Paint").click()
    tab.page.wait_for_url("**job=*")
    expect(tab.page.locator(".shot")).to_have_count(2)  # empty cells, until they are painted
    expect(tab.page.locator("#result .tag").first).to_have_text("done", timeout=60_000)
    folder = server.output / ".tandem/jobs" / tab.page.url.rpartition("=")[2]
    without, both = (Image.open(path).convert("RGB") for path in sorted((folder / "images").glob("*.png")))
    assert max(high for _, high in ImageChops.difference(without, both).getextrema()) <= 2  # one takes the other back
    expect(tab.page.get_by_label("Further LoRAs")).to_have_value(further)
