"""What fuzzing is there to find, planted: the suite must find it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from library.errors import UserError
from tests import fuzz
from tests.fuzz import harmless
from tests.fuzz.test_tools import NEEDS_LINUX, check

# The one limit that a case is to overstep, lowered so that it is quick; the others leave a busy machine its time.
# Memory is overstepped by far: what earlier tests left may be given back meanwhile.
COMPUTING, WAITING, MEMORY = ("CPU_SECONDS", 0.5), ("WALL_SECONDS", 1.0), ("MEBIBYTES", 100)


def spin() -> None:
    while True:
        try:
            sum(range(1000))
        except Exception:  # as code does that takes any error for a damaged file
            return


def refuse(text: str = "") -> None:
    raise UserError(text)


@NEEDS_LINUX
@pytest.mark.parametrize(
    ("call", "limit", "found"),
    [
        (lambda: [][0], None, "IndexError"),
        (lambda: json_of_depth(100_000), None, "RecursionError"),
        (spin, COMPUTING, "not done after 0.5 s of computing"),
        (lambda: time.sleep(60), WAITING, "1 s in all"),
        (lambda: len(bytearray(os.urandom(1)) * (600 << 20)), MEMORY, r"took \d+ MiB"),
        (refuse, None, "refused without a word"),
        (lambda: refuse("Traceback (most recent call last)"), None, "Traceback"),
    ],
    ids=["index", "depth", "loop that is swallowed", "waiting", "memory", "no message", "traceback"],
)
def test_a_fault_in_a_reader_is_found(
    call: Callable[[], object], limit: tuple[str, float] | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit:
        monkeypatch.setattr(fuzz, *limit)
    with pytest.raises((AssertionError, LookupError, RecursionError)) as caught:
        harmless(call)
    assert re.search(found, f"{caught.type.__name__} {caught.value}")


def json_of_depth(levels: int) -> object:
    return json_of_depth(levels - 1)


def test_what_stays_within_the_limits_is_taken_and_leaves_no_timer_behind() -> None:
    assert harmless(lambda: 3) == 3
    assert harmless(refuse, "no") is None
    assert signal.getitimer(signal.ITIMER_PROF) == signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@NEEDS_LINUX
@pytest.mark.parametrize(
    ("body", "limit", "found"),
    [
        ("1 / 0", None, "ZeroDivisionError"),
        ("print('Traceback', file=sys.stderr)", None, "Traceback"),
        ("sys.exit(2)", None, "assert ''"),
        ("sys.exit('error: one' + chr(10) + 'two')", None, "assert 1 in"),
        ("print(chr(27) + '[31m')", None, "STEERS|search"),
        ("while True: pass", ("CPU_SECONDS", 1.0), "not done after"),
        ("open('pipe').read()", WAITING, "not done after"),
        ("x = bytearray(b'x') * (300 << 20); time.sleep(1)", MEMORY, "MiB"),
        ("open('../beside', 'w')", None, "wrote beside its folder"),
        ("os.rename('a', 'pipe')", None, "put a file in the pipe's place"),
    ],
)
def test_a_fault_in_a_tool_is_found(
    tmp_path: Path, body: str, limit: tuple[str, float] | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit:
        monkeypatch.setattr(fuzz, *limit)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a").touch()
    os.mkfifo(tmp_path / "x" / "pipe")
    script = tmp_path / "x" / "tool.py"
    script.write_text(f"import os, sys, time\n{body}\n")
    with pytest.raises(AssertionError, match=found):
        check("planted", script, [], tmp_path / "x")
