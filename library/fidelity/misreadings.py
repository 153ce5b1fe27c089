"""What becomes of a quantised weight that is written by one rule and read by another: candidates for ``diagnose``.

A format is a convention about bytes, and each of its points can be got wrong by itself: the order of the two numbers in
a byte, the order of block scales (tensor cores' tiles, or rows), the axis that scales belong to, the zero point, what
happens above the largest code, the rotation. Where the served bytes can be read by the other rule, they are, and the
numbers that this gives are compared with the reference's. Otherwise the reference is taken through the mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from library.fidelity.rounding_laws import Candidate, ServedMatrix
from library.precision.files.base import QuantizedWeight, in_units
from library.precision.files.comfy_quant import BlockScaledWeight, from_tiles, tiled_shape, to_tiles
from library.precision.files.gguf import INT4, TYPES, GgufWeight
from library.precision.files.int8 import Int8Weight, rotated
from library.precision.files.nf4 import Nf4Weight
from library.precision.files.nvfp4 import Nvfp4Weight

_RUNS = (4, 16, 64, 256, 1024)  # inputs that programs rotate together


def misread(served: ServedMatrix, wanted: Tensor) -> Iterator[Candidate]:
    """Yield what ``wanted`` [out, in] became if the file's rules were not those that it is read by."""
    stored = served.stored
    if stored is None:
        return
    yield from _packed(stored, wanted)
    if isinstance(stored, Int8Weight):
        yield from _rotated(served.numbers, stored.group, wanted)
    if isinstance(stored, BlockScaledWeight):
        yield from _tiled(served, stored, wanted)
    if (steps := _steps(served, stored)) is not None:
        yield from _along_the_other_axis(served, stored, steps, wanted)
        yield from _shifted(stored, steps, wanted)


def _packed(stored: QuantizedWeight, wanted: Tensor) -> Iterator[Candidate]:
    """The two numbers of a byte exchanged; codes counted from another one."""
    start = 0 if isinstance(stored, Nvfp4Weight | Nf4Weight) else INT4.get(getattr(stored, "type", ""))
    if start is not None:
        head, pairs = stored.values[..., :start], stored.values[..., start:]
        swapped = replace(stored, values=torch.cat([head, pairs << 4 | pairs >> 4], dim=-1))
        words = "the two numbers of each byte are exchanged (low and high nibbles)"
        yield Candidate("permuted", words, wanted, numbers=swapped.dequantize(torch.float32))
    if isinstance(stored, Nf4Weight):
        for by in (1, -1):
            other = replace(stored, quant_map=stored.quant_map.roll(by)).dequantize(torch.float32)
            yield Candidate("zero_point", "its codes are off by one", wanted, numbers=other)


def _rotated(numbers: Tensor, group: int, wanted: Tensor) -> Iterator[Candidate]:
    """Rotated in other runs than the file says, or not, or by another matrix: the one that fits best, where it is sure.

    That is the orthogonal Procrustes problem: of all rotations M the nearest to W M = S is U V^T, for W^T S = U s V^T.
    """
    read = f"rotated in runs of {group}" if group else "not rotated"
    for run in (0, *(run for run in _RUNS if wanted.shape[1] % run == 0)):
        if run != group:
            turned = rotated(wanted, run) if run else wanted
            made = f"rotated in runs of {run}" if run else "not rotated"
            words = f"it is {made}, and the file says {read}"
            yield Candidate("rotation", words, rotated(turned, group) if group else turned)
    if group and wanted.numel() >= 4 * group**2:
        right, found = wanted.view(-1, group), numbers.view(-1, group)
        left, _, across = torch.linalg.svd(right.t() @ found)
        words = f"its runs of {group} inputs are rotated by another matrix (another Hadamard matrix, or its signs)"
        yield Candidate("rotation", words, (right @ (left @ across)).view(wanted.shape))


def _tiled(served: ServedMatrix, stored: BlockScaledWeight, wanted: Tensor) -> Iterator[Candidate]:
    """Block scales in tiles that are read by rows, or the other way round."""
    fresh = stored.scheme.quantize(wanted)
    assert isinstance(fresh, BlockScaledWeight)
    scales, shape = fresh.block_scale, fresh.block_scale.shape
    (rows, runs), codes = tiled_shape(shape), scales.view(torch.uint8)
    by_rows = functional.pad(codes, (0, runs - shape[1], 0, rows - shape[0])).view(scales.dtype)
    for other, words in (
        (from_tiles(by_rows, shape), "lie by rows, and are read as tiles"),
        (to_tiles(scales)[: shape[0], : shape[1]], "lie in tiles, and are read by rows"),
    ):
        read = replace(fresh, block_scale=other).dequantize(torch.float32)
        yield Candidate("wrong_scale", f"its block scales {words}", read, numbers=served.numbers)


def _steps(served: ServedMatrix, stored: QuantizedWeight) -> Tensor | None:
    """Return the steps [1 or out, runs]; of a GGUF block of 32 or of 4 bits they are in its bytes."""
    if not isinstance(stored, GgufWeight):
        return served.steps
    if (parts := stored.int4()) is not None:
        return parts[1]
    return (
        stored.values[..., :2].contiguous().view(torch.float16).float()[..., 0] if TYPES[stored.type][0] == 32 else None
    )


def _along_the_other_axis(
    served: ServedMatrix, stored: QuantizedWeight, steps: Tensor, wanted: Tensor
) -> Iterator[Candidate]:
    """Scales that were made for columns, or for runs of outputs, and stand where those of rows, or of inputs, do."""
    (out, columns), runs = wanted.shape, steps.shape[1]
    block = columns // runs
    across: list[Tensor] = []
    if steps.numel() == out == columns:
        across = [steps.view(1, columns)]
    elif runs > 1 and out % block == 0:
        across = [
            each.repeat_interleave(block, 0)
            for each in (steps.reshape(out // block, columns), steps.reshape(columns, out // block).t())
        ]
    for right in across:
        values = stored.scheme.rotate(served.numbers)
        numbers = stored.scheme.rotate(in_units(values, steps) * right)
        most = stored.scheme.largest_unit * right
        clamped = stored.scheme.rotate(stored.scheme.rotate(wanted).clamp(-most, most)) if bool(most.any()) else wanted
        words = "its scales belong to the other axis (columns, or runs of outputs)"
        yield Candidate("wrong_scale", words, clamped, numbers=numbers)


def _shifted(stored: QuantizedWeight, steps: Tensor, wanted: Tensor) -> Iterator[Candidate]:
    """Codes of integers that are one too high or too low, or that wrap around above the largest."""
    if not isinstance(stored, Int8Weight | GgufWeight):
        return
    turn, long = stored.scheme.rotate, steps.repeat_interleave(wanted.shape[1] // steps.shape[1], 1)
    values = turn(wanted)
    if isinstance(stored, Int8Weight) or getattr(stored, "type", "") == "Q8_0":
        units = values / long
        over = (units >= 127.5) | (units < -128.5)
        if bool(over.any()):
            words = f"{int(over.sum())} of {over.numel()} numbers wrap around: above 127 steps they have the other sign"
            yield Candidate("wrapped", words, turn(torch.where(over, values - 256 * long * values.sign(), values)))
    for sign, words in ((1, "large"), (-1, "small")):
        yield Candidate(
            "zero_point", f"every code is one too {words}: its zero point is off by one", turn(values + sign * long)
        )
