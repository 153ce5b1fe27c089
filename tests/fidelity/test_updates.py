"""What a LoRA left in a file is named: how much, with which sign, and whose update it is; in every format."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from library.precision.linear import QuantizedLinear
from library.precision.recipe import Recipe, quantize_model, scheme_named
from networks.files.weights import LoraWeights
from tests.fidelity.test_tensors import lora_for, named, seeded, weight_of
from tests.tiny import tiny_flux_transformer

FORMATS = ("cast", "tensor", "row", "block64", "int8_row", "int8_convrot", "nvfp4", "bf16")
QUERY, KEY = "transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k"
Merged = Callable[[str, dict[str, Tensor]], Tensor]  # layer, all updates -> what is merged into it


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    return tiny_flux_transformer(seed=3).requires_grad_(False)


@pytest.fixture(scope="module")
def loras(reference: nn.Module) -> dict[str, LoraWeights]:
    return lora_for(reference, 0.2, 5)


def served(
    reference: nn.Module, loras: dict[str, LoraWeights], name: str, merged: Merged, factor: float = 1.0
) -> nn.Module:
    """Return the model in a format, every layer's sum rounded once."""
    model = copy.deepcopy(reference)
    if name != "bf16":
        quantize_model(model, Recipe(scheme_named(name)), compute="dequant")
    updates = {layer: update.delta() for layer, update in loras.items()}
    for layer in updates:
        module: Any = model.get_submodule(layer)
        wanted = (weight_of(reference, layer) + merged(layer, updates)) * factor
        if isinstance(module, QuantizedLinear):
            module.set_quantized(module.quantized().scheme.quantize(wanted))
        else:
            module.weight.data.copy_(wanted.bfloat16())
    return model


def sign(layer: str) -> int:
    return 1 if len(layer) % 2 else -1


def other(layer: str, updates: dict[str, Tensor]) -> Tensor:
    """The update of the next layer of that shape."""
    alike = [name for name, update in updates.items() if update.shape == updates[layer].shape]
    return updates[alike[(alike.index(layer) + 1) % len(alike)]]


def square(update: Tensor) -> bool:
    return update.shape[0] == update.shape[1]


CASES: dict[str, tuple[Merged, str, Callable[[str], bool], str]] = {
    "attention at half": (lambda name, d: d[name] * (0.5 if ".attn." in name else 1), "strength",
                          lambda name: ".attn." in name, r"of attention: 0\.(49|5|51)"),
    "one layer at half": (lambda name, d: d[name] * (0.5 if name == QUERY else 1), "strength",
                          lambda name: name == QUERY, r"0\.(4[5-9]|5)"),
    "alpha forgotten": (lambda name, d: 4 * d[name], "strength", lambda name: True, r"all \d+ weights: (4|3\.9)"),
    "other sign": (lambda name, d: -d[name], "lora_sign", lambda name: True, r"all \d+ weights: -(1|0\.9)"),
    "a sign a layer": (lambda name, d: sign(name) * d[name], "lora_sign", lambda name: sign(name) < 0, r": -(1|0\.9)"),
    "another layer's": (other, "lora_moved", lambda name: True, "of the update of"),
    "q and k": (lambda name, d: d[{QUERY: KEY, KEY: QUERY}.get(name, name)], "lora_moved",
                lambda name: name in (QUERY, KEY), f"of the update of {KEY}"),
    "transposed": (lambda name, d: d[name].t() if square(d[name]) else d[name], "lora_transposed", lambda name: False,
                   "of its update transposed"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "name"),
    [  # each with four of the others in every test run
        pytest.param(case, name, marks=pytest.mark.slow if (row + column) % 2 else ())
        for row, case in enumerate(CASES)
        for column, name in enumerate(FORMATS)
    ],
)
def test_the_update_that_is_in_the_file_is_named(
    reference: nn.Module, loras: dict[str, LoraWeights], name: str, case: str
) -> None:
    merged, cause, where, words = CASES[case]
    ((found, tensors, evidence),) = named(reference, served(reference, loras, name, merged), loras, merged=True)
    wanted = {layer for layer in loras if where(layer)} or {n for n, u in loras.items() if square(u.delta())}
    assert (found, {tensor.removesuffix(".weight") for tensor in tensors}) == (cause, wanted), evidence
    assert re.search(words, evidence), evidence


@pytest.mark.parametrize("name", FORMATS)
def test_two_faults_at_once_are_both_named(reference: nn.Module, loras: dict[str, LoraWeights], name: str) -> None:
    def merged(layer: str, updates: dict[str, Tensor]) -> Tensor:
        if layer == QUERY:
            weight = weight_of(reference, layer) + updates[layer]
            return weight[torch.randperm(len(weight), generator=seeded(1))] - weight_of(reference, layer)
        return updates[layer] * (0.5 if layer.startswith("single") else 1)

    found = {cause: (tensors, words) for cause, tensors, words in
             named(reference, served(reference, loras, name, merged), loras, merged=True)}  # fmt: skip
    assert found.keys() == {"permuted", "strength"}
    assert found["permuted"][0] == (f"{QUERY}.weight",)
    assert "of single blocks: 0.5" in found["strength"][1]
    deployed = served(reference, loras, name, lambda layer, d: 0.5 * d[layer], 1.1)
    found = {cause: words for cause, _, words in named(reference, deployed, loras, merged=True)}
    assert "times 1.1" in found["wrong_scale"]
    assert "holds 0.5" in found["wrong_scale"]


@pytest.mark.parametrize("name", FORMATS)
def test_clipping_a_merged_weight_is_no_strength(
    reference: nn.Module, loras: dict[str, LoraWeights], name: str
) -> None:
    def merged(layer: str, updates: dict[str, Tensor]) -> Tensor:
        whole = weight_of(reference, layer) + updates[layer]
        limit = float(1.2 * whole.std())
        return whole.clamp(-limit, limit) - weight_of(reference, layer)

    ((cause, tensors, evidence),) = named(reference, served(reference, loras, name, merged), loras, merged=True)
    assert cause == "clipped", evidence
    assert len(tensors) == len(loras)
    assert "clipped at" in evidence


@pytest.mark.parametrize("name", FORMATS)
def test_a_right_merge_is_no_fault(reference: nn.Module, loras: dict[str, LoraWeights], name: str) -> None:
    assert named(reference, served(reference, loras, name, lambda layer, d: d[layer]), loras, merged=True) == []
