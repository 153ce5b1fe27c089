"""Damaged files: whatever is done to a tensor beside the numbers, it is refused by name, or changes no number.

Every format's honest file, as the programs that write it do, with each of its small tensors missing, not finite, zero,
negative, of another shape, or the wrong way round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers.quantizers.bfl.utils import quantize_fp8r, quantize_nvfp4
from safetensors.torch import save_file
from torch import Tensor

from library.errors import UserError
from library.precision.checkpoint import WeightFiles
from library.precision.files.comfy_quant import to_tiles
from library.precision.files.gguf import TYPES
from library.safetensors_io import RowRange
from tests.precision.files.comfy import MADE, Made, by_kitchen, comfy_tensors, marker, uneven
from tests.precision.files.gguf_files import blocks_of, write_gguf
from tests.precision.files.nf4_files import nf4_tensors

OUT, IN = 256, 512
LAYERS = ("a", "b", "c")
E4M3 = torch.float8_e4m3fn
Tensors = dict[str, Tensor]


def scaled_fp8(weight: Tensor, shape: tuple[int, ...], block: int, leaf: str) -> Tensors:
    """Return codes and amax / 448 of each group, as ComfyUI's and musubi-tuner's converters make them."""
    rows = weight.shape[0] if len(shape) and shape[0] > 1 else 1
    groups = weight.view(rows, -1, block) if rows > 1 else weight.view(1, 1, -1)
    scale = groups.abs().amax(-1) / 448
    scale = torch.where(scale > 0, scale, 1.0)
    codes = (groups / scale[..., None]).clamp(-448, 448).to(E4M3).view(weight.shape)
    return {"weight": codes, leaf: scale.reshape(shape)}


def nf4(nested: bool, kind: str) -> Callable[[str, Tensor], Tensors]:
    return lambda layer, weight: nf4_tensors(weight, f"{layer}.weight", nested, kind)[0]


def in_layer(make: Callable[[Tensor], Tensors]) -> Callable[[str, Tensor], Tensors]:
    return lambda layer, weight: {f"{layer}.{leaf}": tensor for leaf, tensor in make(weight).items()}


def bfl(weight: Tensor) -> Tensors:
    return dict(zip(("weight", "weight_scale", "weight_scale_2"), quantize_nvfp4(weight), strict=True))


def fp8_marked(weight: Tensor) -> Tensors:
    return scaled_fp8(weight, (), IN, "weight_scale") | {"comfy_quant": marker({"format": "float8_e4m3fn"})}


def by_comfy_kitchen(made: Made, layer: str, weight: Tensor) -> Tensors:
    return comfy_tensors(layer, by_kitchen(weight, made.kind, **made.options), made.marker)


FORMATS: dict[str, Callable[[str, Tensor], Tensors]] = {
    "fp8 cast": in_layer(lambda w: {"weight": w.to(E4M3)}),
    "fp8 tensor": in_layer(lambda w: scaled_fp8(w, (), IN, "scale_weight")),
    "fp8 musubi tensor": in_layer(lambda w: scaled_fp8(w, (1,), IN, "scale_weight")),
    "fp8 musubi row": in_layer(lambda w: scaled_fp8(w, (OUT, 1), IN, "scale_weight")),
    "fp8 musubi block64": in_layer(lambda w: scaled_fp8(w, (OUT, IN // 64, 1), 64, "scale_weight")),
    "fp8 musubi block128": in_layer(lambda w: scaled_fp8(w, (OUT, IN // 128, 1), 128, "scale_weight")),
    "fp8 bfl": in_layer(lambda w: dict(zip(("weight", "weight_scale"), quantize_fp8r(w), strict=True))),
    "fp8 comfy_quant": in_layer(fp8_marked),
    "nvfp4 bfl": in_layer(bfl),
    "nf4": nf4(False, "nf4"),
    "nf4 nested": nf4(True, "nf4"),
    "fp4": nf4(False, "fp4"),
    **{
        str(made): partial(by_comfy_kitchen, made)
        for made in MADE
        if made.config.get("convrot_groupsize") in (None, 256)
    },
}


def honest(kind: str) -> Tensors:
    """Return the tensors of a file of three layers, one of them half zeros, with what lies beside them."""
    tensors: Tensors = {"norm.weight": torch.ones(IN).bfloat16()}
    for number, layer in enumerate(LAYERS):
        weight = uneven(OUT, IN, seed=number)
        weight[: OUT // 2] *= number != 1
        tensors |= FORMATS[kind](layer, weight) | {f"{layer}.bias": torch.randn(OUT).bfloat16()}
        if kind.startswith(("fp8 comfy", "nvfp4", "mxfp8")):
            tensors[f"{layer}.input_scale"] = torch.tensor(0.5)
    if kind == "fp8 tensor":
        tensors["scaled_fp8"] = torch.zeros(2, dtype=E4M3)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def filled(number: float, one: bool = False) -> Callable[[Tensor], Tensor | None]:
    """Return the damage that puts ``number`` everywhere, or at ``one`` place; mxfp8's bytes have 255 for NaN."""

    def damage(tensor: Tensor) -> Tensor:
        made = tensor.clone()
        plain = made.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else made
        in_bytes = {0.0: 0, float("inf"): 254}.get(number, 255)
        plain.view(-1)[: 1 if one else None] = in_bytes if plain.dtype == torch.uint8 else number
        return made

    return damage


def of_shape(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor | None]:
    return lambda tensor: change(tensor) if tensor.numel() > 1 else tensor.expand(OUT).clone()


DAMAGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "missing": lambda tensor: None,
    "nan": filled(float("nan")),
    "a nan": filled(float("nan"), one=True),
    "inf": filled(float("inf")),
    "an inf": filled(float("inf"), one=True),
    "zero": filled(0.0),
    "negative": lambda tensor: (-tensor.float()).to(tensor.dtype),
    "one number": of_shape(lambda tensor: tensor.flatten()[:1]),
    "half": of_shape(lambda tensor: tensor[: len(tensor) // 2]),
    "one a row": of_shape(lambda tensor: tensor.reshape(len(tensor), -1)[:, :1]),
    "transposed shape": of_shape(lambda tensor: tensor.reshape(tensor.shape[::-1])),
    "reversed": lambda tensor: tensor.flatten().flip(0).reshape(tensor.shape),
}
NOT_FINITE = [name for name in DAMAGES if "nan" in name or "inf" in name]


def read(path: Path) -> Tensors:
    """Return every tensor of a file in fp32, as training reads them."""
    weights = WeightFiles(path)
    ranges = {name: [RowRange(name)] for name in weights.names}
    found = {name: weights.read_quantized(each) for name, each in ranges.items()}
    return {
        name: weights.read(ranges[name]).float() if one is None else one.dequantize(torch.float32)
        for name, one in found.items()
    }


def refused_or_the_same(path: Path, name: str, sound: Mapping[str, Tensor]) -> str | None:
    """Return what a damaged file is refused with; None if its numbers are those of the sound one."""
    try:
        found = read(path)
    except UserError as refusal:
        said = str(refusal)
        layer = name.partition(".")[0]
        assert said.startswith(f"{path}: ")
        assert "\n" not in said
        assert "; " in said
        assert f"'{name}'" in said or f"'{layer}." in said, said
        return said
    assert all(torch.equal(found[key], tensor) for key, tensor in sound.items() if key in found), name
    assert found.keys() == sound.keys()
    return None


def damages_of(name: str, tensor: Tensor) -> list[str]:
    """Return the names of the damages that a reader has to see in tensor ``name``."""
    leaf = name.rpartition(".")[2]
    if leaf in ("bias",) or name.startswith("norm"):
        return NOT_FINITE
    if leaf == "weight":  # the numbers themselves: any is one, but for NaN in fp8
        return ["nan", "a nan"] if tensor.dtype is E4M3 else ["missing"]
    if leaf in ("comfy_quant", "scaled_fp8") or "quant_state" in name:
        return ["missing"]
    if tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):  # bytes have no sign, those of nested magnitudes no NaN
        unknown = {"reversed", "negative", *(NOT_FINITE if leaf == "absmax" else ())}
        return [each for each in DAMAGES if each not in unknown]
    unknown = {"reversed"} if "map" not in leaf else set()
    return [each for each in DAMAGES if each not in unknown and not (tensor.dtype is E4M3 and "inf" in each)]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_tensor_is_named_or_harmless(kind: str, tmp_path: Path) -> None:
    tensors, path = honest(kind), tmp_path / "m.safetensors"
    save_file(tensors, path)
    sound = read(path)
    assert sound.keys() >= {f"{layer}.weight" for layer in LAYERS}
    tried = 0
    for name in [name for name in tensors if name.startswith(("a.", "b.", "norm", "scaled"))]:
        for damage in damages_of(name, tensors[name]):
            made = DAMAGES[damage](tensors[name])
            if made is None and damage != "missing":
                continue
            spoilt = {key: tensor for key, tensor in tensors.items() if key != name}
            save_file(spoilt | ({} if made is None else {name: made.contiguous()}), path)
            said = refused_or_the_same(path, name, sound)
            assert said or damage not in NOT_FINITE, (name, damage)
            tried += 1
    save_file(tensors | {"gone.weight_scale": torch.ones(())}, path)
    with pytest.raises(UserError, match=r"'gone.weight_scale' is a scale without a quantised weight"):
        read(path)
    assert tried > 8


@pytest.mark.parametrize("kind", TYPES)
def test_damaged_blocks_of_gguf_are_named(kind: str, tmp_path: Path) -> None:
    blocks, path = torch.from_numpy(blocks_of(uneven(64, 512), kind).copy()).view(torch.uint8), tmp_path / "m.gguf"
    bias, size = torch.zeros(64), TYPES[kind][1]
    sound = read(write_gguf(path, {"a.weight": blocks, "a.bias": bias}, kind))
    for number in (float("nan"), float("inf"), 0.0):
        for count in (1, None):
            spoilt = blocks.clone().view(-1, size)
            scale = torch.tensor([number], dtype=torch.float16).view(torch.uint8)
            spoilt[:count, TYPES[kind][2][0] : TYPES[kind][2][0] + 2] = scale
            write_gguf(path, {"a.weight": spoilt.view(blocks.shape), "a.bias": bias}, kind)
            if number == 0 and count:
                assert read(path)["a.weight"].isfinite().all()  # an underflow
            else:
                assert refused_or_the_same(path, "a.weight", sound)
    zeros = blocks.clone().view(-1, size)
    zeros[:100] = torch.from_numpy(blocks_of(torch.zeros(1, 512), kind).copy()).view(torch.uint8).view(-1, size)[:1]
    write_gguf(path, {"a.weight": zeros.view(blocks.shape), "a.bias": torch.full((64,), float("nan"))}, kind)
    assert "'a.bias' holds NaN" in (refused_or_the_same(path, "a.bias", sound) or "")


def test_nvfp4_whose_markers_were_lost_is_read_where_its_scales_tell(tmp_path: Path) -> None:
    """Lost with the order of numbers and scales: 152 % of error, until the scales' own rows were asked."""
    path = tmp_path / "m.safetensors"
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    for spread, tiles, sound in ((0.5, False, True), (0.5, True, False), (0.0, False, False), (0.0, True, False)):
        rows = bfl(weight * (1 + spread * torch.rand(256, 1)) * (1 + spread * torch.rand(512)))
        rows["weight_scale"] = to_tiles(rows["weight_scale"]) if tiles else rows["weight_scale"]
        save_file({f"a.{leaf}": tensor.contiguous() for leaf, tensor in rows.items()}, path)
        if sound:
            assert read(path)["a.weight"].shape == (256, 512)
            continue
        with pytest.raises(UserError, match=r"'a.weight_scale' may lie by rows .* or in tiles .* config.json beside"):
            read(path)
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "modelopt"}}))
        assert read(path)["a.weight"].shape == (256, 512)
        (tmp_path / "config.json").unlink()


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_of_zeros_and_layers_in_high_precision_are_honest(kind: str, tmp_path: Path) -> None:
    zero, path = FORMATS[kind]("b", torch.zeros(OUT, IN)), tmp_path / "m.safetensors"
    scales = [name for name in zero if name.rpartition(".")[2] in ("scale_weight", "weight_scale_2")]
    file = honest(kind) | zero | {"c.proj.weight": torch.randn(OUT, IN).bfloat16()}
    if any(tensor.is_floating_point() and tensor.float().isnan().any() for tensor in zero.values()):
        pytest.skip("the program that makes such files makes NaN of zeros")
    save_file({name: tensor.contiguous() for name, tensor in file.items()}, path)
    assert not read(path)["b.weight"].any()
    for tiny in (0.0, 1e-30):
        changed = {name: torch.full_like(file[name], tiny) for name in scales}
        save_file({name: tensor.contiguous() for name, tensor in (file | changed).items()}, path)
        assert not read(path)["b.weight"].any()


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (512, 512)])
@pytest.mark.parametrize("kind", ["fp8 tensor", "fp8 musubi tensor", "int8, one scale a tensor", "fp8 musubi row"])
def test_weights_that_were_never_trained_are_honest(kind: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """Evenly spread or all of one size, so that every row reaches the largest number of one scale."""
    path, random = tmp_path / "m.safetensors", torch.Generator().manual_seed(0)
    for weight in (torch.rand(shape, generator=random) - 0.5, torch.ones(shape), torch.randn(shape).sign()):
        made = scaled_fp8(weight, (shape[0], 1), shape[1], "scale_weight") if "row" in kind else None
        tensors = {f"a.{leaf}": tensor for leaf, tensor in made.items()} if made else FORMATS[kind]("a", weight)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        assert (read(path)["a.weight"] - weight).norm() < 0.1 * weight.norm()


def test_a_plain_cast_among_scaled_layers_is_honest(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(honest("fp8 tensor") | {"d.weight": torch.randn(OUT, IN).to(E4M3)}, path)
    assert read(path)["d.weight"].abs().max() < 8


def first_half(tensor: Tensor) -> Tensor:
    return tensor[: len(tensor) // 2].clone()


@pytest.mark.parametrize(
    ("kind", "damaged", "change", "said"),
    [
        ("fp8 comfy_quant", "a.comfy_quant", first_half, "'a.comfy_quant' is not the JSON object ComfyUI writes"),
        ("fp8 comfy_quant", "a.weight_scale", lambda t: None, "'a.weight' is quantised by its marker and has no"),
        (
            "fp8 musubi row",
            "a.scale_weight",
            lambda t: t[1:].clone(),
            r"'a.scale_weight' of shape \[255, 1\] is no scale",
        ),
        ("fp8 tensor", "a.weight", lambda t: t.view(torch.uint8), "'a.weight' has dtype U8, whose meaning"),
        ("nf4", "a.weight", first_half, "'a.weight' of .* bytes is no nf4 weight"),
    ],
)
def test_damage_names_its_file_and_the_remedy(
    kind: str, damaged: str, change: Callable[[Tensor], Tensor | None], said: str, tmp_path: Path
) -> None:
    tensors, path = honest(kind), tmp_path / "model.safetensors"
    made = change(tensors.pop(damaged))
    save_file(tensors | ({} if made is None else {damaged: made}), path)
    with pytest.raises(UserError, match=f"model.safetensors: {said}.*; download or convert it again$"):
        read(tmp_path)  # a folder, of which the file is named


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("m.safetensors", b"", "is empty"),
        ("m.gguf", b"", "is empty"),
        ("m.safetensors", b"abc", "not a safetensors file .*only 3 bytes"),
        ("m.gguf", b"GGUX" + bytes(60), "not a GGUF file .*magic"),
    ],
)
def test_a_file_that_is_none_says_why(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: {said}.*; download or convert it again$"):
        read(tmp_path / name)
