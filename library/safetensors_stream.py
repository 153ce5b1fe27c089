"""Writing a safetensors file one tensor at a time.

``safetensors.torch.save_file`` wants all tensors at once; a 24 GB model then needs 24 GB of memory. The
format (https://github.com/huggingface/safetensors#format) allows less: the header only needs dtypes and
shapes, and the data follows tensor by tensor. Header: a little-endian u64 with its length, then JSON,
padded with spaces to a multiple of 8. Tensors are ordered by falling item size, then by name, as
safetensors itself does, so that each begins at a multiple of its item size. Metadata is sorted, so that
equal content gives equal bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from library.atomic import atomic_path

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
TensorSpecs = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> (dtype, shape)


def tensor_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor's data."""
    return dtype.itemsize * math.prod(shape)


def stream_safetensors(
    path: str | Path,
    layout: TensorSpecs,
    produce: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file in one step, holding one tensor at a time.

    Args:
        path: the file.
        layout: name -> (dtype, shape) of every tensor.
        produce: called once per name; returns the tensor, on any device.
        metadata: strings for the header.

    Raises:
        UserError: the file cannot be written.
        ValueError: ``produce`` returned another dtype or shape than ``layout`` says.
    """
    names = sorted(layout, key=lambda name: (-layout[name][0].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in names:
        dtype, shape = layout[name]
        start, end = end, end + tensor_bytes(dtype, shape)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name in names:
            tensor = produce(name).detach().cpu().contiguous()
            if (tensor.dtype, tuple(tensor.shape)) != layout[name]:
                raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, announced as {layout[name]}")
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
