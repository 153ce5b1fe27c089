"""Singular values of weight updates: the best LoRA of a given rank, and the rank that is good enough.

    M = U diag(s) V^T        the closest matrix of rank r to M (Frobenius norm) keeps the r largest s (Eckart, Young)
    energy of M              |M|_F^2 = sum of all s^2; a rank keeps the share that its s^2 have in it

Two ways to the factors, each of which avoids the work that need not be done:

* *A product* B A of rank r (a LoRA): B = Q1 R1 and A^T = Q2 R2, so that B A = Q1 (R1 R2^T) Q2^T, and only the r x r
  core has to be decomposed. In float64.
* *A full matrix* of which few directions are wanted: the randomised range finder of Halko, Martinsson and Tropp
  (https://arxiv.org/abs/0909.4061, algorithm 4.4). Matrix products of a few hundred columns instead of a decomposition
  of a 3072 x 12288 matrix. With four power iterations the share of energy it loses against the exact answer is below
  1e-3 even where singular values fall slowly. Where a quarter of the directions or more is wanted it would not be
  faster, and the matrix is decomposed exactly.

Rules for the rank have the names and meanings of sd-scripts' ``networks/resize_lora.py``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from networks.weights import LoraWeights

RankRule = Literal["sv_fro", "sv_cumulative", "sv_ratio"]
RANK_RULES: tuple[RankRule, ...] = ("sv_fro", "sv_cumulative", "sv_ratio")

_EXACT_BELOW = 512  # smaller sides are decomposed exactly in well under a second
_EXACT_SHARE = 4  # and so is a matrix of which a quarter of the directions is wanted
_OVERSAMPLING = 16
_POWER_ITERATIONS = 4
_FIRST_GUESS = 64  # rank that is tried first where an energy is asked for


class Spectrum(NamedTuple):
    """``left @ diag(values) @ right``: [out, k], [k] falling, [k, in]; ``energy`` is that of the whole matrix."""

    left: Tensor
    values: Tensor
    right: Tensor
    energy: float

    def kept(self, rank: int) -> float:
        """Return the share of the energy in the ``rank`` largest singular values; 1.0 of a matrix of zeros."""
        return min(1.0, float(self.values[:rank].double().square().sum()) / self.energy) if self.energy else 1.0

    def lora(self, rank: int) -> LoraWeights:
        """Return the first ``rank`` directions as a LoRA of scale 1, the singular values shared by both factors."""
        root = self.values[:rank].sqrt()
        return LoraWeights(root[:, None] * self.right[:rank], self.left[:, :rank] * root, float(min(rank, len(root))))


def decompose_product(weights: LoraWeights) -> Spectrum:
    """Return the spectrum of a LoRA's update, in float64, without forming it."""
    left, left_core = torch.linalg.qr(weights.up.double())
    right, right_core = torch.linalg.qr(weights.down.double().t())
    u, values, vh = torch.linalg.svd(left_core @ right_core.t())
    k = len(values)
    values = values * abs(weights.scale)
    u = u if weights.scale >= 0 else -u
    return Spectrum(left @ u[:, :k], values, vh[:k] @ right.t(), float(values.square().sum()))


def decompose(matrix: Tensor, rank: int | None, generator: torch.Generator) -> Spectrum:
    """Return the ``rank`` largest directions of ``matrix`` [out, in] in its dtype (fp32 or wider); None: all.

    Args:
        matrix: on any device.
        rank: directions wanted; no more than there are.
        generator: on the CPU; draws the random directions of the approximate way.
    """
    side = min(matrix.shape)
    energy = _sum_of_squares(matrix)
    if rank is None or side <= _EXACT_BELOW or rank * _EXACT_SHARE >= side:
        u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    else:
        u, values, vh = _randomised(matrix, rank + _OVERSAMPLING, generator)
    rank = side if rank is None else min(rank, side)
    return Spectrum(u[:, :rank], values[:rank], vh[:rank], energy)


def decompose_to_energy(matrix: Tensor, energy: float, cap: int | None, generator: torch.Generator) -> Spectrum:
    """Return the fewest directions that hold the share ``energy`` of the matrix's energy, at most ``cap``."""
    side = min(matrix.shape)
    limit = min(cap or side, side)
    guess = min(_FIRST_GUESS, limit)
    while True:
        spectrum = decompose(matrix, guess, generator)
        if guess == limit or spectrum.kept(guess) >= energy:
            break
        guess = min(2 * guess, limit)
        guess = limit if guess * _EXACT_SHARE >= side else guess  # exact from here on: all at once
    rank = _first_reaching(spectrum.values.double().square().cumsum(0), energy * spectrum.energy)
    return Spectrum(spectrum.left[:, :rank], spectrum.values[:rank], spectrum.right[:rank], spectrum.energy)


def rank_by_rule(values: Tensor, rule: RankRule, parameter: float) -> int:
    """Return the rank that ``rule`` chooses for falling singular values; at least 1.

    Args:
        values: [k].
        rule: ``sv_fro``: the fewest whose Frobenius norm is at least ``parameter`` of the whole (the share of energy is
            its square); ``sv_cumulative``: the fewest whose sum is at least ``parameter`` of the sum of all;
            ``sv_ratio``: those larger than the largest one divided by ``parameter``.
    """
    values = values.double()
    if rule == "sv_fro":
        squares = values.square().cumsum(0)
        return _first_reaching(squares, parameter**2 * float(squares[-1]))
    if rule == "sv_cumulative":
        sums = values.cumsum(0)
        return _first_reaching(sums, parameter * float(sums[-1]))
    return max(1, int((values > values[0] / parameter).sum()))


def _first_reaching(sums: Tensor, target: float) -> int:
    """Return how many terms a rising sum needs to reach ``target``; all if it never does; at least 1."""
    # rounding in the sum must not ask for one more direction of size zero
    reached = sums >= target * (1 - 1e-12)
    return int(reached.int().argmax()) + 1 if bool(reached.any()) else len(sums)


def _sum_of_squares(matrix: Tensor) -> float:
    """Return |matrix|_F^2, summed in float64 without a float64 copy of the matrix."""
    return sum(float(rows.double().square().sum()) for rows in matrix.split(256))


def _randomised(matrix: Tensor, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return an approximate decomposition with ``columns`` directions."""
    if matrix.shape[0] < matrix.shape[1]:
        u, values, vh = _randomised(matrix.t(), columns, generator)
        return vh.t(), values, u.t()
    start = torch.randn(matrix.shape[1], columns, generator=generator, dtype=torch.float32)
    basis = torch.linalg.qr(matrix @ start.to(matrix))[0]
    for _ in range(_POWER_ITERATIONS):
        basis = torch.linalg.qr(matrix.t() @ basis)[0]
        basis = torch.linalg.qr(matrix @ basis)[0]
    u, values, vh = torch.linalg.svd(basis.t() @ matrix, full_matrices=False)
    return basis @ u, values, vh
