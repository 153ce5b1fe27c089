"""nvfp4, against comfy-kitchen's and diffusers' own functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import comfy_kitchen
import pytest
import torch
from comfy_kitchen.float_utils import from_blocked, to_blocked
from diffusers.quantizers.bfl.utils import dequantize_nvfp4, quantize_nvfp4

from library.errors import UserError
from library.precision.files.comfy_quant import from_tiles, tiled_shape, to_tiles
from library.precision.files.nvfp4 import Nvfp4Scheme, Nvfp4Weight, find
from tests.precision.files.comfy import by_kitchen, comfy_tensors, marker, opened, rebuilt, same, uneven

FORMAT = {"format": "nvfp4"}
SHAPES = [(16, 16), (128, 64), (208, 336), (48, 1280), (272, 4112)]


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (300, 17)])
def test_tiles_are_cublas_tiles(shape: tuple[int, int]) -> None:
    scales = torch.randint(0, 256, shape, dtype=torch.uint8)
    tiles = to_tiles(scales)
    assert torch.equal(tiles, to_blocked(scales, flatten=False))
    assert tiles.shape == tiled_shape(shape)
    assert torch.equal(from_tiles(tiles, shape), scales)
    assert torch.equal(from_blocked(tiles, *shape), scales)


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_what_comfy_kitchen_wrote_is_dequantised_to_its_bits(tmp_path: Path, seed: int) -> None:
    shape = SHAPES[seed]
    weight = by_kitchen(uneven(*shape, seed=seed), "nvfp4")
    file = opened(tmp_path / "a.safetensors", comfy_tensors("l", weight, FORMAT))
    stored = find(file)["l.weight"]
    read = stored.read(file)
    assert (stored.shape, read.shape, stored.full_precision) == (shape, shape, False)
    assert torch.equal(read.dequantize(torch.float32), weight.dequantize())
    assert torch.equal(read.dequantize(torch.bfloat16), weight.dequantize().bfloat16())
    assert torch.equal(stored.read(file, slice(3, 9)).dequantize(torch.float32), weight.dequantize()[3:9])
    assert all(same(tensor, file.read(name)) for name, tensor in stored.written(read).items())
    assert {name: (t.dtype, tuple(t.shape)) for name, t in stored.written(read).items()} == stored.specs()


def test_every_byte_stands_for_the_numbers_comfy_kitchen_says(tmp_path: Path) -> None:
    values, random = torch.arange(256, dtype=torch.uint8).view(16, 16), torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 0x7F, (16, 2), generator=random, dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"l.weight": values, "l.weight_scale": to_blocked(blocks, flatten=False)}
    tensors |= {"l.weight_scale_2": torch.tensor(0.0123), "l.comfy_quant": marker(FORMAT)}
    file = opened(tmp_path / "a.safetensors", tensors)
    theirs = comfy_kitchen.dequantize_nvfp4(
        values, tensors["l.weight_scale_2"], tensors["l.weight_scale"], torch.float32
    )
    assert same(find(file)["l.weight"].read(file).dequantize(torch.float32), theirs)


def test_outputs_that_were_filled_up_are_left_out_and_written_back(tmp_path: Path) -> None:
    weight = by_kitchen(uneven(100, 64), "nvfp4")
    tensors = comfy_tensors("l", weight, FORMAT | {"orig_shape": [100, 64]})
    file = opened(tmp_path / "a.safetensors", tensors)
    stored = find(file)["l.weight"]
    assert tensors["l.weight"].shape == (112, 32)
    assert stored.shape == (100, 64)
    assert torch.equal(stored.read(file).dequantize(torch.float32), weight.dequantize())
    assert all(same(tensor, file.read(name)) for name, tensor in stored.written(stored.read(file)).items())


def test_block_scales_by_rows_and_in_one_dimension_are_told_by_their_shape(tmp_path: Path) -> None:
    weight = by_kitchen(uneven(48, 96), "nvfp4")
    tensors = comfy_tensors("l", weight, FORMAT)
    tiles = tensors["l.weight_scale"]
    as_bytes = tiles.view(torch.uint8)
    for scales in (from_blocked(as_bytes, 48, 6).view(tiles.dtype), tiles.reshape(-1), as_bytes):
        file = opened(tmp_path / "a.safetensors", tensors | {"l.weight_scale": scales})
        stored = find(file)["l.weight"]
        assert torch.equal(stored.read(file).dequantize(torch.float32), weight.dequantize())
        assert all(same(tensor, file.read(name)) for name, tensor in stored.written(stored.read(file)).items())


def modelopt_tensors(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a layer as diffusers' own function quantises it for Black Forest Labs' files."""
    values, blocks, scale = quantize_nvfp4(weight)
    tensors = {"l.weight": values, "l.weight_scale": blocks, "l.weight_scale_2": scale}
    return tensors | {"l.input_scale": torch.tensor(0.5)}


@pytest.mark.parametrize("shape", [(48, 96), (128, 64)], ids=["by rows only", "shaped like tiles"])
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


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_weights_are_rounded_as_comfy_kitchen_rounds_them_with_that_scale(seed: int) -> None:
    weight = uneven(*SHAPES[seed], seed=seed)
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
        file = opened(tmp_path / "a.safetensors", comfy_tensors("l", by_kitchen(weight, "nvfp4"), FORMAT))
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


def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average() -> None:
    units = torch.tensor([[-6.0, -2.25, 0.1, 3.0, 4.5, 9.0]])
    drawn = torch.cat([Nvfp4Scheme().round(units, True, torch.Generator().manual_seed(s)) for s in range(4000)])
    assert [set(column.tolist()) for column in drawn.T] == [{-6}, {-3, -2}, {0, 0.5}, {3}, {4, 6}, {6}]
    assert abs(drawn[:, 4].mean() - 4.5) < 0.06  # four standard deviations of the mean of 4000
    assert abs(drawn[:, 1].mean() + 2.25) < 0.03


def test_parts_and_stacks_hold_the_numbers_of_the_whole() -> None:
    weights = [Nvfp4Scheme().quantize(uneven(rows, 96, seed=rows)) for rows in (16, 32)]
    stacked, whole = Nvfp4Weight.stack(weights), torch.cat([weight.dequantize(torch.float32) for weight in weights])
    assert torch.equal(stacked.dequantize(torch.float32), whole)
    cut = stacked.part(slice(5, 40), slice(32, 80))
    assert cut.shape == (35, 48)
    assert torch.equal(cut.dequantize(torch.bfloat16), whole[5:40, 32:80].bfloat16())
    assert cut.values.untyped_storage().data_ptr() == stacked.values.untyped_storage().data_ptr()
    assert Nvfp4Weight.stack([weights[0], weights[0]]).scale.shape == (1, 1)
    halves = [weights[1].part(columns=slice(0, 48)), weights[1].part(columns=slice(48, 96))]
    assert torch.equal(Nvfp4Weight.join(halves).dequantize(torch.float32), weights[1].dequantize(torch.float32))
    with pytest.raises(ValueError, match="different scales"):
        Nvfp4Weight.join([weights[0], replace(weights[0], scale=weights[0].scale * 2)])


def test_sides_that_are_no_multiples_of_16_stay_in_high_precision() -> None:
    assert Nvfp4Scheme().fitting((16, 48)) is not None
    assert Nvfp4Scheme().fitting((16, 24)) is None
    assert Nvfp4Scheme().fitting((24, 16)) is None


def test_a_weight_of_zeros_and_one_with_a_nan() -> None:
    assert torch.equal(Nvfp4Scheme().quantize(torch.zeros(16, 32)).dequantize(torch.float32), torch.zeros(16, 32))
    with pytest.raises(ValueError, match="NaN"):
        Nvfp4Scheme().quantize(torch.full((16, 32), torch.nan))


E4M3 = torch.float8_e4m3fn
SOUND = {
    "l.weight": torch.zeros(32, 16, dtype=torch.uint8),
    "l.weight_scale": torch.ones(32, 2).to(E4M3),
    "l.weight_scale_2": torch.tensor(1.0),
    "l.comfy_quant": marker(FORMAT),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"l.weight_scale": None}, "there is no weight_scale"),
        ({"l.weight_scale_2": None}, "there is no weight_scale_2"),
        ({"l.weight": torch.zeros(32, 16, dtype=torch.int8)}, "dtype I8 where nvfp4 has U8"),
        ({"l.weight": torch.zeros(32, 12, dtype=torch.uint8)}, "runs of 16 of 24 inputs"),
        ({"l.weight_scale": torch.ones(32, 4).to(E4M3)}, r"shape \[32, 4\] are not the block scales"),
        ({"l.weight_scale": torch.ones(32, 2)}, "dtype F32"),
        ({"l.weight_scale": torch.full((32, 2), torch.nan).to(E4M3)}, "NaN or negative"),
        ({"l.weight_scale_2": torch.ones(32)}, "not one scale"),
        ({"l.weight_scale_2": torch.tensor(torch.inf)}, "not positive and finite"),
        ({"l.pre_quant_scale": torch.ones(32)}, "AWQ"),
        ({"l.comfy_quant": marker(FORMAT | {"orig_shape": [30, 30]})}, r"orig_shape says \[30, 30\]"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, change, words) -> None:
    tensors = {name: tensor for name, tensor in (SOUND | change).items() if tensor is not None}
    file = opened(tmp_path / "a.safetensors", tensors)
    with pytest.raises(UserError, match=words) as raised:
        find(file)["l.weight"].read(file)
    assert "\n" not in str(raised.value)
    assert str(file.path) in str(raised.value)
