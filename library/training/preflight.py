"""What can be refused at once: before an hour of caching, and before a model of 24 GB is read.

Each of these would be found later too, where it is used; here only the looking is done early.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from library.errors import UserError
from library.training.checkpoint import check_state, lasting_settings, read_position
from library.training.optimizers import check_optimizer
from networks.adapter_files import check_save_format, read_updates

if TYPE_CHECKING:
    from library.config.schema import TrainConfig
    from library.models.protocol import Family, TextEncoder
    from library.training.network_plan import NetworkPlan


def check_before_loading(config: TrainConfig) -> None:
    """Look at what the run is going to need besides models and data.

    Raises:
        UserError: no such optimizer or argument of it, no ``network_weights``, no state to ``resume`` or one of other
            settings, an ``output_dir`` that cannot be written to.
    """
    check_optimizer(config.optimizer)
    check_save_format(config.network.network_type, config.saving.save_format)
    weights, resume = config.network.network_weights, config.training.resume
    if weights and not Path(weights).exists():
        raise UserError(f"network_weights: {weights} does not exist; check the path")
    if resume:
        read_position(resume, lasting_settings(config))
    _check_writable(Path(config.saving.output_dir))


def check_against_model(config: TrainConfig, family: Family, plan: NetworkPlan, text_encoder: TextEncoder) -> None:
    """Look at the files a run goes on from, now that headers tell which model it is; no weights of it are read.

    Raises:
        UserError: ``network_weights`` is no LoRA of this family; the state to ``resume`` is damaged, was trained on
            another base or with other text encoders, or has nothing left to train.
    """
    training = config.training
    if config.network.network_weights:
        read_updates(config.network.network_weights, plan.targets)
    if training.resume:
        trained_text = text_encoder.fingerprint if plan.text_encoders else None
        steps = training.max_train_steps if training.max_train_epochs is None else None
        check_state(training.resume, family.fingerprint(), lasting_settings(config, trained_text), steps)


def _check_writable(folder: Path) -> None:
    """Check the nearest folder that exists; nothing is made yet."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        reason = "cannot be written to" if nearest.is_dir() else "is a file"
        raise UserError(f"output_dir: {folder}: {nearest} {reason}; choose another folder")
