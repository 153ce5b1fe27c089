"""Packed layers against plain ones, alone and in a language model with a LoRA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from library.models.llm.files import load_lm
from library.nn.packed_linear import PackedLinear, pack_linears, unpack_linears
from library.training.tasks.chat_lora import put_lora_on
from tests.llm.talkers import write_lora
from tests.models.llm.lms import NAMES, VOCABULARY, write_reference
from tools.chatting.session import take_loras_off

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
    packed = PackedLinear(linear, shared)
    x = draw(2, inputs, rows).to(dtype).transpose(1, 2)  # stored by columns
    expected = F.linear(x.double(), before.double(), None if linear.bias is None else linear.bias.double())
    # a sum of up to 131 products, in fp32 and rounded once
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(packed(x).double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(packed(x[0]).double(), expected[0], rtol=tolerance, atol=tolerance)
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
    assert unpack_linears(model)
    assert torch.equal(model(TOKENS), before)
    assert not unpack_linears(model)


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
