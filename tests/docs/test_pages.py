"""The pages hang together: links lead somewhere, and commands are written in one way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.runs import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("assets/*.md")])


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings as GitHub makes them: small letters, hyphens for spaces, numbers."""
    found: set[str] = set()
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        found.add(next(name for n in range(99) if (name := f"{slug}-{n}" if n else slug) not in found))
    return found


def links(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"(?:href|src)=\"([^\"]+)\"", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    for link in (link for link in links(page) if not re.match(r"[a-z]+:", link)):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_name_the_environment_that_setup_made(page: Path) -> None:
    command = re.compile(
        r"^ *(?:python (?!-m)|torchrun|accelerate launch) ?.*|`python (?:tools|bench|train_)", re.MULTILINE
    )
    assert command.findall(page.read_text(encoding="utf-8")) == []


def test_every_picture_is_shown() -> None:
    """One that no page shows grows old unseen."""
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page)}
    assert {picture for picture in (ROOT / "docs" / "images").iterdir() if picture not in shown} == set()
