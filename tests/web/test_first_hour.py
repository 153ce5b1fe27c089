"""The first hour of a new user, from twenty photos to a LoRA that other programs load, in one go in a browser.

Each screen is looked at 1280 and 390 wide; nowhere may the page refuse what it filled in itself, speak of flags, report
an error on the console, or scroll sideways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from tests.tiny_captioner import WORDS, write_tiny_captioner
from tests.web.page import ROOT, SIZES, Server, Tab, expect, serve, until

pytestmark = pytest.mark.slow

ORIENTATION = 0x112  # of EXIF
STEPS, EVERY = 24, 6
LONG = 300_000  # milliseconds, for a training or twelve images on a busy machine


def write_photos(folder: Path) -> list[Path]:
    """Write twenty photos as people have them, two captions, and a film; return all, by name."""
    folder.mkdir()

    def photo(number: int, size: tuple[int, int] = (96, 80)) -> Image.Image:
        image = Image.effect_mandelbrot(size, (-2 + number / 20, -1.5, 1, 1.5), 20).convert("RGB")
        ImageDraw.Draw(image).ellipse((10 + number, 10, 40 + number, 50), fill=(250, 12 * number, 30))
        return image

    for number in range(12):
        photo(number).save(folder / f"IMG_{number:04}.jpg")
    for number in range(2):
        (folder / f"IMG_{number:04}.txt").write_text(f"a disc, photo {number}")
    for number, turned in enumerate((3, 6)):
        exif = Image.Exif()
        exif[ORIENTATION] = turned
        photo(12 + number).save(folder / f"turned {turned}.jpg", exif=exif)
    photo(14, (24, 20)).save(folder / "icon.png")
    photo(15).convert("L").save(folder / "grey.png")
    clear = photo(16)
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    clear.save(folder / "clear.png")
    whole = (folder / "IMG_0003.jpg").read_bytes()
    (folder / "half.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "a page.jpg").write_text("<html>404</html>")
    (folder / "empty.png").touch()
    (folder / "film.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    return sorted(folder.iterdir())


class FirstHour(Tab):
    """A tab in which nothing is refused."""

    def __init__(self, browser: Any, server: Server) -> None:
        super().__init__(browser, server)
        self.page.on(
            "response", lambda answer: answer.status >= 400 and self.bad.append(f"{answer.status} {answer.url}")
        )

    def look(self) -> None:
        """Assert of the screen as it is what must hold of every screen, wide and on a phone."""
        for width, height in reversed(SIZES.values()):
            self.page.set_viewport_size({"width": width, "height": height})
            self.fits()
        said = " ".join(self.page.locator("#message, .message, .bad, .warn, #problems").all_inner_texts())
        assert not re.search(r"--\w", said), said
        self.quiet()

    def choose(self, **options: object) -> None:
        """Fill options of a new run in, as the form has them."""
        for key, value in options.items():
            self.page.locator(f"[data-key={key}]").fill(str(value))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    for name in ("assets", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_tiny_captioner(tmp_path / "models/tiny")
    with serve(tmp_path) as running:
        yield running


def steps_of(run: Path) -> list[int]:
    """Return the steps that a run's metrics have, in their order."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [row["step"] for row in rows if "loss" in row]


def test_twenty_photos_become_a_lora(server: Server, browser: Any, tmp_path: Path) -> None:
    tab = FirstHour(browser, server)
    tab.open()
    images = make_dataset(tab, write_photos(tmp_path / "photos"))
    write_captions(tab, images)
    run = train(tab)
    kept = keep_the_best(tab, run)
    tab.look()
    with tab.page.expect_download() as download:
        tab.page.get_by_role("link", name="Download", exact=True).click()
    assert download.value.suggested_filename == "best disc.safetensors"
    download.value.save_as(tmp_path / "best disc.safetensors")
    assert (tmp_path / "best disc.safetensors").read_bytes() == kept
    load_in_diffusers(tmp_path / "best disc.safetensors")
    tab.close()


def make_dataset(tab: FirstHour, files: list[Path]) -> Path:
    """Drop files, see what is wrong with which, delete those that are broken; return the folder of the images."""
    page = tab.page
    tab.look()
    page.get_by_role("link", name="Add images").click()
    page.locator("#new [type=file]").set_input_files([str(file) for file in files])
    page.get_by_label("Name", exact=True).fill("my disc")
    page.get_by_label("Trigger word").fill("ohwx")
    page.get_by_label("Resolution").fill("64")
    tab.look()
    page.get_by_role("button", name="Make dataset").click()
    expect(page.locator("#message")).to_contain_text("film.mp4: files of this kind are not read here")
    expect(page.locator(".picture")).to_have_count(20)
    expect(page.locator(".finding", has_text="stops training")).to_contain_text("Unreadable or cut off: 3 images")
    for name, found in {
        "half.jpg": "broken",
        "turned 6.jpg": "turned upright (EXIF)",
        "icon.png": "too small",
        "clear.png": "no caption",
    }.items():
        expect(page.locator(".picture", has=page.get_by_text(name, exact=True))).to_contain_text(found)
    tab.look()
    page.get_by_role("button", name="Delete these 3").click()
    expect(page.get_by_text("17 of 17 images")).to_be_visible()
    expect(page.locator("#state .card")).to_have_count(0)
    expect(page.locator(".finding", has_text="stops training")).to_have_count(0)
    images = tab.server.folder / "datasets/my disc/images"
    assert not any((images / name).exists() for name in ("half.jpg", "a page.jpg", "empty.png"))
    assert len([*images.glob("*.jpg"), *images.glob("*.png")]) == 17
    return images


def write_captions(tab: FirstHour, images: Path) -> None:
    """Have the captioner write what is missing, and look at some first."""
    page = tab.page
    page.get_by_role("link", name="15 without a caption").click()
    form = page.locator("#captioner")
    form.get_by_role("button", name="Preview on 4 images").click()
    expect(page.locator(".captioned p:has(img)")).to_have_count(4)
    expect(page.locator("#captioning .bar")).to_have_count(0)
    assert len(list(images.glob("*.txt"))) == 2
    form.get_by_role("button", name="Write", exact=True).click()
    expect(page.locator("#captioning .good").first).to_have_text("15 captions written.")
    captions = {path.stem: path.read_text() for path in images.glob("*.txt")}
    assert len(captions) == 17
    assert captions["IMG_0001"] == "a disc, photo 1"
    assert set(captions["icon"].removeprefix("ohwx, ").split()) <= set(WORDS)
    expect(page.get_by_label("Caption of icon.png", exact=True)).to_have_value(captions["icon"])
    expect(page.locator("#state .card")).to_have_count(0)
    tab.look()


def train(tab: FirstHour) -> Path:
    """Choose the built-in model for the dataset and train, with a stop in between; return the run's folder."""
    page = tab.page
    page.get_by_role("link", name="Train on this").click()
    built_in = page.locator("#models tr", has_text="tiny-flux").first
    tab.look()
    built_in.get_by_role("button").click()
    expect(page.locator("#against")).to_contain_text("Complete")
    tab.choose(max_train_steps=STEPS, save_every_n_steps=EVERY, sample_prompts="ohwx, a disc --w 64 --h 64 --s 2")
    expect(page.locator("#text")).to_have_value(re.compile("sample_prompts"))
    expect(page.locator("#against")).to_contain_text("Complete")
    tab.look()
    page.locator("#start").click()
    page.wait_for_url("**/run?path=*")
    run = Path(parse_qs(urlsplit(page.url).query)["path"][0])
    until(lambda: (run / ".preparing.json").is_file())
    page.reload()
    before = page.get_by_role("list", name="Before the first step").get_by_role("listitem")
    expect(before.last).to_be_visible()
    tab.look()
    until(lambda: len(steps_of(run)) >= EVERY)
    page.get_by_role("button", name="Stop").click()
    state = page.locator("#overview .tag").first
    expect(state).to_have_text("stopped")
    assert len(steps_of(run)) < STEPS
    tab.look()
    page.get_by_role("button", name="Continue from").click()
    expect(state).to_have_text("done", timeout=LONG)
    assert steps_of(run) == list(range(1, STEPS + 1))
    return run


def keep_the_best(tab: FirstHour, run: Path) -> bytes:
    """Compare the four saved steps, keep one, delete the others; return what the kept file holds."""
    page = tab.page
    page.get_by_role("link", name="Which one is best?").click()
    tab.look()
    names = page.locator("label:has([name=saved]:checked)").all_inner_texts()
    steps = [int(re.findall(r"step (\d+)", name)[0]) for name in names]
    assert set(range(EVERY, STEPS + 1, EVERY)) <= set(steps)  # and where it was stopped
    assert len(steps) == len(set(steps))
    page.get_by_label("Width").fill("64")
    page.get_by_label("Height").fill("64")
    page.get_by_label("Steps", exact=True).fill("2")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(page.locator("#result .tag").first).to_have_text("done", timeout=LONG)
    tab.look()
    saved = page.locator("#saved")
    chosen = Path(saved.get_by_label("Saved step").input_value())
    learned = load_file(chosen)
    expect(saved.get_by_role("button", name="Delete")).to_have_count(0)  # none is kept yet
    saved.get_by_label("Name to keep it by").fill("best disc")
    saved.get_by_role("button", name="Keep this one").click()
    expect(page.locator("#message")).to_contain_text("best disc.safetensors")
    saved.get_by_label("the final one too").check()
    saved.get_by_role("button", name="Delete the other checkpoints").click()
    expect(saved).to_have_count(0)
    (kept,) = run.glob("*.safetensors")
    assert kept.name == "best disc.safetensors"
    assert all(part.equal(learned[name]) for name, part in load_file(kept).items())
    page.reload()  # what was generated stays, although the files have other names
    expect(page.locator("button.shot").first).to_be_visible()
    tab.open("/trash")
    expect(page.locator("main")).to_contain_text(".safetensors")
    tab.look()
    tab.open(f"/run?path={run}")
    return kept.read_bytes()


def load_in_diffusers(file: Path) -> None:
    """Assert that diffusers reads a LoRA whole, and that it changes the model."""
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(ROOT / "assets/tiny-flux")
    pipeline.load_lora_weights(file.parent, weight_name=file.name)
    parts = [part for name, part in pipeline.transformer.named_parameters() if "lora_B" in name]
    assert len(parts) == sum("lora_B" in name for name in load_file(file))
    assert all(torch.count_nonzero(part) for part in parts)
