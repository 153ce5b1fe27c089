"""Which files a request may touch, and which requests are answered at all."""

from __future__ import annotations

import hashlib
import http.client
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("starlette", reason="the page's packages are not installed (make setup-web)")

from starlette.requests import Request

from library.web.access import AllowedRoots, Refused
from library.web.site import Site
from tests.web.page import Server, request, serve
from tests.web.test_child import in_a_loop

ESCAPES = ["../secret.txt", "output/../../secret.txt", "output/link/secret.txt", "output/file_link", "~root/.bashrc",
           "/etc/passwd", "", "output\0/x", "output/" + "a" * 5000, "//etc/passwd", "file:///etc/passwd"]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an output folder from which two links lead out, to a secret beside it."""
    (tmp_path / "secret.txt").write_text("the secret")
    work = tmp_path / "work"
    (work / "output").mkdir(parents=True)
    (work / "output/inside.txt").write_text("within")
    (work / "output/link").symlink_to(tmp_path)
    (work / "output/file_link").symlink_to(tmp_path / "secret.txt")
    (work / "output/good_link").symlink_to(work / "output/inside.txt")
    monkeypatch.chdir(work)
    return work


@pytest.mark.parametrize("path", ESCAPES)
def test_a_path_outside_is_refused_in_one_line(here: Path, path: str) -> None:
    roots = AllowedRoots.of(["output"], [])
    with pytest.raises(Refused) as refusal:
        roots.find(path)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_a_path_inside_comes_back_resolved(here: Path) -> None:
    roots = AllowedRoots.of(["output"], [])
    for path in (
        "output/inside.txt",
        "output/../output/inside.txt",
        str(here / "output/inside.txt"),
        "output/good_link",
    ):
        assert roots.find(path) == (here / "output/inside.txt").resolve()
    assert roots.find("output/new/file.txt") == (here / "output/new/file.txt").resolve()


def test_data_folders_are_no_place_for_runs(here: Path) -> None:
    (here / "images").mkdir()
    roots = AllowedRoots.of(["output"], ["images"])
    assert roots.find("images/a.png") == (here / "images/a.png").resolve()
    with pytest.raises(Refused, match="output folders"):
        roots.find("images/run", output=True)


def test_a_configuration_that_names_files_outside_is_refused_wherever_it_says_so(here: Path) -> None:
    roots = AllowedRoots.of(["output"], [])
    for text in ("/etc/passwd", "../secret.txt", "~/models/x", "output/link/secret.txt"):
        for value in (text, [text], {"a": {"b": [text]}}):
            with pytest.raises(Refused, match="lies outside"):
                roots.refuse_paths_outside({"model": {"ae": value}}, "")
    roots.refuse_paths_outside({"name": "black-forest-labs/FLUX.1-dev", "prompt": "a cat, in rain", "n": 3}, "")


def test_a_folder_that_is_not_there_is_refused(here: Path) -> None:
    with pytest.raises(ValueError, match="images: no such folder"):
        AllowedRoots.of(["output"], ["images"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "secret.txt").write_text("the secret")
    (folder / "output/run").mkdir(parents=True)
    (folder / "output/run/evil.svg").write_text(
        "<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
    )
    (folder / "output/.tandem/jobs/1-a/report").mkdir(parents=True)
    (folder / "output/.tandem/jobs/1-a/report/evil.html").write_text("<script>fetch('/')</script>")
    (folder / "output/link").symlink_to(folder)
    (folder / "output/file_link").symlink_to(folder / "secret.txt")
    with serve(folder) as running:
        yield running


def answer(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
    """Return what a request with ``headers`` gets; a header's _ stands for -."""
    return request(server, method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "evil.example"}, 421),  # DNS rebinding
        ({"Host": "127.0.0.1"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}, 403),
        ({"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors"}, 403),  # another port of this machine
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}, 200),  # a link that was followed
        ({"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors"}, 200),
    ],
)
def test_requests_of_other_sites_are_refused(server: Server, headers: dict[str, str], status: int) -> None:
    assert answer(server, "/", **headers)[0] == status


@pytest.mark.parametrize("is_of_request", [True, False])
def test_only_what_a_request_lacks_is_said_to_be_missing_in_it(
    is_of_request: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    site = Site.of(AllowedRoots.of([tmp_path], []))
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "query_string": b"",
        "headers": [],
        "app": None,
    }
    (route,) = site.routes(
        {"/": lambda _, request, form: (request.query_params if is_of_request else dict[str, Any]())["look"]}
    )
    answer = in_a_loop(route.endpoint(Request(scope)))
    said = "is missing in the request; reload the screen" if is_of_request else "this is a bug of the page: KeyError"
    assert answer.status_code == (422 if is_of_request else 500)
    assert said in bytes(answer.body).decode()
    assert ("Traceback" in capfd.readouterr().err) != is_of_request


def test_a_form_of_another_site_changes_nothing_even_as_a_navigation(server: Server) -> None:
    status, _, _ = answer(server, "/", "POST", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")
    assert status == 403
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert answer(server, "/", method)[0] == 405


@pytest.mark.parametrize("path", ESCAPES)
def test_no_file_outside_is_sent(server: Server, path: str) -> None:
    status, _, text = answer(server, f"/file?path={quote(path, safe='')}")
    assert status == 403
    assert "the secret" not in text
    assert "root:" not in text
    for static in ("/static", "/vendor"):
        assert answer(server, f"{static}/../../../../etc/passwd")[0] in (403, 404)
        assert answer(server, f"{static}/..%2f..%2f..%2f..%2fetc/passwd")[0] in (403, 404)


def test_a_picture_or_report_with_a_script_runs_as_nobodys(server: Server) -> None:
    _, headers, _ = answer(server, "/file?path=output/run/evil.svg")
    assert "sandbox" in headers["content-security-policy"]
    assert "script-src" not in headers["content-security-policy"]
    _, headers, _ = answer(server, "/file?path=output/.tandem/jobs/1-a/report/evil.html")
    policy = headers["content-security-policy"]
    assert "sandbox allow-scripts" in policy
    assert "allow-same-origin" not in policy
    assert "default-src 'none'" in policy


def test_elsewhere_it_asks_for_the_token_that_it_prints(tmp_path: Path) -> None:
    with serve(tmp_path, "--host", "0.0.0.0") as running:
        assert answer(running, "/")[0] == 401
        assert answer(running, "/?token=wrong")[0] == 401
        assert answer(running, "/static/page.js")[0] == 401
        token = (tmp_path / "page.log").read_text().split("?token=")[1].split()[0]
        status, headers, _ = answer(running, f"/?token={token}")
        assert status == 303
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert answer(running, "/", Cookie=cookie.split(";")[0])[0] == 200
        assert answer(running, "/", Cookie=cookie.split(";")[0], Origin="http://evil.example")[0] == 403


def test_the_page_never_imports_torch(server: Server) -> None:
    answer(server, "/")
    libraries = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libc.so" in libraries
    assert "torch" not in libraries


ROOT = Path(__file__).resolve().parents[2]
VENDORED = ROOT / "assets/web"
# Names that are never loaded: of a namespace, and in the comment that says whose the script is.
_NAMES = {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}


def test_files_of_others_are_those_that_the_readme_lists() -> None:
    listed = dict(re.findall(r"^\| `([^`]+)` .* `([0-9a-f]{64})` \|$", (VENDORED / "README.md").read_text(), re.M))
    there = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in VENDORED.iterdir()}
    del there["README.md"]
    assert there == listed


def test_nothing_that_a_browser_gets_names_another_host() -> None:
    web = ROOT / "library/web"
    files = [
        *VENDORED.glob("*.js"),
        *VENDORED.glob("*.css"),
        *(web / "static").iterdir(),
        *(web / "templates").iterdir(),
    ]
    assert {"htmx.min.js", "uPlot.min.css", "page.js", "base.html"} <= {file.name for file in files}
    for file in files:
        text = file.read_text(encoding="utf-8")
        hosts = re.findall(r"(?:https?|wss?)://[\w./-]+|(?<=[\"'(`=])//\w[\w-]*\.[\w.-]+[\w/.-]*", text)
        assert set(hosts) <= _NAMES, f"{file.name}: {hosts}"
