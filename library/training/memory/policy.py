"""What fits into a card, and which settings take less: one policy for everything that decides about memory.

``memory = "auto"`` (:func:`choose`), ``tools/plan_memory.py`` (:func:`remedies`), the memory dry run (both) and the
message when a step runs out of memory (:func:`advice`) go through the same table of settings, the cheapest first. What
a configuration takes is asked of a function, ``count``: a trace on fake tensors (``dry_run``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from library.config.published_models import FOR_CUDA
from library.config.schema import TrainConfig
from library.errors import UserError
from library.files import read_toml
from library.training.memory.budget import GIB, in_words

Source = Literal["card", "fake device"]
PARTS = ("encoders", "weights", "LoRA", "gradients", "optimizer", "activations")
RESERVE = round(FOR_CUDA * GIB)
_ON_CPU = 0.95  # of the memory there is
_WORTH_KEEPING = 64 * 2**20  # bytes; less buys no time
_RUN = ("loading", "first step", "step")
_TRAINING = (*_RUN, "sampling")


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes.

    Attributes:
        source: where it is from.
        phases: in the order of the run: of each its highest point, bytes by part.
        batch: the largest, in words.
        swappable: how many blocks may be swapped at most, and the bytes that each takes off the card.
        notes: what is not as the configuration says, in sentences.
    """

    source: Source
    phases: dict[str, dict[str, int]]
    batch: str = ""
    swappable: tuple[int, int] = (0, 0)
    notes: list[str] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Bytes at the highest point of the run."""
        return max(sum(parts.values()) for parts in self.phases.values())

    @property
    def step(self) -> dict[str, int]:
        """Bytes by part at the highest point of a step."""
        return self.phases["step"]

    def over(self, room: int, phases: Collection[str] = _TRAINING) -> int:
        """Return by how many bytes the largest of ``phases`` exceeds ``room``."""
        sizes = (sum(parts.values()) for phase, parts in self.phases.items() if phase in phases)
        return max(0, max(sizes, default=0) - room)


def describe(parts: Mapping[str, int]) -> str:
    """Return bytes by part in one line."""
    named = ", ".join(f"{part} {in_words(parts.get(part, 0))}" for part in PARTS if part != "encoders")
    return f"{in_words(sum(parts.values()))} ({named})"


def room_in(memory: int, on_cpu: bool = False) -> int:
    """Return how many of ``memory`` bytes what is counted may take."""
    return int(_ON_CPU * memory) if on_cpu else memory - RESERVE


@dataclass(frozen=True)
class _Setting:
    """A key that takes less.

    Attributes:
        cost: in words.
        phases: whose memory it lowers.
        exact: it changes no number of the training.
        on_host: it uses host memory, which on a CPU is the same.
    """

    section: str
    key: str
    value: Any
    cost: str
    phases: Collection[str] = _TRAINING
    exact: bool = False
    on_host: bool = False

    def __str__(self) -> str:
        return f"{self.key} = {json.dumps(self.value)}"

    def put_into(self, config: TrainConfig) -> TrainConfig:
        """Return ``config`` with the setting; one that has 16 bits already keeps them."""
        if self.key == "mixed_precision" and config.training.mixed_precision != "no":
            return config
        changed = getattr(config, self.section).model_copy(update={self.key: self.value})
        return config.model_copy(update={self.section: changed})


_SETTINGS = [_Setting(**row) for row in read_toml(Path(__file__).with_name("settings.toml"))[0]["setting"]]
_SWAPPING = "weights come from host memory as they are needed; hidden where a block computes longer than it is copied"


@dataclass(frozen=True)
class Remedy:
    """Settings that take less: what the last one costs, and what is counted with all.

    Attributes:
        lines: by key, the newest last.
    """

    config: TrainConfig
    plan: MemoryPlan
    lines: Mapping[str, str] = field(default_factory=dict)
    cost: str = ""


Count = Callable[[TrainConfig], MemoryPlan]


def remedies(
    config: TrainConfig, plan: MemoryPlan, room: int, count: Count, exact: bool = False, on_cpu: bool = False
) -> Iterator[Remedy]:
    """Yield what makes a run smaller, one setting after the other, until it fits into ``room``.

    In the order of what they cost; each comes on top of those before. A setting that does not lower a phase that is too
    large is skipped.

    Args:
        config, plan: of the run, and what it takes.
        room: bytes.
        count: says what a configuration takes; raises a UserError if it cannot run.
        exact: only settings that change no number of the training.
        on_cpu: host memory is all there is.
    """
    least = Remedy(config, plan)

    def better(setting: _Setting) -> Remedy | None:
        phases = tuple(phase for phase in setting.phases if phase in _RUN or not exact)
        over, changed = least.plan.over(room, phases), setting.put_into(least.config)
        if not over or changed == least.config or (setting.key == "fp8_scaled" and least.config.precision.fp8_base):
            return None
        try:
            plan = count(changed)
        except UserError as error:  # two settings that exclude each other
            if getattr(error, "exit_code", 2) != 2:  # on the process that counts it was another error, which ends it
                raise
            return None
        lines = {key: line for key, line in least.lines.items() if key != setting.key} | {setting.key: str(setting)}
        return Remedy(changed, plan, lines, setting.cost) if plan.over(room, phases) < over else None

    for setting in _SETTINGS:
        if (setting.exact or not exact) and not (setting.on_host and on_cpu) and (found := better(setting)) is not None:
            yield (least := found)
    # compiled blocks are swapped only where they run again in backward (``config.rules``)
    keeps = config.accelerate.torch_compile is True and not least.config.training.gradient_checkpointing
    most, block = (0, 0) if on_cpu or keeps else least.plan.swappable
    phases = _RUN if exact else _TRAINING
    while (over := least.plan.over(room, phases)) and (now := least.config.training.blocks_to_swap) < most:
        swapped = min(most, now + -(-over // max(1, block)))
        if (found := better(_Setting("training", "blocks_to_swap", swapped, _SWAPPING))) is None:
            return
        yield (least := found)


def choose(config: TrainConfig, room: int, count: Count, on_cpu: bool = False) -> Remedy:
    """Return the fastest settings with which a step fits into ``room``, of those that change no number of it.

    From the fastest on: nothing is recomputed; everything is, but for as much as the free memory keeps; the inputs of
    blocks wait in host memory; frozen blocks do too. The last that was tried is returned if none fits.
    """
    fastest = Remedy(config, count(config))
    least = [fastest, *remedies(config, fastest.plan, room, count, exact=True, on_cpu=on_cpu)][-1]
    if list(least.lines) != ["gradient_checkpointing"]:
        return least
    free = min(room - sum(least.plan.step.values()), fastest.plan.step["activations"] - least.plan.step["activations"])
    if least.plan.over(room, _RUN) or free < _WORTH_KEEPING:
        return least
    keeping = _Setting("training", "activation_budget_mb", free // 2**20, "")
    plan = count(keeping.put_into(least.config))
    if plan.over(room, _RUN):
        return least
    return Remedy(keeping.put_into(least.config), plan, {**least.lines, keeping.key: str(keeping)})


def advice(config: TrainConfig, on_cpu: bool = False) -> str:
    """Return which settings to change when a step runs out of memory, the cheapest first."""
    changes = [each for each in _SETTINGS if "step" in each.phases and not (each.on_host and on_cpu)]
    lines = [f"set {each}" for each in changes if each.put_into(config) != config]
    if not config.training.gradient_checkpointing:
        lines[1:1] = ["lower batch_size (train_batch_size) or resolution"]
    else:
        lines[:0] = ["lower batch_size (train_batch_size) or resolution"]
    swapped = config.training.blocks_to_swap
    swapping = [] if on_cpu else [f"raise blocks_to_swap from {swapped}" if swapped else "set blocks_to_swap"]
    return ", or ".join([*lines[: 4 - len(swapping)], *swapping])
