"""The machine's GPUs: how busy and how hot they are, as ``nvidia-smi`` says.

It is asked in a thread of its own at most every two seconds, and only while somebody looks; the page shows its last
answer, so one that hangs, as with a card that fell off the bus, holds nothing up. An old answer is not shown.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock, Thread

_COMMAND = (
    "nvidia-smi",
    "--query-gpu=index,name,utilization.gpu,temperature.gpu,memory.used,memory.total",
    "--format=csv,noheader,nounits",
)
_FRESH, _GIVEN_UP = 2.0, 10.0  # seconds after which it is asked again, and a question is given up


@dataclass(frozen=True)
class Card:
    """A GPU: number, name, GiB of memory; what it does, "87 % busy, 71 °C, 20.1 of 24 GiB", as far as it tells."""

    index: str
    name: str
    does: str
    gib: float = 0.0


_answer: tuple[float, list[Card]] = 0.0, []
_asking = Lock()  # whoever asks has it until there is an answer


def cards(most: float = 15.0) -> list[Card]:
    """Return the GPUs as they were at ``most`` so many seconds ago; none where there are none, or nobody knows."""
    at, found = _answer
    age = time.monotonic() - at
    if age > _FRESH and shutil.which("nvidia-smi") and _asking.acquire(blocking=False):
        Thread(target=_ask, daemon=True).start()
    return found if age < most else []


def _ask() -> None:
    global _answer
    found: list[Card] = []
    try:
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(
                _COMMAND, capture_output=True, timeout=_GIVEN_UP, check=True, text=True, errors="replace"
            )
            found = [_card(*row) for line in said.stdout.splitlines() if len(row := line.split(", ")) == 6]
        _answer = time.monotonic(), found
    finally:
        _asking.release()


def _card(index: str, name: str, *numbers: str) -> Card:
    use, heat, used, total = (float(text) if text.isdecimal() else None for text in numbers)  # else "[N/A]"
    memory = f"{used / 1024:.1f} of {total / 1024:.0f} GiB" if used is not None and total else ""
    does = ("" if use is None else f"{use:.0f} % busy", "" if heat is None else f"{heat:.0f} °C", memory)
    return Card(index, name, ", ".join(filter(None, does)), (total or 0) / 1024)
