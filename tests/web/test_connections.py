"""Requests that stop half-way: the page answers others, forgets these, and says nothing about it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette", reason="the page's packages are not installed (make setup-web)")

from tests.web.page import Server, get, serve

HOST = "Host: 127.0.0.1:{port}\r\n"
HEAD = "POST /new/start HTTP/1.1\r\n" + HOST + "Content-Length: 1000\r\nContent-Type: {kind}\r\n\r\n"
MULTIPART = "multipart/form-data; boundary=x"
HALVES = {
    "nothing": "",
    "a header": "GET / HTTP/1.1\r\nHost: 127",
    "a body": HEAD.format(port="{port}", kind="application/x-www-form-urlencoded") + "text=1",
    "a file": HEAD.format(port="{port}", kind=MULTIPART) + '--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1',
    "a refused body": HEAD.replace("Host: 127", "Host: 128").format(port="{port}", kind=MULTIPART) + "--x",
}


@pytest.fixture(scope="module", params=[64, 256])
def limited(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A page that may have only so many descriptors."""
    with serve(tmp_path_factory.mktemp("limited"), files=request.param) as running:
        yield running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("shared")) as running:
        yield running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serve(tmp_path) as running:
        yield running


def connect(server: Server, text: str) -> socket.socket:
    address = urlsplit(server.address)
    opened = socket.create_connection((address.hostname, address.port), timeout=30)
    opened.sendall(text.format(port=address.port).encode())
    return opened


def check(server: Server) -> None:
    """The page answers, and has written nothing but its address and how to end it."""
    began = time.monotonic()
    assert get(server, "/new")[0] == 200
    assert time.monotonic() - began < 10
    assert len((server.folder / "page.log").read_text().splitlines()) <= 2, (server.folder / "page.log").read_text()


@pytest.mark.parametrize("half", list(HALVES))
def test_three_hundred_half_sent_requests_leave_the_page_answering(limited: Server, half: str) -> None:
    opened = [connect(limited, HALVES[half]) for _ in range(300)]
    check(limited)
    for each in opened:
        each.close()
    check(limited)


def test_requests_cut_off_in_their_body_are_no_errors(server: Server) -> None:
    for half in [half for half in HALVES.values() if "POST" in half] * 70:
        connect(server, half).close()
    check(server)


CHUNKED = "POST /new/edit HTTP/1.1\r\n" + HOST + "Transfer-Encoding: chunked\r\nContent-Type: {kind}\r\n\r\n"


@pytest.mark.parametrize("kind", ["text/plain", MULTIPART])
@pytest.mark.parametrize("pause", [0, 0.5])
@pytest.mark.parametrize("rest", ["zz\r\n", "1\r\nabc\r\n", "0\r\n\r\nno request\r\n\r\n", "5\r\n--x\r\n\r\nzz\r\n"])
def test_requests_that_break_after_their_head_are_no_errors(shared: Server, rest: str, pause: float, kind: str) -> None:
    """Whether the rest comes before the page answers or after."""
    opened = connect(shared, CHUNKED.format(port="{port}", kind=kind) + ("" if pause else rest))
    time.sleep(pause)
    if pause:
        opened.sendall(rest.encode())
    answer = b""
    with suppress(ConnectionResetError):
        while got := opened.recv(65536):
            answer += got
    assert answer.startswith(b"HTTP/1.1 ")
    assert get(shared, "/new")[0] == 200
    lines = (shared.folder / "page.log").read_text().splitlines()[2:]
    assert set(lines) <= {"WARNING:  Invalid HTTP request received."}


def test_what_a_client_owes_has_a_deadline_and_a_steady_upload_has_none(tmp_path: Path) -> None:
    with serve(tmp_path, seconds=4) as server:
        _owe_and_upload(server)


def _owe_and_upload(server: Server) -> None:
    owing = {name: connect(server, half) for name, half in HALVES.items()}
    owing |= {f"slow {name}": connect(server, half) for name, half in HALVES.items() if half}
    long = HALVES["a file"].replace("Content-Length: 1000\r", "Content-Length: 1000000\r")
    steady = connect(server, long)
    for _ in range(26):  # deadline: 4 s for 16 KiB
        time.sleep(0.2)
        steady.sendall(b"x" * 2048)
        for name, each in owing.items():
            if "slow" in name:
                with suppress(OSError):  # it is closed at last
                    each.sendall(b"x")
    for each in owing.values():
        each.settimeout(0.5)
        with suppress(ConnectionError):
            while each.recv(4096):
                pass  # ends if the page has closed it; TimeoutError if not
    steady.settimeout(0.1)
    with pytest.raises(TimeoutError):
        steady.recv(1)
    steady.close()
    check(server)
