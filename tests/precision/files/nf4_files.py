"""Files of 4 bits as bitsandbytes saves them."""

from __future__ import annotations

from collections.abc import Mapping

import bitsandbytes.functional as bnb
import torch
from torch import Tensor

from tests.precision.files.gguf_files import HIGH


def nf4_tensors(
    weight: Tensor, name: str, nested: bool, kind: str = "nf4", blocksize: int = 64
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of ``weight`` as they are saved, and bitsandbytes' answer in fp32.

    It is asked for a flat weight: of rows of 96 numbers its kernel for CPUs (0.50.2) reads others' magnitudes.
    """
    packed, state = bnb.quantize_4bit(weight, blocksize=blocksize, compress_statistics=nested, quant_type=kind)
    tensors = {name: packed, **{f"{name}.{key}": t.clone() for key, t in state.as_dict(packed=True).items()}}
    state.shape = torch.Size([weight.numel()])
    return tensors, bnb.dequantize_4bit(packed, state).view(weight.shape)


def nf4_of(state: Mapping[str, Tensor], prefix: str, nested: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a FLUX in BFL's names as lllyasviel's file has it, and its numbers in fp32 without the prefix."""
    stored, numbers = {}, {}
    for name, tensor in state.items():
        numbers[name], stored[prefix + name] = tensor.float(), tensor
        if tensor.ndim == 2 and not name.startswith(HIGH):
            layer, numbers[name] = nf4_tensors(tensor.float(), prefix + name, nested)
            stored |= layer
    return stored, numbers
