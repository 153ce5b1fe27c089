"""What the page sends to a browser: others' scripts are those that were published, and no host is named."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

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
