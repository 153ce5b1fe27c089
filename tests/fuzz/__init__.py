"""Input nobody would write on purpose: it is taken, or refused with a ``UserError``; never a traceback, never a hang.

``make test`` tries a few hundred cases, the same every time; ``make fuzz`` sets ``FUZZ_CASES`` and tries thousands, new
ones each time. A case is one call of :func:`harmless`, or a tool in a process of its own (``test_tools.py``); how many
there were is printed at the end, and the seed of the tools' cases, which ``FUZZ_SEED`` sets. Hypothesis prints its own.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings

from library.errors import UserError

CASES = int(os.environ.get("FUZZ_CASES", "600"))
SEED = int(os.environ.get("FUZZ_SEED") or (secrets.randbelow(10**9) if "FUZZ_CASES" in os.environ else 0))
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
        result = call(*arguments, **keywords)
    except UserError as error:
        message = str(error) or "nothing"
    if message:
        assert message != "nothing"
        assert "Traceback" not in message
        outcomes["refused"] += 1
        return None
    outcomes["taken"] += 1
    return result
