"""Rounding to fp8: to nearest (ties to even) and stochastically, both saturating.

Saturating means that what lies outside the format becomes its largest number, never NaN or infinity: torch's
own cast has done either, by version and device, so the clamp is ours.

Stochastic rounding goes to one of the two neighbouring codes, with the probability that makes the expected
value equal the input. For normal numbers that is one integer addition: the bits of an fp32 mantissa that fp8
has no room for are the distance from the lower neighbour; adding as many random bits carries into the kept
part with just that probability. Below the smallest normal number fp8's step is fixed, so there it is
``floor(x / step + u) * step``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from library.precision.formats import Fp8Format

_FP32_MANTISSA_BITS = 23


def round_to_nearest(values: Tensor, fp8: Fp8Format) -> Tensor:
    """Return ``values`` (any floating dtype) as fp8, nearest code, ties to the even one, saturating.

    Raises:
        ValueError: a value is NaN.
    """
    values = values.float()
    _refuse_nan(values)
    return values.clamp(-fp8.max, fp8.max).to(fp8.dtype)


def round_stochastically(values: Tensor, fp8: Fp8Format, generator: torch.Generator | None = None) -> Tensor:
    """Return ``values`` as fp8, each one of its two neighbours with the expected value unchanged, saturating.

    Args:
        values: any floating dtype.
        generator: source of the random bits, on the device of ``values``; torch's global one if None.

    Raises:
        ValueError: a value is NaN.
    """
    values = values.float()
    _refuse_nan(values)
    values = values.clamp(-fp8.max, fp8.max)
    dropped = _FP32_MANTISSA_BITS - fp8.mantissa_bits
    random = torch.randint(0, 1 << dropped, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    # A sign bit on top does not disturb the addition: it works on the magnitude of either sign.
    carried = (values.view(torch.int32) + random) >> dropped << dropped
    normal = carried.view(torch.float32)
    steps = values.abs() / fp8.smallest + random * 2.0**-dropped
    small = (steps.floor() * fp8.smallest).copysign(values)
    rounded = torch.where(values.abs() < fp8.min_normal, small, normal)
    return rounded.clamp(-fp8.max, fp8.max).to(fp8.dtype)


def _refuse_nan(values: Tensor) -> None:
    if torch.isnan(values).any():
        raise ValueError("NaN cannot be rounded to fp8")
