"""Draw docs/images/page_*.png and chat_page.png: the page's screens over the demo, and a talk with a tiny model.

    make demo && python -m tests.dev.draw_page [NAME ...]

Takes the demo's run as it is; a queue, another run, a report and a painting are made beside it, in a folder that goes.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image

from library.web.jobs import Jobs
from tests.llm.talkers import write_chat_model, write_story_model
from tests.web.page import ROOT, SIZES, Server, Tab, expect, open_browser, serve

IMAGES = ROOT / "docs/images"
TAUGHT = (
    (
        "What is grouped-query attention?",
        "Several heads of queries share one head of keys and values. Llama 3 has 32 of the first, 8 of the second: "
        "its cache is a quarter of what it would be.",
    ),
    (
        "How is it called in PyTorch?",
        "F.scaled_dot_product_attention(q, k, v, enable_gqa=True). No key is copied.",
    ),
)
_MINUTES = 600_000  # milliseconds, for what a child computes
_LORA = "output/demo/demo.safetensors"


def runs(tab: Tab) -> None:
    """A run that goes on, two that are over, two that wait."""
    output = tab.server.output
    jobs = Jobs(output / ".tandem")
    lines = (output / "demo/metrics.jsonl").read_text().splitlines()
    for name, steps in (("zorbo_rank8", 780), ("zorbo_prodigy", 412)):
        (output / name).mkdir()
        (output / name / "metrics.jsonl").write_text("\n".join(lines[: steps + 7]) + "\n")
        shutil.copy(output / "demo/config.toml", output / name / "config.toml")
    wait = "import time; time.sleep(900)"
    jobs.add("train", "zorbo_prodigy", ["-c", wait], queued=True, output=str(output / "zorbo_prodigy"))
    for name in ("house_style", "zorbo_rank32"):
        jobs.add("train", name, ["-c", wait], queued=True, output=str(output / name))
    tab.open("/")
    expect(tab.page.locator(".tag.running").first).to_be_visible()


def run(tab: Tab) -> None:
    """The demo's curves and samples."""
    tab.open("/run?path=output/demo")
    expect(tab.page.locator("canvas").first).to_be_visible()


def new_run(tab: Tab) -> None:
    """The form over the demo's configuration."""
    tab.open("/new?config=configs/demo.toml")


def data(tab: Tab) -> None:
    """The demo's images."""
    tab.open("/data?dataset=assets/demo_dataset/dataset.toml")
    expect(tab.page.locator("main img").first).to_be_visible(timeout=_MINUTES)


def report(tab: Tab) -> None:
    """The demo's LoRA on a plain cast of its base."""
    tab.open("/precision?" + urlencode({"lora": _LORA}))
    tab.page.locator("main form button.first").first.click()
    expect(tab.page.locator(".verdict").first).to_be_visible(timeout=_MINUTES)
    expect(tab.page.locator(".tag.running")).to_have_count(0, timeout=_MINUTES)


def paint(tab: Tab) -> None:
    """The demo's prompts at several strengths."""
    tab.open("/generate?" + urlencode({"lora": _LORA}))
    tab.page.locator("main form button.first").first.click()
    expect(tab.page.locator(".tag.good, .tag.done").first).to_be_visible(timeout=_MINUTES)


def chat(tab: Tab) -> None:
    """A talk with a model that was taught these answers."""
    write_chat_model(tab.server.folder / "models/llama-tiny-chat", context=8192, pairs=TAUGHT, steps=200)
    write_story_model(tab.server.folder / "models/llama-tiny-stories")
    tab.open("/chat")
    tab.page.select_option("[name=model]", "models/llama-tiny-chat")
    tab.page.click("#load")
    expect(tab.page.locator("#send")).to_be_enabled(timeout=_MINUTES)
    for question, _ in TAUGHT:
        tab.page.fill("#prompt", question)
        tab.page.press("#prompt", "Enter")
        expect(tab.page.locator("#status")).to_contain_text("tokens in", timeout=_MINUTES)
        expect(tab.page.locator("#stop")).to_be_disabled()


# name -> what to do, colours, the window's height
SCREENS: dict[str, tuple[Callable[[Tab], None], str, int]] = {
    "page_run": (run, "light", 1500),
    "page_data": (data, "light", 1300),
    "page_precision": (report, "light", 1400),
    "page_generate": (paint, "dark", 900),
    "page_new_run": (new_run, "dark", 1000),
    "page_runs": (runs, "light", 560),
    "chat_page": (chat, "light", 900),
}


def draw(browser: Any, server: Server, name: str) -> None:
    """Draw one screen."""
    screen, scheme, height = SCREENS[name]
    tab = Tab(browser, server, scheme=scheme)
    tab.page.set_viewport_size({"width": SIZES["wide"][0], "height": height})
    screen(tab)
    tab.page.wait_for_timeout(1500)  # curves and pictures
    path = IMAGES / f"{name}.png"
    tab.page.screenshot(path=path)
    tab.context.close()
    Image.open(path).convert("RGB").quantize(192).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size // 1024} KiB")


def main() -> None:
    """Draw all screens, or those that are named."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        for name in ("assets", "configs"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".tandem_cache"))
        shutil.copytree(ROOT / "output/demo", folder / "output/demo")
        (folder / "models").mkdir()
        with serve(folder) as server, open_browser() as browser:
            for name in sys.argv[1:] or SCREENS:
                draw(browser, server, name)


if __name__ == "__main__":
    main()
