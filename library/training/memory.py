"""Memory: what there is, what a run's parts take, which setting takes less, and what to say when it is not enough."""

from __future__ import annotations

import gc
import resource
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from library.errors import UserError
from library.training.optimizers import unwrapped

if TYPE_CHECKING:
    from library.config.instruction_schema import InstructionTrainConfig
    from library.config.schema import TrainConfig
    from library.training.run import Run

GIB = 2**30
_CPU_MESSAGES = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "std::bad_alloc")  # of torch
# of oneDNN, which says the same of memory that it was not given and of operations that it does not have
_ONEDNN_MESSAGES = ("could not create a primitive", "could not create a memory object", "could not execute a primitive")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if any(text in str(error) for text in _CPU_MESSAGES):
        return True
    return any(text in str(error) for text in _ONEDNN_MESSAGES) and _address_space_is_spent()


def _address_space_is_spent() -> bool:
    """Whether this process has come close to its ``ulimit -v``, the one limit that makes the host refuse memory."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return limit != resource.RLIM_INFINITY and _status("VmPeak") > 7 / 8 * limit


@contextmanager
def when_memory_runs_out(explain: Callable[[], UserError]) -> Iterator[None]:
    """Turn running out of memory in the block into ``explain()``'s error, after letting go of what the block held."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the activations
    else:
        return
    release()
    raise explain()


def release() -> None:
    """Give unused memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def available_bytes(device: torch.device) -> int:
    """Return how much memory this process could have in all: what it holds, and what is free beside it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    held = _status("VmRSS")
    free = next(int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable"))
    limits = [held + free]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:  # it counts addresses, of which most are never touched
        limits.append(max(held, held + soft - _status("VmSize")))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of a container
        with suppress(OSError, ValueError):
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return min(limits)


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def _status(key: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in _lines("/proc/self/status") if line.startswith(key))


def tensor_bytes(tensors: Any) -> int:
    """Return the bytes of tensors, those that share memory once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@dataclass(frozen=True)
class Parts:
    """What a training step takes, in bytes."""

    weights: int  # frozen, on the device
    lora: int
    gradients: int
    optimizer: int
    update: int  # copies held while the optimizer runs, after the activations are gone
    activations: int
    block: int = 0  # frozen weights of one transformer block
    linears: int = 0  # frozen weights that fp8 would halve, at their present width
    width: int = 2  # bytes of one of those

    @property
    def total(self) -> int:
        """At the highest point of the step."""
        lasting = self.weights + self.lora + self.gradients + self.optimizer
        return lasting + max(self.activations, self.update)

    def describe(self) -> str:
        """Return the parts in one line."""
        names = ("weights", "lora", "gradients", "optimizer", "activations")
        spelt = {"lora": "LoRA"}
        parts = ", ".join(f"{spelt.get(n, n)} {in_words(getattr(self, n))}" for n in names)
        return f"{in_words(self.total)} ({parts})"


def in_words(count: int) -> str:
    """Return bytes as ``11.3 GiB`` or ``24 MiB``."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def measured_parts(run: Run, blocks: list[nn.Module], activations: int, device: torch.device) -> Parts:
    """Return what a run's parts take after a step; gradients count as when they are there."""
    trained = run.network.parameters()
    ids = {id(p) for p in trained}
    models = [run.transformer, *([run.step.text_encoders] if run.step.text_encoders is not None else [])]
    frozen = [
        t
        for model in models
        for t in (*model.parameters(), *model.buffers())
        if id(t) not in ids and t.device.type == device.type
    ]
    optimizer = unwrapped(run.optimizer)
    state = [v for s in optimizer.state.values() if isinstance(s, Mapping) for v in s.values() if isinstance(v, Tensor)]
    lora, kept = tensor_bytes(trained), tensor_bytes(state)
    block = [t for t in (blocks[0].parameters() if blocks else ()) if id(t) not in ids]
    linears = [p for b in blocks for p in b.parameters() if id(p) not in ids and p.ndim == 2 and p.dtype.itemsize > 1]
    average = tensor_bytes(run.average.averages) if run.average is not None else 0
    return Parts(
        weights=tensor_bytes(frozen),
        lora=lora,
        gradients=lora,
        optimizer=kept + average,
        update=lora + kept + average,
        activations=activations,
        block=tensor_bytes(block),
        linears=tensor_bytes(linears),
        width=linears[0].dtype.itemsize if linears else 1,
    )


def suggestions(
    parts: Parts, limit: int, config: TrainConfig, blocks: int, batch_size: int, hidden: int, swappable: int
) -> list[tuple[str, int, bool]]:
    """Return settings that take less, each with its estimated total and whether that fits into ``limit``.

    Estimates: recomputing keeps every block's input (``hidden`` bytes) and one block's activations; a swapped block's
    weights leave the device; fp8 keeps one byte a weight; activations are proportional to the batch; 8-bit optimizers
    keep two bytes a weight where AdamW keeps eight. ``swappable``: the largest ``blocks_to_swap``.
    """
    training, estimates = config.training, list[tuple[str, int]]()

    def less(**changes: int) -> int:
        values = {"weights": parts.weights, "activations": parts.activations, "optimizer": parts.optimizer} | changes
        lasting = values["weights"] + parts.lora + parts.gradients + values["optimizer"]
        return lasting + max(values["activations"], parts.lora + values["optimizer"])

    recomputed = hidden * blocks + parts.activations // max(blocks, 1)
    if not training.gradient_checkpointing and recomputed < parts.activations:
        estimates.append(("gradient_checkpointing = true", less(activations=recomputed)))
    most = swappable
    can_swap = bool(parts.block) and not training.blocks_to_swap and most > 0
    if can_swap:
        over = parts.total - limit
        needed = min(most, max(1, -(-over // parts.block) if over > 0 else 1))
        estimates.append((f"blocks_to_swap = {needed}", less(weights=parts.weights - needed * parts.block)))
    if parts.linears and not (config.precision.fp8_base or config.precision.fp8_scaled):
        saved = parts.linears - parts.linears // parts.width
        estimates.append(("fp8_scaled = true", less(weights=parts.weights - saved)))
    if batch_size > 1:
        estimates.append(("batch_size = 1", less(activations=parts.activations // batch_size)))
    count = parts.lora // (2 if training.full_bf16 else 4)
    if parts.optimizer > 2 * count and "8bit" not in config.optimizer.optimizer_type.lower():
        estimates.append(('optimizer_type = "AdamW8bit"', less(optimizer=2 * count)))
    if len(estimates) > 1:
        low = recomputed if not training.gradient_checkpointing else parts.activations
        together = less(
            activations=low // batch_size,
            weights=max(parts.weights - most * parts.block, 0) if can_swap else parts.weights,
            optimizer=min(parts.optimizer, 2 * count),
        )
        estimates.append(("all of these" + (", and every block swapped" if can_swap else ""), together))
    return [(name, total, total <= limit) for name, total in estimates]


def advice(config: TrainConfig | InstructionTrainConfig) -> str:
    """Return which settings to change when a step does not fit, those first that cost least."""
    training, precision = config.training, config.precision
    options = []
    if not training.gradient_checkpointing:
        options.append("set gradient_checkpointing = true")
    options.append("lower batch_size (train_batch_size) or resolution")
    if not (precision.fp8_base or precision.fp8_scaled):
        options.append("set fp8_scaled = true")
    if hasattr(config, "dataset"):
        swapped = training.blocks_to_swap
        options.append(f"raise blocks_to_swap from {swapped}" if swapped else "set blocks_to_swap")
    return ", or ".join(options[:3])
