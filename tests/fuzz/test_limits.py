"""What fuzzing is there to find, planted: the suite must find it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from library.errors import UserError
from tests import fuzz
from tests.fuzz import harmless
from tests.fuzz.test_tools import NEEDS_LINUX, check


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits, so that what oversteps them is quick."""
    monkeypatch.setattr(fuzz, "CPU_SECONDS", 0.5)
    monkeypatch.setattr(fuzz, "WALL_SECONDS", 3.0)
    monkeypatch.setattr(fuzz, "MEBIBYTES", 100)


def spin(swallow: bool = False) -> None:
    while True:
        try:
            sum(range(1000))
        except Exception:
            if swallow:  # as code does that takes any error for a damaged file
                return
            raise


def refuse(text: str = "") -> None:
    raise UserError(text)


@NEEDS_LINUX
@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: [][0], "IndexError"),
        (lambda: json_of_depth(100_000), "RecursionError"),
        (spin, "not done after 0.5 s of computing"),
        (lambda: spin(swallow=True), "not done after 0.5 s of computing"),
        (lambda: time.sleep(60), "3 s in all"),
        (lambda: len(bytearray(os.urandom(1)) * (200 << 20)), r"took \d+ MiB"),
        (refuse, "refused without a word"),
        (lambda: refuse("Traceback (most recent call last)"), "Traceback"),
    ],
    ids=["index", "depth", "loop", "loop that is swallowed", "waiting", "memory", "no message", "traceback"],
)
def test_a_fault_in_a_reader_is_found(call: Callable[[], object], found: str) -> None:
    with pytest.raises((AssertionError, LookupError, RecursionError)) as caught:
        harmless(call)
    assert found in f"{caught.type.__name__} {caught.value}" or caught.match(found)


def json_of_depth(levels: int) -> object:
    return json_of_depth(levels - 1)


def test_what_stays_within_the_limits_is_taken_and_leaves_no_timer_behind() -> None:
    assert harmless(lambda: 3) == 3
    assert harmless(refuse, "no") is None
    time.sleep(0.1)


@NEEDS_LINUX
@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("print('Traceback', file=sys.stderr)", "Traceback"),
        ("sys.exit(1)", "assert 1 in"),
        ("sys.exit(2)", "assert ''"),
        ("sys.exit('error: one' + chr(10) + 'two')", "assert 1 in"),
        ("print(chr(27) + '[31m')", "STEERS|search"),
        ("while True: pass", "not done after"),
        ("open('pipe').read()", "not done after"),
        ("x = bytearray(b'x') * (300 << 20); time.sleep(1)", "MiB"),
        ("open('../beside', 'w')", "wrote beside its folder"),
        ("os.rename('a', 'pipe')", "put a file in the pipe's place"),
    ],
)
def test_a_fault_in_a_tool_is_found(tmp_path: Path, body: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "CPU_SECONDS", 2.0)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a").touch()
    os.mkfifo(tmp_path / "x" / "pipe")
    script = tmp_path / "x" / "tool.py"
    script.write_text(f"import os, sys, time\n{body}\n")
    with pytest.raises(AssertionError, match=found):
        check("planted", script, [], tmp_path / "x")
