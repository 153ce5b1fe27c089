"""How much of a layer's output an error of its weight changes.

With rows x of inputs, or their second moment C, and a weight error E [out, in]:

    |error|^2 = mean |x E^T|^2 = trace(E C E^T)        relative to mean |x W^T|^2 = trace(W C W^T)

Rows that nothing was fitted to give an honest figure; the moment is what is minimised.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from library.precision.parity.activations import LayerInputs


def output_energy(weight: Tensor, inputs: LayerInputs) -> float:
    """Return the mean squared length of ``x @ weight.T``: over the held-out rows, or by the moment without any."""
    if inputs.rows.shape[0]:
        return float((inputs.rows @ weight.float().t()).double().square().sum()) / inputs.rows.shape[0]
    return moment_energy(weight, inputs.moment)


def moment_energy(weight: Tensor, moment: Tensor) -> float:
    """Return ``trace(weight @ moment @ weight.T)``; never below 0."""
    weight = weight.to(moment.dtype)
    return max(0.0, float((weight @ moment).mul_(weight).double().sum()))


def relative_output_error(error: Tensor, weight: Tensor, inputs: LayerInputs) -> float:
    """Return the rms of ``x @ error.T`` over that of ``x @ weight.T``; 0 of 0 is 0."""
    energy = output_energy(error, inputs)
    return math.sqrt(energy / output_energy(weight, inputs)) if energy else 0.0


def damped(moment: Tensor, damping: float, dtype: torch.dtype) -> Tensor:
    """Return ``moment`` in ``dtype`` plus ``damping`` times its mean diagonal on the diagonal.

    GPTQ's way (https://arxiv.org/abs/2210.17323, section 3.3): directions that the calibration has hardly seen count
    like inputs of that size, so that nothing is fitted to the sample's noise. A moment of zeros becomes the identity.
    """
    result = moment.to(dtype, copy=True)
    mean = float(result.diagonal().mean())
    result.diagonal().add_(damping * mean if mean > 0 else 1.0)
    return result
