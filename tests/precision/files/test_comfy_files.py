"""int8, nvfp4 and mxfp8 against comfy-kitchen: layers, parts, and whole files: read, written, trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from library.errors import UserError
from library.precision.checkpoint import WeightFiles
from library.precision.files import int8, nvfp4
from library.precision.files.base import cached_tensor
from library.precision.files.int8 import Int8Scheme
from library.precision.linear import QuantizedLinear
from library.precision.recipe import Recipe, scheme_named
from library.precision.writing import write_quantized
from library.safetensors_io import RowRange
from tests.precision.files.comfy import (
    FIND,
    MADE,
    SHAPES,
    Made,
    by_kitchen,
    comfy_tensors,
    marker,
    opened,
    rebuilt,
    same,
    uneven,
)

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
    bf16, target = WeightFiles(tmp_path / "bf16.safetensors"), tmp_path / "quantised.safetensors"
    write_quantized(bf16, target, "comfy_quant", recipe, low_precision_products=low_precision_products)
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


def test_a_compiled_layer_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one graph, although the compiler meets its table first."""
    for scheme, module, table in (("int8_convrot", int8, "_rotation"), ("nvfp4", nvfp4, "_pairs")):
        monkeypatch.setattr(module, table, cached_tensor(getattr(module, table).__wrapped__))
        layer = QuantizedLinear(scheme_named(scheme).quantize(uneven(64, 256)))
        x = torch.randn(5, 256, requires_grad=True)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.allclose(compiled(x), layer(x), atol=1e-5)


@pytest.mark.parametrize("made", MADE, ids=str)
def test_what_comfy_kitchen_wrote_is_dequantised_to_its_bits(tmp_path: Path, made: Made) -> None:
    for seed, shape in enumerate(SHAPES[made.kind]):
        weight = by_kitchen(uneven(*shape, seed=seed), made.kind, **made.options)
        file = opened(tmp_path / "a.safetensors", comfy_tensors("l", weight, made.marker))
        stored = FIND[made.kind](file)["l.weight"]
        read = stored.read(file)
        assert (stored.shape, read.shape, stored.full_precision) == (shape, shape, False)
        assert torch.equal(read.dequantize(torch.float32), weight.dequantize())
        assert torch.equal(read.dequantize(torch.bfloat16), weight.dequantize().bfloat16())
        rows = slice(shape[0] // 5, min(shape[0] // 5 + 6, shape[0]))
        assert torch.equal(stored.read(file, rows).dequantize(torch.float32), weight.dequantize()[rows])
        if isinstance(made.scheme, Int8Scheme) and shape[0] > 1:  # one row has one scale either way
            assert stored.scheme == read.scheme == made.scheme
        assert all(same(tensor, file.read(name)) for name, tensor in stored.written(read).items())
        assert {name: (t.dtype, tuple(t.shape)) for name, t in stored.written(read).items()} == stored.specs()


@pytest.mark.parametrize("made", MADE, ids=str)
def test_parts_and_stacks_hold_the_numbers_of_the_whole(made: Made) -> None:
    weights = [made.scheme.quantize(uneven(rows, 512, seed=rows)) for rows in (32, 64)]
    kind, whole = type(weights[0]), torch.cat([weight.operand(torch.float32) for weight in weights])
    stacked = kind.stack(weights)
    assert torch.equal(stacked.operand(torch.float32), whole)
    cut = stacked.part(slice(5, 40), slice(256, 512))
    assert cut.shape == (35, 256)
    assert torch.equal(cut.operand(torch.bfloat16), whole[5:40, 256:].bfloat16())
    assert cut.values.untyped_storage().data_ptr() == stacked.values.untyped_storage().data_ptr()
    halves = [stacked.part(columns=slice(0, 256)), stacked.part(columns=slice(256, 512))]
    assert torch.equal(kind.join(halves).operand(torch.float32), whole)
    if made.kind == "nvfp4":
        assert kind.stack([weights[0], weights[0]]).scale.shape == (1, 1)
    if made.kind != "mxfp8":
        with pytest.raises(ValueError, match="different scales"):
            kind.join([weights[0], replace(weights[0], scale=weights[0].scale * 2)])
    if made.kind == "int8_tensorwise":
        with pytest.raises(ValueError, match="one int8, rotated in runs of"):
            kind.stack([stacked, Int8Scheme(group=1024).quantize(uneven(4, 1024))])


@pytest.mark.parametrize("made", MADE, ids=str)
def test_a_weight_that_is_rounded_again_stays_as_it_is(made: Made) -> None:
    weight = made.scheme.quantize(uneven(32, 512))
    again = weight.scheme.quantize(weight.dequantize(torch.float32), before=weight.steps())
    assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in weight.tensors().items())


@pytest.mark.parametrize("made", MADE, ids=str)
def test_a_weight_of_zeros_and_one_with_a_nan(made: Made) -> None:
    assert torch.equal(made.scheme.quantize(torch.zeros(32, 64)).dequantize(torch.float32), torch.zeros(32, 64))
    with pytest.raises(ValueError, match="NaN"):
        made.scheme.quantize(torch.full((32, 64), torch.nan))


@pytest.mark.parametrize(
    ("scheme", "units", "neighbours"),
    [
        (Int8Scheme(), [-127.0, -3.25, 6.75, 0.0, 5.0, 130.0], [{-127}, {-4, -3}, {6, 7}, {0}, {5}, {127}]),
        (scheme_named("nvfp4"), [-6.0, -2.25, 4.5, 0.1, 3.0, 9.0], [{-6}, {-3, -2}, {4, 6}, {0, 0.5}, {3}, {6}]),
    ],
)
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(scheme, units, neighbours) -> None:
    draws = [scheme.round(torch.tensor([units]), True, torch.Generator().manual_seed(seed)) for seed in range(4000)]
    drawn = torch.cat(draws)
    assert [set(column.tolist()) for column in drawn.T] == neighbours
    assert abs(drawn[:, 1].mean() - units[1]) < 0.03  # four standard deviations of the mean of 4000
    assert abs(drawn[:, 2].mean() - units[2]) < (0.03 if isinstance(scheme, Int8Scheme) else 0.06)


E4M3, I8, BYTES, NAN = torch.float8_e4m3fn, torch.int8, torch.uint8, torch.nan
SOUND = {
    "int8_tensorwise": {"weight": torch.ones(8, 32, dtype=I8), "weight_scale": torch.ones(8, 1)},
    "nvfp4": {
        "weight": torch.zeros(32, 16, dtype=BYTES),
        "weight_scale": torch.ones(32, 2).to(E4M3),
        "weight_scale_2": torch.tensor(1.0),
    },
    "mxfp8": {"weight": torch.zeros(32, 64).to(E4M3), "weight_scale": torch.full((32, 2), 127, dtype=BYTES)},
}
DAMAGED: list[tuple[str, dict, dict, str]] = [  # the tensors that change, what the marker adds, what is said
    ("int8_tensorwise", {"weight_scale": None}, {}, "there is no weight_scale"),
    ("int8_tensorwise", {"weight": None}, {}, "without a weight"),
    ("int8_tensorwise", {"weight": torch.ones(8, 32)}, {}, "dtype F32 where int8_tensorwise has I8"),
    ("int8_tensorwise", {"weight": torch.ones(2, 8, 32, dtype=I8)}, {}, "no matrix"),
    ("int8_tensorwise", {"weight_scale": torch.ones(4, 1)}, {}, r"shape \[4, 1\]"),
    ("int8_tensorwise", {"weight_scale": torch.ones(8, 1, dtype=torch.int32)}, {}, "dtype I32"),
    ("int8_tensorwise", {"weight_scale": torch.full((8, 1), NAN)}, {}, "not positive and finite"),
    ("int8_tensorwise", {}, {"convrot": True, "convrot_groupsize": 32}, "rotates runs of 32"),
    ("int8_tensorwise", {}, {"convrot": True, "convrot_groupsize": "all"}, "rotates runs of 'all'"),
    ("int8_tensorwise", {}, {"convrot": True}, "rotates runs of 256 inputs, of 32"),
    ("nvfp4", {"weight_scale": None}, {}, "there is no weight_scale"),
    ("nvfp4", {"weight_scale_2": None}, {}, "there is no weight_scale_2"),
    ("nvfp4", {"weight": torch.zeros(32, 16, dtype=I8)}, {}, "dtype I8 where nvfp4 has U8"),
    ("nvfp4", {"weight": torch.zeros(32, 12, dtype=BYTES)}, {}, "runs of 16 of 24 inputs"),
    ("nvfp4", {"weight_scale": torch.ones(32, 4).to(E4M3)}, {}, r"shape \[32, 4\] are not the block scales"),
    ("nvfp4", {"weight_scale": torch.ones(32, 2)}, {}, "dtype F32"),
    ("nvfp4", {"weight_scale": torch.full((32, 2), NAN).to(E4M3)}, {}, "NaN or negative"),
    ("nvfp4", {"weight_scale_2": torch.ones(32)}, {}, "not one scale"),
    ("nvfp4", {"weight_scale_2": torch.tensor(torch.inf)}, {}, "not positive and finite"),
    ("nvfp4", {"pre_quant_scale": torch.ones(32)}, {}, "AWQ"),
    ("nvfp4", {}, {"orig_shape": [30, 30]}, r"orig_shape says \[30, 30\]"),
    ("mxfp8", {"weight_scale": None}, {}, "there is no weight_scale"),
    ("mxfp8", {"weight": torch.zeros(32, 64)}, {}, "dtype F32 where mxfp8 has F8_E4M3 or U8"),
    ("mxfp8", {"weight": torch.full((32, 64), NAN).to(E4M3)}, {}, "'l.weight' holds NaN"),
    ("mxfp8", {"weight_scale": torch.full((32, 2), 255, dtype=BYTES)}, {}, "'l.weight_scale' holds NaN"),
    ("mxfp8", {"weight_scale": torch.full((2, 32), 1, dtype=BYTES)}, {}, r"shape \[2, 32\]"),
    ("mxfp8", {"weight_scale": torch.ones(32, 2)}, {}, "dtype F32"),
]


@pytest.mark.parametrize(("kind", "change", "config", "words"), DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, kind: str, change, config, words) -> None:
    tensors = {f"l.{name}": tensor for name, tensor in (SOUND[kind] | change).items() if tensor is not None}
    file = opened(tmp_path / "a.safetensors", tensors | {"l.comfy_quant": marker({"format": kind, **config})})
    with pytest.raises(UserError, match=words) as raised:
        FIND[kind](file)["l.weight"].read(file)
    assert "\n" not in str(raised.value)
    assert str(file.path) in str(raised.value)
