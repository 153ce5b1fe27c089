"""A server on this machine that speaks what ``huggingface_hub`` asks of the hub: listings, metadata, files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHA = "0123456789abcdef0123456789abcdef01234567"  # of the one commit that every repository has


@dataclass
class Hub:
    """What is published, and what was asked for.

    Attributes:
        models: name -> folder.
        gated: names whose files are given to nobody.
        fetched: names of the files that were downloaded, in order.
        breaks_after: bytes of a file after which the connection is cut, once; 0 for never.
    """

    models: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)
    breaks_after: int = 0
    url: str = ""
    ranges: list[str] = field(default_factory=list)


def files_of(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve ``hub`` at ``hub.url`` inside the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            name = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2])
            folder = hub.models.get(name)
            if folder is None:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
            elif path.startswith("/api/models/"):
                self._list(name, folder, "/tree/" in path, with_body)
            elif name in hub.gated:
                self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body)
            else:
                self._file(folder, path.split(f"{name}/resolve/")[1].partition("/")[2], with_body)

        def _list(self, name: str, folder: Path, as_tree: bool, with_body: bool) -> None:
            found = files_of(folder)
            tree = [
                {"type": "file", "path": file, "size": path.stat().st_size, "oid": _etag(path)}
                for file, path in found.items()
            ]
            siblings = [{"rfilename": file} for file in found]
            info = {"id": name, "sha": SHA, "siblings": siblings, "private": False, "gated": False, "tags": []}
            self._send(200, json.dumps(tree if as_tree else info).encode(), {}, with_body)

        def _file(self, folder: Path, file: str, with_body: bool) -> None:
            path = files_of(folder).get(file)
            if path is None:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA}, with_body)
                return
            data, headers = path.read_bytes(), {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": SHA}
            status = 200
            if asked := self.headers.get("Range"):
                hub.ranges.append(asked)
                first = int(asked.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
                data, status = data[first:], 206
            if with_body:
                hub.fetched.append(file)
                if 0 < hub.breaks_after < len(data):
                    cut, hub.breaks_after = hub.breaks_after, 0
                    self.send_response(status)
                    for key, value in {**headers, "Content-Length": str(len(data))}.items():
                        self.send_header(key, value)
                    self.end_headers()
                    self.wfile.write(data[:cut])
                    self.wfile.flush()
                    self.close_connection = True
                    self.connection.close()
                    return
            self._send(status, data, headers, with_body)

        def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
