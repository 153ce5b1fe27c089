"""Two passes over memory that plain PyTorch makes in several kernels, as one each: dequantising and rounding rows.

Both are written in Triton and serve GPUs that have it. ``library.precision.fp8_numbers`` has the plain formulas, and
calls these in their place where its ``have_kernels`` says so. On an H200 a weight of 12288 x 3072 takes 0.31 ms plain
and 0.11 as TorchInductor compiles it; its bytes over the bandwidth are 0.04. Rows of 4,608 x 3,072 take 0.11 ms plain,
in five kernels, and 0.02 compiled (docs/benchmarks.md). These two have not been timed on a card.

*Dequantising* reads bytes and builds fp8's numbers from their bits (``fp8_numbers``: the fields of an IEEE half), since
Triton knows e4m3fn from compute capability 8.9 on alone. It is an operator of its own (``tandem::dequantize``), which a
compiled block calls, too: a product follows, so there is nothing to fuse it with.

*Rounding* is called outside of compiled blocks. Within, the plain formula is fused with what made the rows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

_SHIFTS = {torch.float8_e4m3fn: 7, torch.float8_e5m2: 8, torch.int8: 0}  # to a half's fields; int8 is a number as it is
_COLUMNS = 4096  # of a program; 16 bytes to read, and 32 to write, at a time for each thread
WIDEST_ROW = 1 << 15  # that one program rounds


@triton.jit
def dequantize_kernel(  # type: ignore[no-untyped-def]
    values, steps, out, width, block, row_steps, blocks, SHIFT: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    bits = tl.load(values + row * width + columns, mask=inside, other=0)
    if SHIFT == 0:
        numbers = bits.to(tl.float32)
    else:
        fields = bits.to(tl.int16) << SHIFT
        if SHIFT == 7:
            fields = fields & -0x4001  # bit 14 is the sign extension's
        numbers = fields.to(tl.float16, bitcast=True).to(tl.float32)
        if SHIFT == 7:
            numbers = numbers * 256.0
    if blocks == 1:
        numbers = numbers * tl.load(steps + row * row_steps).to(tl.float32)
    else:
        numbers = numbers * tl.load(steps + row * row_steps + columns // block, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * width + columns, numbers.to(out.dtype.element_ty), mask=inside)


@triton.jit
def round_rows_kernel(  # type: ignore[no-untyped-def]
    x, rounded, scales, width, LARGEST: tl.constexpr, LEAST: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < width
    numbers = tl.load(x + row * width + columns, mask=inside, other=0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), axis=0) / LARGEST, LEAST)
    tl.store(scales + row, scale)
    # LARGEST and a few units in the last place at most, which is rounded to LARGEST; a clamp would take NaN away
    tl.store(rounded + row * width + columns, (numbers / scale).to(rounded.dtype.element_ty), mask=inside)


@torch.library.custom_op("tandem::dequantize", mutates_args=())
def dequantize(values: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` [out, in] (e4m3fn, e5m2, int8; contiguous) times ``steps`` [1 or out, blocks] in ``dtype``."""
    out = values.new_empty(values.shape, dtype=dtype)
    (rows, width), blocks = values.shape, steps.shape[1]
    grid = (rows, triton.cdiv(width, _COLUMNS))
    row_steps = blocks if len(steps) > 1 else 0
    with _on(values):
        dequantize_kernel[grid](
            values.view(torch.int8),
            steps.contiguous(),
            out,
            width,
            width // blocks,
            row_steps,
            blocks,
            SHIFT=_SHIFTS[values.dtype],
            COLUMNS=min(_COLUMNS, triton.next_power_of_2(width)),
            num_warps=4,
        )
    return out


@dequantize.register_fake
def _(values: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    return values.new_empty(values.shape, dtype=dtype)


def round_rows(x: Tensor, largest: float, least: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows of ``x`` [n, in] over their scales in ``dtype``, and the scales [n, 1] fp32 (``row_scale``)."""
    x = x.detach().contiguous()
    rounded, scales = x.new_empty(x.shape, dtype=dtype), x.new_empty(len(x), 1, dtype=torch.float32)
    columns = triton.next_power_of_2(x.shape[1])
    with _on(x):
        round_rows_kernel[(len(x),)](
            x,
            rounded,
            scales,
            x.shape[1],
            LARGEST=largest,
            LEAST=least,
            COLUMNS=columns,
            num_warps=min(16, columns // 512 or 1),
        )
    return rounded, scales


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    """Let Triton, which asks for the current device, launch where ``tensor`` is."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check(device: torch.device) -> None:
    """Compare both with numbers that are known, on ``device``: all of fp8's, and rows with scales of 1 and 2.

    fp8's NaN is left out: a file that holds one is refused, and the kernel makes 480 of it.

    Raises:
        RuntimeError: a result differs; Triton's own errors where a kernel cannot be compiled.
    """
    values = torch.arange(256, dtype=torch.uint8).view(2, 128)[:, :127].contiguous().view(torch.float8_e4m3fn)
    steps = torch.tensor([[1.0], [3.0]])
    found = dequantize(values.to(device), steps.to(device), torch.bfloat16)
    same = torch.equal(found.cpu(), (values.float() * steps).bfloat16())
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):  # else no products in fp8
        numbers = torch.tensor([[448.0, -1.0, 0.5, 0.0], [-896.0, 6.0, 2.0, 1.0]])
        rounded, scales = round_rows(numbers.bfloat16().to(device), 448.0, 1e-30, torch.float8_e4m3fn)
        same = same and torch.equal((rounded.float() * scales).cpu(), numbers)
    if not same:
        raise RuntimeError("they give other numbers than PyTorch")
