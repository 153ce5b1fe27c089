"""Every tensor is compared: what was planted is named with its parameter, what is only rounded is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from library.fidelity.differences import compare
from library.fidelity.findings import costly_kinds, tensor_findings, with_lora_faults
from library.fidelity.fixes import Fix, recommend, recommendation
from library.fidelity.runs import EvalSet, Outcome
from library.fidelity.tensors import TensorRow, compare_tensors, module_difference
from library.precision.files.fp8 import Fp8Scheme
from library.precision.fp8_numbers import E4M3FN, E5M2, Fp8Format
from library.precision.linear import QuantizedLinear
from library.precision.names import GRANULARITIES, Granularity
from library.precision.recipe import Recipe, quantize_model, scheme_named
from networks.files.weights import LoraWeights
from tests.precision.layers import quantize
from tests.tiny import tiny_flux_transformer

LAYER = "transformer_blocks.0.ff.net.2"  # 64 x 256: four scales a row in blocks of 64
SQUARE, BROTHER = "single_transformer_blocks.1.attn.to_k", "single_transformer_blocks.1.attn.to_q"


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    """A random tiny FLUX of 36 linear layers."""
    return tiny_flux_transformer(seed=3).requires_grad_(False)


def in_fp8(
    model: nn.Module, granularity: Granularity = "row", fp8: Fp8Format = E4M3FN, stochastic: bool = False, seed: int = 0
) -> nn.Module:
    made = copy.deepcopy(model)
    quantize_model(made, Recipe(Fp8Scheme(granularity, fp8), stochastic=stochastic, seed=seed), compute="dequant")
    return made


def put(model: nn.Module, name: str, weight: Tensor, fp8: Fp8Format | None = None, stochastic: bool = False) -> None:
    """Round ``weight`` to nearest into the layer, in its own format or in ``fp8``."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    if not isinstance(layer, QuantizedLinear):
        layer.weight.data.copy_(weight)
        return
    own = layer.quantized()
    made = quantize(weight, own.granularity, fp8 or own.fp8, stochastic=stochastic, generator=seeded(5))
    layer.weight = nn.Parameter(made.values, requires_grad=False)
    if made.scale is not None:
        layer.scale.copy_(made.scale)


def weight_of(model: nn.Module, name: str) -> Tensor:
    return model.get_submodule(name).weight.data.clone()  # type: ignore[union-attr, operator, return-value]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def named(reference: nn.Module, deployed: nn.Module, loras: dict | None = None, merged: bool = False) -> list[tuple]:
    """Return cause, tensors and evidence of every finding."""
    rows = with_lora_faults(compare_tensors(reference, deployed, loras or {}, merged), merged)
    return [(each.cause, each.layers, each.evidence) for each in tensor_findings(rows)]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fp8", [E4M3FN, E5M2])
@pytest.mark.parametrize("stochastic", [False, True])
def test_an_honest_cast_gives_no_finding(granularity: Granularity, fp8: Fp8Format, stochastic: bool) -> None:
    for seed in range(2):
        model = tiny_flux_transformer(seed=seed).requires_grad_(False)
        assert named(model, in_fp8(model, granularity, fp8, stochastic, seed)) == []


def test_a_copy_in_bf16_or_fp16_and_scales_in_bf16_give_no_finding(reference: nn.Module) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert named(reference, copy.deepcopy(reference).to(dtype).float()) == []
    deployed = in_fp8(reference, "tensor")
    for layer in deployed.modules():
        if isinstance(layer, QuantizedLinear) and layer.scale is not None:
            layer.scale.copy_(layer.scale.bfloat16())
    assert named(reference, deployed) == []


@pytest.mark.parametrize("granularity", ["cast", "row", "block64"])
@pytest.mark.parametrize(
    ("change", "cause", "words"),
    [
        (lambda w: w.roll(5, 0), "permuted", "rolled by 5 rows"),
        (lambda w: w.roll(9, 1), "permuted", "rolled by 9 columns"),
        (lambda w: w.roll((2, 3), (0, 1)), "permuted", "rolled by 2 rows and 3 columns"),
        (lambda w: w.roll(17), "permuted", "rolled by 17 of 16384 places"),
        (lambda w: w.roll(len(w) // 2, 0), "permuted", "its halves are exchanged"),
        (lambda w: w[torch.randperm(len(w), generator=seeded(1))], "permuted", "rows are in another order"),
        (lambda w: w[:, torch.randperm(w.shape[1], generator=seeded(1))], "permuted", "columns are in another order"),
        (lambda w: w.t().reshape(w.shape), "permuted", "transposed"),
        (lambda w: w.flip(1), "permuted", "in reverse order"),
        (lambda w: -w, "wrong_scale", "its sign is flipped"),
        (lambda w: w * 3, "wrong_scale", "times 3"),
        (lambda w: torch.cat([w[:11] * 2, w[11:]]), "wrong_scale", "11 of 64 rows times"),
        (lambda w: w * 0, "zeroed", "all zero"),
        (lambda w: torch.cat([w[:20] * 0, w[20:]]), "zeroed", "20 of 64 rows are zero (0-19)"),
        (lambda w: torch.full_like(w, 0.25), "ruined_layer", "all 0.25"),
    ],
)
def test_what_was_done_to_a_layer_is_named_with_its_parameter(
    reference: nn.Module, granularity: Granularity, change: Callable[[Tensor], Tensor], cause: str, words: str
) -> None:
    deployed = in_fp8(reference, granularity)
    put(deployed, LAYER, change(weight_of(reference, LAYER)))
    ((found, tensors, evidence),) = named(reference, deployed)
    assert (found, tensors) == (cause, (f"{LAYER}.weight",))
    assert words in evidence


@pytest.mark.parametrize("sigmas", [1.2, 1.6])
def test_clipped_numbers_are_counted(reference: nn.Module, sigmas: float) -> None:
    deployed, weight = in_fp8(reference, "tensor"), weight_of(reference, LAYER)
    limit = float(sigmas * weight.std())
    put(deployed, LAYER, weight.clamp(-limit, limit))
    ((cause, _, evidence),) = named(reference, deployed)
    count = int(evidence.split(": ")[1].split()[0])
    assert cause == "clipped"
    assert f"at {limit:.3g}" in evidence
    assert int((weight.abs() > 1.1 * limit).sum()) <= count <= int((weight.abs() > limit).sum())


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (lambda scale: scale.roll(1, 0), "rolled by 1 rows"),
        (lambda scale: scale.roll(1, 1), "rolled by 1 columns"),
        (lambda scale: scale.t().reshape(scale.shape), "transposed"),
    ],
)
def test_scales_in_another_place_are_named_so(
    reference: nn.Module, move: Callable[[Tensor], Tensor], words: str
) -> None:
    spread = copy.deepcopy(reference)
    spread.get_submodule(LAYER).weight.data.mul_(torch.rand(64, 4, generator=seeded(2)).repeat_interleave(64, 1) + 0.2)
    deployed = in_fp8(spread, "block64")
    scale = deployed.get_submodule(LAYER).scale
    scale.copy_(move(scale))
    ((cause, _, evidence),) = named(spread, deployed)
    assert cause == "wrong_scale"
    assert f"its scales are {words}" in evidence


def cut(weight: Tensor, layer: QuantizedLinear) -> Tensor:
    """Round toward zero: the neighbour below in magnitude of what torch rounds to nearest."""
    own = layer.quantized()
    scale = torch.ones(1, 1) if own.scale is None else own.scale
    scaled = (weight.view(len(weight), scale.shape[1], -1) / scale.unsqueeze(-1)).view(weight.shape)
    nearest = scaled.to(own.fp8.dtype)
    codes = nearest.view(torch.uint8).clone()
    codes[nearest.float().abs() > scaled.abs()] -= 1
    return codes.view(own.fp8.dtype)


def flushed(weight: Tensor, layer: QuantizedLinear) -> Tensor:
    values = layer.quantized().values.float()
    return torch.where(values.abs() < layer.quantized().fp8.min_normal, torch.zeros(()), values).to(torch.float8_e4m3fn)


def either(weight: Tensor, layer: QuantizedLinear) -> Tensor:
    codes = cut(weight, layer).view(torch.uint8).clone()
    up = (torch.rand(codes.shape, generator=seeded(3)) < 0.5) & ((codes & 0x7F) < 0x7E)
    codes[up] += 1
    return codes.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("granularity", ["cast", "tensor", "row"])
@pytest.mark.parametrize(
    ("how", "words"), [(cut, "toward zero"), (flushed, "became zero"), (either, "either neighbour at random")]
)
def test_rounding_that_is_not_to_nearest_is_named(
    reference: nn.Module, granularity: Granularity, how: Callable[[Tensor, QuantizedLinear], Tensor], words: str
) -> None:
    deployed = in_fp8(reference, granularity)
    for name, layer in deployed.named_modules():
        if isinstance(layer, QuantizedLinear):
            layer.weight.data.copy_(how(weight_of(reference, name), layer))
    ((cause, tensors, evidence),) = named(reference, deployed)
    assert cause == "rounding_mode"
    assert len(tensors) == 26 or how is flushed  # of which there are few where scales use the whole range
    assert words in evidence


def test_a_quarter_in_a_coarser_format_stands_out_and_a_finer_one_does_not(reference: nn.Module) -> None:
    deployed = in_fp8(reference, "row")
    layers = [name for name, layer in deployed.named_modules() if isinstance(layer, QuantizedLinear)]
    for name in layers[::4]:
        put(deployed, name, weight_of(reference, name), E5M2)
    ((cause, tensors, evidence),) = named(reference, deployed)
    assert cause == "mixed_formats"
    assert list(tensors) == [f"{name}.weight" for name in layers[::4]]
    assert "in e5m2 row, which errs" in evidence
    finer = in_fp8(reference, "row", E5M2)
    for name in layers[::4]:
        put(finer, name, weight_of(reference, name), E4M3FN)
    assert named(reference, finer) == []


def test_numbers_that_went_through_e5m2_are_named(reference: nn.Module) -> None:
    deployed = in_fp8(reference, "tensor")
    put(deployed, LAYER, quantize(weight_of(reference, LAYER), "tensor", E5M2).dequantize(torch.float32))
    ((cause, _, evidence),) = named(reference, deployed)
    assert cause == "mixed_formats"
    assert "rounded to e5m2 before" in evidence


def test_layers_that_hold_each_others_weights_are_named(reference: nn.Module) -> None:
    deployed = in_fp8(reference)
    put(deployed, SQUARE, weight_of(reference, BROTHER))
    put(deployed, BROTHER, weight_of(reference, SQUARE))
    ((cause, tensors, evidence),) = named(reference, deployed)
    assert cause == "exchanged"
    assert set(tensors) == {f"{SQUARE}.weight", f"{BROTHER}.weight"}
    assert "holds the weights of" in evidence


@pytest.mark.parametrize(
    ("parameter", "change", "cause", "words"),
    [
        ("transformer_blocks.0.norm1.linear.bias", lambda b: b * 0, "zeroed", "all zero"),
        ("transformer_blocks.0.attn.norm_q.weight", lambda b: b * 1.1, "wrong_scale", "times 1.1"),
        (f"{LAYER}.bias", lambda b: b.roll(4), "permuted", "rolled by 4"),
        (f"{LAYER}.bias", lambda b: b.sort().values, "permuted", "in another order"),
        (f"{LAYER}.bias", lambda b: b.to(torch.float8_e4m3fn).float(), "small_in_fp8", "rounded to e4m3fn"),
        (f"{LAYER}.bias", lambda b: b + 0.02 * torch.randn(b.shape, generator=seeded(1)), "ruined_layer", "differs by"),
        ("transformer_blocks.0.attn.norm_k.weight", lambda b: b * 0 + 1, "ruined_layer", "all 1"),
    ],
)
def test_biases_and_norms_are_compared_too(
    reference: nn.Module, parameter: str, change: Callable[[Tensor], Tensor], cause: str, words: str
) -> None:
    deployed = in_fp8(reference)
    tensor = deployed.get_parameter(parameter)
    tensor.data.copy_(change(tensor.data))
    ((found, tensors, evidence),) = named(reference, deployed)
    assert (found, tensors) == (cause, (parameter,))
    assert words in evidence


@pytest.mark.parametrize(("size", "seed"), [(0.01, 0), (0.05, 1), (0.5, 2)])
def test_noise_of_any_size_is_no_rounding(reference: nn.Module, size: float, seed: int) -> None:
    deployed, weight = in_fp8(reference), weight_of(reference, LAYER)
    put(deployed, LAYER, weight + size * weight.std() * torch.randn(weight.shape, generator=seeded(seed)))
    ((cause, tensors, _),) = named(reference, deployed)
    assert (cause, tensors) == ("ruined_layer", (f"{LAYER}.weight",))


def test_flipped_bits_are_counted(reference: nn.Module) -> None:
    deployed = in_fp8(reference)
    codes = deployed.get_submodule(LAYER).weight.data.view(torch.uint8)
    codes[3, 7] ^= 0x80
    codes[9, 30] ^= 0x80
    ((cause, _, evidence),) = named(reference, deployed)
    assert cause == "ruined_layer"
    assert "2 of 16384 numbers are wrong (rows 3-9, columns 7-30)" in evidence


@pytest.mark.parametrize(("where", "cause"), [("", "wrong_base"), ("single_transformer_blocks.1.", "other_block")])
def test_another_fine_tune_is_named_in_all_and_in_one_block(reference: nn.Module, where: str, cause: str) -> None:
    deployed = in_fp8(reference)
    for name, layer in deployed.named_modules():
        if isinstance(layer, QuantizedLinear) and name.startswith(where):
            weight = weight_of(reference, name)
            put(deployed, name, weight + 0.1 * weight.std() * torch.randn(weight.shape, generator=seeded(1)))
    ((found, tensors, _),) = named(reference, deployed)
    assert found == cause
    assert all(name.startswith(where) for name in tensors)


def lora_for(model: nn.Module, size: float, seed: int) -> dict[str, LoraWeights]:
    """A LoRA of rank 4 for the blocks' layers; each update ``size`` of its weight."""
    found = {}
    for number, (name, layer) in enumerate(model.named_modules()):
        if type(layer) is nn.Linear and "blocks" in name:
            random = seeded(1000 * seed + number)
            up, down = (
                torch.randn(layer.out_features, 4, generator=random),
                torch.randn(4, layer.in_features, generator=random),
            )
            found[name] = LoraWeights(down, up * float(size * layer.weight.norm() / (up @ down).norm()), 4.0)
    return found


def merge(
    reference: nn.Module,
    deployed: nn.Module,
    loras: dict[str, LoraWeights],
    strength: float = 1.0,
    *,
    into_rounded: bool = False,
    stochastic: bool = False,
    into: Callable[[str], bool] = lambda name: True,
) -> nn.Module:
    for name, update in loras.items():
        layer = deployed.get_submodule(name)
        rounded = isinstance(layer, QuantizedLinear) and into_rounded
        base = layer.dequantized(torch.float32) if rounded else weight_of(reference, name)  # type: ignore[operator]
        if into(name):
            put(deployed, name, base + strength * update.delta(), stochastic=stochastic)
    return deployed


@pytest.mark.parametrize("granularity", ["cast", "tensor", "row", "block64"])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("into_rounded", [False, True])
def test_a_correct_merge_gives_no_finding(
    reference: nn.Module, granularity: Granularity, stochastic: bool, into_rounded: bool
) -> None:
    for seed, size in ((0, 0.2), (1, 0.6)):
        loras, deployed = lora_for(reference, size, seed), in_fp8(reference, granularity)
        merge(reference, deployed, loras, into_rounded=into_rounded, stochastic=stochastic)
        assert named(reference, deployed, loras, merged=True) == []


@pytest.mark.parametrize("size", [0.05, 0.3])
def test_a_merge_into_bf16_and_a_lora_that_is_only_beside_give_no_finding(reference: nn.Module, size: float) -> None:
    loras = lora_for(reference, size, 4)
    merged = merge(reference, copy.deepcopy(reference), loras).to(torch.bfloat16).float()
    assert named(reference, merged, loras, merged=True) == []
    assert named(reference, in_fp8(reference), loras) == []


@pytest.mark.parametrize("granularity", ["cast", "row"])
@pytest.mark.parametrize(("strength", "size"), [(0.5, 0.03), (0.73, 0.1), (2.0, 0.2)])
def test_the_strength_in_a_file_is_found(
    reference: nn.Module, granularity: Granularity, strength: float, size: float
) -> None:
    loras = lora_for(reference, size, 5)
    deployed = merge(reference, in_fp8(reference, granularity), loras, strength)
    ((cause, tensors, evidence),) = named(reference, deployed, loras, merged=True)
    assert cause == "strength"
    assert len(tensors) == len(loras)
    assert float(evidence.split(": ")[1].split()[0]) == pytest.approx(strength, abs=0.02)


@pytest.mark.parametrize("size", [0.02, 0.3])
def test_a_lora_that_is_in_the_file_and_runs_beside_it_is_named(reference: nn.Module, size: float) -> None:
    loras = lora_for(reference, size, 6)
    deployed = merge(reference, in_fp8(reference), loras)
    ((cause, tensors, _),) = named(reference, deployed, loras)
    assert cause == "lora_twice"
    assert len(tensors) == len(loras)


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        (lambda name: name.startswith("single_transformer_blocks"), "of single blocks"),
        (lambda name: ".attn." in name, "of attention"),
        (lambda name: name == LAYER, LAYER),
        (lambda name: True, "all"),
    ],
)
def test_layers_that_a_merge_forgot_are_named_by_group(
    reference: nn.Module, lacks: Callable[[str], bool], words: str
) -> None:
    loras = lora_for(reference, 0.1, 7)
    deployed = merge(reference, in_fp8(reference), loras, into=lambda name: not lacks(name))
    ((cause, tensors, evidence),) = named(reference, deployed, loras, merged=True)
    assert cause == "lora_missing"
    assert set(tensors) == {f"{name}.weight" for name in loras if lacks(name)}
    assert words in evidence


def test_an_update_that_rounding_lost_is_not_called_forgotten(reference: nn.Module) -> None:
    """Added to weights that are on the grid already, an update far under a step moves next to none of them."""
    loras = lora_for(reference, 0.01, 8)
    deployed = merge(reference, in_fp8(reference, "cast"), loras, into_rounded=True)
    found = named(reference, deployed, loras, merged=True)
    assert [cause for cause, _, _ in found] == ["delta_lost"]


def test_a_lora_that_nobody_spoke_of_is_told_from_a_fine_tune(reference: nn.Module) -> None:
    deployed = merge(reference, in_fp8(reference), lora_for(reference, 0.2, 9))
    ((cause, tensors, _),) = named(reference, deployed, lora_for(reference, 0.2, 10))
    assert cause == "other_lora"
    assert len(tensors) == 26


def on_a_grid(weight: Tensor, levels: int, block: int = 32) -> Tensor:
    """Integers of ``2 * levels + 1`` steps, a scale for every block of a row: a model dequantised from 4 or 8 bits."""
    runs = weight.reshape(-1, block)
    step = runs.abs().amax(1, keepdim=True) / levels
    return ((runs / step).round() * step).reshape(weight.shape).bfloat16().float()


@pytest.mark.parametrize("name", ["int8", "int8_row", "int8_convrot", "nvfp4"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_weights_of_other_formats_are_known_by_what_rounding_to_them_costs(
    reference: nn.Module, name: str, stochastic: bool
) -> None:
    deployed = copy.deepcopy(reference)
    quantize_model(deployed, Recipe(scheme_named(name), stochastic=stochastic), compute="dequant")
    assert named(reference, deployed) == []
    layer = deployed.get_submodule(LAYER)
    assert isinstance(layer, QuantizedLinear)
    layer.set_quantized(layer.quantized().scheme.quantize(weight_of(reference, LAYER).roll(3, 0)))
    ((cause, _, evidence),) = named(reference, deployed)
    assert cause == "permuted"
    assert "rolled by 3 rows" in evidence


@pytest.mark.parametrize("name", ["int8", "int8_convrot", "nvfp4", "row"])
@pytest.mark.parametrize("into_rounded", [False, True])
def test_an_honest_merge_in_any_format_is_no_defect(reference: nn.Module, name: str, into_rounded: bool) -> None:
    """Into the original, or at random into weights that are on the grid: nvfp4 clips some of it."""
    for seed in range(2):
        loras = lora_for(reference, 0.2, seed)
        deployed = copy.deepcopy(reference)
        quantize_model(deployed, Recipe(scheme_named(name)), compute="dequant")
        for number, (layer, update) in enumerate(loras.items()):
            made = deployed.get_submodule(layer)
            if isinstance(made, QuantizedLinear):
                high = made.dequantized(torch.float32) if into_rounded else weight_of(reference, layer)
                random = seeded(100 * seed + number)
                scheme = made.quantized().scheme
                made.set_quantized(scheme.quantize(high + update.delta(), stochastic=into_rounded, generator=random))
        quantised = {
            layer: one for layer, one in loras.items() if isinstance(deployed.get_submodule(layer), QuantizedLinear)
        }
        assert named(reference, deployed, quantised, merged=True) == []


@pytest.mark.parametrize("levels", [7, 127])
def test_a_dequantised_model_of_another_format_is_known_by_its_grid(reference: nn.Module, levels: int) -> None:
    deployed = copy.deepcopy(reference)
    for name, layer in deployed.named_modules():
        if type(layer) is nn.Linear and "blocks" in name:
            layer.weight.data.copy_(on_a_grid(layer.weight.data, levels))
    assert named(reference, deployed) == []
    deployed.get_submodule(LAYER).weight.data.copy_(on_a_grid(weight_of(reference, LAYER).roll(3, 0), levels))
    ((cause, _, evidence),) = named(reference, deployed)
    assert cause == "permuted"
    assert "rolled by 3 rows" in evidence


def test_layers_that_are_usually_kept_are_named_as_a_choice(reference: nn.Module) -> None:
    everything = copy.deepcopy(reference)
    quantize_model(everything, Recipe(Fp8Scheme("row"), exclude=()), compute="dequant")
    rows = compare_tensors(reference, everything, {}, False)
    assert tensor_findings(rows) == []
    kinds = {finding.evidence.split(":")[0]: finding.layers for finding in costly_kinds(rows)}
    assert set(kinds) == {"embedders", "modulation", "final"}
    assert "x_embedder.weight" in kinds["embedders"]


def test_every_tensor_has_a_row(reference: nn.Module) -> None:
    rows = compare_tensors(reference, in_fp8(reference), {}, False)
    names = [row.name for row in rows]
    assert set(names) >= {name for name, _ in (*reference.named_parameters(), *reference.named_buffers())}
    scales = [row for row in rows if row.role == "scale"]
    assert scales
    assert all(row.error == pytest.approx(0, abs=1e-6) for row in scales)


def test_the_error_is_that_of_float64(reference: nn.Module) -> None:
    deployed = in_fp8(reference, "tensor")
    put(deployed, LAYER, 1.2 * weight_of(reference, LAYER))
    row: TensorRow = {r.name: r for r in compare_tensors(reference, deployed, {}, False)}[f"{LAYER}.weight"]
    high = weight_of(reference, LAYER).double()
    low = deployed.get_submodule(LAYER).dequantized(torch.float32).double()  # type: ignore[operator]
    assert row.error == pytest.approx(float((low - high).norm() / high.norm()), rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float8_e4m3fn, "e4m3fn"), (torch.float8_e5m2, "e5m2"), (torch.float16, "float16"),
        (torch.bfloat16, "bfloat16"),
    ],
)  # fmt: skip
def test_a_cast_of_a_whole_module_is_told_from_another_file(dtype: torch.dtype, name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.Linear(16, 32)).requires_grad_(False)
        other = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.Linear(16, 32)).requires_grad_(False)
    assert module_difference(module, copy.deepcopy(module)) == ""
    cast = copy.deepcopy(module)
    for parameter in cast.parameters():
        if parameter.ndim > 1:
            parameter.copy_(parameter.to(dtype).float())
    assert module_difference(module, cast) == f"2 of 6 tensors rounded to {name}"
    assert module_difference(module, other).startswith("another file: ")


def test_a_lora_in_one_of_two_text_encoders_is_told_from_another_file() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = nn.Sequential(*(nn.Linear(96, 96) for _ in range(4))).requires_grad_(False)
        with_lora = copy.deepcopy(module)
        for layer in with_lora:
            layer.weight.add_(0.01 * torch.randn(96, 2) @ torch.randn(2, 96))  # type: ignore[union-attr, operator]
    assert "a LoRA's few directions" in module_difference(module, with_lora)


NOTHING = EvalSet([], [], [], "none", (), 0, 1.0, 0)


def run_of(steps: int, finished: float) -> Outcome:
    """Return a run whose latents become ``finished`` in even steps."""
    return Outcome(path=[[torch.full((4, 2, 2), finished * (step + 1) / steps)] for step in range(steps)])


def test_where_the_latents_are_right_nothing_is_recommended() -> None:
    before = replace(compare(run_of(4, 1.0), run_of(4, 1.0), NOTHING), image=0.1)
    fix = Fix("refit", "", 1.0, (Path("a.safetensors"),), before, Outcome())
    assert "the finished latents are right" in recommendation(recommend([fix], before), before)
