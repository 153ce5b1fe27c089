"""A layer of known shape to measure on: heavy-tailed weights, correlated inputs, a LoRA's update.

Weights are Student-t with 4 degrees of freedom and eight columns five times as large, at any standard deviation: the
kind that FLUX's layers are, made from a seed. Inputs lie mostly in a few directions. An update either has no direction
at all, or lies where the inputs are, as a trained LoRA's does.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIZE = 512
RANK = 16
_FREEDOM, _OUTLIERS, _OUTLIER_SIZE = 4, 8, 5.0


def heavy_tailed_weight(std: float, size: int = SIZE, seed: int = 0) -> Tensor:
    """Return a weight [size, size], fp32, of standard deviation ``std``."""
    random = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, size, generator=random)
    spread = torch.randn(size, size, _FREEDOM, generator=random).square().mean(-1).sqrt()
    weight = normal / spread  # Student's t: a normal number over the root of a chi square
    weight[:, torch.randperm(size, generator=random)[:_OUTLIERS]] *= _OUTLIER_SIZE
    return weight * (std / weight.std())


def input_moment(size: int = SIZE, seed: int = 1) -> Tensor:
    """Return the second moment [size, size] of inputs, float64.

    Their k-th direction has a variance of 1 / k, and eight channels are ten times the rms of the others.
    """
    random = torch.Generator().manual_seed(seed)
    directions, _ = torch.linalg.qr(torch.randn(size, size, generator=random, dtype=torch.float64))
    variances = 1.0 / torch.arange(1, size + 1, dtype=torch.float64)
    moment = directions @ (variances[:, None] * directions.t())
    outliers = torch.randperm(size, generator=random)[:_OUTLIERS]
    moment[outliers, outliers] += 100 * float(moment.diagonal().mean())
    return moment


def update_without_direction(weight: Tensor, share: float = 0.01, seed: int = 2) -> Tensor:
    """Return normal numbers of ``share`` of the weight's size."""
    update = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    return update * (share * weight.norm() / update.norm())


def update_along_inputs(weight: Tensor, moment: Tensor, share: float = 0.01, seed: int = 3) -> Tensor:
    """Return an update of rank 16 and ``share`` of the weight's size that looks where the inputs are."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(RANK, weight.shape[1], generator=random)
    down = inputs @ torch.linalg.cholesky(moment).t().float()  # rows are distributed as the inputs are
    update = torch.randn(weight.shape[0], RANK, generator=random) @ down
    return update * (share * weight.norm() / update.norm())
