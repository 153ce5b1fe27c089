"""int8 with and without ConvRot, against comfy-kitchen's own functions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from library.errors import UserError
from library.precision.files.base import StoredWeight
from library.precision.files.int8 import Int8Scheme, find
from tests.precision.files.comfy import by_kitchen, comfy_tensors, in_double, marker, opened, rebuilt, same, uneven

FORMAT = {"format": "int8_tensorwise"}
KINDS = [  # scheme, how comfy-kitchen is asked for it, what the marker says
    (Int8Scheme(rows=False), {}, {}),
    (Int8Scheme(), {"per_channel": True}, {}),
    *(
        (
            Int8Scheme(group=group),
            {"per_channel": True, "convrot": True, "convrot_groupsize": group},
            {"convrot": True, "convrot_groupsize": group},
        )
        for group in (256, 64, 16, 4)
    ),
]
NAMES = [scheme.describe() for scheme, _, _ in KINDS]
SHAPES = [(1, 256), (3, 512), (300, 768), (48, 1280)]


@pytest.mark.parametrize(("scheme", "options", "config"), KINDS, ids=NAMES)
def test_what_comfy_kitchen_wrote_is_dequantised_to_its_bits(tmp_path: Path, scheme, options, config) -> None:
    for seed, shape in enumerate(SHAPES):
        weight = by_kitchen(uneven(*shape, seed=seed), "int8_tensorwise", **options)
        file = opened(tmp_path / "a.safetensors", comfy_tensors("l", weight, FORMAT | config))
        stored = find(file)["l.weight"]
        read = stored.read(file)
        assert torch.equal(read.dequantize(torch.float32), weight.dequantize())
        assert torch.equal(read.dequantize(torch.bfloat16), weight.dequantize().bfloat16())
        if shape[0] > 1:  # one row has one scale either way
            assert stored.scheme == read.scheme == scheme
        assert all(same(tensor, file.read(name)) for name, tensor in stored.written(read).items())
        assert {name: (t.dtype, tuple(t.shape)) for name, t in stored.written(read).items()} == stored.specs()


@pytest.mark.parametrize(("scheme", "options", "config"), KINDS, ids=NAMES)
def test_weights_are_rounded_as_comfy_kitchen_rounds_them(scheme, options, config) -> None:
    for seed, shape in enumerate(SHAPES):
        weight = uneven(*shape, seed=seed)
        theirs, ours = by_kitchen(weight, "int8_tensorwise", **options), scheme.quantize(weight)
        assert torch.equal(ours.values, theirs._qdata)
        assert torch.equal(ours.scale.reshape(-1), theirs._params.scale.reshape(-1))


@pytest.mark.parametrize(("scheme", "options", "config"), KINDS, ids=NAMES)
def test_comfy_kitchen_reads_what_is_written(scheme, options, config) -> None:
    weight = scheme.quantize(uneven(40, 512))
    stored = scheme.store("comfy_quant", "l.weight", (40, 512), torch.bfloat16)
    assert stored.comfy_config() == FORMAT | config
    found = rebuilt(stored, stored.written(weight), "int8_tensorwise", torch.float32)
    assert torch.equal(found, weight.dequantize(torch.float32))


def test_scales_may_have_any_shape(tmp_path: Path) -> None:
    for shapes, rows in (([[1], [1, 1], []], False), ([[8], [8, 1]], True)):
        weight = by_kitchen(uneven(8, 32), "int8_tensorwise", per_channel=rows)
        tensors = comfy_tensors("l", weight, FORMAT)
        for shape in shapes:
            scale = {"l.weight_scale": tensors["l.weight_scale"].reshape(shape)}
            file = opened(tmp_path / "a.safetensors", tensors | scale)
            read = find(file)["l.weight"].read(file, slice(2, 5))
            assert torch.equal(read.dequantize(torch.float32), weight.dequantize()[2:5]), shape


@pytest.mark.parametrize("where", ["marker", "params", "header", "header without prefix"])
def test_the_rotation_is_found_wherever_comfyui_says_it(tmp_path: Path, where: str) -> None:
    weight = by_kitchen(uneven(8, 128), "int8_tensorwise", per_channel=True, convrot=True, convrot_groupsize=64)
    options, layer = {"convrot": True, "convrot_groupsize": 64}, "model.diffusion_model.blocks.0.l"
    config = FORMAT | ({"params": options} if where == "params" else options)
    tensors = comfy_tensors(layer, weight, config if where in ("marker", "params") else None)
    said = layer.removeprefix("model.diffusion_model.") if where.endswith("prefix") else layer
    header = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": {said: config}})}
    file = opened(tmp_path / "a.safetensors", tensors, header if where.startswith("header") else None)
    assert torch.equal(find(file)[f"{layer}.weight"].read(file).dequantize(torch.float32), weight.dequantize())


@pytest.mark.parametrize("group", [4, 16, 64, 256])
def test_rotated_inputs_times_the_operand_are_the_inputs_times_the_weight(group: int) -> None:
    weight = Int8Scheme(group=group).quantize(uneven(24, 512))
    x, gradient = torch.randn(7, 512).double(), torch.randn(7, 24).double()
    dequantized = weight.rotate(in_double(weight))  # fp64: the rotation of the operand's rows
    assert torch.allclose(dequantized, weight.dequantize(torch.float32).double(), atol=1e-6)  # 256 sums in fp32
    assert torch.allclose(weight.rotate(x) @ in_double(weight).T, x @ dequantized.T, atol=1e-12)
    assert torch.allclose(weight.rotate_back(gradient @ in_double(weight)), gradient @ dequantized, atol=1e-12)


@pytest.mark.parametrize("scheme", [scheme for scheme, _, _ in KINDS], ids=NAMES)
def test_parts_and_stacks_hold_the_numbers_of_the_whole(scheme: Int8Scheme) -> None:
    weights = [scheme.quantize(uneven(rows, 512, seed=rows)) for rows in (8, 24)]
    stacked = type(weights[0]).stack(weights)
    whole = torch.cat([weight.operand(torch.float32) for weight in weights])
    assert torch.equal(stacked.operand(torch.float32), whole)
    cut = stacked.part(slice(5, 20), slice(256, 512))
    assert cut.shape == (15, 256)
    assert torch.equal(cut.operand(torch.bfloat16), whole[5:20, 256:].bfloat16())
    assert cut.values.untyped_storage().data_ptr() == stacked.values.untyped_storage().data_ptr()
    halves = [stacked.part(columns=slice(0, 256)), stacked.part(columns=slice(256, 512))]
    assert torch.equal(type(stacked).join(halves).operand(torch.float32), whole)
    with pytest.raises(ValueError, match="different scales"):
        type(stacked).join([weights[0], replace(weights[0], scale=weights[0].scale * 2)])
    with pytest.raises(ValueError, match="one int8, rotated in runs of"):
        type(stacked).stack([stacked, Int8Scheme(group=1024).quantize(uneven(4, 1024))])


def test_large_weights_are_dequantised_in_pieces_to_the_same_numbers() -> None:
    weight = Int8Scheme().quantize(uneven(700, 1024))  # more than two pieces
    expected = (weight.values.float() * weight.scale).bfloat16()
    assert torch.equal(weight.operand(torch.bfloat16), expected)
    columns = weight.part(columns=slice(128, 640))
    assert torch.equal(columns.operand(torch.bfloat16), expected[:, 128:640])


def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average() -> None:
    scheme, units = Int8Scheme(), torch.tensor([[-127.0, -3.25, 0.0, 5.0, 6.75, 130.0]])
    drawn = torch.cat([scheme.round(units, True, torch.Generator().manual_seed(seed)) for seed in range(4000)])
    assert [set(column.tolist()) for column in drawn.T] == [{-127}, {-4, -3}, {0}, {5}, {6, 7}, {127}]
    assert abs(drawn[:, 1].mean() + 3.25) < 0.03  # four standard deviations of the mean of 4000
    assert abs(drawn[:, 4].mean() - 6.75) < 0.03


def test_inputs_that_no_run_of_256_divides_get_shorter_runs_or_none() -> None:
    asked = Int8Scheme(group=256)
    assert [asked.fitting((8, inputs)).group for inputs in (512, 640, 800, 24)] == [256, 64, 16, 0]
    assert asked.fitting((8, 24)).name == "int8_row"


@pytest.mark.parametrize("scheme", [scheme for scheme, _, _ in KINDS], ids=NAMES)
def test_a_weight_that_is_rounded_again_stays_as_it_is(scheme: Int8Scheme) -> None:
    weight = scheme.quantize(uneven(8, 512))
    again = weight.scheme.quantize(weight.dequantize(torch.float32), before=weight.steps())
    assert torch.equal(again.values, weight.values)
    assert torch.equal(again.scale, weight.scale)


def test_a_weight_of_zeros_and_one_with_a_nan() -> None:
    for scheme in (Int8Scheme(rows=False), Int8Scheme(), Int8Scheme(group=16)):
        assert torch.equal(scheme.quantize(torch.zeros(4, 16)).dequantize(torch.float32), torch.zeros(4, 16))
        with pytest.raises(ValueError, match="NaN"):
            scheme.quantize(torch.full((4, 16), torch.nan))


@pytest.mark.parametrize("said", [{}, {"full_precision_matrix_mult": True}])
def test_the_server_rounds_inputs_whatever_the_file_asks_for(tmp_path: Path, said: dict) -> None:
    """What ComfyUI calls in high precision, ``F.linear`` of plain inputs, is a product in int8 in comfy-kitchen."""
    made = by_kitchen(uneven(8, 32), "int8_tensorwise")
    stored: StoredWeight = find(opened(tmp_path / "a.safetensors", comfy_tensors("l", made, FORMAT | said)))["l.weight"]
    assert stored.served_rounding == "int8"
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    step = x.abs().amax(-1, keepdim=True) / 127
    served = torch.nn.functional.linear(x, made)
    torch.testing.assert_close(served, ((x / step).round() * step) @ made.dequantize().t(), rtol=1e-4, atol=1e-4)


SOUND = {"l.weight": torch.ones(8, 32, dtype=torch.int8), "l.weight_scale": torch.ones(8, 1)}


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        ({"l.weight_scale": None}, {}, "there is no weight_scale"),
        ({"l.weight": None}, {}, "without a weight"),
        ({"l.weight": torch.ones(8, 32)}, {}, "dtype F32 where int8_tensorwise has I8"),
        ({"l.weight": torch.ones(2, 8, 32, dtype=torch.int8)}, {}, "no matrix"),
        ({"l.weight_scale": torch.ones(4, 1)}, {}, r"shape \[4, 1\]"),
        ({"l.weight_scale": torch.ones(8, 1, dtype=torch.int32)}, {}, "dtype I32"),
        ({"l.weight_scale": torch.full((8, 1), torch.nan)}, {}, "not positive and finite"),
        ({}, {"convrot": True, "convrot_groupsize": 32}, "rotates runs of 32"),
        ({}, {"convrot": True, "convrot_groupsize": "all"}, "rotates runs of 'all'"),
        ({}, {"convrot": True}, "rotates runs of 256 inputs, of 32"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, change, config, words) -> None:
    tensors = {name: tensor for name, tensor in (SOUND | change).items() if tensor is not None}
    file = opened(tmp_path / "a.safetensors", tensors | {"l.comfy_quant": marker(FORMAT | config)})
    with pytest.raises(UserError, match=words) as raised:
        find(file)["l.weight"].read(file)
    assert "\n" not in str(raised.value)
    assert str(file.path) in str(raised.value)


def test_other_layouts_than_comfyuis_are_refused() -> None:
    with pytest.raises(UserError, match="written in the layout comfy_quant"):
        Int8Scheme().store("musubi", "l.weight", (8, 32), torch.bfloat16)
