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

Prodigy and D-Adaptation estimate their own step size d; what it looks like when that does not work.

Looked at only where learning rates are read anyway, at steps that are logged.

- **d never leaves d0.** The estimate grows from d0 as soon as gradients agree over some steps. Where it has not by a
  tenth of the run (at least 50 steps, at most 500), nothing is learned: the steps are d0, a millionth, of their size.
- **d grows without bound.** A step of Adam's kind moves each weight by about d * lr. LoRA's A begins at numbers of
  about 1 / sqrt(inputs), 0.02 for 3072; with d * lr above 0.1 each single step is larger than what it changes, and the
  estimate, which is of the distance to the solution, only follows that. A d that is not finite is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Keys only optimizers with a distance estimate hold besides "d" (torch's Adafactor has a "d", a threshold).
_DISTANCE_KEYS = ("d0", "growth_rate", "numerator_weighted", "gsq_weighted")
_SETTLED_WITHIN = 0.05  # d has settled where it stays within so much of its last value ...
_SETTLED_SHARE = 0.2  # ... for at least so much of the run


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


def distance_starts(optimizer: Optimizer, is_new: bool) -> dict[str, float]:
    """Return d0 of every parameter group that has a d; of libraries that do not keep it only while the run is new."""
    groups = optimizer.param_groups
    named = [(name, g) for name, g in zip(_names(groups), groups, strict=True) if estimates_distance(g)]
    return {name: float(group.get("d0", group["d"])) for name, group in named if is_new or "d0" in group}


def detect_settled(distances: Sequence[float]) -> int | None:
    """Return the index at which a series of d settles: from there on it stays within 5 % of its last value.

    ``None`` for a d that never left its start, or that does not hold for a fifth of the series (still
    growing).
    """
    finite = [value for value in distances if math.isfinite(value)]
    if len(finite) < 2 or finite[-1] <= finite[0]:
        return None
    last = finite[-1]
    settled = len(distances)
    for i in range(len(distances) - 1, -1, -1):
        if math.isfinite(distances[i]) and abs(distances[i] - last) > _SETTLED_WITHIN * abs(last):
            break
        settled = i
    return settled if len(distances) - settled >= max(2, _SETTLED_SHARE * len(distances)) else None


def warmup_end(rates: Sequence[float]) -> int | None:
    """Return the index at which learning rates stop rising from their start; ``None`` if they never rose."""
    i = 0
    while i + 1 < len(rates) and rates[i + 1] > rates[i]:
        i += 1
    return i or None


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


LARGEST_STEP = 0.1
_TOO_SMALL = 1e-5  # a d0 above a tenth of the usual rate of a LoRA may be right as it is
_GROWN = 1.01  # times d0: has left it


@dataclass
class StepSizeMonitor:
    """Watches d in the learning rates of logged steps; each remark is made once."""

    total_steps: int
    starts: Mapping[str, float]  # d0 of each parameter group
    _warned: set[str] = field(default_factory=set)

    @property
    def patience(self) -> int:
        """Steps after which d should have left d0."""
        return min(max(self.total_steps // 10, 50), 500)

    def check(self, step: int, rates: Mapping[str, float]) -> list[str]:
        """Return the warnings after ``step``.

        Args:
            step: of the run.
            rates: of ``read_learning_rates``.
        """
        new: dict[str, str] = {}
        for kind, remark in self._remarks(step, rates):
            if kind not in self._warned:
                new.setdefault(kind, remark)
        self._warned |= new.keys()
        return list(new.values())

    def _remarks(self, step: int, rates: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        for key, d in rates.items():
            if not key.startswith("d/"):
                continue
            group = key.removeprefix("d/")
            first = self.starts.get(group, 0.0)  # where it is not known, nothing is said of a d that is stuck
            taken = rates.get(f"d*lr/{group}", d)
            if not math.isfinite(d) or taken > LARGEST_STEP:
                yield (
                    "grows",
                    f"warning: step {step}: d of {group} has grown to {d:.3g} (d * lr {taken:.3g}, larger than the "
                    "LoRA's weights): it does not settle; set optimizer_args use_bias_correction=True and "
                    "safeguard_warmup=True, lower d_coef (0.5), or learning_rate = 1.0 if it is higher",
                )
            elif step >= self.patience and d <= _GROWN * first and taken <= _TOO_SMALL:
                yield (
                    "stuck",
                    f"warning: step {step}: d of {group} is still {d:.3g}, where it began: nothing is learned; set "
                    "optimizer_args d0=1e-5 (or 1e-4), raise d_coef (2), remove the warm-up, or set a higher "
                    "batch_size if the loss is very noisy",
                )
