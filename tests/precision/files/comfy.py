"""Files as comfy-kitchen and ComfyUI write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from comfy_kitchen.tensor import QuantizedTensor, get_layout_class
from safetensors.torch import save_file
from torch import Tensor

from library.precision.files import int8, mxfp8, nvfp4
from library.precision.files.base import QuantizedWeight, Scheme, StoredWeight
from library.precision.files.file_tensors import FileTensors
from library.precision.files.int8 import Int8Scheme
from library.safetensors_io import read_entries

FIND = {"int8_tensorwise": int8.find, "nvfp4": nvfp4.find, "mxfp8": mxfp8.find}
LAYOUTS = {
    "int8_tensorwise": "TensorWiseINT8Layout",
    "nvfp4": "TensorCoreNVFP4Layout",
    "mxfp8": "TensorCoreMXFP8Layout",
}
SHAPES = {
    "int8_tensorwise": [(1, 256), (3, 512), (300, 768), (48, 1280)],
    "nvfp4": [(16, 16), (128, 64), (208, 336), (48, 1280), (272, 4112)],
    "mxfp8": [(32, 32), (128, 128), (224, 352), (64, 1280), (288, 4128)],
}


@dataclass(frozen=True)
class Made:
    """A format: Tandem's scheme, ComfyUI's name of it, how comfy-kitchen is asked for it, what the marker adds."""

    scheme: Scheme
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def marker(self) -> dict[str, Any]:
        return {"format": self.kind, **self.config}

    def __str__(self) -> str:
        return self.scheme.describe()


MADE = [
    Made(Int8Scheme(rows=False), "int8_tensorwise"),
    Made(Int8Scheme(), "int8_tensorwise", {"per_channel": True}),
    *(
        Made(Int8Scheme(group=group), "int8_tensorwise", {"per_channel": True, **turned}, turned)
        for group in (256, 64, 16, 4)
        for turned in [{"convrot": True, "convrot_groupsize": group}]
    ),
    Made(nvfp4.Nvfp4Scheme(), "nvfp4"),
    Made(mxfp8.Mxfp8Scheme(), "mxfp8"),
]


def by_kitchen(weight: Tensor, kind: str, **options: Any) -> QuantizedTensor:
    """Return ``weight`` as comfy-kitchen quantises it for the format that ComfyUI calls ``kind``."""
    return QuantizedTensor.from_float(weight, LAYOUTS[kind], **options)


def comfy_tensors(layer: str, weight: QuantizedTensor, config: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Return the tensors of a layer as ComfyUI's ``state_dict`` has them; without a marker if ``config`` is None."""
    tensors = {name: tensor.contiguous() for name, tensor in weight.state_dict(f"{layer}.weight").items()}
    return tensors | ({} if config is None else {f"{layer}.comfy_quant": marker(config)})


def marker(config: Mapping[str, Any]) -> Tensor:
    """Return a ``comfy_quant`` tensor."""
    return torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)


def opened(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> FileTensors:
    """Write ``tensors`` to ``path`` with the safetensors library and return them as they are found there."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    return FileTensors(path, *read_entries([path]))


def rebuilt(stored: StoredWeight, tensors: Mapping[str, Tensor], kind: str, dtype: torch.dtype) -> Tensor:
    """Return what comfy-kitchen dequantises the ``tensors`` to that Tandem writes for ``stored``."""
    layer, config = stored.name.removesuffix(".weight"), stored.comfy_config()
    scales = {"scale": tensors[f"{layer}.weight_scale"]}
    if kind == "nvfp4":
        scales = {"scale": tensors[f"{layer}.weight_scale_2"], "block_scale": tensors[f"{layer}.weight_scale"]}
    if kind == "mxfp8":
        scales["scale"] = scales["scale"].view(torch.float8_e8m0fnu)
    turned = {name: config[name] for name in ("convrot", "convrot_groupsize") if name in config}
    params = get_layout_class(LAYOUTS[kind]).Params(**scales, **turned, orig_dtype=dtype, orig_shape=stored.shape)
    return QuantizedTensor(tensors[stored.name], LAYOUTS[kind], params).dequantize()


def same(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes."""
    alike = left.dtype == right.dtype and left.shape == right.shape
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (left, right)]
    return alike and torch.equal(*flat)


def uneven(*shape: int, seed: int = 0) -> Tensor:
    """Return a matrix whose rows and columns differ in size by a factor of a thousand, as weights do."""
    random = torch.Generator().manual_seed(seed)
    sizes = [10 ** (3 * torch.rand(side, generator=random) - 3) for side in shape]
    return torch.randn(shape, generator=random) * sizes[0][:, None] * sizes[1]


def in_double(weight: QuantizedWeight) -> Tensor:
    """Return the operand of ``weight`` in fp64, of its fp32 products."""
    return weight.operand(torch.float32).double()
