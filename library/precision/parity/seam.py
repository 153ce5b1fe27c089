"""Where an error lies: along the border of a filled region, inside it, or outside it.

Everything here looks at an error, deployed less reference, as an array [C, H, W] of latent cells or pixels, and at the
mask of the filled region. Distances are counted in cells by the larger of the two offsets (Chebyshev), which is what
dilating a mask with a 3 x 3 square counts.

What tells causes apart: rounding noise is much the same everywhere, and has no sign; what a server does to the mask
shows in the ring along the border; a LoRA that lost its strength darkens or brightens the ring; exact pixels pasted
beside imperfect ones leave a step across the border (``library.fidelity.border``, ``docs/precision.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Regions:
    """Cells by where they lie, each [H, W] bool; rings are so many cells wide.

    Attributes:
        filled: the region to fill.
        inside, outside: cells of the two within the ring along the border.
        interior, exterior: the rest of the two; of a side that is no wider than the ring, the cells deeper than
            its median one.
    """

    filled: Tensor
    inside: Tensor
    outside: Tensor
    interior: Tensor
    exterior: Tensor


def border_distance(mask: Tensor, most: int) -> Tensor:
    """Return how many cells each cell of ``mask`` [H, W] bool is from the nearest cell of the other kind, int64.

    A cell that touches the other kind, also by a corner, has distance 1; what is farther than ``most`` has most + 1.
    The image's rim is no border.
    """
    distance = torch.full(mask.shape, most + 1, dtype=torch.int64, device=mask.device)
    for kind in (mask, ~mask):
        reached = ~kind
        for step in range(1, most + 1):
            grown = F.max_pool2d(reached[None, None].float(), 3, stride=1, padding=1)[0, 0] > 0
            distance[grown & ~reached & kind] = step
            reached = grown
    return distance


def regions(mask: Tensor, ring: int) -> Regions:
    """Sort the cells of ``mask`` [H, W] (true or over one half: to be filled) by their distance from its border.

    Raises:
        ValueError: everything is filled, or nothing.
    """
    filled = mask > 0.5 if mask.is_floating_point() else mask.bool()
    if not filled.any() or filled.all():
        raise ValueError("a mask without a border: everything is to be filled, or nothing")
    distance = border_distance(filled, ring)

    def beyond(side: Tensor) -> Tensor:
        far = side & (distance > ring)
        if far.any():
            return far
        deeper = side & (distance > distance[side].median())
        return deeper if deeper.any() else side

    near = distance <= ring
    return Regions(filled, filled & near, ~filled & near, beyond(filled), beyond(~filled))


@dataclass(frozen=True)
class BorderErrors:
    """An error beside the border and away from it; see :func:`border_errors`."""

    near: Mapping[str, float]
    far: Mapping[str, float]


def border_errors(error: Tensor, mask: Tensor, ring: int) -> BorderErrors:
    """Return the sizes of ``error`` [C, H, W] within ``ring`` cells of the border of ``mask`` [H, W], and beyond.

    Of both sides the rms ("ring inside", "ring outside") and that of the high-pass part ("grain inside", "grain
    outside"); as "step" the mean absolute difference of neighbours across the border, beside that of neighbours in the
    interior.

    Raises:
        ValueError: the mask has no border.
    """
    where, error = regions(mask, ring), error.double()
    grain = high_pass(error)
    near = {"ring inside": _rms(error, where.inside), "ring outside": _rms(error, where.outside)}
    near |= {"grain inside": _rms(grain, where.inside), "grain outside": _rms(grain, where.outside)}
    far = {"ring inside": _rms(error, where.interior), "ring outside": _rms(error, where.exterior)}
    far |= {"grain inside": _rms(grain, where.interior), "grain outside": _rms(grain, where.exterior)}
    near["step"], far["step"] = _steps(error, where)
    return BorderErrors(near, far)


def high_pass(image: Tensor) -> Tensor:
    """Return ``image`` [C, H, W] less its 3 x 3 mean (edges repeated): what the eye takes for grain."""
    padded = F.pad(image[None], (1, 1, 1, 1), mode="replicate")
    return image - F.avg_pool2d(padded, 3, stride=1)[0]


def _steps(error: Tensor, where: Regions) -> tuple[float, float]:
    """Mean absolute difference of neighbours across the border, and of neighbours in the interior."""
    crossing, within = [], []
    for axis in (-2, -1):
        change = error.diff(dim=axis).abs().mean(0)
        filled, inner = (
            torch.stack([mask.narrow(axis, i, change.shape[axis]) for i in (0, 1)])
            for mask in (where.filled, where.interior)
        )
        crossing.append(change[filled.any(0) & ~filled.all(0)])
        within.append(change[inner.all(0)])
    across, usual = torch.cat(crossing), torch.cat(within)
    return float(across.mean()), float(usual.mean()) if usual.numel() else float(across.mean())


def _rms(image: Tensor, region: Tensor) -> float:
    return image[:, region].square().mean().sqrt().item()
