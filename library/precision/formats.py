"""The two 8-bit floating-point formats that model weights are published in.

``e4m3fn`` has 4 exponent and 3 mantissa bits, no infinity and one NaN code (S.1111.111): 448 is its largest
number, 2^-6 its smallest normal one, 2^-9 its smallest of all. ``e5m2`` is the upper byte of an IEEE half:
57344, 2^-14, 2^-16, with infinities and NaNs. Weights use e4m3fn nearly always; it has twice the resolution.
Source: Micikevicius et al. 2022, "FP8 formats for deep learning" (https://arxiv.org/abs/2209.05433), tables
1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from library.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Fp8Format:
    """One 8-bit format.

    Attributes:
        name: as files and options write it.
        dtype: torch's dtype.
        mantissa_bits: bits after the leading one.
        max: largest finite number; casts saturate here.
        min_normal: smallest normal number; below it the step is fixed.
        safetensors_name: the dtype in a safetensors header.
        half_shift: bits by which a code is shifted to stand in the fields of an IEEE half ...
        half_factor: ... and the power of two by which that half is then too small.
    """

    name: str
    dtype: torch.dtype
    mantissa_bits: int
    max: float
    min_normal: float
    safetensors_name: str
    half_shift: int
    half_factor: float

    @property
    def smallest(self) -> float:
        """Smallest positive number: the step below ``min_normal``."""
        return self.min_normal * 2.0**-self.mantissa_bits


E4M3FN = Fp8Format("e4m3fn", torch.float8_e4m3fn, 3, 448.0, 2.0**-6, "F8_E4M3", 7, 2.0**8)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 2, 57344.0, 2.0**-14, "F8_E5M2", 8, 1.0)
FORMATS = (E4M3FN, E5M2)


def format_named(name: str) -> Fp8Format:
    """Return the format called ``name``; ``fp8_e4m3fn`` and ``float8_e4m3fn`` are understood too.

    Raises:
        UserError: there is none.
    """
    plain = name.removeprefix("float8_").removeprefix("fp8_")
    for fp8 in FORMATS:
        if plain == fp8.name:
            return fp8
    names = [fp8.name for fp8 in FORMATS]
    raise UserError(f"fp8 format {name!r} is none of {', '.join(names)}{did_you_mean(plain, names)}")


def format_of(dtype: torch.dtype) -> Fp8Format | None:
    """Return the format whose codes ``dtype`` holds, or None."""
    return next((fp8 for fp8 in FORMATS if fp8.dtype == dtype), None)


def holds_nan_or_inf(codes: torch.Tensor) -> bool:
    """Return whether any of ``codes`` (an fp8 tensor) stands for no finite number; such a weight is a broken file."""
    fp8 = format_of(codes.dtype)
    assert fp8 is not None, f"{codes.dtype} is no fp8 dtype"
    magnitudes = codes.view(torch.uint8).bitwise_and(0x7F)
    first_bad = 0x7F if fp8 is E4M3FN else 0x7C
    return bool(magnitudes.ge(first_bad).any())
