"""An honest rounding is told by the grid alone: no alarm for any way of rounding, changes of all layers are named.

Files are made by other programs' rules: GGUF by the ``gguf`` package and, with an importance matrix, by a weighted
search of scales as llama.cpp's; nf4 by bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import bitsandbytes.functional as bnb
import gguf
import pytest
import torch
from torch import Tensor, nn

from library.fidelity import grids
from library.fidelity.findings import tensor_findings
from library.fidelity.layers import layer_row
from library.fidelity.tensors import compare_tensors, without_compensated
from library.precision.files.base import QuantizedWeight
from library.precision.files.gguf import TYPES, GgufWeight
from library.precision.files.mxfp8 import Mxfp8Scheme
from library.precision.files.nf4 import Nf4Weight
from library.precision.linear import QuantizedLinear
from library.precision.parity.activations import LayerInputs
from library.precision.parity.compensated import quantize_compensated
from library.precision.recipe import scheme_named
from tests.precision.files.gguf_files import blocks_of, random_blocks
from tests.precision.files.gguf_files import dequantized as by_the_package

Make = Callable[[Tensor, torch.Generator], QuantizedWeight | Tensor]  # what a layer of the deployment holds
LAYERS = {
    "attn.to_q": (96, 256),
    "attn.to_k": (64, 256),
    "attn.to_out": (64, 512),
    "ff.up": (160, 256),
    "ff.down": (64, 768),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------------------------------- weights, and formats


def weight_like(kind: int, shape: tuple[int, int], random: torch.Generator) -> Tensor:
    """Return bf16 numbers: normal, heavy tails, outlier columns, or rows of many sizes."""
    weight = torch.randn(shape, generator=random)
    if kind == 1:
        weight /= torch.randn(*shape, 4, generator=random).square().mean(-1).sqrt()
    if kind == 2:
        weight[:, :: shape[1] // 7] *= 8
    if kind == 3:
        weight *= torch.rand(shape[0], 1, generator=random).square() + 0.02
    return (0.03 * weight).bfloat16().float()


def plain_gguf(kind: str) -> Make:
    def make(weight: Tensor, random: torch.Generator) -> GgufWeight:
        return gguf_weight(torch.from_numpy(blocks_of(weight, kind)), weight, kind)

    return make


def gguf_weight(blocks: Tensor, weight: Tensor, kind: str) -> GgufWeight:
    return GgufWeight(blocks.view(len(weight), weight.shape[1] // TYPES[kind][0], -1), kind)


def with_importance(kind: str) -> Make:
    """Q4_0 or Q5_0 by llama.cpp's ``make_qx_quants``: of 19 scales the one with the least weighted error.

    Each is fitted to the codes by least squares and rounded to fp16 after that, so codes are not always the nearest.
    """
    half = {"Q4_0": 8, "Q5_0": 16}[kind]

    def make(weight: Tensor, random: torch.Generator) -> GgufWeight:
        importance = torch.exp(torch.randn(weight.shape[1], generator=random))
        runs = weight.view(-1, 32)
        important = (importance.expand_as(weight) * (weight**2 + weight.square().mean(1, keepdim=True)).sqrt()).view(
            -1, 32
        )
        largest = runs.gather(1, runs.abs().argmax(1, keepdim=True))
        best, scales = torch.full((len(runs), 1), -1.0), torch.zeros(len(runs), 1)
        codes = torch.zeros_like(runs)
        for step in range(-9, 10):
            tried = (
                (-(half + 0.1 * step) / torch.where(largest == 0, 1.0, largest) * runs).round().clamp(-half, half - 1)
            )
            product, size = ((important * tried * x).sum(1, keepdim=True) for x in (runs, tried))
            gain = product**2 / size.clamp_min(1e-30)
            better = gain > best
            best, scales = torch.where(better, gain, best), torch.where(better, product / size.clamp_min(1e-30), scales)
            codes = torch.where(better, tried, codes)
        return gguf_weight(_packed(codes, scales, kind), weight, kind)

    return make


def _packed(codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Return the blocks of codes: the package's own of exactly these numbers, with our scales put in."""
    half = {"Q4_0": 8, "Q5_0": 16}[kind]
    exact = codes.clone()
    swapped = exact[:, :1].clone()
    exact[:, :1] = -half  # so that the package's scale is one
    blocks = torch.from_numpy(gguf.quantize(exact.numpy(), gguf.GGMLQuantizationType[kind])).clone()
    assert torch.equal(torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])), exact)
    first = 2 if kind == "Q4_0" else 6  # the byte whose low half is the first code
    code = (swapped + half).to(torch.uint8)
    blocks[:, first : first + 1] = (blocks[:, first : first + 1] & 0xF0) | (code & 15)
    if kind == "Q5_0":
        blocks[:, 2:3] = (blocks[:, 2:3] & 0xFE) | (code >> 4)
    blocks[:, :2] = scales.half().view(torch.uint8)
    return blocks


def four_bits(kind: str = "nf4", nested: bool = False, block: int = 64) -> Make:
    def make(weight: Tensor, random: torch.Generator) -> Nf4Weight:
        packed, state = bnb.quantize_4bit(
            weight.contiguous(), blocksize=block, compress_statistics=nested, quant_type=kind
        )
        values, runs = packed.view(len(weight), -1), weight.shape[1] // block
        whole = Nf4Weight(values, state.absmax.view(len(weight), runs), state.code.float(), kind=kind)
        if not nested:
            return whole
        inner, offset = state.state2, torch.tensor(float(state.offset))
        below = {"nested_absmax": inner.absmax, "nested_quant_map": inner.code.float(), "nested_offset": offset}
        return replace(whole, nested_block=inner.blocksize, stride=runs, **below)

    return make


def by_scheme(name: str, stochastic: bool = False) -> Make:
    scheme = Mxfp8Scheme() if name == "mxfp8" else scheme_named(name)
    return lambda weight, random: scheme.fitting(weight.shape).quantize(weight, stochastic=stochastic, generator=random)


def searched(name: str) -> Make:
    """Steps of the least squared error, each of eight down to 0.65 times the largest number's: some numbers clip."""

    def make(weight: Tensor, random: torch.Generator) -> QuantizedWeight:
        scheme = scheme_named(name).fitting(weight.shape)
        turned = scheme.rotate(weight)
        largest = scheme.magnitudes(turned)
        rows, runs = largest.shape
        best, chosen = torch.full_like(largest, float("inf")), largest
        for share in torch.linspace(0.65, 1, 8):
            numbers = scheme.steps(share * largest)
            units = (turned.view(len(turned), runs, -1) / numbers.unsqueeze(-1)).view(turned.shape)
            made = (scheme.round(units).float().view(len(turned), runs, -1) * numbers.unsqueeze(-1)).view(turned.shape)
            error = (made - turned).square().view(len(turned), runs, -1).sum(-1)
            error = error if rows > 1 else error.sum(0, keepdim=True)
            chosen, best = torch.where(error < best, share * largest, chosen), torch.minimum(error, best)
        steps = scheme.steps(chosen)
        units = (turned.view(len(turned), runs, -1) / steps.unsqueeze(-1)).view(turned.shape)
        return scheme.pack(scheme.round(units), steps)

    return make


def dequantized(make: Make) -> Make:
    """A copy in bf16, which does not say what its format was."""

    def made(weight: Tensor, random: torch.Generator) -> Tensor:
        weight = make(weight, random)
        assert isinstance(weight, QuantizedWeight)
        return weight.dequantize(torch.bfloat16).float()

    return made


FORMATS: dict[str, Make] = {
    **{kind: plain_gguf(kind) for kind in ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "Q4_K")},
    **{f"{kind} with importance": with_importance(kind) for kind in ("Q5_0", "Q4_0")},
    "nf4": four_bits(), "nf4 twice": four_bits(nested=True), "fp4": four_bits("fp4"),
    "nf4 of 128": four_bits(block=128),
    **{name: by_scheme(name) for name in ("int8", "int8_row", "int8_convrot", "nvfp4", "mxfp8", "row", "block64")},
    **{f"{name} at random": by_scheme(name, True) for name in ("int8_row", "int8_convrot", "nvfp4", "mxfp8")},
    **{f"{name} searched": searched(name) for name in ("int8_row", "int8_convrot", "nvfp4")},
    **{f"{kind} dequantised": dequantized(plain_gguf(kind)) for kind in ("Q8_0", "Q5_1", "Q4_0", "Q4_K")},
    **{f"{name} dequantised": dequantized(four_bits(name)) for name in ("nf4", "fp4")},
    **{f"{name} dequantised": dequantized(by_scheme(name)) for name in ("int8_row", "nvfp4", "row")},
}  # fmt: skip


def models(make: Make, seed: int, change: Callable[[str, Tensor], Tensor] | None = None) -> tuple[nn.Module, nn.Module]:
    """Return a reference of five layers of one distribution, and a deployment of it, perhaps of changed weights."""
    reference, deployed = nn.Module(), nn.Module()
    for number, (name, shape) in enumerate(LAYERS.items()):
        random = seeded(100 * seed + number)
        weight = weight_like(seed % 4, shape, random)
        stored = make(weight if change is None else change(name, weight), random)
        for model, kept in ((reference, weight), (deployed, stored)):
            if isinstance(kept, QuantizedWeight):
                layer: nn.Module = QuantizedLinear(kept)
            else:
                layer = nn.Linear(*shape[::-1], bias=False)
                layer.weight = nn.Parameter(kept, requires_grad=False)
            model.add_module(name.replace(".", "_"), layer)
    return reference, deployed


def findings(reference: nn.Module, deployed: nn.Module) -> list[tuple[str, int, str]]:
    rows = compare_tensors(reference, deployed, {}, False)
    return [(each.cause, len(each.layers), each.evidence) for each in tensor_findings(rows)]


# ------------------------------------------------------------------------------------------------------------ tests


@pytest.mark.parametrize("name", FORMATS)
def test_an_honest_deployment_gives_no_finding(name: str) -> None:
    seed = [*FORMATS].index(name)  # of the distributions one
    assert findings(*models(FORMATS[name], seed)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 245 comparisons
def test_two_hundred_honest_deployments_give_no_finding() -> None:
    """The figure of docs/benchmarks.md: formats x distributions x seeds."""
    found = {
        (name, seed): alarms
        for name, make in FORMATS.items()
        for seed in range(7)
        if (alarms := findings(*models(make, seed)))
    }
    print(f"false alarms in {7 * len(FORMATS)} comparisons of tensors: {len(found)}")
    assert found == {}


def other_lora(name: str, weight: Tensor, size: float = 0.2) -> Tensor:
    if not name.startswith("attn"):
        return weight
    down, up = (torch.randn(shape, generator=seeded(8)) for shape in ((8, weight.shape[1]), (weight.shape[0], 8)))
    return weight + up @ down * (size * weight.norm() / (up @ down).norm())


def fine_tune(name: str, weight: Tensor) -> Tensor:
    change = torch.randn(weight.shape, generator=seeded(9))
    return weight + change * (0.1 * weight.norm() / change.norm())


CHANGES = {
    "another LoRA in attention": (other_lora, ("other_lora", "ruined_layer", "wrong_base"), 3, ""),
    "another fine-tune": (fine_tune, ("wrong_base", "ruined_layer"), 5, ""),
    "all times 1.03": (lambda name, weight: 1.03 * weight, ("wrong_scale",), 5, "times 1.03"),
    "all times 0.97": (lambda name, weight: 0.97 * weight, ("wrong_scale",), 5, "times 0.97"),
}


SEVERAL = ("Q8_0", "Q4_K", "Q4_0 with importance", "nf4 twice", "nvfp4", "Q4_K dequantised")


@pytest.mark.parametrize(
    ("name", "change"),
    [  # each format with one or two changes and each change with three formats in every test run
        pytest.param(name, change, marks=pytest.mark.slow if "0.97" in change or (row + column) % 2 else ())
        for row, name in enumerate(SEVERAL)
        for column, change in enumerate(CHANGES)
    ],
)
def test_a_change_in_all_layers_is_named(name: str, change: str) -> None:
    how, causes, layers, words = CHANGES[change]
    found = findings(*models(FORMATS[name], len(name), how))
    assert sum(number for cause, number, _ in found if cause in causes) >= layers, found
    assert any(words in text for _, _, text in found)


@pytest.mark.parametrize("name", ["nvfp4", "nf4", "Q4_0"])
def test_rows_in_another_order_and_a_factor_are_both_named_on_a_coarse_grid(name: str) -> None:
    def change(layer: str, weight: Tensor) -> Tensor:
        return 0.9 * weight[torch.randperm(len(weight), generator=seeded(1))] if layer == "ff.up" else weight

    ((cause, _, evidence),) = findings(*models(FORMATS[name], 0, change))
    assert cause == "permuted"
    assert "rows are in another order (0-159), and times 0.9" in evidence


@pytest.mark.parametrize("name", [pytest.param("nvfp4", marks=pytest.mark.slow), "nvfp4 at random"])
def test_a_factor_and_two_wrong_rows_of_a_large_matrix_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more numbers than this some rows are looked at for the factor, and all for wrong ones."""
    monkeypatch.setattr(grids, "_SAMPLE", 1 << 17)
    weight = weight_like(0, (512, 800), seeded(5))
    assert len(weight[grids.sampled_rows(weight)]) == 74
    swapped = weight.index_copy(0, torch.tensor([3, 4]), weight[[4, 3]])
    found = {}
    for change, made in {"none": weight, "factor": 1.03 * weight, "rows": swapped}.items():
        stored = FORMATS[name](made, seeded(6))
        assert isinstance(stored, QuantizedWeight)
        reference = nn.Linear(800, 512, bias=False)
        reference.weight = nn.Parameter(weight, requires_grad=False)
        found[change] = findings(nn.ModuleDict({"to_q": reference}), nn.ModuleDict({"to_q": QuantizedLinear(stored)}))
    assert found["none"] == []
    assert [(cause, "times 1.03" in text) for cause, _, text in found["factor"]] == [("wrong_scale", True)]
    assert [(cause, "(3-4)" in text) for cause, _, text in found["rows"]] == [("permuted", True)]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_change_in_all_layers_of_any_format_is_no_rounding(name: str, change: str) -> None:
    how, _, layers, _ = CHANGES[change]
    for seed in range(4):
        found = findings(*models(FORMATS[name], seed, how))
        assert sum(number for _, number, _ in found) >= layers - 1, (seed, found)  # of tails, and at random, one less


@pytest.mark.parametrize("name", ["int8_convrot", pytest.param("nvfp4", marks=pytest.mark.slow), "row"])
def test_rounding_that_makes_up_for_its_errors_is_known_by_its_outputs(name: str) -> None:
    """GPTQ keeps no law of a grid; a fine-tune does not either, and its outputs err more for it."""
    scheme = scheme_named(name)

    def inputs(shape: tuple[int, int]) -> LayerInputs:
        random = seeded(shape[1])
        x = torch.randn(4 * shape[1], shape[1], generator=random) * torch.arange(1, shape[1] + 1) ** -0.7
        x = x @ torch.linalg.qr(torch.randn(shape[1], shape[1], generator=random)).Q
        return LayerInputs(x.t() @ x / len(x), len(x), x.abs().amax(0), x[:64])

    def compensated(weight: Tensor, random: torch.Generator) -> QuantizedWeight:
        shape = (weight.shape[0], weight.shape[1])
        return quantize_compensated(weight, inputs(shape).moment, scheme.fitting(shape))

    for change, alarms in ((None, 0), (fine_tune, 5)):
        reference, deployed = models(compensated, 0, change)
        rows = compare_tensors(reference, deployed, {}, False)
        layers = []
        for row in (row for row in rows if row.role == "weight"):
            high = reference.get_submodule(row.layer).weight
            layer = deployed.get_submodule(row.layer)
            layers.append(layer_row(row, high, layer, layer, inputs(tuple(high.shape)), None, "no"))
        left = without_compensated(rows, [layer.name for layer in layers if layer.compensated])
        assert sum(bool(row.fault) for row in left) == alarms


@pytest.mark.parametrize("kind", TYPES)
def test_a_grid_holds_its_own_numbers_and_is_as_fine_as_its_blocks_are(kind: str) -> None:
    """The ``gguf`` package's numbers of random blocks are on the grid, and half a step is the largest error between."""
    blocks = random_blocks((16, 512), kind)
    numbers = by_the_package(blocks, kind)
    weight = GgufWeight(torch.from_numpy(blocks).view(16, 512 // TYPES[kind][0], -1), kind)
    low, high = (end.repeat_interleave(512 // end.shape[1], 1) for end in weight.ends())
    inside = (numbers >= torch.minimum(low, high)) & (numbers <= torch.maximum(low, high))  # Q8_0 never uses -128
    assert float(inside.float().mean()) > 0.99
    found = weight.on_grid(numbers)
    assert float((found - numbers)[inside].abs().max()) < 1e-5 * float(numbers.abs().max())
    between = low + (high - low) * torch.rand(16, 512, generator=seeded(3))
    step = (weight.levels[1:] - weight.levels[:-1]).max()
    assert bool(((weight.on_grid(between) - between).abs() <= 0.501 * step * (high - low).abs() + 1e-9).all())
