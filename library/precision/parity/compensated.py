"""Rounding in which every column makes up for the errors of the columns before it.

GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323): minimise trace((Q - W) C (Q - W)^T) one column after the
other. When column j has been rounded with error e, the best change of the columns that are still free is

    W[:, j:]  -=  e / U[j, j] * U[j, j:]          C^-1 = U^T U, U upper triangular

with U fixed for the whole matrix. Errors are carried on within a block of columns at once, and to all later blocks by
one product. U is had without an inverse: with the rows and columns of C in reverse order, C = R R^T for an upper
triangular R, and U = R^-1.

Scales are those of the weight that is given, so every granularity works alike and the columns may be taken in any
order; the ones with the largest inputs come first, while there are most others left to make up for them. What is
carried on can take a weight past its scale. Scales therefore have a little room on top, which costs a floating-point
format next to nothing, and rows that still do not fit are done again with larger scales: nothing is ever clamped.

Formats that rotate are rounded in the rotated basis, weight and moment alike.

Where the base is quantised already (:func:`merge_into`) no room is left: with the scales it had, the base itself is
rounded without error, and only the update has to be fitted in between, at 0.6 times the output error of new scales.
Steps of the base are then far larger than entries of the update, and a few per cent of what the update does to the
outputs are lost; the strength at which it is added makes up for that.

Cost for [out, in]: in^3 for U and out * in^2 for carrying on; 3072 x 3072 takes about 3 s on two cores, on a GPU far
less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from library.precision.files.base import QuantizedWeight, Scheme
from library.precision.parity.layer_errors import DAMPING, damped, update_retention

_BLOCK = 128  # columns between two products over all later ones, as in GPTQ's code
_DOUBLE = 1024  # inputs up to which U is computed in float64: 0.1 s
ROOM = 1 / 64
_ATTEMPTS = 8
_FEASIBLE = (0.5, 2.0)  # of the update's effect, what a change of its strength can put right


def quantize_compensated(
    weight: Tensor,
    moment: Tensor,
    scheme: Scheme,
    *,
    room: float = ROOM,
    before: Tensor | None = None,
) -> QuantizedWeight:
    """Return ``weight`` rounded so that outputs on the inputs of ``moment`` change least.

    Args:
        weight: [out, in], finite; with a LoRA to merge: the sum.
        moment: [in, in], second moment of the inputs.
        scheme: the format.
        room: by how much steps are larger than the weight as given needs.
        before: steps of the weight that is added to; they stay where they suffice.

    Raises:
        ValueError: a value is NaN.
    """
    weight = scheme.rotate(weight.detach().float())
    moment = scheme.rotate(scheme.rotate(moment.to(weight.device, torch.float32)).t())
    order = moment.diagonal().argsort(descending=True, stable=True)
    carry = _carry(moment, order)
    steps = scheme.steps(scheme.magnitudes(weight) * (1 + room), before)
    if steps is None:
        values, _ = _round_columns(weight, weight.new_ones(1, 1), carry, order, scheme)
        return scheme.pack(values, None)
    values, largest = _round_columns(weight, steps, carry, order, scheme)
    for _ in range(_ATTEMPTS):
        over = largest > scheme.largest_unit * (1 + 2.0**-20) * steps  # amax / scale rounds to a hair above
        if not over.any():
            break
        larger = scheme.steps(torch.where(over, largest * (1 + ROOM), 0.0), steps)
        assert larger is not None
        if torch.equal(larger, steps):
            break  # as near as the format's steps come
        rows = (larger != steps).any(dim=1) if steps.shape[0] > 1 else torch.ones(len(weight), dtype=torch.bool)
        rows, steps = rows.to(weight.device), larger
        row_steps = steps[rows] if steps.shape[0] > 1 else steps
        values[rows], largest_again = _round_columns(weight[rows], row_steps, carry, order, scheme)
        largest = (
            largest.index_copy(0, rows.nonzero().flatten(), largest_again) if row_steps is not steps else largest_again
        )
    return scheme.pack(scheme.round(values), steps)


def merge_into(base: QuantizedWeight, update: Tensor, moment: Tensor, scheme: Scheme) -> QuantizedWeight:
    """Return ``base`` plus ``update``, with scales of its own and the update's full effect on the outputs.

    Args:
        base: [out, in], as its file has it.
        update: [out, in] fp32.
        moment: [in, in], second moment of the inputs.
        scheme: the base's, with scales as its file has them.
    """
    values = base.dequantize(torch.float32)
    strength = 1.0
    for last in (False, True):
        merged = quantize_compensated(values + strength * update, moment, scheme, room=0.0, before=base.steps())
        if not last:
            left = update_retention(merged.dequantize(torch.float32), values, update, moment).output_gain
            if left is None or not _FEASIBLE[0] < left < _FEASIBLE[1]:
                break  # an update without effect, or one that no strength brings in
            strength = 1 / left
    return merged


def _carry(moment: Tensor, order: Tensor) -> Tensor:
    """Return U with each row divided by its diagonal, for columns in ``order``: fp32, unit upper triangular.

    A moment that is no longer positive definite in its precision is damped ten times more, and again.
    """
    dtype, damping = torch.float64 if moment.shape[0] <= _DOUBLE else torch.float32, DAMPING
    while True:
        reverse = order.flip(0)
        metric = damped(moment, damping, dtype)[reverse][:, reverse]
        lower, failed = torch.linalg.cholesky_ex(metric)
        if not failed:
            break
        damping *= 10
    # R = J L J and U = R^-1 = J L^-1 J with J the reversal
    identity = torch.eye(len(order), dtype=dtype, device=lower.device)
    upper = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)
    return (upper / upper.diagonal().unsqueeze(1)).float()


def _round_columns(
    weight: Tensor, scale: Tensor, carry: Tensor, order: Tensor, scheme: Scheme
) -> tuple[Tensor, Tensor]:
    """Round the columns of ``weight`` in ``order``.

    Returns:
        The rounded values in units of their scale, fp32 [out, in]; and for each scale the largest magnitude that was
        asked of it, [rows, blocks].
    """
    out_features, in_features = weight.shape
    left = weight[:, order]
    rounded = torch.empty_like(left)
    block_of = order // (in_features // scale.shape[1])
    largest = weight.new_zeros(out_features, scale.shape[1])
    for start in range(0, in_features, _BLOCK):
        columns = slice(start, min(start + _BLOCK, in_features))
        inner = left[:, columns].t().contiguous()  # a column of the weight is a row: contiguous
        errors = torch.empty_like(inner)
        for j in range(inner.shape[0]):
            step = scale[:, block_of[start + j]]
            value = scheme.round(inner[j] / step).float()
            rounded[:, start + j] = value
            errors[j] = inner[j] - value * step
            inner[j + 1 :].addr_(carry[start + j, start + j + 1 : columns.stop], errors[j], alpha=-1)
        where = block_of[columns].expand(out_features, -1)
        largest.scatter_reduce_(1, where, inner.t().abs(), "amax")
        left[:, columns.stop :].addmm_(errors.t(), carry[columns, columns.stop :], alpha=-1)
    result = torch.empty_like(rounded)
    result[:, order] = rounded
    return result, largest if scale.shape[0] > 1 else largest.amax(dim=0, keepdim=True)
