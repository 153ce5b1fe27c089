"""The two 8-bit floating-point formats: rounding to them, and back in time for every product.

*Formats.* ``e4m3fn`` has 4 exponent and 3 mantissa bits, no infinity and one NaN (S.1111.111): 448 is its largest
number, 2^-6 its smallest normal one, 2^-9 its smallest of all. ``e5m2`` is the upper byte of an IEEE half: 57344,
2^-14, 2^-16, with infinities and NaNs. Weights use e4m3fn nearly always; it has twice the resolution (Micikevicius et
al. 2022, https://arxiv.org/abs/2209.05433, tables 1 and 2).

*Rounding* is to nearest (ties to even) or stochastic, and saturates: what lies outside the format becomes its largest
number, never NaN or infinity. torch's own cast has done either, by version and device, so the clamp is ours. Stochastic
rounding goes to one of the two neighbours, with the probability that makes the expected value equal the input. For
normal numbers that is one integer addition: the bits of an fp32 mantissa that fp8 has no room for are the distance from
the lower neighbour; adding as many random bits carries into the rest with just that probability. Below the smallest
normal number fp8's step is fixed, so there it is ``floor(x / step + u) * step``.

*Dequantising on a CPU* is on the training path: every linear does it twice a step. torch's own cast takes 25 to 30 ms
for 3072 x 3072 on one core, longer than the matrix product with 640 tokens (17 to 26 ms), and makes a FLUX step of
width 1536 1.44 times as long (AMD Zen 4, 3.02 s and 2.09 s). Instead, a value shifted left by 7 (e4m3fn) or 8 (e5m2)
has sign, exponent and mantissa in the fields of an IEEE half, denormals included, and is that half times a power of
two, which joins the scale. In chunks that stay in the cache this takes 2.8 ms on an AMD Zen 5 and 7 ms on an Intel Xeon
with AMX, and gives the same bits: the product with the scale is made in fp32 and rounded once. (bf16's fields would be
quicker still, but there every fp8 denormal is a bf16 denormal, slow on CPUs that trap those and zero where they are
flushed.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from library.errors import UserError, did_you_mean

_FP32_MANTISSA_BITS = 23


@dataclass(frozen=True)
class Fp8Format:
    """One 8-bit format.

    Attributes:
        name: as files and options write it.
        dtype: torch's dtype.
        mantissa_bits: bits after the leading one.
        max: largest finite number; casts saturate here.
        min_normal: smallest normal number; below it the step is fixed.
        half_shift: bits by which a value is shifted to stand in the fields of an IEEE half ...
        half_factor: ... and the power of two by which that half is then too small.
    """

    name: str
    dtype: torch.dtype
    mantissa_bits: int
    max: float
    min_normal: float
    half_shift: int
    half_factor: float

    @property
    def smallest(self) -> float:
        """Smallest positive number: the step below ``min_normal``."""
        return self.min_normal * 2.0**-self.mantissa_bits


E4M3FN = Fp8Format("e4m3fn", torch.float8_e4m3fn, 3, 448.0, 2.0**-6, 7, 2.0**8)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 2, 57344.0, 2.0**-14, 8, 1.0)
FORMATS = (E4M3FN, E5M2)
FP8_DTYPES = {fp8.dtype: fp8 for fp8 in FORMATS}


def format_named(name: str) -> Fp8Format:
    """Return the format called ``name``; ``fp8_e4m3fn`` and ``float8_e4m3fn`` are understood too."""
    plain, formats = name.removeprefix("float8_").removeprefix("fp8_"), {fp8.name: fp8 for fp8 in FORMATS}
    if plain not in formats:
        raise UserError(f"fp8 format {name!r} is none of {', '.join(formats)}{did_you_mean(plain, formats)}")
    return formats[plain]


def format_of(dtype: torch.dtype) -> Fp8Format:
    """Return the format whose values ``dtype``, an fp8 one, holds."""
    assert dtype in FP8_DTYPES, f"{dtype} is no fp8 dtype"
    return FP8_DTYPES[dtype]


def holds_nan_or_inf(values: Tensor) -> bool:
    """Return whether any of ``values`` (an fp8 tensor) stands for no finite number; such a weight is a broken file."""
    first_bad = 0x7F if format_of(values.dtype) is E4M3FN else 0x7C
    magnitudes = values.view(torch.uint8).bitwise_and(0x7F)
    return bool(magnitudes.ge(first_bad).any())


def round_to_nearest(values: Tensor, fp8: Fp8Format) -> Tensor:
    """Return ``values`` (any floating dtype) as the nearest fp8 number, ties to the even one, saturating.

    Raises:
        ValueError: a value is NaN.
    """
    values = values.float()
    refuse_nan(values, "fp8")
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
    refuse_nan(values, "fp8")
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


def refuse_nan(values: Tensor, name: str) -> None:
    """Raise a ValueError if ``values``, which are to be rounded to the format ``name``, hold a NaN."""
    if torch.isnan(values).any():
        raise ValueError(f"NaN cannot be rounded to {name}")


def row_scale(x: Tensor, most: float, least: float) -> Tensor:
    """Return by what rows of ``x`` [..., in] are divided to end at ``most``, [..., 1] fp32; not below ``least``."""
    # one pass on a GPU, where such products are made; on a CPU abs and amax take a quarter of the time
    largest = torch.linalg.vector_norm(x, math.inf, dim=-1, keepdim=True).float()
    return (largest / most).clamp_min(least)


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` [n, in] in e4m3fn, each row divided by its scale [n, 1] fp32: its largest magnitude / 448."""
    scale = row_scale(x, E4M3FN.max, torch.finfo(torch.float32).tiny)
    return (x / scale).to(E4M3FN.dtype), scale  # at most 448 and two units in the last place, which rounds to 448


def is_walked(device: torch.device) -> bool:
    """Return whether tensors on ``device`` are fake for the time being, and have no numbers."""
    return torch._C._len_torch_dispatch_stack() > 0 and type(torch.empty(0, device=device)) is not Tensor


def round_to_whole(values: Tensor, stochastic: bool, generator: torch.Generator | None) -> Tensor:
    """Return the nearest whole number, the even one of two; or that below or above, the expected value unchanged."""
    if not stochastic:
        return values.round()
    below = values.floor()
    random = torch.rand(values.shape, generator=generator, device=values.device)
    return below.add_(random < values - below)


def power_of_two(values: Tensor, least: int, most: int) -> Tensor:
    """Return the least powers of two that are not below ``values``, fp32; from 2^``least`` to 2^``most``."""
    mantissa, exponent = torch.frexp(values)  # in [0.5, 1) * 2^e; a power of two itself is 0.5 * 2^e
    power = exponent - (mantissa == 0.5).int()
    return torch.ldexp(torch.ones_like(values), power.clamp_(least, most))


_CHUNK = 1 << 18  # numbers turned at a time: 1 MiB as fp32; 8 times that falls out of the cache and takes 5 x


def by_bits(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``values * scale`` in ``dtype`` through the fields of IEEE halves."""
    fp8 = format_of(values.dtype)
    result = torch.empty(values.shape, dtype=dtype)
    rows = max(1, _CHUNK // max(1, values.shape[1]))
    # written over by every chunk: memory that is new is slower than all the rest
    integers, numbers = (torch.empty(rows, values.shape[1], dtype=each) for each in (torch.int16, torch.float32))
    factor = torch.ones(1, 1) if scale is None else scale
    # the power of two is exact in fp32 unless it overflows the scale, which then overflows the weight as well
    factor = (factor * fp8.half_factor).unsqueeze(-1)
    for start in range(0, values.shape[0], rows):
        chunk = slice(start, start + rows)
        bits = values[chunk].view(torch.int8)
        halves = integers[: len(bits)].copy_(bits).bitwise_left_shift_(fp8.half_shift)
        if fp8.half_shift == 7:
            halves.bitwise_and_(-0x4001)  # bit 14 is the sign extension's; the half's exponent there is 0
        floats = numbers[: len(bits)].copy_(halves.view(torch.float16))
        floats.view(len(bits), factor.shape[1], -1).mul_(factor if len(factor) == 1 else factor[chunk])
        result[chunk].copy_(floats)
    return result


def dequantize(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``values * scale`` in ``dtype``: the product in fp32, rounded once.

    Args:
        values: [out, in], e4m3fn or e5m2, finite (see :func:`holds_nan_or_inf`); may be a slice.
        scale: [1 or out, blocks] fp32 or bf16, or None.
        dtype: fp32, bf16 or fp16.
    """
    assert values.dtype in FP8_DTYPES, f"{values.dtype} is no fp8 dtype"
    if values.device.type == "cpu" and not torch.compiler.is_compiling():
        return by_bits(values, None if scale is None else scale.float(), dtype)
    if scale is None:
        return values.to(dtype)
    return scaled(values, scale, dtype)


def scaled(values: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` [out, in] times ``steps`` [1 or out, blocks] in ``dtype``: multiplied in fp32, rounded once.

    ``dtype`` has to have every value (bf16 and fp16 have those of fp8 and int8), so that nothing in fp32 is made.
    """
    numbers = values.to(dtype)
    blocks = numbers.unflatten(1, (steps.shape[1], -1))
    if torch.compiler.is_compiling():
        return (blocks.float() * steps.unsqueeze(-1)).to(dtype).view(values.shape)
    torch.mul(blocks, steps.unsqueeze(-1), out=blocks)
    return numbers
