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

from library.fidelity.grids import Grid, rounded_on
from library.precision.files.base import QuantizedWeight, ReadOnlyScheme, in_units
from library.precision.files.fp8 import Fp8Weight

CHUNK = 1 << 22  # entries that are turned at a time
_TOLERANCE = 0.125
MOST = 1 + _TOLERANCE  # steps that honest rounding errs, stochastic or to nearest
_MERGED = 1.9  # times rounding to nearest: rounded twice, stochastically the second time, is 1.73
RARE = 5e-4  # share of entries that may lie up to two steps further out
_COARSE = 1.5  # times the typical error, where the format is not known
_EITHER, _ROW = 1.55, 3.0  # times rounding to nearest: stochastic rounding has 1.41; of a single row


@dataclass(frozen=True)
class Steps:
    """Errors in steps of the format at the reference's numbers; ``seen``: those of at least one step.

    Attributes:
        beyond: share of all entries that err more than allowed. farthest: the largest error.
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
        numbers: fp32 [out, in]. quantized: values and scales of fp8 where they are known, also of numbers on a cast's
            grid.
        expected: relative error of layers like it: of rounding to nearest in its format, or, where that is not known,
            of the median layer; 0 in high precision.
        merged: something was merged into it, so that it may have been rounded twice.
        stored: as the file has it, in any format. grid: that its numbers lie on, of formats other than fp8.
    """

    numbers: Tensor
    quantized: Fp8Weight | None = None
    expected: float = 0.0
    merged: bool = False
    stored: QuantizedWeight | None = None
    grid: Grid | None = None

    def fits(self, wanted: Tensor, gains: Tensor | None = None) -> bool:
        """Return whether the numbers are an honest rounding of ``wanted`` times its scale groups' ``gains``."""
        if self.quantized is not None and not self.merged:
            scaled = self.quantized if gains is None else with_gains(self.quantized, gains)
            return honest(steps_of(scaled, wanted))
        if self.grid is not None and not self.merged:
            return rounded_on(self.grid, self.numbers, wanted if gains is None else wanted * spread(gains, wanted))
        if not self.expected:
            return same_in_bf16(self.over(gains), wanted)
        nearest = self._nearest_errors(wanted, gains)
        limit = (_MERGED if self.merged else _EITHER if nearest is not None else _COARSE) * self.expected
        numbers = self.over(gains)
        drift = 0.006 + 1.5 * self.expected**2 + 5 * self.expected / math.sqrt(wanted.numel())
        far = relative(numbers, wanted) > (2 * limit if nearest is not None else limit) + 1e-3
        if far or abs(gain_of(numbers, wanted) - 1) > drift:
            return False
        if nearest is None:
            return True
        errors = (numbers - wanted).square_().sum(1, dtype=torch.float64)
        tiny = 1e-6 * wanted.square().sum(1, dtype=torch.float64)
        most = _MERGED if self.merged else _EITHER
        alike = float(errors.sum()) <= most**2 * float(nearest.sum()) + float(tiny.sum())
        return alike and bool((errors <= _ROW**2 * nearest + tiny).all())

    def over(self, gains: Tensor | None) -> Tensor:
        """Return the numbers divided by the gains of their groups."""
        return self.numbers if gains is None else self.numbers / spread(gains, self.numbers)

    @property
    def steps(self) -> Tensor | None:
        """The steps that its values are multiplied with, [1 or out, runs]; None where there are none, or not known."""
        steps = None if self.stored is None else self.stored.steps()
        return steps if steps is not None and bool((torch.isfinite(steps) & (steps > 0)).all()) else None

    def _nearest_errors(self, wanted: Tensor, gains: Tensor | None) -> Tensor | None:
        """Return each row's squared error of ``wanted`` rounded to nearest with the served steps, if they are known."""
        if self.stored is None or isinstance(self.stored.scheme, ReadOnlyScheme):
            return None
        scheme, steps = self.stored.scheme, self.steps
        if steps is None and self.stored.steps() is not None:
            return None
        steps = torch.ones(1, 1) if steps is None else steps
        if gains is not None:
            if gains.shape[1] not in (1, steps.shape[1]):
                return None
            steps = steps / gains
        units = in_units(scheme.rotate(wanted), steps)
        errors = (scheme.round(units).float() - units).square_().unflatten(1, (steps.shape[1], -1)).sum(-1)
        return (errors * steps.square()).sum(1, dtype=torch.float64)


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
        beyond += float((size > allowed).sum())
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
    chunk = weight[rows].float()
    if scale is None:
        return chunk
    factors = scale if scale.shape[0] == 1 else scale[rows]
    return (chunk.view(len(chunk), factors.shape[1], -1) / factors.unsqueeze(-1)).view(chunk.shape)


def honest(steps: Steps, merged: bool = False) -> bool:
    """Return whether errors are those of rounding to nearest or stochastically, of two roundings where ``merged``."""
    doubt = 3 / math.sqrt(max(steps.seen, 1))
    outliers = steps.beyond > (10 * RARE if merged else RARE) or steps.farthest > (2 * MOST if merged else MOST) + 2
    return not outliers and abs(steps.drift) < 0.1 + doubt and steps.energy < (0.42 if merged else 0.25) + doubt / 3


def same_in_bf16(numbers: Tensor, wanted: Tensor) -> bool:
    """Return whether both are the same but for a rounding to bf16 or fp16, and of the same size over all."""
    close = (numbers - wanted).abs_() <= wanted.abs().mul_(2.0**-7).add_(6e-8)
    return bool(close.all()) and abs(gain_of(numbers, wanted) - 1) < 1e-3 + 2.0**-8 / math.sqrt(wanted.numel())


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


def group_gains(numbers: Tensor, wanted: Tensor, rows: int, blocks: int) -> Tensor:
    """Return [rows, blocks], the factor of each group that shares a scale; 1 where the reference is zero."""
    parts = [(x.view(x.shape[0], blocks, -1)) for x in (numbers, wanted)]
    products, sizes = (parts[0] * parts[1]).sum(-1, dtype=torch.float64), parts[1].square().sum(-1, dtype=torch.float64)
    if rows == 1:
        products, sizes = products.sum(0, keepdim=True), sizes.sum(0, keepdim=True)
    return torch.where(sizes > 0, products / sizes, torch.ones_like(sizes)).float()


def with_gains(quantized: Fp8Weight, gains: Tensor) -> Fp8Weight:
    """Return the same values with scales divided by ``gains``."""
    scale = quantized.factors
    return Fp8Weight(quantized.values, (scale / gains).float())


def spread(gains: Tensor, like: Tensor) -> Tensor:
    """Return ``gains`` [rows, blocks] as a matrix of the shape of ``like``."""
    return gains.repeat_interleave(like.shape[1] // gains.shape[1], 1).expand(like.shape)


@dataclass(frozen=True)
class Candidate:
    """What may have been done: a key of ``CAUSES``, words, and what the served numbers are to be a rounding of.

    ``gains``: of its scale groups. ``numbers``: the served ones read otherwise; their format's steps say nothing then.
    """

    cause: str
    words: str
    wanted: Tensor
    gains: Tensor | None = None
    numbers: Tensor | None = None
