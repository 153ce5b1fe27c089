"""Weights of which each tensor is cut and joined by itself, and dequantising some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import ClassVar, Self

import torch
from torch import Tensor

from library.precision.files.base import QuantizedWeight, Weight


class CutWeight(QuantizedWeight):
    """A weight of which each tensor is cut and joined by itself; ``scale``, where it has one, is [1 or out, 1].

    Attributes:
        spans: field -> inputs that one of its columns is for; of every tensor but ``scale``.
    """

    spans: ClassVar[Mapping[str, int]]

    @property
    def column_block(self) -> int:
        """The widest span."""
        return max(self.spans.values())

    def part(self, rows: slice = slice(None), columns: slice = slice(None)) -> Self:
        """Return some rows and columns, as views."""
        block_slice(columns, self.column_block)  # refuses an edge within a block
        tensors = self.tensors()
        cut = {name: tensors[name][rows, block_slice(columns, span)] for name, span in self.spans.items()}
        if "scale" in tensors:
            cut["scale"] = scale_of_rows(tensors["scale"], rows)
        return self.with_tensors(cut)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the inputs of ``parts`` side by side; their scale and their other fields have to be the same.

        Raises:
            ValueError: it is not.
        """
        first, tensors = _first_alike(parts), [part.tensors() for part in parts]
        if "scale" in tensors[0] and not all(torch.equal(each["scale"], tensors[0]["scale"]) for each in tensors):
            raise ValueError("they have different scales")
        return first.with_tensors({name: torch.cat([each[name] for each in tensors], dim=1) for name in first.spans})

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Return weights one below the other; different scales of tensors become scales of rows."""
        first, tensors = _first_alike(parts), [part.tensors() for part in parts]
        stacked = {name: torch.cat([each[name] for each in tensors]) for name in first.spans}
        if (scale := tensors[0].get("scale")) is not None:
            one = len(scale) == 1 and all(torch.equal(each["scale"], scale) for each in tensors)
            by_rows = [each["scale"].expand(part.shape[0], 1) for part, each in zip(parts, tensors, strict=True)]
            stacked["scale"] = scale.clone() if one else torch.cat(by_rows)
        return first.with_tensors(stacked)


def _first_alike(parts: Sequence[Weight]) -> Weight:
    """Return the first of ``parts``; raises a ValueError if they differ in what is no tensor: type, rotation."""
    words = [[v for f in fields(part) if not isinstance(v := getattr(part, f.name), Tensor)] for part in parts]
    if any(each != words[0] for each in words):
        raise ValueError(f"one is {' and one '.join(sorted({part.scheme.describe() for part in parts}))}")
    return parts[0]


def scale_of_rows(scale: Tensor, rows: slice) -> Tensor:
    """Return what of a ``scale`` [1 or out, ...] is of ``rows``."""
    return scale if len(scale) == 1 else scale[rows]


def block_slice(columns: slice, block: int) -> slice:
    """Return the blocks of ``block`` inputs that ``columns`` are.

    Raises:
        ValueError: they do not begin and end at a block's edge.
    """
    start, stop = columns.start or 0, columns.stop
    for edge in (start, stop or 0):
        if edge % block:
            raise ValueError(f"column {edge} lies within a block of {block}")
    return slice(start // block, None if stop is None else stop // block)


_CPU_CHUNK, _GPU_CHUNK = 1 << 18, 1 << 24  # numbers


def in_chunks(weight: Weight, numbers: Callable[[Weight], Tensor], dtype: torch.dtype) -> Tensor:
    """Return what ``numbers`` makes of ``weight``, fp32 [out, in], in ``dtype``, some rows at a time.

    What is needed on the way, several times the size of the result, stays in a CPU's cache: chunks of 256 thousand
    numbers are the fastest (4.2 ms for two million in Q4_K, 13 ms at once).
    """
    outputs, inputs = weight.shape
    rows = max(1, (_CPU_CHUNK if weight.values.device.type == "cpu" else _GPU_CHUNK) // max(1, inputs))
    if torch.compiler.is_compiling() or rows >= outputs:
        return numbers(weight).to(dtype)
    out = torch.empty(outputs, inputs, dtype=dtype, device=weight.values.device)
    for start in range(0, outputs, rows):
        out[start : start + rows] = numbers(weight.part(slice(start, start + rows)))
    return out
