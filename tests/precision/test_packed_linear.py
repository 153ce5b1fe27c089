"""Packed layers against plain ones, alone and in a language model with a LoRA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from library.errors import UserError
from library.models.llm.files import load_lm
from library.precision.files.gguf import TYPES
from library.precision.files.int8 import Int8Scheme
from library.precision.linear import QuantizedLinear
from library.precision.packed_linear import (
    DecodedLinear,
    Int4Linear,
    Int8Linear,
    OneDnnLinear,
    PackedLinear,
    pack_linears,
    unpacked,
)
from library.training.tasks.chat_lora import put_lora_on
from tests.llm.talkers import write_lora
from tests.models.llm.lms import NAMES, VOCABULARY, reference, write_model, write_reference
from tests.precision.files.gguf_files import weight_of
from tools.chat_worker import take_loras_off
from tools.command import load_language_model

TOKENS = torch.arange(60).view(2, 30) % VOCABULARY


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "bias"), [(1, 48, 80, True), (3, 131, 7, False), (65, 64, 257, True), (1, 1, 1, True)]
)
def test_a_product_is_the_plain_one(
    dtype: torch.dtype, shared: bool, rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    linear = nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)
    before = linear.weight.clone()
    packed = OneDnnLinear(linear, shared)
    x = draw(2, inputs, rows).to(dtype).transpose(1, 2)  # stored by columns
    expected = F.linear(x.double(), before.double(), None if linear.bias is None else linear.bias.double())
    # a sum of up to 131 products, in fp32 and rounded once
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(packed(x).double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(packed(x[0]).double(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(packed(x[1, :1]).double(), expected[1, :1], rtol=tolerance, atol=tolerance)
    assert torch.equal(packed.unpacked().weight, before)


@torch.inference_mode()
@pytest.mark.parametrize("name", NAMES)
def test_a_packed_model_computes_the_same(name: str, tmp_path: Path) -> None:
    write_reference(tmp_path, name)
    model = load_lm(tmp_path, torch.float32)
    before = model(TOKENS)
    tied = model.lm_head.weight is model.embedding.weight
    pack_linears(model)
    assert not any(type(layer) is nn.Linear for layer in model.modules())
    assert model.lm_head.shared == tied
    assert (model(TOKENS) - before).abs().max() < 1e-4 * before.abs().max()
    cache = model.new_cache(2, 30)
    pieces = [model(TOKENS[:, :20], cache=cache), *(model(TOKENS[:, i : i + 1], cache=cache) for i in range(20, 30))]
    assert (torch.cat(pieces, 1) - before).abs().max() < 1e-4 * before.abs().max()
    with unpacked(model):
        assert torch.equal(model(TOKENS), before)
        assert not any(isinstance(layer, PackedLinear) for layer in model.modules())
    assert isinstance(model.lm_head, OneDnnLinear)
    plain = load_lm(tmp_path, torch.float32)
    with unpacked(plain):
        pass
    assert type(plain.lm_head) is nn.Linear


@torch.inference_mode()
def test_loras_come_and_go_on_a_packed_model(tmp_path: Path) -> None:
    write_reference(tmp_path / "model", "llama3")
    write_lora(tmp_path / "model", tmp_path / "lora", seed=1)
    plain, packed = (load_lm(tmp_path / "model", torch.float32) for _ in range(2))
    before = plain(TOKENS)
    put_lora_on(plain, tmp_path / "lora", 0.7)
    pack_linears(packed)
    for _ in range(2):
        put_lora_on(packed, tmp_path / "lora", 0.7)
        assert any(isinstance(layer, PackedLinear) for layer in packed.modules())
        expected = plain(TOKENS)
        assert (packed(TOKENS) - expected).abs().max() < 1e-4 * expected.abs().max()
        assert (expected - before).abs().max() > 0.01 * before.abs().max()
        take_loras_off(packed)
        assert (packed(TOKENS) - before).abs().max() < 1e-4 * before.abs().max()


def test_what_is_trained_or_has_no_kernel_stays() -> None:
    trained, half = nn.Linear(4, 4), nn.Linear(4, 4).half().requires_grad_(False)
    model = nn.ModuleList([trained, half])
    pack_linears(model)
    assert list(model) == [trained, half]


KINDS = ["int8 rows", "int8 tensor", "Q4_0", "Q4_1", "Q4_K"]


def quantised(kind: str, outputs: int, inputs: int, bias: bool) -> QuantizedLinear:
    own = draw(outputs).bfloat16() if bias else None
    if kind in TYPES:
        return QuantizedLinear(weight_of(kind, outputs, inputs), own)
    return QuantizedLinear(Int8Scheme(rows=kind == "int8 rows").quantize(draw(outputs, inputs)), own)


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_decoded_within_the_product_is_the_dequantised_weight(kind: str, rows: int, bias: bool) -> None:
    layer = quantised(kind, 48, 512, bias)
    model = nn.ModuleList([layer, nn.Linear(2, 2).bfloat16()])
    pack_linears(model)
    (packed, _) = model
    assert isinstance(packed, Int8Linear if kind.startswith("int8") else Int4Linear)
    x = draw(2, 512, rows).bfloat16().transpose(1, 2)
    weight = layer.dequantized(torch.float32).double()
    expected = F.linear(x.double(), weight, None if layer.bias is None else layer.bias.double())
    # scales, offsets and results are rounded to bf16's 8 bits: each by 2^-9 of what is summed, in quadrature
    summed = (x.double().square() @ weight.square().t()).sqrt() + expected.abs()
    assert ((packed(x).double() - expected).abs() / summed).max() < 2**-6
    assert ((packed(x[0, :1]).double() - expected[0, :1]).abs() / summed[0, :1]).max() < 2**-6
    assert packed.unpacked() is layer


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_codes_are_the_numbers_of_a_gguf_weight(kind: str) -> None:
    weight = weight_of(kind)
    found = weight.int4()
    assert found is not None
    codes, scale, offset = found
    assert codes.shape == (24, 512)
    assert codes.max() <= 15
    numbers = codes.view(24, -1, 32) * scale[..., None] + offset[..., None]
    expected = weight.dequantize(torch.float32)
    # the same in fp32, in another order
    torch.testing.assert_close(numbers.view(24, 512), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    assert weight_of("Q6_K").int4() is None


def test_quantised_layers_of_an_fp32_model_or_without_a_kernel_stay() -> None:
    for own in (quantised("Q4_0", 48, 64, False), quantised("int8 rows", 8, 8, False)):
        model = nn.ModuleList([own, nn.Linear(2, 2)])
        pack_linears(model)
        assert model[0] is own
    odd = [quantised("Q4_0", 40, 64, False), quantised("Q5_0", 48, 64, False)]
    model = nn.ModuleList([*odd, nn.Linear(2, 2).bfloat16()])
    pack_linears(model)
    assert list(model[:2]) == odd


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["folder", "Q4_1", "mixed"])
def test_a_model_of_eight_bits_computes_what_its_weights_say(kind: str, tmp_path: Path) -> None:
    """As the same weights do dequantised."""
    theirs = reference("llama3", hidden_size=64, intermediate_size=96)  # whole blocks of 32
    theirs.save_pretrained(tmp_path / "model")
    file = tmp_path / "model"
    if kind != "folder":
        file = tmp_path / "model.gguf"
        write_model(file, theirs, (lambda name: "Q8_0" if "v_proj" in name else "Q4_0") if kind == "mixed" else kind)
    model = load_language_model(file, "int8", False)
    decoded = [layer for layer in model.modules() if isinstance(layer, DecodedLinear)]
    assert isinstance(model.lm_head, Int8Linear)
    assert any(isinstance(layer, Int4Linear) for layer in decoded) == (kind not in ("folder", "Q8_0"))
    assert not any(type(layer) in (nn.Linear, QuantizedLinear) for layer in model.modules())

    same = load_lm(file, torch.float32, dequantised=True)
    expected = same(TOKENS)
    in_bf16 = load_lm(file, torch.bfloat16, dequantised=True)(TOKENS).float()
    own = float((in_bf16 - expected).norm() / expected.norm())  # what bf16 alone makes of these random weights
    # rounding a row to int8 moves its numbers by up to 1 / 254 of the largest, 1 % of their own size
    near = 2 * own + 0.05
    assert near < 0.1
    assert (model(TOKENS).float() - expected).norm() < near * expected.norm()
    with unpacked(model):
        again = model(TOKENS).float()
    cache = model.new_cache(2, 30)
    pieces = [model(TOKENS[:, :20], cache=cache), *(model(TOKENS[:, i : i + 1], cache=cache) for i in range(20, 30))]
    # the same numbers, rounded elsewhere
    assert (torch.cat(pieces, 1).float() - again).norm() < 2 * own * again.norm()


def test_two_ways_of_quantising_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--fp8_scaled: has no effect with --dtype int8"):
        load_language_model(tmp_path, "int8", True)
