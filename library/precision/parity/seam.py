"""Where an error lies: along the border of a filled region, inside it, outside it, or at an image's own edges.

Everything here looks at two images, a reference and a deployed one, as arrays [..., H, W] of latent cells or pixels,
and at the mask of the filled region. Distances are counted in cells by the larger of the two offsets (Chebyshev), which
is what dilating a mask with a 3 x 3 square counts.

Three metrics tell causes apart (found with a toy fill model; ``docs/precision.md`` shows them):

- the seam ratio, rms error of a ring over that of the interior: rounding noise is the same everywhere and gives 1; a
  LoRA that lost its strength shows at the border first;
- the *signed* difference of ring and interior: noise has none, a LoRA that became weaker darkens or brightens;
- the error's step from a cell inside to its neighbour outside, over the steps within the interior: exact pixels
  pasted beside imperfect ones give a step of several times the usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RING_WIDTHS = (1, 2, 4, 8)
SeamMetrics = dict[str, Any]  # metric -> number, or ring width -> number; see :func:`seam_metrics`


@dataclass(frozen=True)
class Regions:
    """Cells by where they lie, each [H, W] bool.

    Attributes:
        filled: the region to fill. known: the rest.
        inside: width -> filled cells within so many cells of the border.
        outside: width -> known cells within so many cells of the border.
        interior: filled cells beyond the widest ring; where there are none, the filled cells deeper than
            the median one.
    """

    filled: Tensor
    known: Tensor
    inside: Mapping[int, Tensor]
    outside: Mapping[int, Tensor]
    interior: Tensor


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


def regions(mask: Tensor) -> Regions:
    """Sort the cells of ``mask`` [H, W] (true or over one half: to be filled) by their distance from its border.

    Raises:
        ValueError: everything is filled, or nothing.
    """
    filled = mask > 0.5 if mask.is_floating_point() else mask.bool()
    if not filled.any() or filled.all():
        raise ValueError("a mask without a border: everything is to be filled, or nothing")
    distance = border_distance(filled, max(RING_WIDTHS))
    interior = filled & (distance > max(RING_WIDTHS))
    if not interior.any():
        far = border_distance(filled, max(filled.shape))
        deeper = filled & (far > far[filled].median())
        interior = deeper if deeper.any() else filled
    inside = {width: filled & (distance <= width) for width in RING_WIDTHS}
    outside = {width: ~filled & (distance <= width) for width in RING_WIDTHS}
    return Regions(filled, ~filled, inside, outside, interior)


def edge_regions(image: Tensor, share: float = 0.1) -> tuple[Tensor, Tensor]:
    """Return the strongest edges of ``image`` [C, H, W] and its flattest half, each [H, W] bool.

    For images without a mask: an edge is one of the ``share`` of cells where the image changes most.
    """
    steepness = _gradient(image.float()).square().sum(0)
    values = steepness.flatten()
    edges = steepness >= values.quantile(1 - share)
    return edges, (steepness <= values.median()) & ~edges


def seam_metrics(reference: Tensor, deployed: Tensor, mask: Tensor) -> SeamMetrics:
    """Measure the error ``deployed - reference``, both [C, H, W], by region of ``mask`` [H, W].

    Returns:
        - ``inside``, ``outside``: ring width -> rms error in the ring over that of the interior; ``inside[2]`` is the
          usual seam ratio.
        - ``high_pass``: the same of the error's high-pass part, rings inside.
        - ``signed``: mean error of the ring inside less that of the interior, over the rms of the reference's filled
          region.
        - ``step``: mean absolute difference of the error across the border over that of neighbours in the interior.
        - ``jump_reference``, ``jump_deployed``: the images' own mean absolute difference across the border over that
          of neighbours in the interior.
        - ``bend_reference``, ``bend_deployed``: the same of second differences, which see a kink where both sides meet.
        - ``error_filled``, ``error_known``, ``error_interior``: rms error over the rms of the whole reference.

    Raises:
        ValueError: the mask has no border.
    """
    where = regions(mask)
    reference, deployed = reference.double(), deployed.double()
    error = deployed - reference
    size = reference.square().mean().sqrt().item()
    filled_size = max(_rms(reference, where.filled), 1e-30)
    middle = _mean(error, where.interior)

    def ratios(of: Tensor, rings: Mapping[int, Tensor]) -> dict[int, float]:
        return {width: _ratio(_rms(of, ring), _rms(of, where.interior)) for width, ring in rings.items()}

    return {
        "inside": ratios(error, where.inside),
        "outside": ratios(error, where.outside),
        "high_pass": ratios(high_pass(error), where.inside),
        "signed": {width: (_mean(error, ring) - middle) / filled_size for width, ring in where.inside.items()},
        "step": _across(error, where, order=1),
        "jump_reference": _across(reference, where, order=1),
        "jump_deployed": _across(deployed, where, order=1),
        "bend_reference": _across(reference, where, order=2),
        "bend_deployed": _across(deployed, where, order=2),
        "error_filled": _ratio(_rms(error, where.filled), size),
        "error_known": _ratio(_rms(error, where.known), size),
        "error_interior": _ratio(_rms(error, where.interior), size),
    }


def high_pass(image: Tensor) -> Tensor:
    """Return ``image`` [C, H, W] less its 3 x 3 mean (edges repeated): what the eye takes for grain."""
    padded = F.pad(image[None], (1, 1, 1, 1), mode="replicate")
    return image - F.avg_pool2d(padded, 3, stride=1)[0]


def spectrum(error: Tensor) -> tuple[list[float], list[float]]:
    """Return frequencies (cycles a cell, up to 0.5) and the error's mean power there, for ``error`` [C, H, W].

    Power is averaged over channels and over rings of equal frequency, and is 1 on average over all frequencies: white
    noise is a flat line at 1.
    """
    height, width = error.shape[-2:]
    power = torch.fft.fft2(error.double()).abs().square().mean(0)
    power = power / power.mean().clamp_min(1e-300)
    rows, columns = torch.fft.fftfreq(height), torch.fft.fftfreq(width)
    radius = (rows[:, None].square() + columns[None, :].square()).sqrt()
    bins = max(4, min(height, width) // 2)
    index = (radius * 2 * bins).long()
    frequencies, powers = [], []
    for each in range(bins):
        chosen = index == each
        if chosen.any():
            frequencies.append((each + 0.5) / (2 * bins))
            powers.append(power[chosen].mean().item())
    return frequencies, powers


def _across(image: Tensor, where: Regions, order: int) -> float:
    """Mean absolute difference of ``order`` across the border over that within the interior."""
    crossing, within = [], []
    for axis in (-2, -1):
        change = image.diff(n=order, dim=axis).abs().mean(0)
        cells = [where.filled.narrow(axis, i, change.shape[axis]) for i in range(order + 1)]
        inner = [where.interior.narrow(axis, i, change.shape[axis]) for i in range(order + 1)]
        crossing.append(change[torch.stack(cells).any(0) & ~torch.stack(cells).all(0)])
        within.append(change[torch.stack(inner).all(0)])
    if not torch.cat(within).numel():
        return float("nan")
    return _ratio(torch.cat(crossing).mean().item(), torch.cat(within).mean().item())


def _gradient(image: Tensor) -> Tensor:
    """Length of the central differences of ``image`` [C, H, W], edges repeated."""
    padded = F.pad(image[None], (1, 1, 1, 1), mode="replicate")[0]
    rows = (padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]) / 2
    columns = (padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]) / 2
    return (rows.square() + columns.square()).sqrt()


def _rms(image: Tensor, region: Tensor) -> float:
    return image[:, region].square().mean().sqrt().item()


def _mean(image: Tensor, region: Tensor) -> float:
    return image[:, region].mean().item()


def _ratio(value: float, base: float) -> float:
    """``value`` over ``base``; two zeros are equal, 1."""
    if base == 0.0:
        return 1.0 if value == 0.0 else float("inf")
    return value / base
