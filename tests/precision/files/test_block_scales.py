"""nvfp4 and mxfp8, against comfy-kitchen's and diffusers' own functions."""

from __future__ import annotations

from pathlib import Path

import comfy_kitchen
import pytest
import torch
from comfy_kitchen.float_utils import from_blocked, to_blocked
from diffusers.quantizers.bfl.utils import dequantize_nvfp4, quantize_nvfp4

from library.errors import UserError
from library.precision.files import mxfp8
from library.precision.files.comfy_quant import from_tiles, tiled_shape, to_tiles
from library.precision.files.nvfp4 import Nvfp4Scheme, find
from tests.precision.files.comfy import FIND, SHAPES, by_kitchen, comfy_tensors, marker, opened, rebuilt, same, uneven


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (300, 17)])
def test_tiles_are_cublas_tiles(shape: tuple[int, int]) -> None:
    scales = torch.randint(0, 256, shape, dtype=torch.uint8)
    tiles = to_tiles(scales)
    assert torch.equal(tiles, to_blocked(scales, flatten=False))
    assert tiles.shape == tiled_shape(shape)
    assert torch.equal(from_tiles(tiles, shape), scales)
    assert torch.equal(from_blocked(tiles, *shape), scales)


def test_every_byte_stands_for_the_numbers_comfy_kitchen_says(tmp_path: Path) -> None:
    values, random = torch.arange(256, dtype=torch.uint8).view(16, 16), torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 0x7F, (16, 2), generator=random, dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"l.weight": values, "l.weight_scale": to_blocked(blocks, flatten=False)}
    tensors |= {"l.weight_scale_2": torch.tensor(0.0123), "l.comfy_quant": marker({"format": "nvfp4"})}
    file = opened(tmp_path / "a.safetensors", tensors)
    theirs = comfy_kitchen.dequantize_nvfp4(
        values, tensors["l.weight_scale_2"], tensors["l.weight_scale"], torch.float32
    )
    assert same(find(file)["l.weight"].read(file).dequantize(torch.float32), theirs)


def modelopt_tensors(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a layer as diffusers' own function quantises it for Black Forest Labs' files."""
    values, blocks, scale = quantize_nvfp4(weight)
    tensors = {"l.weight": values, "l.weight_scale": blocks, "l.weight_scale_2": scale}
    return tensors | {"l.input_scale": torch.tensor(0.5)}


@pytest.mark.parametrize("shape", [(48, 96), (128, 256)], ids=["by rows only", "shaped like tiles"])
def test_files_without_a_marker_are_read_as_diffusers_reads_them(tmp_path: Path, shape: tuple[int, int]) -> None:
    tensors = modelopt_tensors(uneven(*shape))
    file = opened(tmp_path / "a.safetensors", tensors)
    stored = find(file)["l.weight"]
    theirs = dequantize_nvfp4(tensors["l.weight"], tensors["l.weight_scale"], tensors["l.weight_scale_2"])
    assert torch.equal(stored.read(file).dequantize(torch.float32), theirs)
    assert (stored.layout, stored.input_scale, stored.full_precision) == ("modelopt", "l.input_scale", None)
    assert all(same(tensor, file.read(name)) for name, tensor in stored.written(stored.read(file)).items())


def test_without_a_marker_scales_in_tiles_are_refused(tmp_path: Path) -> None:
    tensors = modelopt_tensors(uneven(48, 96))
    tiles = to_tiles(tensors["l.weight_scale"])
    with pytest.raises(UserError, match=r"l.weight_scale.*\[48, 6\], by rows"):
        find(opened(tmp_path / "a.safetensors", tensors | {"l.weight_scale": tiles}))


@pytest.mark.parametrize("seed", range(len(SHAPES["nvfp4"])))
def test_weights_are_rounded_as_comfy_kitchen_rounds_them_with_that_scale(seed: int) -> None:
    weight = uneven(*SHAPES["nvfp4"][seed], seed=seed)
    ours = Nvfp4Scheme().quantize(weight)
    values, tiles = comfy_kitchen.quantize_nvfp4(weight, ours.scale.reshape(()))
    blocks = from_blocked(tiles.view(torch.uint8), *ours.block_scale.shape)
    lifted = blocks == 0  # blocks that comfy-kitchen rounds to zero as a whole
    assert torch.equal(ours.block_scale.view(torch.uint8)[~lifted], blocks[~lifted])
    assert torch.equal(ours.values.view(*blocks.shape, 8)[~lifted], values.view(*blocks.shape, 8)[~lifted])
    # the scale of a matrix: a power of two, less than twice the one that comfy-kitchen would take; the largest block's
    # own, rounded to e4m3, may be 232 / 224 below it
    least = weight.abs().max() / (6 * 448)
    assert torch.frexp(ours.scale).mantissa.item() == 0.5
    assert least / 1.036 <= ours.scale.item() < 2 * least


def test_comfyui_has_every_number_in_bf16_as_it_was_trained() -> None:
    weight = Nvfp4Scheme().quantize(uneven(208, 336))
    stored = Nvfp4Scheme().store("comfy_quant", "l.weight", (208, 336), torch.bfloat16)
    tensors, exact = stored.written(weight), weight.dequantize(torch.float32)
    assert torch.equal(rebuilt(stored, tensors, "nvfp4", torch.float32), exact)
    assert torch.equal(rebuilt(stored, tensors, "nvfp4", torch.bfloat16).float(), exact)  # nothing is rounded


@pytest.mark.parametrize("largest", [1e-30, 1.0, 2688.0, 448.0 * 6 * 2**7, 3e4])
def test_steps_are_found_again_from_a_packed_weight(largest: float) -> None:
    scheme = Nvfp4Scheme()
    weight = uneven(48, 64)
    weight *= largest / weight.abs().max()
    steps = scheme.steps(scheme.magnitudes(weight))
    packed = scheme.pack(scheme.round((weight.view(48, 4, 16) / steps[..., None]).view(48, 64)), steps)
    assert torch.equal(packed.block_scale.float() * packed.scale, steps)
    again = scheme.steps(scheme.magnitudes(weight) / 3, steps)
    assert torch.equal(again, steps)
    wider = scheme.steps(scheme.magnitudes(weight) * 1.5, steps)
    assert (wider >= steps).all()
    repacked = scheme.pack(torch.zeros(48, 64), wider)
    assert torch.equal(repacked.block_scale.float() * repacked.scale, wider)


@pytest.mark.parametrize("made", ["here", "by comfy-kitchen"])
def test_a_weight_that_is_rounded_again_stays_as_it_is(tmp_path: Path, made: str) -> None:
    weight = uneven(48, 96)
    if made == "here":
        read = Nvfp4Scheme().quantize(weight)
    else:  # a scale that is no power of two, and blocks of zeros
        weight[:, 16:32] = 0
        file = opened(tmp_path / "a.safetensors", comfy_tensors("l", by_kitchen(weight, "nvfp4"), {"format": "nvfp4"}))
        read = find(file)["l.weight"].read(file)
    numbers = read.dequantize(torch.float32)
    again = read.scheme.quantize(numbers, before=read.steps())
    assert torch.equal(again.scale, read.scale)
    assert torch.equal(again.dequantize(torch.float32), numbers)
    larger = read.scheme.quantize(numbers * 2, before=read.steps())  # steps grow where they have to
    assert (larger.steps() >= read.steps() * (1 - 1e-6)).all()
    error = larger.dequantize(torch.float32) - numbers * 2
    assert error.norm() < 0.12 * (numbers * 2).norm()  # as of any weight: a tenth
    bare = Nvfp4Scheme().quantize(numbers, before=read.steps())  # and without the matrix's scale none is smaller
    assert (bare.steps() >= read.steps() * (1 - 1e-6)).all()


def test_rounding_to_nearest_takes_the_even_code_of_two() -> None:
    units = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.25, -0.2, -2.5, 1.3, 0.26, 4.9, 5.1, 6.0]])
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -0.0, -2.0, 1.5, 0.5, 4.0, 6.0, 6.0]
    assert Nvfp4Scheme().round(units)[0].tolist() == expected


def test_sides_that_are_no_multiples_of_16_stay_in_high_precision() -> None:
    assert Nvfp4Scheme().fitting((16, 48)) is not None
    assert Nvfp4Scheme().fitting((16, 24)) is None
    assert Nvfp4Scheme().fitting((24, 16)) is None


@pytest.mark.parametrize("exponent", [1, 100, 127, 143])
def test_every_exponent_stands_for_what_comfy_kitchen_says(tmp_path: Path, exponent: int) -> None:
    values = torch.arange(256, dtype=torch.uint8).clamp_max(254)
    values[127] = 126  # 127 and 255 are NaN
    values = values.view(8, 32).view(torch.float8_e4m3fn)
    scale = to_blocked(torch.full((8, 1), exponent, dtype=torch.uint8), flatten=False)
    theirs = comfy_kitchen.dequantize_mxfp8(values, scale.view(torch.float8_e8m0fnu), torch.float32)
    tensors = {"l.weight": values, "l.weight_scale": scale, "l.comfy_quant": marker({"format": "mxfp8"})}
    file = opened(tmp_path / "a.safetensors", tensors)
    assert torch.equal(mxfp8.find(file)["l.weight"].read(file).dequantize(torch.float32), theirs)


@pytest.mark.parametrize("shape", SHAPES["mxfp8"])
def test_mxfp8_is_rounded_as_comfy_kitchen_rounds_it(shape: tuple[int, int]) -> None:
    weight = uneven(*shape, seed=shape[0])
    theirs = by_kitchen(weight, "mxfp8").dequantize()
    assert torch.equal(mxfp8.Mxfp8Scheme().quantize(weight).dequantize(torch.float32), theirs)


def test_mxfp8_is_not_written() -> None:
    with pytest.raises(UserError, match="read and not written"):
        mxfp8.Mxfp8Scheme().store("comfy_quant", "l.weight", (32, 64), torch.bfloat16)


@pytest.mark.parametrize(("kind", "block"), [("nvfp4", 16), ("mxfp8", 32)])
@pytest.mark.parametrize("rows", [48, 50])
def test_scales_may_be_bytes_by_rows_or_filled_up(tmp_path: Path, kind: str, block: int, rows: int) -> None:
    """The shape says which; outputs that were filled up are left out, and written back."""
    weight, filled = by_kitchen(uneven(rows, 96), kind), 64 if block == 32 or rows == 50 else 48
    tensors = comfy_tensors("l", weight, {"format": kind, "orig_shape": [rows, 96]})
    assert tensors["l.weight"].shape[0] == filled
    given = tensors["l.weight_scale"]
    tiles = given.view(torch.uint8)
    for scales in (given, tiles, given.reshape(-1), from_blocked(tiles, filled, 96 // block)):
        file = opened(tmp_path / "a.safetensors", tensors | {"l.weight_scale": scales})
        stored = FIND[kind](file)["l.weight"]
        assert stored.shape == (rows, 96)
        assert torch.equal(stored.read(file).dequantize(torch.float32), weight.dequantize())
        assert all(same(tensor, file.read(name)) for name, tensor in stored.written(stored.read(file)).items())
