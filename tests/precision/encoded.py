"""A weight of every kind that the fused product decodes, of random numbers."""

from __future__ import annotations

import torch

from library.precision.files.base import QuantizedWeight
from library.precision.files.fp8 import Fp8Scheme
from library.precision.files.gguf import TYPES, GgufWeight
from library.precision.files.int8 import Int8Scheme
from library.precision.files.mxfp8 import Mxfp8Scheme
from library.precision.files.nf4 import Nf4Weight
from library.precision.files.nvfp4 import Nvfp4Scheme
from library.precision.fp8_numbers import E5M2
from library.precision.names import GRANULARITIES
from tests.precision.files.gguf_files import random_blocks


def encoded_weights(outputs: int, inputs: int, seed: int = 0) -> dict[str, QuantizedWeight]:
    """Return name -> weight [outputs, inputs]; inputs divide by 128."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=random) * 0.05
    schemes = {
        **{f"fp8_{each}": Fp8Scheme(each) for each in GRANULARITIES},
        **{f"e5m2_{each}": Fp8Scheme(each, E5M2) for each in ("cast", "row", "block64")},
        "int8_tensor": Int8Scheme(False, 0, torch.float32),
        "int8_row": Int8Scheme(True, 0, torch.float32),
        "int8_convrot": Int8Scheme(True, 64, torch.float32),
        "mxfp8": Mxfp8Scheme(),
        "nvfp4": Nvfp4Scheme(),
    }
    found: dict[str, QuantizedWeight] = {name: scheme.quantize(weight) for name, scheme in schemes.items()}
    halves = [Nvfp4Scheme().quantize(weight[: outputs // 2]), Nvfp4Scheme().quantize(weight[outputs // 2 :] * 16)]
    found["nvfp4_stacked"] = type(halves[0]).stack(halves)  # a scale a row
    nibbles = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=random)
    runs, numbers = inputs // 64, torch.linspace(-1, 1, 16)
    found["nf4"] = Nf4Weight(nibbles, torch.rand(outputs, runs, generator=random), numbers)
    found["nf4_nested"] = Nf4Weight(
        nibbles,
        torch.randint(0, 256, (outputs, runs), dtype=torch.uint8, generator=random),
        numbers,
        nested_absmax=torch.rand(-(-outputs * runs // 256), generator=random),
        nested_quant_map=torch.linspace(0, 1, 256),
        nested_offset=torch.tensor(0.1),
        nested_block=256,
        stride=runs,
    )
    for kind in ("Q8_0", "Q4_0"):
        blocks = torch.as_tensor(random_blocks((outputs, inputs), kind, 0.05, seed))
        found[kind] = GgufWeight(blocks.view(outputs, -1, TYPES[kind][1]), kind)
    return found
