"""mxfp8, against comfy-kitchen's own functions."""

from __future__ import annotations

from pathlib import Path

import comfy_kitchen
import pytest
import torch
from comfy_kitchen.float_utils import from_blocked, to_blocked

from library.errors import UserError
from library.precision.files.mxfp8 import Mxfp8Scheme, Mxfp8Weight, find
from tests.precision.files.comfy import by_kitchen, comfy_tensors, marker, opened, same, uneven

FORMAT = {"format": "mxfp8"}
SHAPES = [(32, 32), (128, 128), (224, 352), (64, 1280), (288, 4128)]


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_what_comfy_kitchen_wrote_is_dequantised_to_its_bits(tmp_path: Path, seed: int) -> None:
    weight = by_kitchen(uneven(*SHAPES[seed], seed=seed), "mxfp8")
    file = opened(tmp_path / "a.safetensors", comfy_tensors("l", weight, FORMAT))
    stored = find(file)["l.weight"]
    read = stored.read(file)
    assert torch.equal(read.dequantize(torch.float32), weight.dequantize())
    assert torch.equal(read.dequantize(torch.bfloat16), weight.dequantize().bfloat16())
    assert torch.equal(stored.read(file, slice(3, 9)).dequantize(torch.float32), weight.dequantize()[3:9])
    assert all(same(tensor, file.read(name)) for name, tensor in stored.written(read).items())
    assert {name: (t.dtype, tuple(t.shape)) for name, t in stored.written(read).items()} == stored.specs()


@pytest.mark.parametrize("exponent", [0, 1, 100, 127, 200])
def test_every_exponent_stands_for_what_comfy_kitchen_says(tmp_path: Path, exponent: int) -> None:
    values = torch.arange(256, dtype=torch.uint8).clamp_max(254)
    values[127] = 126  # 127 and 255 are NaN
    values = values.view(8, 32).view(torch.float8_e4m3fn)
    scale = to_blocked(torch.full((8, 1), exponent, dtype=torch.uint8), flatten=False)
    theirs = comfy_kitchen.dequantize_mxfp8(values, scale.view(torch.float8_e8m0fnu), torch.float32)
    tensors = {"l.weight": values, "l.weight_scale": scale, "l.comfy_quant": marker(FORMAT)}
    file = opened(tmp_path / "a.safetensors", tensors)
    assert torch.equal(find(file)["l.weight"].read(file).dequantize(torch.float32), theirs)


def test_scales_may_be_bytes_by_rows_or_filled_up(tmp_path: Path) -> None:
    weight = by_kitchen(uneven(50, 96), "mxfp8")
    tensors = comfy_tensors("l", weight, FORMAT | {"orig_shape": [50, 96]})
    tiles = tensors["l.weight_scale"].view(torch.uint8)
    for scales in (tiles, tiles.reshape(-1), from_blocked(tiles, 64, 3)):
        file = opened(tmp_path / "a.safetensors", tensors | {"l.weight_scale": scales})
        stored = find(file)["l.weight"]
        assert stored.shape == (50, 96)
        assert torch.equal(stored.read(file).dequantize(torch.float32), weight.dequantize())
        assert all(same(tensor, file.read(name)) for name, tensor in stored.written(stored.read(file)).items())


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_weights_are_rounded_as_comfy_kitchen_rounds_them(seed: int) -> None:
    weight = uneven(*SHAPES[seed], seed=seed)
    assert torch.equal(
        Mxfp8Scheme().quantize(weight).dequantize(torch.float32), by_kitchen(weight, "mxfp8").dequantize()
    )


def test_parts_and_stacks_hold_the_numbers_of_the_whole() -> None:
    weights = [Mxfp8Scheme().quantize(uneven(rows, 96, seed=rows)) for rows in (32, 64)]
    stacked, whole = Mxfp8Weight.stack(weights), torch.cat([weight.dequantize(torch.float32) for weight in weights])
    assert torch.equal(stacked.dequantize(torch.float32), whole)
    assert torch.equal(stacked.part(slice(5, 40), slice(32, 96)).dequantize(torch.float32), whole[5:40, 32:])
    halves = [stacked.part(columns=slice(0, 32)), stacked.part(columns=slice(32, 96))]
    assert torch.equal(Mxfp8Weight.join(halves).dequantize(torch.float32), whole)
    assert torch.equal(Mxfp8Scheme().quantize(whole, before=stacked.steps()).dequantize(torch.float32), whole)


def test_a_weight_of_zeros_stays_zero_and_such_files_are_not_made() -> None:
    assert torch.equal(Mxfp8Scheme().quantize(torch.zeros(32, 64)).dequantize(torch.float32), torch.zeros(32, 64))
    with pytest.raises(UserError, match="read and not written"):
        Mxfp8Scheme().store("comfy_quant", "l.weight", (32, 64), torch.bfloat16)


SOUND = {
    "l.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn),
    "l.weight_scale": torch.full((32, 2), 127, dtype=torch.uint8),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"l.weight_scale": None}, "there is no weight_scale"),
        ({"l.weight": torch.zeros(32, 64)}, "dtype F32 where mxfp8 has F8_E4M3 or U8"),
        ({"l.weight": torch.full((32, 64), torch.nan).to(torch.float8_e4m3fn)}, "'l.weight' holds NaN"),
        ({"l.weight_scale": torch.full((32, 2), 255, dtype=torch.uint8)}, "'l.weight_scale' holds NaN"),
        ({"l.weight_scale": torch.full((2, 32), 1, dtype=torch.uint8)}, r"shape \[2, 32\]"),
        ({"l.weight_scale": torch.ones(32, 2)}, "dtype F32"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, change, words) -> None:
    tensors = {name: tensor for name, tensor in (SOUND | change).items() if tensor is not None}
    file = opened(tmp_path / "a.safetensors", tensors | {"l.comfy_quant": marker(FORMAT)})
    with pytest.raises(UserError, match=words) as raised:
        find(file)["l.weight"].read(file)
    assert "\n" not in str(raised.value)
