"""GGUF files written by the ``gguf`` package, in any type: quantised where it can, else of random blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from library.precision.files.gguf import TYPES, GgufWeight

Blocks = np.ndarray


def write_gguf(
    path: Path,
    tensors: Mapping[str, Tensor],
    kind: Callable[[str, Tensor], str] | str = "Q8_0",
    *,
    architecture: str = "flux",
    orig_shapes: Mapping[str, Sequence[int]] | None = None,
    strings: Mapping[str, str] | None = None,
    tokens: Sequence[str] = (),
) -> Path:
    """Write ``tensors`` as ComfyUI-GGUF's ``convert.py`` does: matrices in ``kind``, what has one dimension in F32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (strings or {}).items():
        writer.add_string(key, value)
    if tokens:
        writer.add_array("tokenizer.ggml.tokens", list(tokens))
        writer.add_array("tokenizer.ggml.scores", [float(i) for i in range(len(tokens))])
    for name, shape in (orig_shapes or {}).items():
        writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
    for name, tensor in tensors.items():
        wanted = kind if isinstance(kind, str) else kind(name, tensor)
        data = blocks_of(tensor, wanted) if tensor.ndim > 1 else tensor.float().numpy()
        qtype = GGMLQuantizationType[wanted if tensor.ndim > 1 else "F32"]
        writer.add_tensor(name, data, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


HIGH = ("img_in", "txt_in", "time_in", "vector_in", "guidance_in", "final_layer")  # left in 16 bits by converters


def image_model_types(quantised: str) -> Callable[[str, Tensor], str]:
    """Return what type a tensor of FLUX has in a file of ``quantised``; Q4_K_M mixes Q6_K in."""

    def kind(name: str, tensor: Tensor) -> str:
        if name.removeprefix("model.diffusion_model.").startswith(HIGH):
            return "BF16"
        return "Q6_K" if quantised == "Q4_K" and "img_mlp.2" in name else quantised

    return kind


def read_by_the_package(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file in fp32 as the ``gguf`` package reads and dequantises them."""
    tensors = gguf.GGUFReader(path).tensors
    return {each.name: torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy()) for each in tensors}


def blocks_of(weight: Tensor, kind: str) -> Blocks:
    """Return ``weight`` [..., in] in ``kind``: bytes [..., bytes], or floats; K-quants other than Q4_K are random.

    Bytes are blocks already.
    """
    if weight.dtype == torch.uint8:
        return weight.numpy()
    values = weight.float().numpy()
    if kind in ("F32", "F16"):
        return values.astype(np.float32 if kind == "F32" else np.float16)
    try:
        return gguf.quantize(values, GGMLQuantizationType[kind])
    except NotImplementedError:
        return _q4_k(values) if kind == "Q4_K" else random_blocks(values.shape, kind, float(weight.std()))


def random_blocks(shape: Sequence[int], kind: str, size: float = 1.0, seed: int = 0) -> Blocks:
    """Return blocks of random bytes of ``kind`` for a weight of ``shape``, with scales that give about ``size``."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (int(np.prod(shape)) // block, block_bytes), dtype=np.uint8)
    for offset in TYPES[kind][2]:
        blocks[:, offset : offset + 2] = np.full((len(blocks), 1), 1.0, np.float16).view(np.uint8)
    spread = gguf.dequantize(blocks, GGMLQuantizationType[kind]).std()
    scales = (random.normal(size=(len(blocks), 1)) * size / spread).astype(np.float16)
    for offset in TYPES[kind][2]:
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def dequantized(blocks: Blocks, kind: str) -> Tensor:
    """Return the ``gguf`` package's answer in fp32."""
    return torch.from_numpy(gguf.dequantize(blocks, GGMLQuantizationType[kind]))


def _q4_k(values: np.ndarray) -> Blocks:
    """Quantise by the smallest and largest of each 32: ``d * scale * q - dmin * minimum``, scales of 6 bits."""
    runs = values.reshape(-1, 8, 32)
    low = np.maximum(-runs.min(-1), 0.0)
    step = np.maximum((runs.max(-1) + low) / 15, 1e-8)
    d, dmin = ((side.max(-1, keepdims=True) / 63).astype(np.float16) for side in (step, low))
    scale, minimum = (
        np.clip(np.rint(side / np.maximum(of.astype(np.float32), 1e-12)), 0, 63).astype(np.uint8)
        for side, of in ((step, d), (low, dmin))
    )
    units = d.astype(np.float32) * scale
    q = np.rint((runs + (dmin.astype(np.float32) * minimum)[..., None]) / np.maximum(units, 1e-12)[..., None])
    q = np.clip(q, 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    first = [part[:, :4] | (part[:, 4:] >> 4 << 6) for part in (scale, minimum)]
    last = (scale[:, 4:] & 15) | ((minimum[:, 4:] & 15) << 4)
    nibbles = (q[:, :, 0] | (q[:, :, 1] << 4)).reshape(-1, 128)
    parts = [d.view(np.uint8), dmin.view(np.uint8), *first, last, nibbles]
    return np.concatenate(parts, axis=1).reshape(*values.shape[:-1], -1)


def weight_of(kind: str, out_features: int = 24, in_features: int = 512) -> GgufWeight:
    """Return a weight of random blocks of a type."""
    blocks = random_blocks((out_features, in_features), kind)
    return GgufWeight(torch.from_numpy(blocks).view(out_features, in_features // TYPES[kind][0], -1), kind)
