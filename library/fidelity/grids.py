"""Is a matrix an honest rounding of what it should be? Told by the grid it lies on, with no other layer as reference.

What is rounded to a grid errs by that grid alone, whichever scales it was given (the largest number's, or searched with
an importance matrix): the reference's numbers are rounded to the very same grid, and the served ones may err as these
do. A second way of rounding is honest too, to either neighbour at random, and has laws as exact: none goes beyond them,
and known are how many go to the farther one, how many are too large, and the errors' first, second and fourth powers.
Another LoRA, a fine-tune or a factor move numbers by what no grid bounds: one of these may then be like either's, but
not all. These laws and factors are looked for in some rows of a large matrix; what a few rows can break, in all.

A dequantised copy does not say what its grid is. The numbers that are seen in a run of a row are levels of it, and an
honest number is the nearest of these to the reference's, as it is of all. A grid as fine as that of 8 bits shows but a
few of its levels in a run, which is said of such layers (``too_fine``): changes as small as their error are not seen.

Rounding that makes up for its errors by activations (GPTQ) keeps no law of these; the outputs show it (``layers``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from library.precision.files.base import LevelledWeight, QuantizedWeight, either
from library.randomness import generator

_NEAREST = (
    1.03  # times the error of rounding to nearest on the same grid; ggml's codes by an importance matrix have 1.02
)
_SMALL = 0.02  # relative error under which rounding at random is not told from other changes
_DRAWS, _RARE = 8, 0.002  # rounding at random has none beyond; a change by a quarter of a step has 0.004
_ALIKE = 0.05  # relative difference of two roundings at random, beside what chance makes
_OF_REFERENCE = 2.0**-9  # rms error of a reference in bf16, relative
_FEWER = 1.4  # times the different numbers of a run half as long: on one grid. Two of 16 levels have 1.9 times one's
_FEW = 0.9  # different numbers over all in runs of the shortest; of 4 bits 0.6, of 8 bits 0.97
_SHORTEST, _LONGEST = 16, 256
_SAMPLE = 1 << 20  # numbers that tell a factor to 0.001, and the share of rare numbers to a twentieth
_FACTOR = 0.005  # that a factor differs from 1
_GAIN = 0.006  # of two roundings
SURE = 5.0  # standard errors
EITHER_NEIGHBOUR, ONE_ROW = 1.55, 3.0  # times rounding to nearest: rounding at random has 1.41; of a single row


class Grid(Protocol):
    """Something that rounds to a grid."""

    def on_grid(self, weight: Tensor, random: torch.Generator | None = None) -> Tensor:
        """Return ``weight`` [out, in] as the nearest numbers of the grid, or as either neighbour at random."""
        ...

    def part(self, rows: slice) -> Grid:
        """Return the grid of some rows."""
        ...


@dataclass(frozen=True)
class SeenGrid:
    """The numbers in each run of a matrix, ascending: ``levels`` [out, runs, run]; of a finer grid ``too_fine``."""

    levels: Tensor
    too_fine: bool

    def on_grid(self, weight: Tensor, random: torch.Generator | None = None) -> Tensor:
        """See :class:`Grid`; within each run."""
        runs = weight.float().reshape(self.levels.shape).contiguous()
        above = torch.searchsorted(self.levels, runs).clamp_(1, self.levels.shape[2] - 1)
        lower, upper = self.levels.gather(2, above - 1), self.levels.gather(2, above)
        return either(runs, lower, upper, random).view(weight.shape)

    def part(self, rows: slice) -> SeenGrid:
        """See :class:`Grid`."""
        return SeenGrid(self.levels[rows].contiguous(), self.too_fine)


def seen_grid(numbers: Tensor) -> SeenGrid:
    """Return the grid of ``numbers`` [out, in]: of the longest runs that are on one, as far as runs show it."""
    run = math.gcd(numbers.shape[1], _SHORTEST)
    seen = distinct(numbers, run)
    too_fine = seen > _FEW * run
    while not too_fine and run < _LONGEST and numbers.shape[1] % (2 * run) == 0:
        more = distinct(numbers, 2 * run)
        if more > _FEWER * seen:
            break
        run, seen = 2 * run, more
    return SeenGrid(numbers.float().reshape(len(numbers), -1, run).sort(dim=2).values, too_fine)


def distinct(numbers: Tensor, run: int) -> float:
    """Return the mean number of different numbers in ``run`` neighbours of a row; a sample of 2,048 runs."""
    columns = numbers.shape[1] // run * run
    if not columns:
        return math.inf
    runs = numbers[:, :columns].reshape(-1, run)
    runs = runs[:: max(1, len(runs) // 2048)].float().sort(dim=1).values
    return float((runs[:, 1:] != runs[:, :-1]).float().sum(1).mean()) + 1


def on_own_grid(stored: QuantizedWeight, weight: Tensor) -> Tensor:
    """Return ``weight`` rounded to nearest in the format, with the steps of ``stored`` where nothing here writes it."""
    return stored.on_grid(weight) if isinstance(stored, LevelledWeight) else stored.rounded(weight)


def sampled_rows(weight: Tensor) -> slice:
    """Return evenly spaced rows of a large ``weight`` [out, in], about 2^20 numbers, and all of a small one.

    One row in 6 n + 1, so that all places in heads, or in queries, keys and values that take turns, are among them.
    """
    return slice(None, None, 6 * round(weight.numel() / (6 * _SAMPLE)) + 1)


def errs_like(numbers: Tensor, nearest: Tensor, wanted: Tensor, most: float) -> bool:
    """Return whether ``numbers`` err at most so many times what ``nearest`` does, in all, and thrice in any row."""
    error, honest_error = ((each - wanted).square().sum(1, dtype=torch.float64) for each in (numbers, nearest))
    tiny = _OF_REFERENCE**2 * wanted.square().sum(1, dtype=torch.float64)
    rows = bool((error <= ONE_ROW**2 * (honest_error + honest_error.mean()) + tiny).all())
    return rows and float(error.sum()) <= most**2 * float(honest_error.sum()) + float(tiny.sum())


def rounded_on(grid: Grid, numbers: Tensor, wanted: Tensor) -> bool:
    """Return whether ``numbers`` are ``wanted`` [out, in] rounded on their ``grid``, to nearest or at random."""
    nearest = grid.on_grid(wanted)
    if not errs_like(numbers, nearest, wanted, EITHER_NEIGHBOUR) or not same_gain(numbers, nearest, wanted):
        return False
    if abs(gain_of(numbers - nearest, wanted)) > _GAIN / 3 and factor_on(grid, numbers, wanted) != 1:
        return False
    if errs_like(numbers, nearest, wanted, _NEAREST) or relative(numbers, wanted) < _SMALL:
        return True
    rows = sampled_rows(wanted)
    grid, numbers, nearest, wanted = grid.part(rows), numbers[rows], nearest[rows], wanted[rows]
    random = generator("either neighbour", *wanted.shape)
    draws = [grid.on_grid(wanted, random) for _ in range(_DRAWS)]
    laws = zip(_laws(numbers, nearest, wanted), _laws(draws[0], nearest, wanted), strict=True)
    return _beyond(numbers, nearest, draws, wanted) < _RARE and all(
        abs(float(one.mean() - other.mean())) < _ALIKE * float(other.mean()) + 4 * _doubt(one, other)
        for one, other in laws
    )


def _beyond(numbers: Tensor, nearest: Tensor, draws: Sequence[Tensor], wanted: Tensor) -> float:
    """Return the share of numbers that lie outside both their neighbours, which several ``draws`` show nearly all."""
    near, far = (nearest - wanted).abs(), torch.stack([(draw - wanted).abs() for draw in draws]).amax(0)
    outside = (numbers - wanted).abs() > far + 0.05 * (near + far)
    return float((outside & (far > near)).float().mean())


def same_gain(numbers: Tensor, nearest: Tensor, wanted: Tensor) -> bool:
    """Return whether ``numbers`` are as large as ``nearest``, as far as chance moves that; few large numbers, far."""
    change = numbers - nearest
    doubt = float((change * wanted).norm()) / float(wanted.square().sum() or 1.0)
    return not bool(wanted.any()) or abs(gain_of(change, wanted)) <= _GAIN + SURE * doubt


def factor_on(grid: Grid, numbers: Tensor, wanted: Tensor) -> float:
    """Return what ``wanted`` was multiplied with before it was rounded to nearest on the ``grid``; 1 if by nothing.

    A factor is one if it explains most of the numbers that are not the nearest. It is looked for near the gain, which
    rounding on a coarse grid makes smaller, on a sample of the rows, and confirmed on all.
    """
    some = sampled_rows(wanted)

    def far(factor: float, rows: slice = some) -> float:
        made = grid.part(rows).on_grid(factor * wanted[rows])
        return float((made - numbers[rows]).square().sum(dtype=torch.float64))

    gain = gain_of(numbers, wanted)
    best = min((gain * (1 + step / 100) for step in range(-2, 11)), key=far)
    best = min((best * (1 + step / 500) for step in range(-4, 5)), key=far)
    confirmed = abs(best - 1) > _FACTOR and all(far(best, rows) < 0.5 * far(1.0, rows) for rows in (some, slice(None)))
    return best if confirmed else 1.0


def _laws(numbers: Tensor, nearest: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
    """Return for each number whether it is not the nearest, whether it is too large, and its error's powers 1, 2, 4."""
    others = (numbers - nearest).abs() > 1e-4 * wanted.abs().mean()
    error = (numbers - wanted).double()
    return others.double(), (error * wanted > 0).double(), error.abs(), error.square(), error**4


def _doubt(one: Tensor, other: Tensor) -> float:
    """Return the standard error of the difference of two means."""
    return math.sqrt(float(one.var() + other.var()) / one.numel())


def dot(a: Tensor, b: Tensor) -> float:
    """Return the sum of products, added up in float64."""
    return float((a * b).sum(dtype=torch.float64))


def relative(numbers: Tensor, wanted: Tensor) -> float:
    """Return |numbers - wanted| / |wanted|; 0 of 0 is 0, anything of 0 is 1."""
    difference = numbers - wanted
    error, size = dot(difference, difference), dot(wanted, wanted)
    return math.sqrt(error / size) if size else float(error > 0)


def gain_of(numbers: Tensor, wanted: Tensor) -> float:
    """Return the factor by which ``wanted`` comes nearest to ``numbers``; 1 of zeros."""
    size = dot(wanted, wanted)
    return dot(numbers, wanted) / size if size else 1.0
