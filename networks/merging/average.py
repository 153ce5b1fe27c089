"""The average of a run's saved LoRAs, made after the run.

    e_1 = w_1        e_i = beta_i e_{i-1} + (1 - beta_i) w_i

over the files in the order of training. The weights w are the factors: A is averaged with A and B with B, as
musubi-tuner's ``lora_post_hoc_ema.py`` does. That is the weight average that an EMA kept during the run would have
given; it is not the average of the updates B A, which would have a larger rank. It makes sense only for saves of one
run: factors of different runs have nothing to do with each other.

*Constant or linear beta* (musubi's ``--beta``, ``--beta2``): beta goes from the first value to the second from the
second file to the last.

*Power function* (``--sigma_rel``, Karras et al. 2023, https://arxiv.org/abs/2312.02696): at training step t the past
counts as t^gamma, so that beta_i = (t_{i-1} / t_i)^(gamma + 1); of steps one apart that is the paper's
(1 - 1/t)^(gamma + 1). sigma_rel is the profile's width as a share of the run; gamma is the positive root of
(gamma + 1) / ((gamma + 2)^2 (gamma + 3)) = sigma_rel^2. musubi counts files instead of steps and from one too low a
number, by which the first file gets no weight; here the steps are those the files name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from library.errors import UserError, names_in_short
from networks.files.adapters import LoraFile
from networks.files.weights import LoraWeights

_STEP = re.compile(r"-step(\d+)(-|\.|$)")
_EPOCH = re.compile(r"-(\d{6})(\.|$)")


def training_order(paths: Sequence[Path], metadata: Sequence[Mapping[str, str]]) -> list[int]:
    """Return how far each file's training was: steps, or epochs where no step is known.

    The step is ``ss_steps`` of the metadata, or the number in ``name-step00000100.safetensors``; the epoch the one in
    ``name-000002.safetensors``.
    """
    steps = [strings.get("ss_steps", "") for strings in metadata]
    if all(step.isdigit() and int(step) for step in steps):
        found: list[int | None] = [int(step) for step in steps]
    else:
        found = [_number(_STEP, path) for path in paths]
        if None in found:
            found = [_number(_EPOCH, path) for path in paths]
    if None in found:
        unnamed = paths[found.index(None)]
        raise UserError(f"{unnamed}: says no step (ss_steps, or -step00000100 in its name); put the files in order "
                        "and give --no_sort")  # fmt: skip
    numbers = [number for number in found if number is not None]
    if len(set(numbers)) < len(numbers):
        twice = next(path for i, path in enumerate(paths) if numbers[i] in numbers[:i])
        raise UserError(f"{twice}: is of the same step as another file; leave one of them out")
    return numbers


def linear_betas(count: int, first: float, last: float) -> list[float]:
    """Return beta of the second file to the last of ``count``, from ``first`` to ``last``."""
    return [float(beta) for beta in np.linspace(first, last, count - 1)]


def power_betas(times: Sequence[int], sigma_rel: float) -> list[float]:
    """Return beta of the second file to the last, saved at the rising ``times``."""
    if not 0 < sigma_rel < 12**-0.5:  # gamma = 0, the plain mean, has 1 / sqrt(12)
        raise UserError(f"--sigma_rel {sigma_rel:g}: must be above 0 and below 0.288; 0.05 to 0.25 are usual")
    power = power_of_width(sigma_rel) + 1
    return [(before / after) ** power for before, after in itertools.pairwise(times)]


def power_of_width(sigma_rel: float) -> float:
    """Return gamma of a power function profile of relative width ``sigma_rel``: the positive root of the cubic."""
    inverse = sigma_rel**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def average_loras(paths: Sequence[Path], files: Sequence[LoraFile], betas: Sequence[float]) -> dict[str, LoraWeights]:
    """Return the average of the files' factors in fp32, in their order; ``betas`` are of the second to the last.

    Raises:
        UserError: the files have other layers, ranks or alphas: they are not of one run.
    """
    first = files[0].weights
    totals = {name: (w.down.float(), w.up.float()) for name, w in first.items()}
    for path, file, beta in zip(paths[1:], files[1:], betas, strict=True):
        if alone := sorted(first.keys() ^ file.weights.keys()):
            raise UserError(f"{path}: has other layers than {paths[0]} ({names_in_short(alone, 2)}); average one run")
        for name, module in file.weights.items():
            if (module.rank, module.alpha) != (first[name].rank, first[name].alpha):
                here, there = f"{module.rank} and {module.alpha:g}", f"{first[name].rank} and {first[name].alpha:g}"
                raise UserError(f"{path}: {name} has rank and alpha {here}, {paths[0]} has {there}; average one run")
            down, up = totals[name]
            totals[name] = (_mix(down, module.down, beta), _mix(up, module.up, beta))
    return {name: LoraWeights(down, up, first[name].alpha) for name, (down, up) in totals.items()}


def _mix(past: Tensor, now: Tensor, beta: float) -> Tensor:
    return past * beta + now.float() * (1 - beta)


def _number(pattern: re.Pattern[str], path: Path) -> int | None:
    match = pattern.search(path.name)
    return int(match[1]) if match else None
