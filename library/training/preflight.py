"""What can be refused at once: before an hour of caching, and before a model of 24 GB is read.

Each of these would be found later too, where it is used; here only the looking is done early.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from library.errors import UserError
from library.training.checkpoint import check_state, lasting_settings, read_position, shared_settings
from library.training.optimizers import check_optimizer
from library.training.resume import AUTO
from networks.adapter_files import check_save_format, read_updates

if TYPE_CHECKING:
    from library.config.instruction_schema import InstructionTrainConfig
    from library.config.schema import TrainConfig
    from library.models.protocol import Family, TextEncoder
    from library.training.network_plan import NetworkPlan
    from networks.targets import LoraTargets


def check_before_loading(
    config: TrainConfig | InstructionTrainConfig, settings: Mapping[str, Any] | None = None
) -> None:
    """Look at what the run is going to need besides models and data; ``settings`` are those of a state, if not usual.

    Raises:
        UserError: no such optimizer or argument of it, no ``network_weights``, no state to ``resume`` or one of other
            settings, an ``output_dir`` that cannot be written to.
    """
    check_optimizer(config.optimizer)
    check_save_format(config.network.network_type, config.saving.save_format)
    weights, resume = config.network.network_weights, config.training.resume
    if weights and not Path(weights).exists():
        raise UserError(f"network_weights: {weights} does not exist; check the path")
    if resume and resume != AUTO:
        read_position(resume, shared_settings(config) if settings is None else settings)
    _check_writable(Path(config.saving.output_dir))


def check_against_model(
    config: TrainConfig, family: Family, plan: NetworkPlan, text_encoder: TextEncoder, finished_too: bool = False
) -> None:
    """Look at the files a run goes on from, now that headers tell which model it is; no weights of it are read.

    ``finished_too`` allows a state at the run's last step.

    Raises:
        UserError: ``network_weights`` is no LoRA of this family; the state to ``resume`` is damaged, was trained on
            another base or with other text encoders, or has nothing left to train; ``tp`` cannot split the model.
    """
    if config.parallel.is_tensor_parallel:
        family.split_plan(config.parallel.tp)
    trained_text = text_encoder.fingerprint if plan.text_encoders and config.training.resume else None
    check_saved(config, plan.targets, family.fingerprint(), lasting_settings(config, trained_text), finished_too)


def check_saved(
    config: TrainConfig | InstructionTrainConfig,
    targets: LoraTargets,
    base: str,
    settings: Mapping[str, Any],
    finished_too: bool = False,
) -> None:
    """Look at ``network_weights`` and ``resume``; see :func:`check_against_model`.

    Args:
        config: sections ``network`` and ``training`` are read.
        targets, base: the base model's row and fingerprint.
        settings: that a state goes on with.
        finished_too: as for :func:`check_against_model`.
    """
    training = config.training
    if config.network.network_weights:
        read_updates(config.network.network_weights, targets, [] if config.network.allow_partial else None)
    if training.resume:
        steps = training.max_train_steps if training.max_train_epochs is None else None
        check_state(training.resume, base, settings, steps, finished_too)


def _check_writable(folder: Path) -> None:
    """Check the nearest folder that exists; nothing is made yet."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        reason = "cannot be written to" if nearest.is_dir() else "is a file"
        raise UserError(f"output_dir: {folder}: {nearest} {reason}; choose another folder")
