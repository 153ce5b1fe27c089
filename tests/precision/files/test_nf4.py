"""bitsandbytes' 4 bits: files as it and diffusers save them, numbers against its own dequantising."""

from __future__ import annotations

import json
from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from library.errors import UserError
from library.precision.checkpoint import WeightFiles
from library.precision.files.nf4 import Nf4Weight
from library.precision.linear import QuantizedLinear
from library.safetensors_io import RowRange
from tests.precision.files.nf4_files import nf4_tensors


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def saved(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
    return path


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("blocksize", [64, 128])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_numbers_are_bitsandbytes_bit_for_bit(
    kind: str, nested: bool, blocksize: int, prefix: str, tmp_path: Path
) -> None:
    name = f"{prefix}a.weight"
    tensors, expected = nf4_tensors(numbers(300, 384), name, nested, kind, blocksize)
    weights = WeightFiles(saved(tmp_path / "m.safetensors", tensors | {f"{prefix}a.bias": numbers(300)}))
    assert weights.names == [f"{prefix}a.bias", name]
    assert weights.shape(name) == (300, 384)
    whole = weights.read_quantized([RowRange(name)])
    assert isinstance(whole, Nf4Weight)
    assert (whole.nested_absmax is not None) == nested  # it stays as small as it is in the file
    assert torch.equal(whole.dequantize(torch.float32), expected)
    assert torch.equal(whole.dequantize(torch.bfloat16), expected.bfloat16())
    assert torch.equal(weights.read_float(RowRange(name, 123, 256)), expected[123:256])
    part = whole.part(slice(50, 299), slice(128, 256)).part(slice(7, 100), slice(0, blocksize))
    assert torch.equal(part.dequantize(torch.float32), expected[57:150, 128 : 128 + blocksize])
    assert torch.equal(whole.part(slice(5, None, 7)).dequantize(torch.float32), expected[5::7])
    turned = weights.read_quantized([RowRange(name, 150, 300), RowRange(name, 0, 150)])
    assert turned is not None
    assert torch.equal(turned.dequantize(torch.float32), expected.roll(150, dims=0))
    assert weights.quantized is not None
    assert f"bitsandbytes 4 bit: 1 {kind}; 1 in higher precision" in weights.quantized.describe()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("inputs", [24, 40, 66, 96, 200])
def test_rows_that_are_no_whole_blocks_keep_their_numbers(inputs: int, nested: bool, tmp_path: Path) -> None:
    tensors, expected = nf4_tensors(numbers(128, inputs), "a.weight", nested)
    weights = WeightFiles(saved(tmp_path / "m.safetensors", tensors))
    assert torch.equal(weights.read_float(RowRange("a.weight")), expected)
    assert torch.equal(weights.read_float(RowRange("a.weight", 5, 77)), expected[5:77])
    whole = weights.read_quantized([RowRange("a.weight")])
    assert whole is not None
    block = whole.column_block
    assert inputs % block == 0
    assert torch.equal(
        whole.part(columns=slice(block, 2 * block)).dequantize(torch.float32), expected[:, block : 2 * block]
    )


def test_packed_bytes_may_be_called_another_dtype(tmp_path: Path) -> None:
    """``bnb_4bit_quant_storage``: for FSDP the same bytes are bf16 or fp32."""
    for dtype in (torch.bfloat16, torch.float32):
        tensors, expected = nf4_tensors(numbers(64, 128), "a.weight", True)
        tensors["a.weight"] = tensors["a.weight"].view(-1).view(dtype)[:, None]
        weights = WeightFiles(saved(tmp_path / "m.safetensors", tensors))
        assert torch.equal(weights.read_float(RowRange("a.weight")), expected)


def test_a_moved_and_cast_layer_keeps_numbers_and_gives_their_gradients() -> None:
    packed, state = bnb.quantize_4bit(numbers(256, 512), compress_statistics=True, quant_type="nf4")
    second = state.state2
    weight = Nf4Weight(
        packed.view(256, 256), state.absmax.view(256, 8), state.code, second.absmax, second.code, state.offset,
        nested_block=second.blocksize, stride=8,
    )  # fmt: skip
    expected = bnb.dequantize_4bit(packed, state)
    layer = QuantizedLinear(weight, torch.zeros(256)).to(torch.bfloat16)
    assert torch.equal(layer.dequantized(torch.float32), expected)
    x = numbers(16, 512).requires_grad_()
    layer(x).square().sum().backward()
    reference = x.detach().clone().requires_grad_()
    torch.nn.functional.linear(reference, expected).square().sum().backward()
    assert x.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(x.grad, reference.grad, rtol=1e-4, atol=1e-4 * float(reference.grad.abs().max()))
    held = sum(tensor.nbytes for name, tensor in layer.state_dict().items() if name != "bias")
    assert held <= 256 * 512 * (4.127 / 8) + 2048  # QLoRA's 4.127 bits a number, and the maps


def broken(tensors: dict[str, Tensor], state: dict[str, object]) -> dict[str, Tensor]:
    """Return ``tensors`` with another JSON object."""
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors | {"a.weight.quant_state.bitsandbytes__nf4": text}


def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path) -> None:
    whole, _ = nf4_tensors(numbers(64, 128), "a.weight", True)
    mark = "a.weight.quant_state.bitsandbytes__nf4"
    said = json.loads(bytes(whole[mark].tolist()))
    without = lambda name: {key: tensor for key, tensor in whole.items() if key != name}  # noqa: E731
    cases = {
        "'a.weight.absmax' is missing, and .* asks for it; download or convert it again": without("a.weight.absmax"),
        "'a.weight.nested_quant_map' is missing": without("a.weight.nested_quant_map"),
        "'a.weight' is missing": without("a.weight"),
        "'a.weight.quant_map' belongs to a bitsandbytes": without(mark),
        "'a.weight.absmax' is 127 of U8 where": whole | {"a.weight.absmax": whole["a.weight.absmax"][:127]},
        "'a.weight.absmax' is 128 of F32 where": whole | {"a.weight.absmax": whole["a.weight.absmax"].float()},
        "'a.weight.quant_map' is 15 of F32 where": whole | {"a.weight.quant_map": whole["a.weight.quant_map"][:15]},
        "'a.weight' of 4096 bytes is no nf4 weight of 64 x 129": broken(whole, said | {"shape": [64, 129]}),
        "'a.weight' of 4096 bytes is no nf4 weight of 6 x 12": broken(whole, said | {"shape": [6, 12]}),
        "is not the JSON object bitsandbytes writes": broken(whole, said | {"shape": [64, -128]}),
        "nf4' is not the JSON object bitsandbytes writes": broken(whole, {"shape": [64, 128]}),
        "is not the JSON object bitsandbytes .*; download": whole | {mark: torch.tensor([1, 2], dtype=torch.uint8)},
        "'a.weight.quant_state.bitsandbytes__nf9' is no mark": without(mark)
        | {"a.weight.quant_state.bitsandbytes__nf9": whole[mark]},
    }
    for message, tensors in cases.items():
        with pytest.raises(UserError, match=message) as refusal:
            WeightFiles(saved(tmp_path / "m.safetensors", tensors))
        assert "\n" not in str(refusal.value)
    whole["a.weight.nested_absmax"][0] = torch.nan
    with pytest.raises(
        UserError, match=r"'a.weight.nested_absmax' holds a scale that is not positive and finite; download"
    ):
        WeightFiles(saved(tmp_path / "m.safetensors", whole)).read_float(RowRange("a.weight"))


def test_nf4_is_never_written(tmp_path: Path) -> None:
    tensors, _ = nf4_tensors(numbers(64, 128), "a.weight", False)
    weights = WeightFiles(saved(tmp_path / "m.safetensors", tensors))
    assert weights.quantized is not None
    stored = weights.quantized.weights["a.weight"]
    assert stored.served_rounding is None
    with pytest.raises(UserError, match="nf4 of bitsandbytes is read only here; diffusers puts a LoRA beside it"):
        stored.scheme.quantize(numbers(64, 128))
