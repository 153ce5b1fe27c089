"""Published fp8 layouts, built here by hand from their definitions, and what is read from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from library.errors import UserError
from library.precision.checkpoint import QuantizedFile, WeightFiles
from library.precision.files.fp8 import Fp8Scheme, Fp8Weight
from library.precision.linear import QuantizedLinear
from library.precision.recipe import Recipe, WeightLoader
from library.safetensors_io import RowRange

F8, F8_WIDE = torch.float8_e4m3fn, torch.float8_e5m2


def codes(rows: int = 96, columns: int = 128, dtype: torch.dtype = F8) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def marker(**config: object) -> Tensor:
    return torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)


def layout(folder: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> QuantizedFile | None:
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata)
    return WeightFiles(path).quantized


def scale_of(found: QuantizedFile | None, *ranges: RowRange) -> Tensor | None:
    assert found is not None
    weight = found.read(ranges)
    assert isinstance(weight, Fp8Weight)
    return weight.scale


NORM = {"norm.scale": torch.ones(8), "a.bias": torch.ones(96)}


def test_a_bf16_file_holds_no_fp8(tmp_path: Path) -> None:
    assert layout(tmp_path, {"a.weight": torch.ones(4, 4, dtype=torch.bfloat16), **NORM}) is None


def test_a_plain_cast_has_no_scales(tmp_path: Path) -> None:
    tensors = {"a.weight": codes(), "b.weight": codes(dtype=F8_WIDE), "b.bias": torch.ones(96).to(F8)} | NORM
    found = layout(tmp_path, tensors)
    assert found is not None
    assert (found.layout, found.bookkeeping) == ("plain", frozenset())
    assert scale_of(found, RowRange("a.weight")) is None
    assert "b.bias" in found.weights
    assert found.describe().endswith(": plain cast: 2 e4m3fn, plain cast; 1 e5m2, plain cast; 2 in higher precision")


def test_comfyuis_marked_file_has_one_scale_a_tensor(tmp_path: Path) -> None:
    prefix = "model.diffusion_model."
    tensors = {
        f"{prefix}scaled_fp8": torch.zeros(2, dtype=F8),
        f"{prefix}a.weight": codes(),
        f"{prefix}a.scale_weight": torch.tensor(0.25),
        f"{prefix}a.scale_input": torch.tensor(3.0),
        **NORM,
    }
    found = layout(tmp_path, tensors)
    assert found is not None
    assert found.layout == "comfy_scaled"
    assert found.bookkeeping == {f"{prefix}{n}" for n in ("scaled_fp8", "a.scale_weight", "a.scale_input")}
    scale = scale_of(found, RowRange(f"{prefix}a.weight", 10, 20))
    assert scale is not None
    assert scale.tolist() == [[0.25]]
    assert "ComfyUI scaled fp8: 1 e4m3fn, one scale a tensor; 2 in higher" in found.describe()
    assert "1 with a scale for activations" in found.describe()


@pytest.mark.parametrize("where", ["marker", "header", "header without prefix"])
@pytest.mark.parametrize("container", [F8, torch.uint8])
def test_comfyuis_per_layer_file_says_its_formats(tmp_path: Path, where: str, container: torch.dtype) -> None:
    prefix = "model.diffusion_model." if where == "header without prefix" else ""
    config = {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}
    tensors = {
        f"{prefix}a.weight": codes().view(container),
        f"{prefix}a.weight_scale": torch.tensor([0.5]),
        f"{prefix}a.input_scale": torch.tensor(1.0),
        **NORM,
    }
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": {"a": config}})}
    if where == "marker":
        tensors["a.comfy_quant"] = marker(**config)
        metadata = {}
    found = layout(tmp_path, tensors, metadata)
    assert found is not None
    assert found.layout == "comfy_quant"
    assert set(found.weights) == {f"{prefix}a.weight"}
    assert found.weights[f"{prefix}a.weight"].full_precision is True
    scale = scale_of(found, RowRange(f"{prefix}a.weight"))
    assert scale is not None
    assert scale.tolist() == [[0.5]]


@pytest.mark.parametrize(("shape", "expected"), [((1,), (1, 1)), ((96, 1), (96, 1)), ((96, 2, 1), (96, 2))])
def test_musubi_tuners_scales_are_per_tensor_row_or_block(
    tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, int]
) -> None:
    stored = (torch.rand(shape) + 0.5).bfloat16()
    found = layout(tmp_path, {"a.weight": codes(), "a.scale_weight": stored} | NORM)
    assert found is not None
    assert found.layout == "musubi"
    scale = scale_of(found, RowRange("a.weight"))
    assert scale is not None
    assert torch.equal(scale.float(), stored.float().view(expected))
    if expected[0] > 1:
        cut = scale_of(found, RowRange("a.weight", 32, 64))
        assert cut is not None
        assert torch.equal(cut, scale[32:64])


def test_rows_joined_from_several_weights_bring_their_scales_along(tmp_path: Path) -> None:
    tensors = {
        "a.weight": codes(96), "a.scale_weight": torch.rand(96, 2, 1) + 0.5,
        "b.weight": codes(64), "b.scale_weight": torch.tensor([0.25]),
        "c.weight": codes(32), "c.scale_weight": torch.rand(32, 4, 1) + 0.5,
        "d.weight": codes(16),
    }  # fmt: skip
    found = layout(tmp_path, tensors)
    assert found is not None
    ranges = [("b.weight", 0, 2), ("a.weight", 94, None), ("c.weight", 3, 4), ("d.weight", 0, 1)]
    scale = scale_of(found, *(RowRange(*rows) for rows in ranges))
    assert scale is not None
    a, c = tensors["a.scale_weight"], tensors["c.scale_weight"]
    expected = [[0.25] * 4] * 2 + a[94:, [0, 0, 1, 1], 0].tolist() + c[3:4, :, 0].tolist() + [[1.0] * 4]
    assert scale.tolist() == expected
    # (scale, shift) swapped within one weight: one scale stays one
    assert scale_of(found, RowRange("b.weight", 32, 64), RowRange("b.weight", 0, 32)).shape == (1, 1)


W = {"a.weight": codes()}
REFUSED = {
    "'a.weight_scale_2' belongs to a quantisation that is not known": W | {"a.weight_scale_2": torch.ones(1)},
    "'a.weight_scale_inv' belongs to a quantisation": W | {"a.weight_scale_inv": torch.ones(1, 1)},
    "'a.codebook' belongs to a quantisation": {"a.weight": codes().view(torch.uint8), "a.codebook": torch.ones(16)},
    "'a.weight' has dtype I8, whose meaning no known layout gives": {"a.weight": codes().view(torch.int8)},
    "'b.scale_weight' is a scale without a quantised weight": W
    | {"b.scale_weight": torch.ones(1), "b.weight": torch.ones(2, 2)},
    "'a.weight_scale' is one scale without a comfy_quant marker": W | {"a.weight_scale": torch.ones(1)},
    "'a.comfy_quant' names the format 'int3'": W | {"a.comfy_quant": marker(format="int3")},
    "'a.comfy_quant' names the format ['x']": W | {"a.comfy_quant": marker(format=["x"])},
    "'a.weight' has dtype F8_E4M3 where float8_e5m2 has U8 or F8_E5M2": W
    | {"a.comfy_quant": marker(format="float8_e5m2")},
    "'a.comfy_quant' is not the JSON object ComfyUI writes": W | {"a.comfy_quant": torch.zeros(3, dtype=torch.uint8)},
    "is not the JSON object ComfyUI writes": W | {"a.comfy_quant": torch.full((10**5,), ord("["), dtype=torch.uint8)},
    "'b.weight_scale' is one scale without a": {"b.weight": codes()[0, 0], "b.weight_scale": torch.ones(())},
    "'a.weight.absmax' belongs to a": {"a.weight": codes().view(torch.uint8), "a.weight.absmax": torch.ones(8)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_unknown_layout_is_refused_by_key_name(tmp_path: Path, message: str) -> None:
    tensors = {name: tensor.clone() for name, tensor in REFUSED[message].items()}
    with pytest.raises(UserError) as error:
        layout(tmp_path, tensors)
    assert message in str(error.value)
    assert str(tmp_path / "model.safetensors") in str(error.value)
    damage = any(words in message for words in ("is a scale without", "where float8_e5m2 has", "is not the JSON"))
    remedy = "download or convert it again" if damage else "use the bf16 file, or one of a format that is read"
    assert str(error.value).endswith(remedy)


def test_a_broken_header_entry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'b.comfy_quant' marks a layer without a weight; download or convert it again"):
        layout(tmp_path, W | {"b.comfy_quant": marker(format="float8_e4m3fn")})
    with pytest.raises(UserError, match="'_quantization_metadata' is not the JSON object ComfyUI writes"):
        layout(tmp_path, dict(W), {"_quantization_metadata": "[]"})


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(7), r"'a.scale_weight' of shape \[7\] is no scale per tensor, row or block"),
        (torch.ones(96, 3, 1), r"of shape \[96, 3, 1\] is no scale"),
        (torch.tensor([0.0]), "'a.scale_weight' holds a scale that is not positive and finite"),
        (torch.tensor([torch.nan]), "not positive and finite"),
    ],
)
def test_a_scale_that_cannot_be_is_refused(tmp_path: Path, scale: Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        scale_of(layout(tmp_path, W | {"a.scale_weight": scale}), RowRange("a.weight"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(128, 32)
        self.k = nn.Linear(128, 64)
        self.x_embedder = nn.Linear(128, 32)
        self.norm = nn.LayerNorm(32)


def load(model: nn.Module, loading: WeightLoader, path: Path, key_map: dict[str, list[RowRange]]) -> None:
    """What a loader does, in four lines."""
    weights = WeightFiles(path)
    for name, ranges in key_map.items():
        left = loading.load(model, name, weights.read_quantized(ranges) or weights.read(ranges), "cpu")
        if left is not None:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(left.float(), requires_grad=False))


def test_a_fused_weight_is_cut_into_fp8_layers_with_its_codes_unchanged(tmp_path: Path) -> None:
    tensors = {
        "qk.weight": codes(96), "qk.bias": torch.randn(96).to(F8), "qk.scale_weight": torch.rand(96, 2, 1) + 0.5,
        "norm.weight": torch.randn(32).to(F8),
    }  # fmt: skip
    with torch.device("meta"):
        model = Model()
    loading = WeightLoader()
    save_file(tensors, tmp_path / "model.safetensors")
    parts, leaves = {"q": (0, 32), "k": (32, None)}, ("weight", "bias")
    key_map = {f"{n}.{leaf}": [RowRange(f"qk.{leaf}", *rows)] for n, rows in parts.items() for leaf in leaves}
    load(model, loading, tmp_path / "model.safetensors", key_map | {"norm.weight": [RowRange("norm.weight")]})
    assert isinstance(model.k, QuantizedLinear)
    assert torch.equal(model.k.weight.view(torch.uint8), tensors["qk.weight"].view(torch.uint8)[32:])
    exact = tensors["qk.weight"].float().view(96, 2, 64) * tensors["qk.scale_weight"]
    assert torch.equal(model.q.dequantized(torch.float32), exact.view(96, 128)[:32])
    assert torch.equal(model.k.bias, tensors["qk.bias"].float()[32:])
    assert torch.equal(model.norm.weight, tensors["norm.weight"].float())  # fp8 norms are cast up exactly
    assert loading.describe() == "2 linear weights read as they are stored"


def test_bf16_weights_become_fp8_as_the_recipe_says_while_they_are_read(tmp_path: Path) -> None:
    tensors = {
        f"{n}.weight": torch.randn(m.weight.shape).bfloat16() for n, m in Model().named_children() if n != "norm"
    }
    with torch.device("meta"):
        model = Model()
    recipe = Recipe(Fp8Scheme("row"))
    loading = WeightLoader(recipe)
    assert layout(tmp_path, tensors) is None
    for name, tensor in tensors.items():
        left = loading.load(model, name, tensor, "cpu")
        assert (left is None) == (name != "x_embedder.weight")
    assert torch.equal(
        model.q.dequantized(torch.float32), recipe.quantize("q", tensors["q.weight"]).dequantize(torch.float32)
    )
    assert loading.describe().startswith("2 quantised (e4m3fn, a scale a row")


def test_nan_codes_are_refused_by_name(tmp_path: Path) -> None:
    broken = codes().view(torch.uint8)
    broken[3, 4] = 0x7F
    tensors = {"q.weight": broken.view(F8)[:32].clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="'q.weight' holds NaN or infinity"):
        WeightFiles(tmp_path / "model.safetensors").read_quantized([RowRange("q.weight")])
