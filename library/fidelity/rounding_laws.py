"""The laws that honest rounding keeps, and what is measured of a matrix to tell whether it does.

In units of the format's step at the reference's number, an honest rounding to nearest never errs by more than 1/2, a
stochastic one never by more than 1; a merge into weights that were rounded before adds at most 1/2 of a step that may
be twice as long. The mean squared error is 1/12 and 1/6 of a step's square; rounding toward zero has 1/3, and a mean of
-1/2. None of that depends on a layer's size or on how its weights are distributed. An eighth of a step is allowed for a
reference or a scale in bf16 (each moves a number by at most 1/32 of a step).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from library.fidelity.grids import SURE, Grid, SeenGrid, errs_like, factor_on, gain_of, relative, rounded_on, same_gain
from library.precision.files.base import QuantizedWeight, in_units
from library.precision.files.cut_weight import scale_of_rows
from library.precision.files.fp8 import Fp8Weight
from library.randomness import generator

CHUNK = 1 << 22  # entries that are turned at a time
_TOLERANCE = 0.125
MOST = 1 + _TOLERANCE  # steps that honest rounding errs, stochastic or to nearest
TWO_ROUNDINGS = 1.9  # times rounding to nearest: rounded twice, stochastically the second time, is 1.73
RARE = 5e-4  # share of entries that may lie up to two steps further out
_COARSE = 1.5  # times the typical error, where the format is not known
_UNLIKE = 0.5  # relative error from which numbers are no rounding of any format, whatever the factor


@dataclass(frozen=True)
class Steps:
    """Errors in steps of the format at the reference's numbers; ``seen``: those of at least one step.

    Attributes:
        beyond: share of all entries that err more than allowed, or lie above the format's end.
        farthest: the largest error.
        drift: mean over the seen, positive away from zero. energy: mean of squares over the seen, at most one step far.
        against: share of the seen whose error has the other sign than the drift.
        flushed: share of seen subnormal numbers that became zero. seen: how many there are.
    """

    beyond: float
    farthest: float
    drift: float
    against: float
    energy: float
    flushed: float
    seen: int


@dataclass(frozen=True)
class ServedMatrix:
    """A matrix as it is served.

    Attributes:
        numbers: fp32 [out, in].
        stored: as the file has it, in any format; also as fp8 where the numbers lie on a cast's grid.
        seen: the grid of numbers in high precision that went through a format which they do not tell.
        expected: relative error of rounding to nearest on its grid; 0 in high precision.
        merged: something was merged into it, so that it may have been rounded twice.
    """

    numbers: Tensor
    stored: QuantizedWeight | None = None
    seen: SeenGrid | None = None
    expected: float = 0.0
    merged: bool = False

    @property
    def grid(self) -> Grid | None:
        """What its numbers lie on; None in high precision."""
        return self.seen if self.stored is None else self.stored

    @property
    def fp8(self) -> Fp8Weight | None:
        """Values and scales of fp8."""
        return self.stored if isinstance(self.stored, Fp8Weight) else None

    def fits(self, wanted: Tensor, base: Tensor | None = None) -> bool:
        """Return whether the numbers are an honest rounding of ``wanted`` [out, in].

        ``base``: what an update was merged into, if one was and that is known.
        """
        grid = self.grid
        if grid is None:
            return self._near(wanted) if self.expected else same_in_bf16(self.numbers, wanted)
        if self.fp8 and self.merged == (base is not None) and not honest(steps_of(self.fp8, wanted, base), self.merged):
            return False
        if self.seen is not None:  # which cannot tell what was clipped
            error = relative(self.numbers, wanted)
            if abs(gain_of(self.numbers, wanted) - 1) > 0.006 + error**2 + SURE * error / math.sqrt(wanted.numel()):
                return False
        if not self.merged:
            return rounded_on(grid, self.numbers, wanted)
        nearest = grid.on_grid(wanted)
        return errs_like(self.numbers, nearest, wanted, TWO_ROUNDINGS) and same_gain(self.numbers, nearest, wanted)

    def factor(self, wanted: Tensor) -> float:
        """Return what ``wanted`` was multiplied with before it was rounded, as far as the numbers are like it."""
        gain, grid = gain_of(self.numbers, wanted), self.grid
        if grid is None or relative(self.numbers, gain * wanted) > _UNLIKE:
            return gain
        found = factor_on(grid, self.numbers, wanted)
        drawn = grid.on_grid(gain * wanted, generator("factor", *wanted.shape))  # which clips what it rounds
        return gain**2 / (gain_of(drawn, wanted) or gain) if found == 1 else found

    def _near(self, wanted: Tensor) -> bool:
        """Return whether numbers whose grid is not known, as they are read otherwise, err as layers like it do."""
        drift = 0.006 + 1.5 * self.expected**2 + 5 * self.expected / math.sqrt(wanted.numel())
        close = relative(self.numbers, wanted) <= (TWO_ROUNDINGS if self.merged else _COARSE) * self.expected + 1e-3
        return close and abs(gain_of(self.numbers, wanted) - 1) <= drift

    @property
    def steps(self) -> Tensor | None:
        """The steps that its values are multiplied with, [1 or out, runs]; None where there are none, or not known."""
        steps = None if self.stored is None else self.stored.steps()
        return steps if steps is not None and bool((torch.isfinite(steps) & (steps > 0)).all()) else None


def steps_of(served: Fp8Weight, wanted: Tensor, base: Tensor | None = None) -> Steps:
    """Measure the errors of ``served`` against ``wanted`` [out, in] in steps, a chunk of rows at a time.

    ``base``: what an update was merged into, if one was. The step is that at the larger of the two numbers: the base
    may have been rounded before.
    """
    fp8, scale = served.fp8, served.steps()
    allowed = MOST if base is None else 2 * MOST
    beyond = near = drift = above = below = energy = subnormal = flushed = 0.0
    seen, farthest = 0, 0.0
    lowest = int(math.log2(fp8.min_normal))
    rows = max(1, CHUNK // wanted.shape[1])
    for start in range(0, wanted.shape[0], rows):
        chunk = slice(start, start + rows)
        v = over_scale(wanted, scale, chunk)
        q = served.values[chunk].float()
        larger = v.abs() if base is None else v.abs().maximum(over_scale(base, scale, chunk).abs())
        exponent = (torch.frexp(larger).exponent - 1).clamp_(min=lowest) - fp8.mantissa_bits
        step = torch.ldexp(torch.ones_like(v), exponent)
        error = (q - v).mul_(v.sign()).div_(step)  # positive: away from zero
        size = error.abs()
        large = v.abs() >= step
        within = large & (size <= allowed)
        small = (v.abs() > 1.25 * step) & (v.abs() < fp8.min_normal)
        beyond += float(((size > allowed) | (v.abs() > fp8.max + (0.5 + _TOLERANCE) * step)).sum())  # no scale clips
        farthest = max(farthest, float(size.max()))
        drift += float(error[within].sum())
        above += float((error[within] > _TOLERANCE / 2).sum())
        below += float((error[within] < -_TOLERANCE / 2).sum())
        energy += float(error[within].square().sum())
        near += float(within.sum())
        seen += int(large.sum())
        subnormal += float(small.sum())
        flushed += float((small & (q == 0)).sum())
    n, near = wanted.numel(), max(near, 1.0)
    flushed = flushed / subnormal if subnormal else 0.0
    against = (below if drift > 0 else above) / near
    return Steps(beyond / n, farthest, drift / near, against, energy / near, flushed, seen)


def over_scale(weight: Tensor, scale: Tensor | None, rows: slice) -> Tensor:
    """Return rows of ``weight`` in the numbers that the format's values stand for without their scale."""
    return in_units(weight[rows].float(), None if scale is None else scale_of_rows(scale, rows))


def honest(steps: Steps, merged: bool = False) -> bool:
    """Return whether errors are those of rounding to nearest or stochastically, of two roundings where ``merged``."""
    doubt = 3 / math.sqrt(max(steps.seen, 1))
    outliers = steps.beyond > (10 * RARE if merged else RARE) or steps.farthest > (2 * MOST if merged else MOST) + 2
    return not outliers and abs(steps.drift) < 0.1 + doubt and steps.energy < (0.42 if merged else 0.25) + doubt / 3


def same_in_bf16(numbers: Tensor, wanted: Tensor) -> bool:
    """Return whether both are the same but for a rounding to bf16 or fp16, and of the same size over all."""
    close = (numbers - wanted).abs_() <= wanted.abs().mul_(2.0**-7).add_(6e-8)
    return bool(close.all()) and abs(gain_of(numbers, wanted) - 1) < 1e-3 + 2.0**-8 / math.sqrt(wanted.numel())


def group_gains(numbers: Tensor, wanted: Tensor, rows: int, blocks: int) -> Tensor:
    """Return [rows, blocks], the factor of each group that shares a scale; 1 where the reference is zero."""
    parts = [(x.view(x.shape[0], blocks, -1)) for x in (numbers, wanted)]
    products, sizes = (parts[0] * parts[1]).sum(-1, dtype=torch.float64), parts[1].square().sum(-1, dtype=torch.float64)
    if rows == 1:
        products, sizes = products.sum(0, keepdim=True), sizes.sum(0, keepdim=True)
    return torch.where(sizes > 0, products / sizes, torch.ones_like(sizes)).float()


def spread(gains: Tensor, like: Tensor) -> Tensor:
    """Return ``gains`` [rows, blocks] as a matrix of the shape of ``like``."""
    return gains.repeat_interleave(like.shape[1] // gains.shape[1], 1).expand(like.shape)


@dataclass(frozen=True)
class Candidate:
    """What may have been done: a key of ``CAUSES``, words, and what the served numbers are to be a rounding of.

    ``numbers``: the served ones read otherwise; their format's steps say nothing then.
    """

    cause: str
    words: str
    wanted: Tensor
    numbers: Tensor | None = None
