"""What a run takes on a card, and what would make it fit: asked before there is a card, or anything to train.

Three sources give one answer, a :class:`MemoryPlan`, which says which it was:

    card         fake tensors on the card of this machine: nothing of it is touched
    fake device  the same walk on a device that computes nothing (``fake_cuda``), where PyTorch is a CPU build
    formulas     where there is no compiler for that either: what ``estimator`` says of a training step

Each answers in a process of its own (``walk``), which may import and patch what it likes; a walk takes a minute at full
depth. What
they found is remembered under ``~/.cache/tandem`` by configuration, model, dataset and code.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from library.config.schema import TrainConfig
from library.errors import UserError
from library.files import write_text
from library.training.memory.budget import GIB, MemoryEstimate
from library.training.memory.fake_cuda import cache_folder, library_path

Source = Literal["card", "fake device", "formulas"]
PARTS = ("encoders", "weights", "LoRA", "gradients", "optimizer", "activations")
_ROOT = Path(__file__).resolve().parents[3]
_LIMIT = 1800  # seconds; the longest walk that was seen took two minutes on a busy core
# Besides what is counted: the CUDA context, cuBLAS' workspaces, what the allocator loses between blocks. 0.5 to 0.9 GiB
# on an H100 (bench/gpu.py: allocated and reserved).
RESERVE = GIB
_HOPPER = (9, 0)


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes.

    Attributes:
        source: where it is from.
        history: in the order of the run: the phase, and bytes by part.
        swappable: how many blocks may be swapped at most, and the bytes that each takes off the card.
        notes: what is not as the configuration says, in sentences.
        at_peak: the largest tensors then: bytes, how many, and where they were made; where asked for.
    """

    source: Source
    history: list[tuple[str, dict[str, int]]]
    swappable: tuple[int, int] = (0, 0)
    notes: list[str] = field(default_factory=list)
    at_peak: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Bytes at the highest point of the run."""
        return max(sum(parts.values()) for _, parts in self.history)

    def step(self) -> MemoryEstimate:
        """Return the highest point of a training step."""
        parts = self.phases()["step"]
        held = {name.lower(): parts.get(name, 0) for name in PARTS if name != "encoders"}
        return MemoryEstimate(**held)

    def phases(self) -> dict[str, dict[str, int]]:
        """Return of each phase its highest point, bytes by part."""
        highest: dict[str, dict[str, int]] = {}
        for phase, parts in self.history:
            if phase and sum(parts.values()) > sum(highest.get(phase, {}).values()):
                highest[phase] = parts
        return highest


def plan_memory(
    config: TrainConfig, memory: int = 80 * GIB, traces: bool = False, source: Source | None = None
) -> MemoryPlan:
    """Return what a run of ``config`` takes.

    Args:
        config: complete; its model and dataset need not be there: then the published model is counted, on one image.
        memory: of the card.
        traces: keep where the tensors at the peak were made.
        source: default: the best there is.

    Raises:
        UserError: the configuration cannot run.
    """
    notes, environment = list[str](), dict[str, str]()
    if source is None and torch.cuda.is_available():
        source = "card"
    if source is None or source == "fake device":
        try:
            source, environment = "fake device", {"LD_PRELOAD": str(library_path())}
        except UserError as error:
            source, notes = "formulas", [str(error)]
    request = {
        "config": config.model_dump(mode="json", exclude_unset=True),
        "memory": memory,
        "capability": torch.cuda.get_device_capability() if source == "card" else _HOPPER,
        "traces": traces,
        "source": source,
    }
    kept = cache_folder() / "plans" / f"{_key(config, request)}.json"
    if kept.is_file():
        answer = json.loads(kept.read_text(encoding="utf-8"))
    else:
        answer = _ask(request, environment)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, json.dumps(answer))
    history = [(phase, parts) for phase, parts in answer["history"]]
    return MemoryPlan(source, history, tuple(answer["swappable"]), [*notes, *answer["notes"]], answer["at_peak"])


def _ask(request: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Let a process of its own walk; return its answer."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", "library.training.memory.walk", str(asked), str(answered)]
        paths = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment},
            capture_output=True, text=True, timeout=_LIMIT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if not answered.is_file():
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise UserError(f"the memory could not be counted ({last}); please report it with the configuration")
        answer = json.loads(answered.read_text(encoding="utf-8"))
    if "error" in answer:
        raise UserError(*answer["error"])
    return answer


def _key(config: TrainConfig, request: dict[str, Any]) -> str:
    """Return a name for all that a walk depends on."""
    prompts = config.sampling.sample_prompts  # listed ones stand in the request
    files = [config.model.pretrained_model_name_or_path, config.dataset.dataset_config]
    files += [prompts] if isinstance(prompts, str) else []
    seen: list[Any] = [request, torch.__version__]
    for name in filter(None, files):
        path = Path(name).expanduser()
        inside = [path, *sorted(path.parent.glob("*/"))] if path.suffix == ".toml" else [path]
        seen.append([(str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in inside if p.exists()])
    code = hashlib.sha256(json.dumps(seen, default=str).encode())
    for folder in ("library", "networks"):
        for file in sorted((_ROOT / folder).rglob("*.py")):
            code.update(file.read_bytes())
    return code.hexdigest()[:24]


_TRAINING = ("loading", "first step", "step", "sampling")


@dataclass(frozen=True)
class _Setting:
    """A key that takes less: in which phases, and what it costs."""

    section: str
    key: str
    value: Any
    cost: str
    phases: tuple[str, ...] = _TRAINING

    def __str__(self) -> str:
        return f"{self.key} = {json.dumps(self.value)}"

    def put_into(self, config: TrainConfig) -> TrainConfig:
        """Return ``config`` with the setting."""
        changed = getattr(config, self.section).model_copy(update={self.key: self.value})
        return config.model_copy(update={self.section: changed})


# The cheapest first.
_SETTINGS = (
    _Setting(
        "precision", "fp8_text_encoder", True, "embeddings of a quantised encoder: other ones", ("encoding captions",)
    ),
    _Setting("training", "gradient_checkpointing", True, "about a third more time"),
    _Setting("training", "cpu_offload_checkpointing", True, "host memory; hidden behind the blocks by a fast link"),
    _Setting("optimizer", "optimizer_type", "AdamW8bit", "moments in eight bits"),
    _Setting("precision", "fp8_scaled", True, "weights are dequantised for each product"),
)
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


def remedies(config: TrainConfig, memory: int) -> Iterator[Remedy]:
    """Yield what makes a run of ``config`` smaller, one setting after the other, until it fits into ``memory``.

    In the order of what they cost; each comes on top of those before. What takes nothing off a phase that does not fit
    is left out.
    """
    least = Remedy(config, plan_memory(config, memory))
    for setting in _SETTINGS:
        if (found := _better(least, setting, memory)) is not None:
            yield (least := found)
    most, block = least.plan.swappable
    while (over := _over(least.plan, memory, _TRAINING)) and (now := least.config.training.blocks_to_swap) < most:
        swaps = _Setting("training", "blocks_to_swap", min(most, now + -(-over // max(1, block))), _SWAPPING)
        if (found := _better(least, swaps, memory)) is None:
            return
        yield (least := found)


def _better(least: Remedy, setting: _Setting, memory: int) -> Remedy | None:
    """Return ``least`` and ``setting``; None if that cannot be, or takes nothing off what is too much."""
    over, changed = _over(least.plan, memory, setting.phases), setting.put_into(least.config)
    if not over or changed == least.config or (setting.key == "fp8_scaled" and least.config.precision.fp8_base):
        return None
    try:
        plan = plan_memory(changed, memory)
    except UserError:  # two settings that exclude each other
        return None
    lines = {key: line for key, line in least.lines.items() if key != setting.key} | {setting.key: str(setting)}
    return Remedy(changed, plan, lines, setting.cost) if _over(plan, memory, setting.phases) < over else None


def _over(plan: MemoryPlan, memory: int, phases: Collection[str]) -> int:
    """Return by how many bytes the largest of ``phases`` exceeds ``memory``, with room for what is not counted."""
    held = (sum(parts.values()) for phase, parts in plan.phases().items() if phase in phases)
    return max(0, max(held, default=0) + RESERVE - memory)


def fits(plan: MemoryPlan, memory: int) -> bool:
    """Return whether a run goes into a card of ``memory`` bytes, with room for what is not counted."""
    return plan.peak + RESERVE <= memory


def as_rows(plan: MemoryPlan) -> dict[str, Any]:
    """Return a plan without its history, to be written as JSON: each phase's highest point, bytes by part."""
    return {**asdict(plan), "history": None, "peak": plan.peak, "phases": plan.phases()}
