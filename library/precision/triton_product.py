"""Products with a quantised weight that is decoded within them: a Triton kernel, for ``quantised_compute = fused``.

The plain way is two steps: dequantise the weight, multiply with the copy (``library.precision.linear``). The copy is
short-lived and as large as the weight in bf16, written to memory and read again; some formats need more on the way to
it. For a block of FLUX.1 (3072 x 15360) that is, in MiB beside the weight, inputs and outputs:

                  weight    dequantised    fused
    fp8, int8     45, 48    90             0
    mxfp8         46        96             0
    nvfp4         25        190            0        numbers are looked up in fp32 first, some rows at a time
    nf4           25, 23    186            0, 14    so are these; with double quantisation: magnitudes in fp32
    Q8_0          48        156            0
    Q4_0          25        172            0

(``test_a_fused_product_makes_no_copy_of_the_weight`` counts them.) Here one kernel does both passes,

    forward    y  = x W^T + b        [n, in]  -> [n, out]
    backward   dx = g W              [n, out] -> [n, in]

each block of threads reading a tile of W as it is stored, turning it into numbers in registers, and multiplying it with
a tile of the inputs on the tensor cores. A number is decoded and scaled in fp32 and rounded once to the dtype of the
inputs: the bits that ``QuantizedWeight.dequantize`` has. Sums are fp32.

*One decoder a format*, in :func:`_tile`. Triton knows e4m3 only on cards that convert it (compute capability 8.9); on
others it is decoded from bytes. e4m3 and e2m1 (of nvfp4) are sign, exponent and mantissa, so they are shifted into
those fields of an fp32 number. Its exponent is then too small by the difference of the biases, which the product with a
power of two corrects, exactly, also for their subnormals, which are subnormal in fp32 as well.

*The weight is the left operand*: out^T = W x^T. Hopper's tensor cores take that one, and only that one, from registers.
In a benchmark of Triton's own (triton-lang/triton, pull request 11624) fp8 times bf16 takes 35 us, bf16 times fp8 98.

*What it costs.* A tile of W is decoded once for every 128 rows of inputs, 36 times for the 4608 tokens of a 1024 x 1024
image. Counted in the machine code for e4m3, and not measured on any card: the cycles that a multiprocessor needs for
128 x 64 numbers of W and 128 rows,

                                on tensor cores    to issue all instructions
    RTX 3090, 4090, 5090        4096               1700, 1300, 1300
    A100                        1024               1700
    H100                        512                520, in backward 780

(dense rates with fp32 sums of 512, 2048 and 4096 FLOP a cycle; 4 instructions a cycle). So on the cards of those who
are short of memory the tensor cores stay the limit, and an A100 should take nearly twice as long as with cuBLAS. With
few tokens (modulation, small images) the weight's bytes are all that is read, and it should be faster than the plain
way everywhere. Until someone has measured that, it is off: ``auto`` never takes it, and who lacks these last MiB asks
for it. ``make bench-gpu`` has a row for it. The first to try on a Hopper card: 256 rows in a tile.

*What it takes*: a card of Nvidia's of compute capability 8.0 or more (bf16 on tensor cores), inputs in bf16 or fp16,
weights that lie in one piece, formats that say how they are decoded (``QuantizedWeight.encoded``; the K-quants of GGUF
do not). The rest goes the plain way. Inputs are rotated as for that.

To torch it is one operator, ``tandem::fused_product``, with a shape of its own: ``FakeTensorMode`` and
``torch.compile`` pass over it. Written for Triton 3.6 and 3.7, which torch 2.11 and 2.13 require.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from library.precision.files.base import Encoded, QuantizedWeight, device_is_capable

_DTYPES = (torch.bfloat16, torch.float16)  # fp32 would not go to the tensor cores, and nothing would be gained
# Of 8 warps: features, and terms of their sums, in a tile. 64 fp32 sums a thread; with three stages in flight at most
# 73 KiB of shared memory, where a consumer's card has 99. Wider ones decode less often, and spill below Hopper.
BLOCK_F, BLOCK_K, WARPS, STAGES = 128, 64, 8, 3
_MOST_ROWS, _FEWEST_ROWS = 128, 16  # rows of inputs in a tile; tensor cores want 16
GROUP = 8  # tiles of the weight that neighbours share, so that both operands stay in the second-level cache


def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor | None:
    """Return ``x @ weight.T + bias``, [n, in] -> [n, out]; None: that is none for this kernel."""
    encoded = _encoded(x, weight)
    return None if encoded is None else fused_product(weight.rotate(x), *encoded, *weight.shape, bias, False)


def input_gradient(gradient: Tensor, weight: QuantizedWeight) -> Tensor | None:
    """Return ``gradient @ weight``, [n, out] -> [n, in]; None: that is none for this kernel."""
    encoded = _encoded(gradient, weight)
    if encoded is None:
        return None
    return weight.rotate_back(fused_product(gradient, *encoded, *weight.shape, None, True))


def _encoded(x: Tensor, weight: QuantizedWeight) -> Encoded | None:
    if not device_is_capable(x.device, (8, 0)) or x.dtype not in _DTYPES or not x.numel() or len(weight.shape) != 2:
        return None
    encoded = weight.encoded()
    if encoded is None or not all(t.is_contiguous() for t in (encoded.values, encoded.scale, encoded.table)):
        return None
    run = _run(encoded.scale, weight.shape[1])  # a tile of W has BLOCK_K inputs in forward, BLOCK_F in backward
    fits = not run or all(run % block == 0 or block % run == 0 for block in (BLOCK_F, BLOCK_K))
    return encoded if fits else None


@torch.library.custom_op("tandem::fused_product", mutates_args=())
def fused_product(
    x: Tensor,
    code: str,
    values: Tensor,
    scale: Tensor,
    table: Tensor,
    outputs: int,
    inputs: int,
    bias: Tensor | None,
    backward: bool,
) -> Tensor:
    """Launch the kernel: x [n, in] -> [n, out], or with ``backward`` [n, out] -> [n, in], in the dtype of ``x``.

    ``code`` to ``table`` are an :class:`Encoded`, ``bias`` is [out].
    """
    x, rows, features = x.contiguous(), x.shape[0], inputs if backward else outputs
    out, block_n = x.new_empty(rows, features), min(_MOST_ROWS, max(_FEWEST_ROWS, triton.next_power_of_2(rows)))
    tensors = (x, _as_bytes(values), _as_bytes(scale), table, x if bias is None else bias, out)
    strides = (0 if scale.shape[0] == 1 else scale.shape[1], 0 if table.shape[0] == 1 else 1)
    if code == "e4m3fn" and device_is_capable(x.device, (8, 9)):
        code = "fp8e4nv"  # which Triton converts by an instruction of the card
    kind = {"CODE": code, "SCALE": _kind(scale), "RUN": _run(scale, inputs)}
    which = {"BIAS": bias is not None, "BACKWARD": backward}
    tile = {"BLOCK_N": block_n, "BLOCK_F": BLOCK_F, "BLOCK_K": BLOCK_K, "GROUP": GROUP}
    grid = (triton.cdiv(rows, block_n) * triton.cdiv(features, BLOCK_F),)
    # Triton launches on the current device, which is another one where a process has several
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        product_kernel[grid](
            *tensors, rows, outputs, inputs, *strides, **kind, **which, **tile, num_warps=WARPS, num_stages=STAGES
        )
    return out


@fused_product.register_fake
def _(x, code, values, scale, table, outputs, inputs, bias, backward):
    return x.new_empty(x.shape[0], inputs if backward else outputs)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return ``tensor``, fp8 as uint8: Triton has no fp8 on older cards."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.dtype != torch.int8 else tensor


def _run(scale: Tensor, inputs: int) -> int:
    """Return how many inputs share a scale; 0: all of a row."""
    return inputs // scale.shape[1] if scale.shape[1] > 1 else 0


def _kind(scale: Tensor) -> str:
    return {torch.float8_e4m3fn: "e4m3fn", torch.uint8: "e8m0"}.get(scale.dtype, "fp32")


@triton.jit
def product_kernel(
    x,
    values,
    scale,
    table,
    bias,
    out,
    n,
    outputs,
    inputs,
    scale_stride,
    table_stride,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    RUN: tl.constexpr,
    BIAS: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Make one tile of ``out`` [n, features]: BLOCK_N rows, BLOCK_F features; BLOCK_K terms of its sums at a time.

    Strides lead from a row's scales to the next row's; 0: there is one row for all.
    """
    features, terms = (inputs, outputs) if BACKWARD else (outputs, inputs)
    ROWS: tl.constexpr = BLOCK_K if BACKWARD else BLOCK_F  # of a tile of W
    COLUMNS: tl.constexpr = BLOCK_F if BACKWARD else BLOCK_K
    # Programs that run together take GROUP tiles of features by all tiles of rows, not a whole row of tiles.
    tiles_n, tiles_f = tl.cdiv(n, BLOCK_N), tl.cdiv(features, BLOCK_F)
    group, within = tl.program_id(0) // (GROUP * tiles_n), tl.program_id(0) % (GROUP * tiles_n)
    own = min(tiles_f - group * GROUP, GROUP)
    feature, row = (group * GROUP + within % own) * BLOCK_F, within // own * BLOCK_N

    rows, features_at = row + tl.arange(0, BLOCK_N), feature + tl.arange(0, BLOCK_F)
    x_rows = x + rows.to(tl.int64)[None, :] * terms
    sums = tl.zeros([BLOCK_F, BLOCK_N], tl.float32)
    for term in range(0, terms, BLOCK_K):
        at = term + tl.arange(0, BLOCK_K)
        x_KN = tl.load(x_rows + at[:, None], mask=(at < terms)[:, None] & (rows < n)[None, :], other=0.0)
        first, column = (term, feature) if BACKWARD else (feature, term)
        w = _tile(
            values,
            scale,
            table,
            first,
            column,
            outputs,
            inputs,
            scale_stride,
            table_stride,
            CODE,
            SCALE,
            RUN,
            ROWS,
            COLUMNS,
        )
        w_FK = tl.trans(w) if BACKWARD else w
        sums = tl.dot(w_FK.to(x_KN.dtype), x_KN, sums, input_precision="ieee")
    inside = features_at < features
    if BIAS:
        sums += tl.load(bias + features_at, mask=inside, other=0.0).to(tl.float32)[:, None]
    to = out + rows.to(tl.int64)[None, :] * features + features_at[:, None]
    tl.store(to, sums.to(out.dtype.element_ty), mask=inside[:, None] & (rows < n)[None, :])


@triton.jit
def _tile(
    values,
    scale,
    table,
    row,
    column,
    outputs,
    inputs,
    scale_stride,
    table_stride,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return W[row : row + ROWS, column : column + COLUMNS], fp32; 0 or any finite number outside of W."""
    rows = row + tl.arange(0, ROWS)
    if CODE == "Q8_0":
        w = _q8_0(values, rows, column, outputs, inputs, COLUMNS)
    elif CODE == "Q4_0":
        w = _q4_0(values, rows, column, outputs, inputs, COLUMNS)
    elif CODE == "e2m1":
        w = _fields(_nibbles(values, rows, column, outputs, inputs, COLUMNS), 4, 1, 126)
    elif CODE == "table":
        at = tl.reshape(_nibbles(values, rows, column, outputs, inputs, COLUMNS).to(tl.int32), [ROWS * COLUMNS])
        w = tl.reshape(tl.gather(tl.load(table + tl.arange(0, 16)), at, 0), [ROWS, COLUMNS])
    else:
        at = column + tl.arange(0, COLUMNS)
        mask = (rows < outputs)[:, None] & (at < inputs)[None, :]
        bits = tl.load(values + rows.to(tl.int64)[:, None] * inputs + at[None, :], mask=mask, other=0)
        if CODE == "e4m3fn":
            w = _e4m3fn(bits)
        elif CODE == "fp8e4nv":
            w = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        elif CODE == "e5m2":  # the upper byte of an IEEE half
            w = (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            tl.static_assert(CODE == "int8")
            w = bits.to(tl.float32)
    if CODE != "Q8_0" and CODE != "Q4_0":
        # RUN inputs share a scale, 0: all of a row; there is one for the whole tile's width, or there are several
        RUNS: tl.constexpr = COLUMNS // RUN if RUN > 0 and RUN < COLUMNS else 1
        run = (column // RUN if RUN > 0 else 0) + tl.arange(0, RUNS)
        mask = (rows < outputs)[:, None] & (run < (inputs // RUN if RUN > 0 else 1))[None, :]
        step = tl.load(scale + rows.to(tl.int64)[:, None] * scale_stride + run[None, :], mask=mask, other=0)
        if SCALE == "e8m0":
            step = (step.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
        elif SCALE == "e4m3fn":
            step = _e4m3fn(step) * tl.load(table + rows * table_stride, mask=rows < outputs, other=0.0)[:, None]
        w = tl.reshape(tl.reshape(w, [ROWS, RUNS, COLUMNS // RUNS]) * step[:, :, None], [ROWS, COLUMNS])
    return w


@triton.jit
def _fields(bits, WIDTH: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the numbers of ``bits`` of sign, exponent and mantissa in WIDTH bits, fp32.

    BIAS: 127, fp32's bias of exponents, less their own.
    """
    bits = bits.to(tl.uint32)
    magnitude = (bits & ((1 << (WIDTH - 1)) - 1)) << (23 - MANTISSA)
    bits = magnitude | ((bits >> (WIDTH - 1)) << 31)
    factor = tl.full([1, 1], (127 + BIAS) << 23, tl.uint32).to(tl.float32, bitcast=True)  # 2^BIAS
    return bits.to(tl.float32, bitcast=True) * factor


@triton.jit
def _e4m3fn(bits):
    """Return the numbers of bytes in e4m3fn, fp32; S.1111.111 is its NaN."""
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), _fields(bits, 8, 3, 120))


@triton.jit
def _nibbles(values, rows, column, outputs, inputs, COLUMNS: tl.constexpr):
    """Return half bytes [rows, COLUMNS] (uint8) of which a row has inputs / 2 bytes, the first in the high half."""
    at = column // 2 + tl.arange(0, COLUMNS // 2)
    mask = (rows < outputs)[:, None] & (at < inputs // 2)[None, :]
    pairs = tl.load(values + rows.to(tl.int64)[:, None] * (inputs // 2) + at[None, :], mask=mask, other=0)
    return tl.reshape(tl.join(pairs >> 4, pairs & 15), [rows.shape[0], COLUMNS])


@triton.jit
def _block(values, rows, column, outputs, inputs, BYTES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return where blocks of 32 inputs and BYTES bytes begin, [rows, COLUMNS / 32], which exist, and their scales."""
    blocks = column // 32 + tl.arange(0, COLUMNS // 32)
    mask = (rows < outputs)[:, None] & (blocks < inputs // 32)[None, :]
    at = values + (rows.to(tl.int64)[:, None] * (inputs // 32) + blocks[None, :]) * BYTES
    return at, mask, tl.load(at.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _q8_0(values, rows, column, outputs, inputs, COLUMNS: tl.constexpr):
    """Return numbers [rows, COLUMNS]; a block is its scale in fp16 and 32 numbers in int8."""
    at, mask, step = _block(values, rows, column, outputs, inputs, 34, COLUMNS)
    numbers = tl.load(at[:, :, None] + 2 + tl.arange(0, 32)[None, None, :], mask=mask[:, :, None], other=0)
    return tl.reshape(numbers.to(tl.int8, bitcast=True).to(tl.float32) * step[:, :, None], [rows.shape[0], COLUMNS])


@triton.jit
def _q4_0(values, rows, column, outputs, inputs, COLUMNS: tl.constexpr):
    """Return numbers [rows, COLUMNS]; a block is its scale in fp16 and 16 bytes, whose low halves are the first 16."""
    at, mask, step = _block(values, rows, column, outputs, inputs, 18, COLUMNS)
    pairs = tl.load(at[:, :, None] + 2 + tl.arange(0, 16)[None, None, :], mask=mask[:, :, None], other=0)
    halves = tl.permute(tl.join(pairs & 15, pairs >> 4), [0, 1, 3, 2])  # [rows, blocks, half, 16]
    numbers = tl.reshape(halves, [rows.shape[0], COLUMNS // 32, 32]).to(tl.float32) - 8
    return tl.reshape(numbers * step[:, :, None], [rows.shape[0], COLUMNS])
