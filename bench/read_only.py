"""Weights of formats that are read and never written here, made by the packages that own them: for timings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import bitsandbytes.functional as bnb
import torch
from torch import Tensor

from library.precision.files.base import QuantizedWeight, ReadOnlyScheme
from library.precision.files.gguf import TYPES, GgufWeight
from library.precision.files.nf4 import Nf4Weight
from tests.precision.files.gguf_files import random_blocks


@dataclass(frozen=True)
class ReadOnly(ReadOnlyScheme):
    """A type of GGUF, whose numbers are random of the weight's size, or ``nf4`` with double quantisation."""

    reason: str = "is made for timings only"

    def quantize(self, weight: Tensor, **_: Any) -> QuantizedWeight:
        """Return a weight of the shape of ``weight`` [out, in]."""
        outputs, inputs = weight.shape
        if self.name != "nf4":
            blocks = torch.from_numpy(random_blocks(weight.shape, self.name, float(weight.float().std())))
            return GgufWeight(blocks.view(outputs, inputs // TYPES[self.name][0], -1), self.name)
        packed, state = bnb.quantize_4bit(weight.float(), compress_statistics=True, quant_type="nf4")
        nested = state.state2
        return Nf4Weight(
            packed.view(outputs, -1),
            state.absmax.view(outputs, -1),
            state.code,
            nested.absmax,
            nested.code,
            state.offset,
            nested_block=nested.blocksize,
            stride=inputs // state.blocksize,
        )


SCHEMES = {name: ReadOnly(name) for name in (*TYPES, "nf4")}
