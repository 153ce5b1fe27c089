"""A server of the page with folders of its own, a headless Chromium, and a tab that notices what must not happen."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from tests.web import forked_page

pytest.importorskip("uvicorn", reason="the page's packages are not installed (make setup-web)")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (requirements/web-dev.txt)")
expect = playwright.expect

ROOT = Path(__file__).resolve().parents[2]
WAIT = 60_000  # milliseconds; every step takes a fraction of a second on a quiet machine
expect.set_options(timeout=WAIT)
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
SIZES = {"wide": (1280, 900), "phone": (390, 844)}


class Server:
    """A running page."""

    def __init__(self, process: forked_page.Page, address: str, folder: Path) -> None:
        self.process, self.address, self.folder = process, address, folder

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def kill(self) -> None:
        """Kill the page's process alone, as a crash does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def serve(folder: Path, *words: str, files: int | None = None, seconds: float | None = None) -> Iterator[Server]:
    """Yield a page whose working directory is ``folder``, with ``output`` in it and ``words`` on its command line.

    ``files``: how many descriptors it may have; ``seconds``: how long it waits for what a client owes.

    It may reach nothing but this machine. Its jobs' processes are killed at the end.
    """
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = os.environ | nowhere | {"OMP_NUM_THREADS": "1", "no_proxy": "", "NO_PROXY": ""}
    log = folder / "page.log"
    log.unlink(missing_ok=True)
    process = forked_page.start(["--port", "0", *words], folder, environment, files, seconds)
    try:
        limit = time.monotonic() + 60
        while not (log.exists() and (found := re.search(r"http://[\d.]+:\d+", log.read_text()))):
            assert process.poll() is None, log.read_text() if log.exists() else "it did not start"
            assert time.monotonic() < limit
            time.sleep(0.05)
        yield Server(process, found[0].replace("0.0.0.0", "127.0.0.1"), folder)
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        _end_jobs(folder / "output/.tandem")


def _end_jobs(state: Path) -> None:
    """End all jobs, and wait until nobody writes into their folders any more."""
    from library.folder_lock import hold
    from library.web.jobs import Jobs

    jobs, limit = Jobs(state), time.monotonic() + 60
    while going := [job for job in jobs.all() if not job.is_over]:
        assert time.monotonic() < limit, going
        for job in going:
            jobs.stop(job.id, again=True)
        time.sleep(0.05)
    if jobs.queue_lock.exists():
        with hold(jobs.queue_lock, seconds=60):
            pass


def request(
    server: Server, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, http.client.HTTPMessage, str]:
    """Return status, headers and text of a request as a browser could send it."""
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=30)
    connection.request(method, path, body, headers or {})
    got = connection.getresponse()
    return got.status, got.headers, got.read().decode(errors="replace")


def get(server: Server, path: str) -> tuple[int, str]:
    """Return status and text of a visit."""
    status, _, text = request(server, "GET", path)
    return status, text


def post(server: Server, path: str, /, **form: str) -> tuple[int, str]:
    """Return status and text of a form that the page's own scripts could send."""
    kind = {"content-type": "application/x-www-form-urlencoded", "hx-request": "true"}
    status, _, text = request(server, "POST", path, urlencode(form), kind)
    return status, text


def until(true: Callable[[], Any], seconds: float = 200) -> Any:
    """Return what ``true`` answers once it is true."""
    end = time.monotonic() + seconds
    while not (answer := true()):
        assert time.monotonic() < end, "did not come"
        time.sleep(0.1)
    return answer


@contextmanager
def open_browser() -> Iterator[Any]:
    """Yield the system's Chromium, headless."""
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield running
        running.close()


class Tab:
    """A tab on the page that notes requests to elsewhere, errors on the console, and dialogs of scripts.

    ``quiet`` asserts that there were none; answers that refuse (4xx) may be meant.
    """

    def __init__(self, browser: Any, server: Server, size: str = "wide", scheme: str = "light") -> None:
        width, height = SIZES[size]
        self.server = server
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT)
        self.bad: list[str] = []
        self.agrees = True  # to what the page asks
        self.page.on("request", lambda request: self._notice(request.url))
        self.page.on("console", lambda said: said.type == "error" and self._notice_error(said.text))
        self.page.on("pageerror", lambda error: self.bad.append(str(error)))
        self.page.on("dialog", self._notice_dialog)

    def _notice(self, url: str) -> None:
        if not url.startswith((self.server.address, "data:", "blob:")):
            self.bad.append(url)

    def _notice_dialog(self, dialog: Any) -> None:
        if dialog.type == "confirm" and dialog.message.startswith(("End ", "Delete ")):  # what the page asks
            dialog.accept() if self.agrees else dialog.dismiss()
        else:
            self.bad.append(f"dialog {dialog.message}")
            dialog.dismiss()

    def _notice_error(self, text: str) -> None:
        if "status of 4" not in text:  # an answer that refuses is shown on the page
            self.bad.append(text)

    def open(self, path: str = "/") -> None:
        self.page.goto(self.server.address + path)

    def fits(self) -> None:
        """Assert that nothing sticks out at the side: the page itself does not scroll sideways."""
        self.page.wait_for_load_state()  # a click on a page that is only half there does nothing
        over = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert over <= 0, f"{self.page.url}: {over} pixels too wide"

    def quiet(self) -> None:
        assert not self.bad, self.bad

    def close(self) -> None:
        self.quiet()
        self.context.close()
