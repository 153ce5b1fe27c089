"""A pretraining state on disk: weights, optimizer, schedule and position; from it a run goes on bit for bit.

The position says which tokens come next, what is random is a function of it, so nothing else needs saving. A folder is
written under a temporary name and renamed when it is whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

from library.atomic import atomic_folder
from library.config.llm_schema import LLMConfig
from library.errors import UserError
from library.files import write_safetensors, write_text
from library.training.checkpoint import Stateful
from library.training.pipeline.pretraining import staged
from library.training.state_file import read_state, write_state
from library.training.whole_states import own_part, own_state, split_parameters, whole_shape

_WEIGHTS, _POSITION = "weights.safetensors", "position.json"


@dataclass
class PretrainingPosition:
    """Where a run stands."""

    step: int = 0  # optimizer steps done
    windows: int = 0  # training windows seen, over all processes
    loss_ema: float = 0.0


def lasting_settings(config: LLMConfig) -> dict[str, Any]:
    """Return the settings that a state goes on with; a resumed run that changed one is refused."""
    return {
        "preset": config.model.preset,
        "context": config.model.context,
        "optimizer_type": config.optimizer.optimizer_type,
        "optimizer_args": sorted(config.optimizer.optimizer_args),
        "learning_rate": config.optimizer.learning_rate,
        "weight_decay": config.optimizer.weight_decay,
        "full_bf16": config.training.full_bf16,
        "seed": config.training.seed,
    }


def save_state(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    states: Mapping[str, Any],
    position: PretrainingPosition,
    settings: Mapping[str, Any],
) -> None:
    """Write a state folder in one step, replacing an older one of the same name; raises a WriteError if it cannot.

    ``weights`` and ``states`` (of optimizer and schedule) are whole, whatever layout the run has.
    """
    with atomic_folder(folder) as temporary:
        write_safetensors(temporary / _WEIGHTS, weights)
        for name, state in states.items():
            write_state(temporary / name, state)
        about = {**asdict(position), "settings": dict(settings), "saved": time.time()}
        write_text(temporary / _POSITION, json.dumps(about))


@torch.no_grad()
def load_state(
    folder: str | Path,
    model: nn.Module,
    parts: Mapping[str, Stateful],
    settings: Mapping[str, Any],
    total_steps: int,
    finished_too: bool = False,
) -> PretrainingPosition:
    """Put a saved state back into ``model`` and ``parts``; return the position to go on from.

    ``finished_too`` allows a state at the run's last step, whose end is yet to come.

    Raises:
        UserError: ``folder`` is no state or damaged, has no step left, or was written by a run with other settings or
            another model.
    """
    folder = Path(folder)
    try:
        saved = json.loads((folder / _POSITION).read_text(encoding="utf-8"))
        then, _ = saved.pop("settings"), saved.pop("saved", None)
        position = PretrainingPosition(**saved)
        weights = load_file(folder / _WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"resume: {folder} is no pretraining state ({error}); give a folder save_state wrote") from None
    if position.step > total_steps or (position.step == total_steps and not finished_too):
        raise UserError(f"resume: {folder} is at step {position.step} of {total_steps}; raise max_train_steps")
    for key in sorted(then.keys() & settings.keys()):
        if then[key] != settings[key]:
            raise UserError(
                f"resume: {folder} was trained with {key} = {json.dumps(then[key])}, now it is "
                f"{json.dumps(settings[key])}; set that again, or start a new run with init_from"
            )
    parameters, cuts, stage = dict(model.named_parameters()), split_parameters(model), staged(model)
    shapes = {name: whole_shape(parameter, cuts.get(name)) for name, parameter in parameters.items()}
    if stage is not None:
        parameters, shapes = dict(stage.own), {name: shape for name, (shape, _) in stage.whole.items()}
    found = {name: tensor.shape for name, tensor in weights.items()}
    differing = [n for n in found.keys() | shapes.keys() if found.get(n) != shapes.get(n)]
    if differing:
        raise UserError(f"resume: {folder} holds another model ({sorted(differing)[0]} differs); use its settings")
    for name, parameter in parameters.items():
        parameter.copy_(own_part(parameter, cuts.get(name), weights[name]))
    for name, part in parts.items():
        state = read_state(folder / name)
        if isinstance(part, Optimizer):
            state = own_state(state, part, model)
        try:
            part.load_state_dict(state)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"resume: {folder}: the saved {name} does not fit this run's ({error})") from error
    return position
