"""The update of low rank that makes up for as much as possible of a weight error, on the inputs that occur.

Wanted are B [out, r] and A [r, in] that minimise E|x (T - B A)^T|^2 = trace((T - B A) C (T - B A)^T), with T [out, in]
the error to undo and C the inputs' second moment. This is reduced-rank regression. With C = L L^T the best B A L is
the truncated SVD of T L (Eckart-Young); its left factor U are the r leading eigenvectors of T C T^T, and

    B = U,   A = U^T T L L^-1 = U^T T

so neither a root nor an inverse of C is needed. QERA (https://arxiv.org/abs/2410.06040, theorem 1) gives this solution
with C^(1/2) for quantisation errors; LoRA retargeting puts the LoRA's own update into T. With A given (EoRA, LoftQ and
others fit one side at a time) the best B is least squares:

    B = T C A^T (A C A^T)^-1

Large layers find U by subspace iteration, whose error is in directions that matter least: T C T^T is never formed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from library.precision.parity.errors import damped
from library.randomness import generator

DAMPING = 0.01
_EXACT = 256  # rows up to which all eigenvectors are computed, in 20 ms; 768 take 0.3 s, 3072 take 20 s
_ITERATIONS, _OVERSAMPLING = 12, 32


def fit_low_rank(target: Tensor, moment: Tensor, rank: int, damping: float = DAMPING) -> tuple[Tensor, Tensor]:
    """Return (up [out, rank], down [rank, in]), fp32, whose product is nearest to ``target`` on the inputs.

    Args:
        target: [out, in], what is to be made up for.
        moment: [in, in], second moment of the inputs.
        rank: at most min(out, in); columns beyond it are zero.
        damping: see ``errors.damped``.
    """
    out_features, in_features = target.shape
    exact = out_features <= _EXACT
    dtype = torch.float64 if exact else torch.float32
    target, metric = target.to(dtype), damped(moment, damping, dtype)
    possible = min(rank, out_features, in_features)
    leading = _eigenvectors(target, metric, possible) if exact else _by_iteration(target, metric, possible)
    down = leading.t() @ target
    # Both factors of the same size, as an SVD shared between them: the files' dtypes round both alike.
    sizes = down.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    up, down = leading * sizes, down / sizes.unsqueeze(1)
    missing = rank - possible
    if missing:
        up = torch.cat([up, up.new_zeros(out_features, missing)], dim=1)
        down = torch.cat([down, down.new_zeros(missing, in_features)])
    return up.float(), down.float()


def fit_up(target: Tensor, moment: Tensor, down: Tensor, damping: float = DAMPING) -> Tensor:
    """Return the up-projection [out, rank], fp32, that with ``down`` [rank, in] is nearest to ``target`` [out, in]."""
    metric = damped(moment, damping, torch.float32)
    seen = down.float() @ metric  # [rank, in]
    gram = (seen @ down.float().t()).double()
    gram.diagonal().add_(1e-10 * gram.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny))
    crossed = (target.float() @ seen.t()).double()
    return torch.linalg.solve(gram, crossed.t()).t().float()


def _eigenvectors(target: Tensor, metric: Tensor, count: int) -> Tensor:
    """Return the leading eigenvectors of target metric target^T, [out, count]."""
    gram = target @ metric @ target.t()
    return torch.linalg.eigh(gram + gram.t()).eigenvectors.flip(1)[:, :count]


def _by_iteration(target: Tensor, metric: Tensor, count: int) -> Tensor:
    """The same, by subspace iteration with a few spare columns (Halko et al. 2011, algorithm 4.4)."""
    columns = min(count + _OVERSAMPLING, *target.shape)
    start = torch.randn(target.shape[0], columns, generator=generator("subspace", *target.shape))
    basis = torch.linalg.qr(start.to(target.device)).Q
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(target @ (metric @ (target.t() @ basis))).Q
    projected = basis.t() @ target
    small = (projected @ metric @ projected.t()).double()
    within = torch.linalg.eigh(small + small.t()).eigenvectors.flip(1)[:, :count]
    return basis @ within.to(basis.dtype)
