"""One browser for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from tests.web.page import CHROMIUM, open_browser

    if not CHROMIUM:
        pytest.skip("no chromium on this machine")
    with open_browser() as running:
        yield running


@pytest.fixture(params=["wide", "phone"])
def size(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tab(browser: Any, server: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A tab on the page, of each size where a test asks for ``size``."""
    from tests.web.page import Tab

    opened = Tab(browser, server, request.getfixturevalue("size") if "size" in request.fixturenames else "wide")
    yield opened
    opened.close()
