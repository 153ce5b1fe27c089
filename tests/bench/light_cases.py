"""Cases of known time and memory. Their processes import torch, but neither the trainer nor the tests."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.measure import KEEPING, WAITING, step_seconds

BUSY, WAITS = 0.04, 0.2  # seconds of a step
HELD, KEPT, PASSING = 24, 16, 32  # MiB: of the base, and what the steps add for good and for a moment


@dataclass
class Step:
    """A step that is busy, waits, and takes memory."""

    base: Tensor = field(default_factory=lambda: mebibytes(HELD))
    kept: list[Tensor] = field(default_factory=list)

    @property
    def base_bytes(self) -> int:
        return self.base.nbytes

    def step(self) -> float:
        self.kept = self.kept or [mebibytes(KEPT)]
        passing = mebibytes(PASSING)
        started = time.process_time()
        while time.process_time() < started + BUSY:
            pass
        time.sleep(WAITS)
        return float(passing[0])


def mebibytes(size: int) -> Tensor:
    return torch.ones(size << 20, dtype=torch.uint8)


def process_of(stepper: Step) -> tuple[int, dict[str, str | None], float]:
    """Return this process, what its environment says of waiting and of memory, and the time of a step."""
    return os.getpid(), {name: os.environ.get(name) for name in (*WAITING, *KEEPING)}, step_seconds(stepper)


def no_step() -> Step:
    raise KeyError("no such family")
