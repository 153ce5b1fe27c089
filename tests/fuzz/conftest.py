"""Says at the end how many cases there were."""

from __future__ import annotations

import pytest

from tests.fuzz import SEED, outcomes


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if outcomes:
        taken, refused = outcomes["taken"], outcomes["refused"]
        cases = f"{taken + refused} cases, {taken} taken, {refused} refused"
        terminalreporter.write_line(f"fuzzing: {cases}; FUZZ_SEED={SEED} of the tools")
