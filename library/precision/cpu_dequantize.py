"""fp8 codes back to numbers on the CPU, which is on the training path: every linear does it twice a step.

torch's own cast takes 25 to 30 ms for 3072 x 3072 on one core, longer than the matrix product with 640 tokens
(17 to 26 ms), and a table look-up 3 to 40 ms. There are two better ways, which give the same bits: the product
with the scale is made in fp32 and rounded once.

By bits: a code shifted left by 7 (e4m3fn) or 8 (e5m2) has sign, exponent and mantissa in the fields of an IEEE
half, denormals included, and is that half times a power of two, which joins the scale. Done in pieces that stay in
the cache this takes 2.8 ms on an AMD Zen 5 and 11 ms on an Intel Xeon with AMX, with nothing to compile. (Codes
shifted into bf16's fields would be quicker still, but there every fp8 denormal is a bf16 denormal, slow on CPUs
that trap those and zero where they are flushed.)

Compiled: the cast itself, one pass instead of six, compiled by inductor: 3.6 ms and 4.1 ms on the same machines (8.5
where most codes are denormals, as in a plain cast: torch's vector code has a branch for them). It takes a C++ compiler,
a few seconds, and 150 MiB for inductor's modules. Which one serves a process is measured at its first large weight.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from library.precision.formats import Fp8Format, format_of

_PIECE = 1 << 18  # numbers turned at a time: 1 MiB as fp32; 8 times that falls out of the cache and takes 5 x
_LARGE = 1 << 20  # weights from here on are worth a compiler's start
_COMPILED_DTYPES = (torch.bfloat16, torch.float16)  # those of products; fp32 is for preparing files
_MOST_KERNELS = 64  # two formats, two dtypes, three kinds of scale, whole weights and slices of them

Dequantize = Callable[[Tensor, Tensor | None, torch.dtype], Tensor]


def dequantize_on_cpu(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``codes * scale`` in ``dtype``; see ``quantize.dequantize``."""
    if codes.numel() < _LARGE or dtype not in _COMPILED_DTYPES:
        return by_bits(codes, scale, dtype)
    return _faster()(codes, scale, dtype)


def by_bits(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``codes * scale`` in ``dtype`` through the fields of IEEE halves."""
    fp8 = format_of(codes.dtype)
    assert fp8 is not None, f"{codes.dtype} is no fp8 dtype"
    result = torch.empty(codes.shape, dtype=dtype)
    rows = max(1, _PIECE // max(1, codes.shape[1]))
    for start in range(0, codes.shape[0], rows):
        piece = slice(start, start + rows)
        values = _as_halves(codes[piece], fp8).float()
        own = torch.ones(1, 1) if scale is None else scale if scale.shape[0] == 1 else scale[piece]
        # the power of two is exact in fp32 unless it overflows the scale, which then overflows the weight as well
        values.view(len(values), own.shape[1], -1).mul_((own * fp8.half_factor).unsqueeze(-1))
        result[piece].copy_(values)
    return result


def compiled(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``codes * scale`` in ``dtype`` by one compiled loop.

    Raises:
        Exception: whatever inductor raises where it finds no compiler.
    """
    own = torch.ones(1, 1) if scale is None else scale
    with torch._dynamo.config.patch(recompile_limit=_MOST_KERNELS):  # past the limit it would run the slow cast
        if own.shape[1] == 1:
            return _kernel()(codes, own, dtype)
        # blocks as a dimension of the input: a view inside the kernel would divide for every number
        return _kernel()(codes.unflatten(1, (own.shape[1], -1)), own.unsqueeze(-1), dtype).view(codes.shape)


def _as_halves(codes: Tensor, fp8: Fp8Format) -> Tensor:
    halves = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(fp8.half_shift)
    if fp8.half_shift == 7:
        halves.bitwise_and_(-0x4001)  # bit 14 is the sign extension's; the half's exponent there is 0
    return halves.view(torch.float16)


def _cast(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.to(torch.float32) * scale).to(dtype)


@functools.cache
def _kernel() -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    return torch.compile(_cast, dynamic=True, options={"compile_threads": 1})


@functools.cache
def _faster() -> Dequantize:
    """Return the quicker of the two ways on this machine."""
    codes = torch.arange(_LARGE).to(torch.uint8).bitwise_and_(0x7B).view(torch.float8_e4m3fn).view(-1, 1024)
    scale = torch.ones(len(codes), 1)
    try:
        seconds = _seconds(compiled, codes, scale)
    except Exception as failure:  # no compiler, no Python headers, a read-only home: inductor has many names for them
        reason = next(iter(str(failure).strip().splitlines()), type(failure).__name__)
        warnings.warn(f"fp8 weights are turned back without a compiled kernel, more slowly: {reason}", stacklevel=2)
        return by_bits
    return compiled if seconds < _seconds(by_bits, codes, scale) else by_bits


def _seconds(way: Dequantize, codes: Tensor, scale: Tensor) -> float:
    """Return the shortest of five times; the first call, which compiles, does not count."""
    way(codes, scale, torch.bfloat16)
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        way(codes, scale, torch.bfloat16)
        times.append(time.perf_counter() - begun)
    return min(times)
