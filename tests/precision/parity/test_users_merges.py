"""What a whole model gives after the merges that users make today, beside ours, on the trained tiny FLUX.

The LoRA is of rank 4 and 2 % of each weight, in the directions its layer's inputs take. Everything is measured on
noisy latents and texts that nothing was fitted to, against the model in high precision with the LoRA.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from library.precision.files.fp8 import Fp8Scheme, Fp8Weight
from library.precision.names import Granularity
from library.precision.parity.activations import LayerInputs, collect_inputs
from library.precision.parity.compensated import merge_into, quantize_compensated
from tests.precision.layers import quantize
from tests.precision.parity.users_merges import comfyui, musubi_base_weights, sd_scripts

MODEL = Path(__file__).resolve().parents[3] / "assets" / "tiny-flux" / "transformer"
SHARE, RANK = 0.02, 4
Merge = Callable[[Fp8Weight, Tensor], Fp8Weight]


def velocity(model: nn.Module, seed: int) -> Tensor:
    """Return the model's answers to four random inputs of 8 x 8 tokens at four noise levels."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        return model(
            hidden_states=torch.randn(4, 64, 64, generator=random),
            encoder_hidden_states=torch.randn(4, 24, 64, generator=random),
            pooled_projections=torch.randn(4, 64, generator=random),
            timestep=torch.tensor([0.2, 0.4, 0.6, 0.8]),
            img_ids=torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0)),
            txt_ids=torch.zeros(24, 3),
            guidance=torch.ones(4),
        ).sample


@cache
def setting() -> tuple[nn.Module, dict[str, LayerInputs], dict[str, Tensor]]:
    """Return the model, its blocks' linear layers with their inputs, and the LoRA's update of each."""
    model = FluxTransformer2DModel.from_pretrained(MODEL, torch_dtype=torch.float32).eval()
    blocks = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "blocks" in n and "norm" not in n]
    runs = [partial(velocity, model, seed) for seed in range(4)]
    inputs = {name: each for group in collect_inputs(model, blocks, runs) for name, each in group.items()}
    updates = {}
    for number, name in enumerate(blocks):
        weight, random = model.get_submodule(name).weight.detach(), torch.Generator().manual_seed(number)
        down = torch.randn(RANK, weight.shape[1], generator=random) @ inputs[name].moment
        update = torch.randn(weight.shape[0], RANK, generator=random) @ (down / down.norm(dim=1, keepdim=True))
        updates[name] = update * (SHARE * weight.norm() / update.norm())
    return model, inputs, updates


def answers(change: Callable[[str, Tensor], Tensor]) -> Tensor:
    """Return what the model answers to unseen inputs with every weight changed."""
    model, inputs, _ = setting()
    changed = copy.deepcopy(model)
    for name in inputs:
        weight = changed.get_submodule(name).weight
        weight.data = change(name, weight.data)
    return velocity(changed, seed=100)


def error(change: Callable[[str, Tensor], Tensor]) -> float:
    """Return the relative rms distance from the high-precision model with the LoRA."""
    _, _, updates = setting()
    wanted = answers(lambda name, weight: weight + updates[name])
    return float((answers(change) - wanted).norm() / wanted.norm())


def merged_by(merge: Merge, granularity: Granularity) -> float:
    """Return the error of a file of ``granularity`` into which ``merge`` has merged the LoRA."""
    _, _, updates = setting()
    return error(lambda name, w: merge(quantize(w, granularity), updates[name]).dequantize(torch.float32))


def test_a_musubi_merge_into_a_scaled_file_leaves_the_lora_out() -> None:
    without = error(lambda name, weight: quantize(weight, "tensor").dequantize(torch.float32))
    assert merged_by(musubi_base_weights, "tensor") == pytest.approx(without, rel=0.05)


@pytest.mark.parametrize("granularity", ["cast", "tensor"])
def test_our_merge_from_bf16_has_half_the_error_of_theirs(granularity: Granularity) -> None:
    _, inputs, updates = setting()

    def ours(name: str, weight: Tensor) -> Tensor:
        merged = quantize_compensated(weight + updates[name], inputs[name].moment, Fp8Scheme(granularity))
        return merged.dequantize(torch.float32)

    theirs = sd_scripts if granularity == "cast" else musubi_base_weights
    assert error(ours) < 0.5 * min(merged_by(comfyui, granularity), merged_by(theirs, granularity))


def test_our_merge_into_an_fp8_file_alone_is_better_than_theirs() -> None:
    _, inputs, updates = setting()
    moments = {update.data_ptr(): inputs[name].moment for name, update in updates.items()}

    def ours(weight: Fp8Weight, update: Tensor) -> Fp8Weight:
        return merge_into(weight, update, moments[update.data_ptr()], Fp8Scheme("tensor"))

    beside = error(lambda name, w: quantize(w, "tensor").dequantize(torch.float32) + updates[name])
    found = merged_by(ours, "tensor")
    assert found < 0.9 * merged_by(comfyui, "tensor")
    assert found < 1.25 * beside  # the base's own rounding is in both
