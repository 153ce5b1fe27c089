"""The page of ``chat.py --web``, driven in a real headless Chromium against a server of its own.

Needs requirements-web.txt, requirements-web-dev.txt and a Chromium on this machine; make test-web installs the first
two and runs it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from library.llm.chat import Message, chat_tokens
from library.llm.generation import SamplingSettings, generate_tokens
from library.llm.tokenizers import load_tokenizer
from library.models.lm_files import load_lm
from tests.llm.talkers import write_chat_model, write_story_model

pytest.importorskip("gradio", reason="gradio is not installed (make setup-web)")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (requirements-web-dev.txt)")
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_CHROMIUM = next((path for name in _NAMES if (path := shutil.which(name))), "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not _CHROMIUM, reason="no chromium on this machine")]

ROOT = Path(__file__).resolve().parents[2]
WAIT = 30_000  # milliseconds; every step takes a fraction of a second on a quiet machine
ENDLESS = 60_000  # tokens: minutes


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("models")
    write_chat_model(top / "chat")
    write_story_model(top / "story", context=2 * ENDLESS)
    return top


@pytest.fixture(scope="module")
def address(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server on a free port, which may reach nothing but this machine."""
    log = tmp_path_factory.mktemp("server") / "log"
    sampling = ["--temperature", "0.8", "--max_new_tokens", str(ENDLESS)]
    command = [sys.executable, str(ROOT / "tools/chat.py"), "--models_dir", str(models), "--web", *sampling]
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = os.environ | nowhere | {"OMP_NUM_THREADS": "1"}
    with open(log, "w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        limit = time.monotonic() + 120
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < limit, log.read_text()
            time.sleep(0.1)
        yield found[0]
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(timeout=30) == 0  # Ctrl-C ends it in good order
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=_CHROMIUM, args=flags)
        yield running
        running.close()


class Tab:
    """The page in a tab, in the words of one who uses it."""

    def __init__(self, browser: object, address: str) -> None:
        self.page = browser.new_page(viewport={"width": 1100, "height": 900})  # type: ignore[attr-defined]
        self.page.set_default_timeout(WAIT)
        self.elsewhere: list[str] = []
        self.page.on("request", lambda request: request.url.startswith(address) or self.elsewhere.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("#message textarea")

    def send(self, text: str) -> None:
        self.page.fill("#message textarea", text)
        self.page.press("#message textarea", "Enter")

    def answers(self) -> list[str]:
        return [_words(text) for text in self.page.locator("#talk [data-testid=bot]").all_inner_texts()]

    def wait_idle(self) -> None:
        playwright.expect(self.page.locator("#stop")).to_be_disabled(timeout=WAIT)
        playwright.expect(self.page.locator("#send")).to_be_enabled(timeout=WAIT)

    def set_number(self, name: str, value: float) -> None:
        self.page.fill(f"#{name} input[type=number]", str(value))
        self.page.press(f"#{name} input[type=number]", "Tab")

    def choose(self, name: str, value: str) -> None:
        self.page.click(f"#{name} input")
        self.page.click(f'[role=option]:has-text("{value}")')

    def status(self) -> str:
        return self.page.inner_text("#status")


def _words(text: str) -> str:
    return " ".join(text.split())  # HTML shows runs of blanks as one


@pytest.fixture
def tab(browser: object, address: str) -> Iterator[Tab]:
    opened = Tab(browser, address)
    yield opened
    opened.page.close()


def expected(folder: Path, tokens: list[int], count: int) -> str:
    tokenizer = load_tokenizer(folder)
    settings = SamplingSettings(count, temperature=0, stop_tokens=tokenizer.stop_tokens)
    (made,) = generate_tokens(load_lm(folder, torch.float32), [tokens], settings)
    return _words(tokenizer.decode(made, skip_special=True))


def test_a_talk_from_streaming_to_another_model(tab: Tab, models: Path) -> None:
    tokenizer = load_tokenizer(models / "story")
    assert "chat talks in turns (template llama3)" in tab.page.inner_text("#introduction")

    tab.choose("model", "story")
    playwright.expect(tab.page.locator("#introduction")).to_contain_text("story is a base model", timeout=WAIT)
    playwright.expect(tab.page.locator("#system textarea")).to_be_disabled()
    tab.send("the cat")
    lengths: list[int] = []
    limit = time.monotonic() + WAIT / 1000
    while len(set(lengths)) < 4:  # the text grows before one's eyes
        lengths += [len(answer) for answer in tab.answers()]
        assert time.monotonic() < limit, lengths
        time.sleep(0.02)
    assert lengths == sorted(lengths)
    tab.page.click("#stop")
    tab.wait_idle()
    (stopped,) = tab.answers()
    count = int(re.match(r"(\d+) tokens in", tab.status())[1])  # type: ignore[index]
    assert 4 < count < ENDLESS
    assert len(stopped) >= lengths[-1]
    time.sleep(0.5)
    assert tab.answers() == [stopped]

    tab.page.click("#reset")
    playwright.expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(0)
    tab.set_number("temperature", 0)
    playwright.expect(tab.page.locator("#top_p input[type=number]")).to_be_disabled(timeout=WAIT)
    tab.set_number("max", 30)
    tab.send("the dog")
    playwright.expect(tab.page.locator("#status")).to_contain_text("cut off after 30 tokens", timeout=WAIT)
    tab.wait_idle()
    assert tab.answers() == [expected(models / "story", [tokenizer.bos, *tokenizer.encode("the dog")], 30)]

    tab.choose("model", "chat")
    playwright.expect(tab.page.locator("#introduction")).to_contain_text("talks in turns", timeout=WAIT)
    playwright.expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(0)  # a text is no conversation
    tab.page.fill("#system textarea", "be short")
    messages = [Message("system", "be short")]
    for i, question in enumerate(("what is RoPE?", "say it in Greek")):
        messages.append(Message("user", question))
        tab.send(question)
        playwright.expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(i + 1, timeout=WAIT)
        tab.wait_idle()
        answer = expected(models / "chat", chat_tokens(load_tokenizer(models / "chat"), messages)[0], 30)
        assert tab.answers()[i] == answer
        messages.append(Message("assistant", answer))
    known = int(re.search(r"(\d+) known", tab.status())[1])  # type: ignore[index]
    assert known > 20  # the first turn was not computed again
    assert tab.elsewhere == []  # no font, script or count of visitors from anywhere but here


def test_tabs_wait_for_each_other_and_a_closed_one_holds_nobody_up(
    browser: object, address: str, tab: Tab, models: Path
) -> None:
    other = Tab(browser, address)
    other.choose("model", "story")
    playwright.expect(other.page.locator("#introduction")).to_contain_text("story is a base model", timeout=WAIT)
    other.send("the cat")
    playwright.expect(other.page.locator("#talk [data-testid=bot]")).to_have_count(1, timeout=WAIT)
    other.set_number("temperature", 1)
    other.choose("model", "chat")  # not now
    playwright.expect(other.page.locator("body")).to_contain_text("an answer is being written; stop it", timeout=WAIT)
    tab.set_number("temperature", 0)
    tab.set_number("max", 30)
    tab.send("hello")
    playwright.expect(tab.page.locator("#status")).to_contain_text("another tab is being answered", timeout=WAIT)
    other.page.close()
    playwright.expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(1, timeout=WAIT)
    tab.wait_idle()
    tokens = chat_tokens(load_tokenizer(models / "chat"), [Message("user", "hello")])[0]
    assert tab.answers() == [expected(models / "chat", tokens, 30)]


def test_a_message_that_cannot_be_is_given_back(tab: Tab) -> None:
    tab.send("the cat sat on the mat " * 200)
    playwright.expect(tab.page.locator("#status")).to_contain_text("shorten the message", timeout=WAIT)
    tab.wait_idle()
    assert tab.answers() == []
    assert tab.page.input_value("#message textarea").startswith("the cat sat")
