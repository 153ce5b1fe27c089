"""Which saved checkpoints may go: kohya's ``save_last_n_*``.

Nothing is deleted before the newer file is whole on the disk, and only files of this run's name and of an earlier
step or epoch are touched: never the final LoRA, the best one, or what a longer run left there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from library.atomic import discard

if TYPE_CHECKING:
    from library.config.schema import SavingConfig


def remove_old(
    folder: Path, name: str, saving: SavingConfig, step: int | None = None, epoch: int | None = None
) -> None:
    """Delete the checkpoints that a save at ``step`` or ``epoch`` makes superfluous.

    ``save_last_n_steps = n`` keeps what was saved in the last n steps; ``save_last_n_epochs = n`` keeps the last n
    epoch files. States follow the same numbers unless ``..._state`` gives others.

    Args:
        folder: the output folder.
        name: the run's output name.
        saving: the settings.
        step, epoch: what has just been saved, one of the two.
    """
    if step is not None:
        limits = (_steps(step, saving.save_last_n_steps), _steps(step, saving.save_last_n_steps_state))
        pattern = re.compile(re.escape(name) + r"-step(\d{8})(\.safetensors|-state|)")
    else:
        assert epoch is not None
        every = saving.save_every_n_epochs or 1
        limits = (
            _epochs(epoch, every, saving.save_last_n_epochs),
            _epochs(epoch, every, saving.save_last_n_epochs_state),
        )
        pattern = re.compile(re.escape(name) + r"-(\d{6})(\.safetensors|-state|)")
    oldest_lora, oldest_state = limits
    for path in folder.iterdir():
        if not (match := pattern.fullmatch(path.name)):
            continue
        if not match[2] and not (path / "adapter_config.json").is_file():
            continue  # no LoRA of a language model
        is_state = match[2] == "-state"
        oldest = (oldest_state if oldest_state is not None else oldest_lora) if is_state else oldest_lora
        if oldest is not None and int(match[1]) < oldest:
            discard(path)


def _steps(step: int, last: int | None) -> int | None:
    return None if last is None else step - last


def _epochs(epoch: int, every: int, last: int | None) -> int | None:
    return None if last is None else epoch - every * last + 1
