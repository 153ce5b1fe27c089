"""Requests that are cut off: the page answers others, and says nothing about it."""

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
    "a body": HEAD.format(port="{port}", kind="application/x-www-form-urlencoded") + "text=1",
    "a file": HEAD.format(port="{port}", kind=MULTIPART) + '--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1',
    "a refused body": HEAD.replace("Host: 127", "Host: 128").format(port="{port}", kind=MULTIPART) + "--x",
}


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


def test_requests_cut_off_in_their_body_are_no_errors(server: Server) -> None:
    for half in [*HALVES.values()] * 70:
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
