"""Which step sizes the optimizer really uses, for the metrics, the progress bar and the plots.

``read_learning_rates`` looks at what the parameter groups contain and not at class names, so that it works
for an optimizer given by class path and for one wrapped by accelerate. Read it right before
``optimizer.step()``: every value is the one that step will use. (Read afterwards, after the schedule moved
on too, it is the next step's.)

=====================  ====================================================================================
``lr/<group>``         the learning rate the schedule set. For AdamWScheduleFree and its kin times their own
                       warm-up, for Adafactor with relative_step the rate it computes
``d/<group>``          the distance estimate D of Prodigy and D-Adaptation (Mishchenko and Defazio 2023,
                       arXiv 2306.06101; Defazio and Mishchenko 2023, arXiv 2301.07733)
``d*lr/<group>``       the step size: what multiplies the normalised gradient direction
=====================  ====================================================================================

What enters d*lr besides d and lr, as the libraries compute it (``dlr`` in their code):

- prodigyopt, DAdaptAdam: Adam's bias correction sqrt(1 - beta2^(k+1)) / (1 - beta1^(k+1)), if
  ``use_bias_correction``; DAdaptAdam: the group's ``layer_scale``; ``d_coef`` is already contained in d;
- DAdaptSGD: divided by the first gradient's norm (so it is unknown until the first step);
- prodigy-plus: ``shared_d`` instead of d with ``split_groups_mean``; RAdam's rectification with
  ``use_bias_correction``. Its ``effective_lr``, the share of a step that the trained point y takes at once,
  is left out, as it is for every schedule-free optimizer: d*lr is the step of the underlying sequence z.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Keys only optimizers with a distance estimate hold besides "d" (torch's Adafactor has a "d", a threshold).
_DISTANCE_KEYS = ("d0", "growth_rate", "numerator_weighted", "gsq_weighted")


def read_learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """Return lr, d and d*lr of every parameter group, as the next ``optimizer.step()`` will use them.

    Groups are called by their ``name``, else ``group<i>``. Nothing waits for the device unless an optimizer
    keeps these numbers in tensors; then all are fetched at once.
    """
    groups = optimizer.param_groups
    values: dict[str, float | Tensor] = {}
    for name, group in zip(_names(groups), groups, strict=True):
        rate = _learning_rate(optimizer, group)
        values[f"lr/{name}"] = rate
        if not estimates_distance(group):
            continue
        values[f"d/{name}"] = group["d"]
        if (factor := _step_factor(group)) is not None:
            distance = group["d"]
            if group.get("split_groups") and group.get("split_groups_mean") and group.get("shared_d") is not None:
                distance = group["shared_d"]
            values[f"d*lr/{name}"] = distance * rate * factor
    return _to_floats(values)


def estimates_distance(group: Mapping[str, Any]) -> bool:
    """Return whether a parameter group is one of an optimizer that estimates its step size."""
    return "d" in group and any(key in group for key in _DISTANCE_KEYS)


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one distinct name a group."""
    names = [str(group.get("name", f"group{i}")) for i, group in enumerate(groups)]
    return [name if names.count(name) == 1 else f"{name}{i}" for i, name in enumerate(names)]


def _learning_rate(optimizer: Optimizer, group: Mapping[str, Any]) -> float | Tensor:
    """Return the group's rate, times what the optimizer itself schedules."""
    rate = group["lr"]
    if group.get("relative_step"):
        step = next((optimizer.state[p]["step"] for p in group["params"] if "step" in optimizer.state.get(p, {})), 0)
        start = 1e-6 * (step + 1) if group.get("warmup_init") else 1e-2
        return min(start, 1.0 / math.sqrt(step + 1))
    if "scheduled_lr" not in group:
        return rate
    steps_done = group.get("k", 0)
    if group.get("warmup_steps"):
        return rate * min(1.0, (steps_done + 1) / group["warmup_steps"])
    if "silent_sgd_phase" in group:
        return rate * _rectification(group["betas"][1], steps_done + 1, 0.0 if group["silent_sgd_phase"] else 1.0)
    return rate


def _step_factor(group: Mapping[str, Any]) -> float | None:
    """Return what multiplies d * lr in the next step; ``None`` while that is unknown."""
    if "prodigy_steps" in group:  # prodigy-plus counts k from 1
        return _rectification(group["betas"][1], group["k"], 0.0) if group.get("use_bias_correction") else 1.0
    factor = float(group.get("layer_scale", 1.0))
    if group.get("use_bias_correction") and "k" in group:
        (beta1, beta2), steps = group["betas"][:2], group["k"] + 1
        factor *= math.sqrt(1 - beta2**steps) / (1 - beta1**steps)
    if "g0_norm" in group or ("momentum" in group and "numerator_weighted" in group):  # DAdaptSGD
        first = group.get("g0_norm")
        return factor / float(first) if first else None
    return factor


def _rectification(beta2: float, steps: int, otherwise: float) -> float:
    """Return RAdam's factor on the step (Liu et al. 2019, arXiv 1908.03265); ``otherwise`` early on."""
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * steps * beta2**steps / (1 - beta2**steps)
    if length <= 4:
        return otherwise
    top = (length - 4) * (length - 2) * longest
    return math.sqrt(top / ((longest - 4) * (longest - 2) * length))


def _to_floats(values: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Turn values into floats; the tensors among them in one transfer from their device."""
    tensors = {key: value.detach().double().reshape(()) for key, value in values.items() if isinstance(value, Tensor)}
    fetched = dict(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True)) if tensors else {}
    return {key: fetched[key] if key in fetched else float(value) for key, value in values.items()}
