"""What can be refused at once: before an hour of caching, and before a model of 24 GB is read.

Each of these would be found later too, where it is used; here only the looking is done early.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from library.errors import UserError
from library.training.checkpoint import lasting_settings, read_position
from library.training.optimizers import check_optimizer

if TYPE_CHECKING:
    from library.config.schema import TrainConfig


def check_before_loading(config: TrainConfig) -> None:
    """Look at what the run is going to need besides models and data.

    Raises:
        UserError: no such optimizer or argument of it, no ``network_weights``, no state to ``resume`` or one of other
            settings, an ``output_dir`` that cannot be written to.
    """
    check_optimizer(config.optimizer)
    weights, resume = config.network.network_weights, config.training.resume
    if weights and not Path(weights).exists():
        raise UserError(f"network_weights: {weights} does not exist; check the path")
    if resume:
        read_position(resume, lasting_settings(config))
    _check_writable(Path(config.saving.output_dir))


def _check_writable(folder: Path) -> None:
    """Check the nearest folder that exists; nothing is made yet."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        reason = "cannot be written to" if nearest.is_dir() else "is a file"
        raise UserError(f"output_dir: {folder}: {nearest} {reason}; choose another folder")
