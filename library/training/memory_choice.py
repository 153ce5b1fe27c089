"""``memory = "auto"``: the fastest memory policy with which the largest batch fits, found by taking real steps.

From the fastest on: nothing is computed again; everything is, but for as much as the free memory keeps; the inputs of
blocks wait in host memory; frozen blocks do too. None of it changes a number of the training, so a run may go on under
another choice. A GPU without other work is what is measured: a twentieth is left free for what the allocator wastes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console

from library.training.memory import in_words
from library.training.rehearsal import Rehearsal, Trial, preflight

if TYPE_CHECKING:
    from library.config.schema import TrainConfig, TrainingConfig

_ROOM = 0.95  # of the memory there is
_WORTH_KEEPING = 64 * 2**20  # bytes; less buys no time
_SWAP_TRIES = 3


def rehearsed(rehearsal: Rehearsal, console: Console) -> TrainConfig:
    """Return the run's configuration after a rehearsal, if one is due: as it was, or with memory's choice made.

    Raises:
        UserError: a step does not fit, whatever is chosen.
    """
    config = rehearsal.config
    if config.training.memory == "auto":
        chosen, trial = choose(rehearsal)
        assert trial.parts is not None
        said = ", ".join(f"{key} = {_toml(value)}" for key, value in _changes(chosen).items()) or "nothing recomputed"
        takes = f"{trial.parts.describe()}, of {in_words(rehearsal.limit)}"
        console.print(f"memory: {said}; a step of {rehearsal.what} takes {takes}", soft_wrap=True)
        return config.model_copy(update={"training": chosen})
    asked, on_gpu = config.training.preflight, rehearsal.accelerator.device.type == "cuda"
    if asked or (asked is None and on_gpu and not config.parallel.splits_model):
        preflight(rehearsal, console)
    return config


def choose(rehearsal: Rehearsal) -> tuple[TrainingConfig, Trial]:
    """Return the first policy that fits, fastest first, and the step that was taken with it.

    Raises:
        UserError: none does.
    """
    training, limit = rehearsal.config.training, rehearsal.limit
    whole = rehearsal.trial(training)
    if whole.within(_ROOM, limit):
        return training, whole
    recomputing = _with(training, gradient_checkpointing=True)
    least = rehearsal.trial(recomputing)
    if least.within(_ROOM, limit):
        return _keeping(rehearsal, recomputing, whole, least)
    last = least
    for candidate in _on_the_host(rehearsal, recomputing, least):
        last = rehearsal.trial(candidate)
        if last.within(_ROOM, limit):
            return candidate, last
    raise rehearsal.refuse(last, "set fp8_scaled = true, a smaller batch_size or a lower resolution")


def _keeping(
    rehearsal: Rehearsal, recomputing: TrainingConfig, whole: Trial, least: Trial
) -> tuple[TrainingConfig, Trial]:
    """Return ``recomputing`` with what the free memory can keep, if that is worth it and turns out to fit."""
    assert least.parts is not None
    room = int(_ROOM * rehearsal.limit) - least.parts.total
    if whole.parts is not None:
        room = min(room, whole.parts.activations - least.parts.activations)
    compiled = rehearsal.config.accelerate.torch_compile  # a compiled block does not show what it keeps
    if room >= _WORTH_KEEPING and not compiled:
        keeping = _with(recomputing, checkpoint_keep_mb=room // 2**20)
        trial = rehearsal.trial(keeping)
        if trial.within(1.0, rehearsal.limit):
            return keeping, trial
    return recomputing, least


def _on_the_host(rehearsal: Rehearsal, recomputing: TrainingConfig, least: Trial) -> Iterator[TrainingConfig]:
    """Yield policies that use host memory, if that is another memory than the device's; the fastest first."""
    if rehearsal.accelerator.device.type == "cpu":
        return
    offloading = _with(recomputing, cpu_offload_checkpointing=True)
    yield offloading
    most = least.swappable
    if least.parts is None or not least.parts.block or not most or rehearsal.config.accelerate.torch_compile:
        return
    over = least.parts.total - _ROOM * rehearsal.limit
    swapped = max(1, -(-int(over) // least.parts.block))
    for attempt in range(_SWAP_TRIES):
        swapped = min(most, swapped + attempt * max(1, swapped // 4))
        yield _with(offloading, blocks_to_swap=swapped)
        if swapped == most:
            return


def _with(training: TrainingConfig, **changes: Any) -> TrainingConfig:
    return training.model_copy(update=changes)


def _changes(chosen: TrainingConfig) -> dict[str, Any]:
    """Return the keys of the choice that are not at their defaults, as they are written."""
    keys = ("gradient_checkpointing", "checkpoint_keep_mb", "cpu_offload_checkpointing", "blocks_to_swap")
    values = {key: getattr(chosen, key) for key in keys}
    return {key: value for key, value in values.items() if value}


def _toml(value: Any) -> str:
    return str(value).lower()
