"""Captions that a model writes, in the browser: tried first, written by a job, taken back."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from library.web.jobs import Jobs
from tests.tiny_captioner import WORDS, write_tiny_captioner
from tests.web.page import Server, expect, post, serve

pytestmark = pytest.mark.slow

TOML = """[[datasets]]
resolution = 64
  [[datasets.subsets]]
  image_dir = "images"
  caption_extension = ".txt"
  trigger_word = "ohwx"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "datasets/cats/images").mkdir(parents=True)
    for n in range(6):
        picture = Image.effect_mandelbrot((90 + 20 * n, 120), (-2, -1.5, 1 + n / 9, 1.5), 20)
        picture.convert("RGB").save(folder / f"datasets/cats/images/{n}.png")
    (folder / "datasets/cats/images/broken.png").write_bytes(b"none")
    (folder / "datasets/cats/images/5.txt").write_text("mine")
    (folder / "datasets/cats/dataset.toml").write_text(TOML)
    write_tiny_captioner(folder / "models/tiny")
    with serve(folder) as running:
        yield running


def texts_of(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.txt"))}


def test_captions_are_previewed_written_and_undone(server: Server, tab: Any) -> None:
    folder, page = server.folder / "datasets/cats", tab.page
    tab.open(f"/data?{urllib.parse.urlencode({'dataset': folder / 'dataset.toml'})}")
    page.get_by_role("link", name="Write captions", exact=True).click()
    form = page.locator("#captioner")
    expect(form.locator("[name=model]")).to_have_value("models/tiny")
    expect(form.locator("[name=prefix]")).to_have_value("ohwx")
    expect(form.locator("[name=which] option").first).to_have_text("images without a caption (6)")
    form.locator("[name=prompt]").fill("What is it?")
    form.get_by_role("button", name="Preview on 4 images").click()
    tried = page.locator(".captioned p:has(img)")
    expect(tried).to_have_count(4)
    expect(page.locator("#captioning .bar")).to_have_count(0)
    previewed = {line.removeprefix("ohwx, ") for line in tried.locator("ins").all_inner_texts()}
    assert all(set(line.split()) <= set(WORDS) for line in previewed)
    assert texts_of(folder / "images") == {"5": "mine"}
    tab.fits()

    form.get_by_role("button", name="Write", exact=True).click()
    expect(page.locator("#captioning .good").first).to_have_text("5 captions written.")
    expect(page.locator("#captioning .bad").first).to_contain_text("1 of 6 images left out")
    expect(page.locator("#captioning")).not_to_contain_text("--")
    written = texts_of(folder / "images")
    assert [*written] == list("012345")
    assert written["5"] == "mine"
    assert previewed <= {text.removeprefix("ohwx, ") for text in written.values()}
    undo = page.locator("#history [name=undo]")
    expect(undo).to_be_enabled()  # the screen has come anew
    expect(page.get_by_label("Caption of 1.png", exact=True)).to_have_value(written["1"])
    undo.click()
    expect(page.locator("#message")).to_contain_text("Undone: captions by models/tiny (ohwx, What is it?)")
    expect(page.get_by_label("Caption of 1.png", exact=True)).to_have_value("")
    assert texts_of(folder / "images") == {"5": "mine"}


@pytest.mark.parametrize(("model", "says"), [("/etc", "lies outside"), ("../x", "lies outside")])
def test_a_model_outside_of_the_folders_is_refused(model: str, says: str, server: Server) -> None:
    toml = str(server.folder / "datasets/cats/dataset.toml")
    status, text = post(server, "/data/captions", dataset=toml, model=model, prompt="", prefix="", which="all")
    assert status == 403
    assert says in text
    assert not any(f"--model={model}" in job.words for job in Jobs(server.output / ".tandem").all())
