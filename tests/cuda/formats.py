"""A stand-in's transformer as files of quantised models have it: headers with holes behind them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import gguf
import torch

from library.precision.files.comfy_quant import tiled_shape
from library.precision.recipe import scheme_named
from library.safetensors_io import TensorSpecs, read_entries
from library.training.memory.dummy_checkpoint import write_specs

_QUANTISED = re.compile(r".*(blocks|layers)\.(\w+\.)?\d+\..*\.weight")


def write_quantised(transformer: Path, kind: str) -> Path:
    """Write what a file of ``kind`` has instead of ``transformer``'s bf16 matrices, beside it; return its path.

    Args:
        kind: ``nf4``, ``mxfp8``, a scheme's name, or a type of GGUF; with ``Q4_K`` each second matrix is ``Q6_K``.
    """
    specs = {name: entry.spec for name, entry in read_entries([transformer])[0].items()}
    matrices = [name for name, (_, shape) in specs.items() if len(shape) == 2 and _QUANTISED.fullmatch(name)]
    if kind.startswith("Q"):
        second = "Q6_K" if kind == "Q4_K" else kind
        types = {name: second if i % 2 else kind for i, name in enumerate(matrices)}
        return _write_gguf(transformer.with_suffix(".gguf"), specs, types)
    layers, texts = {}, {}
    for name in matrices:
        layer, (dtype, shape) = name.removesuffix(".weight"), specs[name]
        if kind == "nf4":
            beside, texts[f"{name}.quant_state.bitsandbytes__nf4"] = _nf4(name, shape)
            specs |= beside | {key: (torch.uint8, (len(text),)) for key, text in texts.items()}
        elif kind == "mxfp8":
            layers[layer] = {"format": kind}
            blocks = tiled_shape((shape[0], shape[1] // 32))
            specs |= {name: (torch.float8_e4m3fn, shape), f"{layer}.weight_scale": (torch.uint8, blocks)}
        elif scheme := scheme_named(kind).fitting(shape):
            stored = scheme.store("comfy_quant", name, shape, dtype)
            specs |= stored.specs()
            layers[layer] = stored.comfy_config()
    path = transformer.with_name(f"{kind}.safetensors")
    write_specs(path, specs, {"_quantization_metadata": json.dumps({"layers": layers})} if layers else None)
    entries = read_entries([path])[0]
    with open(path, "r+b") as file:
        for key, text in texts.items():
            file.seek(entries[key].offset)
            file.write(text)
    return path


def _nf4(name: str, shape: tuple[int, ...]) -> tuple[TensorSpecs, bytes]:
    """Return the tensors of a weight with magnitudes that are quantised too, and the text of its state."""
    runs = math.prod(shape) // 64
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}
    specs: TensorSpecs = {
        name: (torch.uint8, (32 * runs, 1)),
        f"{name}.absmax": (torch.uint8, (runs,)),
        f"{name}.quant_map": (torch.float32, (16,)),
        f"{name}.nested_absmax": (torch.float32, (-(-runs // 256),)),
        f"{name}.nested_quant_map": (torch.float32, (256,)),
    }
    return specs, json.dumps(state).encode()


def _write_gguf(path: Path, specs: TensorSpecs, types: dict[str, str]) -> Path:
    writer, end = gguf.GGUFWriter(path, "flux"), 0
    for name, (_, shape) in specs.items():
        kind = gguf.GGMLQuantizationType[types.get(name, "BF16" if len(shape) > 1 else "F32")]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        held = math.prod(shape) // block * size
        writer.add_tensor_info(name, shape, torch.empty(0).numpy().dtype, held, raw_dtype=kind)
        end = -(-end // writer.data_alignment) * writer.data_alignment + held
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = -(-path.stat().st_size // writer.data_alignment) * writer.data_alignment
    with open(path, "r+b") as file:
        file.truncate(start + end)
    return path
