"""Input nobody would write on purpose: it is taken, or refused with a ``UserError``; never a traceback, never a hang.

``make test`` tries a few hundred cases, the same every time; ``make fuzz`` sets ``FUZZ_CASES`` and tries thousands, new
ones each time. A case is one call of :func:`harmless`, or a tool in a process of its own (``test_tools.py``); how many
there were is printed at the end, and the seed of the tools' cases, which ``FUZZ_SEED`` sets. Hypothesis prints its own.
Every case computes for ten seconds at most, waits for two minutes at most (the machine may be busy), and takes a
gibibyte of memory at most; ``test_limits.py`` sees to it that what does not is found.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings

from library.errors import UserError

CASES = int(os.environ.get("FUZZ_CASES", "300"))
SEED = int(os.environ.get("FUZZ_SEED") or (secrets.randbelow(10**9) if "FUZZ_CASES" in os.environ else 0))
CPU_SECONDS, WALL_SECONDS, MEBIBYTES = 10.0, 120.0, 1024
outcomes: Counter[str] = Counter()


def share_of_cases(share: float) -> settings:
    """Return settings that try this share of all cases; decorates a test."""
    return settings(
        max_examples=max(1, round(CASES * share)),
        derandomize="FUZZ_CASES" not in os.environ,
        deadline=None,  # the machine's load decides; a hang ends at pytest's own time limit
        database=None,
        phases=[Phase.generate],  # a case as it was found says enough; making it smaller takes minutes
        suppress_health_check=list(HealthCheck),
    )


def harmless(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call what must not fail but by a ``UserError`` with a message; return its result, None if it was refused."""
    message = ""
    try:
        with bounded():
            result = call(*arguments, **keywords)
    except UserError as error:
        message = str(error) or "nothing"
    if message:
        assert message != "nothing", "refused without a word"
        assert "Traceback" not in message, message
        outcomes["refused"] += 1
        return None
    outcomes["taken"] += 1
    return result


@contextmanager
def bounded() -> Iterator[None]:
    """Let what is done here fail if it takes too long or too much memory; the latter where Linux tells it."""
    late: list[str] = []

    def stop(*_: object) -> None:
        late.append(f"not done after {CPU_SECONDS:g} s of computing or {WALL_SECONDS:g} s in all")
        raise AssertionError(late[0])

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, CPU_SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, WALL_SECONDS))
    before = _resident(reset=True)
    handlers = [signal.signal(number, stop) for number, _, _ in timers]
    try:
        for _, timer, seconds in timers:
            signal.setitimer(timer, seconds, 1.0)  # once more each second, should an "except Exception" take it
        yield
    finally:
        for (number, timer, _), handler in zip(timers, handlers, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
        more = (_resident() - before) / 1024
        assert not late, late[0]  # also if whoever was stopped took that for a damaged file
        assert more < MEBIBYTES, f"took {more:.0f} MiB"


def _resident(reset: bool = False) -> int:
    """Return the KiB that this process has in memory, ``reset``, or the most that it had since; 0 without Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what there is now, see proc(5)
    found = re.search(rf"Vm{'RSS' if reset else 'HWM'}:\s+(\d+)", status.read_text())
    assert found is not None
    return int(found[1])
