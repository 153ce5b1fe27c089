"""Whole files of int8, nvfp4 and mxfp8 layers: read, written, and trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from library.errors import UserError
from library.precision.checkpoint import WeightFiles
from library.precision.linear import QuantizedLinear
from library.precision.recipe import Recipe, scheme_named
from library.precision.writing import write_quantized
from library.safetensors_io import RowRange
from tests.precision.files.comfy import by_kitchen, comfy_tensors, marker, rebuilt, uneven

PREFIX = "model.diffusion_model.double_blocks.0."
KINDS = {"int8": "int8_tensorwise", "int8_row": "int8_tensorwise", "int8_convrot": "int8_tensorwise", "nvfp4": "nvfp4"}
TURNED = {"convrot": True, "convrot_groupsize": 64}


def test_layers_of_one_file_may_have_any_formats(tmp_path: Path) -> None:
    weights = {
        "a": (by_kitchen(uneven(32, 64), "int8_tensorwise"), {"format": "int8_tensorwise"}),
        "b": (
            by_kitchen(uneven(32, 64), "int8_tensorwise", per_channel=True, **TURNED),
            {"format": "int8_tensorwise", **TURNED},
        ),
        "c": (by_kitchen(uneven(32, 64), "nvfp4"), {"format": "nvfp4"}),
        "d": (by_kitchen(uneven(32, 64), "mxfp8"), {"format": "mxfp8"}),
    }
    tensors: dict[str, torch.Tensor] = {}
    for layer, (weight, config) in weights.items():
        tensors |= comfy_tensors(PREFIX + layer, weight, config)
    fp8 = uneven(32, 64).to(torch.float8_e4m3fn)
    tensors |= {f"{PREFIX}e.weight": fp8, f"{PREFIX}e.weight_scale": torch.tensor(0.5)}
    tensors |= {f"{PREFIX}e.comfy_quant": marker({"format": "float8_e4m3fn"})}
    tensors |= {f"{PREFIX}f.weight": uneven(32, 64).bfloat16(), f"{PREFIX}a.bias": torch.ones(32)}
    save_file(tensors, tmp_path / "mixed.safetensors")
    files = WeightFiles(tmp_path / "mixed.safetensors")
    expected = {layer: weight.dequantize() for layer, (weight, _) in weights.items()}
    expected |= {"e": fp8.float() * 0.5, "f": tensors[f"{PREFIX}f.weight"].float()}
    for layer, weight in expected.items():
        assert files.shape(f"{PREFIX}{layer}.weight") == (32, 64)
        assert torch.equal(files.read_float(RowRange(f"{PREFIX}{layer}.weight", 3, 20)), weight[3:20])
    assert {name.removeprefix(PREFIX) for name in files.names} == {*(f"{layer}.weight" for layer in "abcdef"), "a.bias"}
    assert files.read_quantized([RowRange(f"{PREFIX}f.weight")]) is None
    with pytest.raises(UserError, match="quantise them alike"):
        files.read_quantized([RowRange(f"{PREFIX}a.weight"), RowRange(f"{PREFIX}c.weight")])


@pytest.mark.parametrize("scheme", list(KINDS))
@pytest.mark.parametrize("low_precision_products", [False, True])
def test_comfy_kitchen_reads_the_files_that_are_written(tmp_path: Path, scheme: str, low_precision_products) -> None:
    shapes = {"a": (32, 256), "b": (48, 320), "c": (32, 40), "d": (20, 64)}
    source = {f"{PREFIX}{layer}.weight": uneven(*shape).bfloat16() for layer, shape in shapes.items()}
    save_file(source | {f"{PREFIX}a.bias": torch.ones(32)}, tmp_path / "bf16.safetensors")
    recipe = Recipe(scheme_named(scheme))
    target = tmp_path / "quantised.safetensors"
    write_quantized(
        WeightFiles(tmp_path / "bf16.safetensors"),
        target,
        "comfy_quant",
        recipe,
        low_precision_products=low_precision_products,
    )
    written, again = load_file(target), WeightFiles(target)
    assert again.quantized is not None
    for name, weight in source.items():
        layer = name.removesuffix(".weight")
        own = recipe.scheme_of(layer, tuple(weight.shape))
        if own is None:
            assert scheme == "nvfp4"
            assert weight.shape in ((32, 40), (20, 64))
            assert torch.equal(written[name], weight)
            continue
        said = json.loads(bytes(written[f"{layer}.comfy_quant"].tolist()))
        assert said.pop("full_precision_matrix_mult", False) is not low_precision_products
        stored, expected = again.quantized.weights[name], own.quantize(weight).dequantize(torch.float32)
        assert said == stored.comfy_config()
        assert torch.equal(rebuilt(stored, written, KINDS[scheme], torch.float32), expected)
        assert torch.equal(again.read_float(RowRange(name)), expected)


@pytest.mark.parametrize("scheme", list(KINDS))
def test_a_layer_multiplies_with_the_weight_that_its_file_stands_for(scheme: str) -> None:
    weight = scheme_named(scheme).quantize(torch.randn(1536, 1536) / 1536**0.5)  # more than a chunk of the product
    layer = QuantizedLinear(weight, torch.randn(1536))
    x, gradient = torch.randn(300, 1536), torch.randn(300, 1536)  # more than a chunk of rotated tokens
    x.requires_grad_()
    out = layer(x)
    out.backward(gradient)
    assert x.grad is not None
    exact = weight.dequantize(torch.float32).double()
    assert layer.bias is not None
    # fp32 sums of 1536 products of size one
    assert torch.allclose(out.double(), x.double() @ exact.T + layer.bias.double(), atol=1e-4)
    assert torch.allclose(x.grad.double(), gradient.double() @ exact, atol=1e-4)


def test_a_compiled_layer_gives_the_same(tmp_path: Path) -> None:
    for scheme in ("int8_convrot", "nvfp4"):
        layer = QuantizedLinear(scheme_named(scheme).quantize(uneven(64, 256)))
        x = torch.randn(5, 256, requires_grad=True)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.allclose(compiled(x), layer(x), atol=1e-5)
