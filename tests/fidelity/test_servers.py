"""What servers do with a LoRA and with inputs: against comfy-kitchen, which ComfyUI quantises and multiplies by.

The files are written here, with comfy-kitchen, in ComfyUI's published layouts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy_kitchen
import comfy_kitchen.tensor as ck
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from library.config.schema import ModelConfig
from library.fidelity.deployed import parse_deployment
from library.fidelity.servers import BY_NAME, dora_error, dropped_by_bypass, usual_server
from library.fidelity.serving import Models, Variant, numbers
from library.precision.activations import FakeQuantLinear
from networks.files.weights import DoraWeights, LoraWeights
from networks.files.writing import save_adapter
from tests.tiny import save_single_files, tiny_flux_pipeline

NAME = "transformer_blocks.0.ff.net.0.proj"
PARTS = [f"transformer_blocks.0.attn.to_{each}" for each in "qkv"]
FP8, INT8 = "TensorCoreFP8Layout", "TensorWiseINT8Layout"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux_pipeline(tmp_path_factory.mktemp("servers") / "base", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def plain(base: Path) -> Path:
    """The transformer in bf16 under ComfyUI's names."""
    return save_single_files(base, base.parent / "single").transformer


def fp8(weight: Tensor, **params: Any) -> ck.QuantizedTensor:
    return ck.QuantizedTensor.from_float(weight, FP8, scale="recalculate", **params)


def int8(weight: Tensor, **params: Any) -> ck.QuantizedTensor:
    kind = {"per_channel": True, "convrot": True, "convrot_groupsize": 64}
    return ck.QuantizedTensor.from_float(weight, INT8, **kind, **params)


def comfy_file(plain: Path, name: str, kind: str = "fp8", input_scale: float | None = None, **config: Any) -> Path:
    """Write the file with its blocks' linear weights quantised by comfy-kitchen, a marker beside each."""
    tensors, path = {}, plain.with_name(f"{name}.safetensors")
    for key, tensor in load_file(plain).items():
        layer = key.removesuffix(".weight")
        if tensor.ndim < 2 or "blocks" not in key or "mod" in key:
            tensors[key] = tensor
            continue
        made = {"fp8": fp8, "int8": int8}[kind](tensor)
        tensors[key], tensors[f"{layer}.weight_scale"] = made._qdata, made._params.scale
        says = {"fp8": {"format": "float8_e4m3fn"},
                "int8": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}}[kind]  # fmt: skip
        marker = json.dumps(says | config).encode()
        tensors[f"{layer}.comfy_quant"] = torch.tensor(list(marker), dtype=torch.uint8)
        if input_scale:
            tensors[f"{layer}.input_scale"] = torch.tensor(input_scale)
    save_file(tensors, path)
    return path


def old_file(plain: Path, name: str, marker: int) -> Path:
    """Write the file in the layout of 2025: ``scale_weight``, and a marker of so many elements."""
    tensors = {"scaled_fp8": torch.zeros(marker, dtype=torch.float8_e4m3fn)}
    for key, tensor in load_file(plain).items():
        if tensor.ndim == 2 and "blocks" in key and "mod" not in key:
            made = fp8(tensor)
            tensor, tensors[key.replace(".weight", ".scale_weight")] = made._qdata, made._params.scale
        tensors[key] = tensor
    save_file(tensors, path := plain.with_name(f"{name}.safetensors"))
    return path


def lora(size: float = 0.01) -> dict[str, LoraWeights]:
    random = torch.Generator().manual_seed(5)

    def weights(out: int) -> LoraWeights:
        down, up = torch.randn(4, 64, generator=random), torch.randn(out, 4, generator=random)
        return LoraWeights(down / 8, size * up, 4.0)

    return {NAME: weights(256), **{part: weights(64) for part in PARTS}}


def of(base: Path, deploy: object, server: str | None = None, update: dict[str, LoraWeights] | None = None) -> Models:
    config = ModelConfig(model_type="flux", pretrained_model_name_or_path=str(base))
    loras = {"transformer": lora() if update is None else update}
    row = BY_NAME[server] if server else None
    return Models(config, parse_deployment(str(deploy)), loras, torch.float32, torch.device("cpu"), row)


def kinds(models: Models) -> set[tuple[str, float | None]]:
    found = models.roundings(Variant(weights=True, activations="auto")).values()
    return {(each.how, None if each.scale is None else round(float(each.scale), 4)) for each in found}


def test_the_file_says_how_products_are_made(base: Path, plain: Path) -> None:
    cast = plain.with_name("cast.safetensors")
    held = {k: t.to(torch.float8_e4m3fn) if t.ndim == 2 and "blocks" in k else t for k, t in load_file(plain).items()}
    save_file(held, cast)
    for path, wanted in (
        (cast, set()),
        (old_file(plain, "old", 0), {("unit", None)}),
        (old_file(plain, "precise", 2), set()),
        (comfy_file(plain, "marked"), {("unit", None)}),
        (comfy_file(plain, "calibrated", input_scale=0.25), {("static", 0.25)}),
        (comfy_file(plain, "forbidden", full_precision_matrix_mult=True), set()),
        (comfy_file(plain, "int8", "int8"), {("int8", None)}),
    ):
        assert kinds(of(base, path)) == wanted, path.name
        assert of(base, path).server is BY_NAME["comfyui"]
        for other in ("diffusers", "gguf"):
            assert kinds(of(base, path, other)) == set()
    assert of(base, plain).server is BY_NAME["diffusers"]
    assert usual_server("gguf").name == "gguf"
    assert usual_server("nf4").name == "diffusers"


def test_a_recipe_is_served_as_the_file_that_it_makes(base: Path) -> None:
    assert kinds(of(base, "tensor")) == set()  # our fp8 files ask for high precision
    assert kinds(of(base, "int8_convrot")) == {("int8", None)}
    assert of(base, "block64").server is BY_NAME["diffusers"]  # musubi-tuner's layout


def served(models: Models, merge: Any, activations: Any = None) -> Any:
    with models.transformer(Variant(weights=True, merge=merge, activations=activations)) as network:
        return network


def comfyui_sum(models: Models, name: str) -> Tensor:
    """As ``LowVramPatch``: the weight dequantised to bf16, the LoRA's product made and added in bf16."""
    weights = models.transformer_lora[name]
    product = weights.up.bfloat16() @ weights.down.bfloat16()
    return numbers(models.base(deployed=True).get_submodule(name)).bfloat16() + product * (weights.alpha / 4)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize(
    ("kind", "scale", "activations"), [("fp8", None, "unit"), ("fp8", 0.02, "static"), ("int8", None, "int8")]
)
def test_a_merged_layer_is_comfyuis(kind: str, scale: float | None, activations: str, base: Path, plain: Path) -> None:
    """Merged and multiplied by comfy-kitchen, with its own random numbers, and by the profile."""
    models = of(base, comfy_file(plain, f"{kind}-{scale}", kind, scale))
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    total = comfyui_sum(models, NAME).float()
    make = {"fp8": fp8, "int8": int8}[kind]
    if kind == "fp8":  # the stochastic rounding of comfy/quant_ops.py, which is ComfyUI's own
        nearest = make(total)
        random = torch.randint(0, 256, total.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
        values = comfy_kitchen.stochastic_rounding_fp8(total / nearest._params.scale, random)
        theirs = ck.QuantizedTensor(values, FP8, nearest._params)
        given: Any = ck.QuantizedTensor.from_float(x, FP8, scale=torch.tensor(scale or 1.0))
    else:
        theirs, given = make(total, stochastic_rounding=2), x
    layer: Any = served(models, "unrounded", "auto").get_submodule(NAME)
    assert isinstance(layer, FakeQuantLinear)
    assert layer.rounding.how == activations
    ours = layer.base.quantized()
    torch.testing.assert_close(ours.scale.flatten(), theirs._params.scale.flatten(), rtol=2**-7, atol=0)  # bf16's sum
    product, right = layer(x) - layer.bias, torch.nn.functional.linear(given, theirs)
    wanted = x @ total.t()
    both = [relative(each, wanted) for each in (product, right)]
    # two draws of the same noise: 256 outputs of 512 tokens, of 16,384 rounded weights; 5 % is six standard errors
    assert both[0] == pytest.approx(both[1], rel=0.05)
    # and multiplied alike: our merged weight, in comfy-kitchen's product, is our layer's output
    own = ck.QuantizedTensor(ours.values, theirs._layout_cls, type(theirs._params)(
        **{**vars(theirs._params), "scale": ours.scale.reshape(theirs._params.scale.shape)}))  # fmt: skip
    assert relative(product, torch.nn.functional.linear(given, own)) < 1e-3


def test_three_merges_differ_only_where_products_are_in_high_precision(base: Path, plain: Path) -> None:
    models = of(base, comfy_file(plain, "precise3", full_precision_matrix_mult=True))
    first, resident, streamed = (Variant(weights=True, merge=each.how, activations="auto") for each in
                                 BY_NAME["comfyui"].merges)  # fmt: skip
    assert models.runs_as(first) == models.runs_as(streamed) != models.runs_as(resident)
    wanted = comfyui_sum(models, NAME).float()
    found = {v.merge: numbers(models.merged_weights(v).get_submodule(NAME)) for v in (first, resident)}
    assert relative(found["unrounded"], wanted) < 2**-9  # the product is rounded to bf16 once here, twice there
    assert 0.02 < relative(found["stochastic"], wanted) < 0.06  # 2.6 % to nearest, up to twice the variance
    gain = float((found["stochastic"] * wanted).sum() / wanted.square().sum())
    assert gain == pytest.approx(1, abs=0.002)
    fast = of(base, comfy_file(plain, "marked3"))
    assert fast.runs_as(first) == fast.runs_as(resident) == fast.runs_as(streamed)
    assert "unrounded" not in fast.rounded_in(first).values()


def test_a_merge_with_random_numbers_is_the_same_each_time(base: Path, plain: Path) -> None:
    models = of(base, comfy_file(plain, "seeded", full_precision_matrix_mult=True))
    variant = Variant(weights=True, merge="stochastic")
    one, two = (models.merged_weights(variant) for _ in range(2))
    for name in (NAME, *PARTS):
        assert torch.equal(numbers(one.get_submodule(name)), numbers(two.get_submodule(name)))


def test_legacy_sums_in_fp16_and_gguf_never_rounds(base: Path, plain: Path) -> None:
    models = of(base, comfy_file(plain, "legacy", full_precision_matrix_mult=True), "comfyui-legacy")
    (way,) = BY_NAME["comfyui-legacy"].merges
    assert set(models.rounded_in(Variant(weights=True, merge=way.how)).values()) == {"stochastic_fp16"}
    (way,) = BY_NAME["gguf"].merges
    assert models.rounded_in(Variant(weights=True, merge=way.how)) == {}
    assert BY_NAME["comfyui-bypass"].merges == BY_NAME["diffusers"].merges == ()


def test_a_rotation_is_rounded_in_beside_weights_in_high_precision_too(base: Path, plain: Path) -> None:
    """Activations alone: the reference's weights, inputs rounded where the int8 file's server rounds them."""
    models = of(base, comfy_file(plain, "int8alone", "int8"), update={})
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    with models.transformer(Variant(activations="auto")) as network:
        layer: Any = network.get_submodule(NAME)
    weight = layer.base.weight
    rotated = ck.int8_utils._rotate_activation(x, ck.int8_utils._build_hadamard(64), 64)
    step = rotated.abs().amax(-1, keepdim=True) / 127
    back = ck.int8_utils._rotate_activation((rotated / step).round() * step, ck.int8_utils._build_hadamard(64), 64)
    torch.testing.assert_close(layer(x) - layer.bias, back @ weight.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("layout", "dropped"), [("diffusers", 3), ("kohya", 0), ("comfy", 0)])
def test_the_bypass_drops_parts_of_what_is_one_layer_in_comfyui(
    layout: str, dropped: int, base: Path, plain: Path, tmp_path: Path
) -> None:
    models = of(base, plain)
    path = tmp_path / "lora.safetensors"
    save_adapter(path, lora(), models.targets, layout, "fp32", {})
    assert len(dropped_by_bypass([path], models.targets)) == dropped


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [False, True])
def test_a_dora_is_merged_as_comfyuis_source_has_it(dtype: torch.dtype, columns: bool, strength: float) -> None:
    """``weight_decompose`` of ``comfy/weight_adapter/base.py``, written down step by step."""
    random = torch.Generator().manual_seed(3)
    weight, down, up = (torch.randn(shape, generator=random) / 8 for shape in ((96, 64), (4, 64), (96, 4)))
    scale = (weight.norm(dim=0, keepdim=True) if columns else weight.norm(dim=1, keepdim=True)) * 1.02
    diff = torch.mm(up.to(dtype), down.to(dtype))
    diff *= 2.0 / 4
    base = weight.to(dtype)
    calculated = base + diff.type(dtype)
    norm = calculated.transpose(0, 1).norm(dim=1, keepdim=True).transpose(0, 1) if columns else base.norm(
        dim=1, keepdim=True)  # fmt: skip
    norm = norm + torch.finfo(dtype).eps
    calculated *= (scale.to(dtype) / norm).type(dtype)
    if strength != 1.0:
        calculated -= base
        calculated = base + strength * calculated
    dora = DoraWeights({"down": down, "up": up, "dora_scale": scale}, 2.0)
    assert torch.equal(dora.apply_in(dtype, weight, strength), calculated)
    errors = [dora_error({"a": dora}, lambda _: weight, strength, how) for how in ("unrounded", "stochastic_fp16")]
    assert errors[0] > 4 * errors[1]  # bf16 has three bits fewer
    assert dora_error({"a": dora}, lambda _: weight, strength, "nearest") < 1e-4  # in fp32
