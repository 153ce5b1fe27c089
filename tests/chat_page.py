"""A server of ``chat.py --web``, a headless Chromium, and the page in the words of one who uses it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="gradio is not installed (make setup-web)")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (requirements-web-dev.txt)")
expect = playwright.expect

ROOT = Path(__file__).resolve().parents[1]
WAIT = 30_000  # milliseconds; every step takes a fraction of a second on a quiet machine
_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in _NAMES if (path := shutil.which(name))), "")


@contextmanager
def serve_chat(*words: str) -> Iterator[str]:
    """Yield the address of a server on a free port, which may reach nothing but this machine.

    Raises:
        AssertionError: it does not start, does not end on Ctrl-C, or something failed in it.
    """
    command = [sys.executable, str(ROOT / "tools/chat.py"), "--web", *words]
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = os.environ | nowhere | {"OMP_NUM_THREADS": "1", "no_proxy": "", "NO_PROXY": ""}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with open(log, "w") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            server = subprocess.Popen(command, env=environment, start_new_session=True, **streams)  # type: ignore[call-overload]
        try:
            limit = time.monotonic() + 120
            while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < limit, log.read_text()
                time.sleep(0.1)
            yield found[0]
            os.kill(server.pid, signal.SIGINT)
            assert server.wait(timeout=30) == 0, log.read_text()
            assert "Traceback" not in log.read_text(), log.read_text()
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


@contextmanager
def open_browser() -> Iterator[Any]:
    """Yield the system's Chromium, headless."""
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield running
        running.close()


def words(text: str) -> str:
    """Return ``text`` as HTML shows it, runs of blanks as one."""
    return " ".join(text.split())


class Tab:
    """The page in a tab, in the words of one who uses it."""

    def __init__(self, browser: Any, address: str, width: int = 1100, height: int = 900) -> None:
        self.page = browser.new_page()
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.set_default_timeout(WAIT)
        self.elsewhere: list[str] = []
        self.page.on("request", lambda request: request.url.startswith(address) or self.elsewhere.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("#message textarea")

    def send(self, text: str) -> None:
        self.page.fill("#message textarea", text)
        self.page.press("#message textarea", "Enter")

    def answers(self) -> list[str]:
        return [words(text) for text in self.page.locator("#talk [data-testid=bot]").all_inner_texts()]

    def wait_idle(self) -> None:
        expect(self.page.locator("#stop")).to_be_disabled(timeout=WAIT)
        expect(self.page.locator("#send")).to_be_enabled(timeout=WAIT)

    def set_number(self, name: str, value: float) -> None:
        self.page.fill(f"#{name} input[type=number]", str(value))
        self.page.press(f"#{name} input[type=number]", "Tab")

    def choose(self, name: str, value: str) -> None:
        self.page.click(f"#{name} input")
        self.page.click(f'[role=option]:has-text("{value}")')

    def status(self) -> str:
        return self.page.inner_text("#status")
