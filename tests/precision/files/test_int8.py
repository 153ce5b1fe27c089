"""int8 with and without ConvRot, against comfy-kitchen's own functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from library.errors import UserError
from library.precision.files import int8
from library.precision.files.base import StoredWeight
from library.precision.files.int8 import Int8Scheme, find
from library.precision.linear import QuantizedLinear
from tests.precision.files.comfy import (
    MADE,
    SHAPES,
    Made,
    by_kitchen,
    comfy_tensors,
    in_double,
    opened,
    rebuilt,
    uneven,
)

KIND = "int8_tensorwise"
FORMAT = {"format": KIND}


@pytest.mark.parametrize("made", [made for made in MADE if made.kind == KIND], ids=str)
def test_weights_are_rounded_as_comfy_kitchen_rounds_them(made: Made) -> None:
    for seed, shape in enumerate(SHAPES[KIND]):
        weight = uneven(*shape, seed=seed)
        theirs, ours = by_kitchen(weight, KIND, **made.options), made.scheme.quantize(weight)
        assert torch.equal(ours.values, theirs._qdata)
        assert torch.equal(ours.scale.reshape(-1), theirs._params.scale.reshape(-1))


@pytest.mark.parametrize("made", [made for made in MADE if made.kind == KIND], ids=str)
def test_comfy_kitchen_reads_what_is_written(made: Made) -> None:
    weight = made.scheme.quantize(uneven(40, 512))
    stored = made.scheme.store("comfy_quant", "l.weight", (40, 512), torch.bfloat16)
    assert stored.comfy_config() == made.marker
    found = rebuilt(stored, stored.written(weight), KIND, torch.float32)
    assert torch.equal(found, weight.dequantize(torch.float32))


def test_scales_may_have_any_shape(tmp_path: Path) -> None:
    for shapes, rows in (([[1], [1, 1], []], False), ([[8], [8, 1]], True)):
        weight = by_kitchen(uneven(8, 32), KIND, per_channel=rows)
        tensors = comfy_tensors("l", weight, FORMAT)
        for shape in shapes:
            scale = {"l.weight_scale": tensors["l.weight_scale"].reshape(shape)}
            file = opened(tmp_path / "a.safetensors", tensors | scale)
            read = find(file)["l.weight"].read(file, slice(2, 5))
            assert torch.equal(read.dequantize(torch.float32), weight.dequantize()[2:5]), shape


@pytest.mark.parametrize("where", ["marker", "params", "header", "header without prefix"])
def test_the_rotation_is_found_wherever_comfyui_says_it(tmp_path: Path, where: str) -> None:
    weight = by_kitchen(uneven(8, 128), KIND, per_channel=True, convrot=True, convrot_groupsize=64)
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


def test_large_weights_are_dequantised_in_pieces_to_the_same_numbers() -> None:
    weight = Int8Scheme().quantize(uneven(700, 1024))  # more than two pieces
    expected = (weight.values.float() * weight.scale).bfloat16()
    assert torch.equal(weight.operand(torch.bfloat16), expected)
    columns = weight.part(columns=slice(128, 640))
    assert torch.equal(columns.operand(torch.bfloat16), expected[:, 128:640])


def test_inputs_that_no_run_of_256_divides_get_shorter_runs_or_none() -> None:
    asked = Int8Scheme(group=256)
    assert [asked.fitting((8, inputs)).group for inputs in (512, 640, 800, 24)] == [256, 64, 16, 0]
    assert asked.fitting((8, 24)).name == "int8_row"


@pytest.mark.parametrize("said", [{}, {"full_precision_matrix_mult": True}])
def test_the_server_rounds_inputs_whatever_the_file_asks_for(tmp_path: Path, said: dict) -> None:
    """What ComfyUI calls in high precision, ``F.linear`` of plain inputs, is a product in int8 in comfy-kitchen."""
    made = by_kitchen(uneven(8, 32), KIND)
    stored: StoredWeight = find(opened(tmp_path / "a.safetensors", comfy_tensors("l", made, FORMAT | said)))["l.weight"]
    assert stored.served_rounding == "int8"
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    step = x.abs().amax(-1, keepdim=True) / 127
    served = torch.nn.functional.linear(x, made)
    torch.testing.assert_close(served, ((x / step).round() * step) @ made.dequantize().t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group", [0, 16, 64, 256])
@pytest.mark.parametrize("rows", [True, False])
def test_products_are_the_definition_in_double(rows: bool, group: int) -> None:
    """Inputs rotated once and rounded by tokens, sums exact; the gradient is that of the dequantised weight."""
    weight = Int8Scheme(rows=rows, group=group).quantize(uneven(48, 512))
    bias, x = torch.randn(48), torch.randn(3, 20, 512, requires_grad=True)
    layer = QuantizedLinear(weight, bias, compute="quantised")
    turned, numbers = weight.rotate(x.detach().double()), weight.values.double() * weight.scale.double()
    step = turned.abs().amax(-1, keepdim=True) / 127
    wanted = (turned / step).round() * step @ numbers.T + bias.double()
    found = layer(x)
    found.sum().backward()
    for each in (found, layer(weight.rotate(x), rotated=True)):
        assert (each - wanted).norm() < 1e-3 * wanted.norm()  # fp32 takes a tie the other way now and then
    gradient = weight.dequantize(torch.float32).sum(0).expand_as(x)
    torch.testing.assert_close(x.grad, gradient, rtol=1e-4, atol=1e-4)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), found)


@pytest.mark.parametrize(
    ("capability", "taken"),
    [((7, 5), False), ((8, 0), True), ((8, 6), True), ((8, 9), True), ((9, 0), False), ((12, 0), False)],
)
def test_cards_that_gain_by_it_multiply_in_int8(monkeypatch, capability: tuple[int, int], taken: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(int8, "_has_products", lambda *_: True)  # there is no card here
    device = torch.device("cuda")
    assert Int8Scheme(group=64).quantize(uneven(32, 64)).multiplies_on(device) == taken
    assert not Int8Scheme().quantize(uneven(24, 64)).multiplies_on(device)  # no whole number of sixteen outputs
    assert Int8Scheme().lacking(device) is None  # it may be asked for on all of them
    monkeypatch.setattr(int8, "_kitchen_is_there", lambda: False)
    assert Int8Scheme().lacking(device) == "products in int8 need comfy-kitchen: pip install comfy-kitchen"
    assert Int8Scheme().lacking(torch.device("cpu")) == "products in int8 need an NVIDIA GPU, Turing or newer"


@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_where_the_kernels_fail_weights_are_dequantised_and_it_is_said_once(monkeypatch, caplog, fault: str) -> None:
    def failing(x: torch.Tensor, *_: object) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no kernel image is available")
        return x.new_zeros(64, 64)

    monkeypatch.setattr(int8, "_product", failing)
    int8._products_work.cache_clear()
    weight, x = Int8Scheme(group=64).quantize(uneven(32, 64)), torch.randn(8, 64)
    dequantised = QuantizedLinear(weight, compute="dequant")(x)
    for _ in range(2):
        assert torch.equal(QuantizedLinear(weight, compute="quantised")(x), dequantised)
    int8._products_work.cache_clear()
    reason = {"raises": "no kernel image is available", "wrong": "its products are wrong"}[fault]
    assert caplog.messages == [f"int8 weights of 64 inputs are dequantised for products on cpu: {reason}"]


def test_other_layouts_than_comfyuis_are_refused() -> None:
    with pytest.raises(UserError, match="written in the layout comfy_quant"):
        Int8Scheme().store("musubi", "l.weight", (8, 32), torch.bfloat16)
