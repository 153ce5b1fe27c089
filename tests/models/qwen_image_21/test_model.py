"""The Qwen-Image-2.1 transformer with the optimised forward against diffusers' own, same weights."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Rope
from peft import LoraConfig
from torch import Tensor

from library.config.schema import NetworkConfig
from library.models.qwen_image_21.model import InterleavedRope, optimise_forward
from library.nn.norms import RMSNorm
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.models.claims import assert_as_near_as_diffusers, assert_timesteps_are_not_rounded, saved_bytes
from tests.targets import QWEN_21_TARGETS
from tests.tiny_qwen_21 import CHANNELS, TEXT_WIDTH, run_21, theirs_called, tiny_21_inputs, tiny_21_transformer

CASES = {  # references' sizes, tokens of text before each image, padded tokens of each caption
    "plain": ((), (9,), None),
    "padded": ((), (9,), (0, 4)),
    "a reference": (((4, 6),), (3, 9), None),
    "two references": (((2, 4), (4, 2)), (4, 2, 7), None),
    "neighbours, padded": (((2, 2), (4, 4)), (5, 0, 8), (3, 0)),
}


def forward(
    transformer: torch.nn.Module, case: str, dtype: torch.dtype = torch.float32, alone: bool = False
) -> list[Tensor]:
    """Return output and gradients with respect to images and texts; the painted image is 6 x 4 latents.

    ``alone``: each sample with its own caption, without padding; in a batch diffusers moves the painted image on by it.
    """
    sizes, lengths, padded = CASES[case]
    random = torch.Generator().manual_seed(3)
    images = [torch.randn(2, CHANNELS, *size, generator=random) for size in (*sizes, (6, 4))]
    texts = [torch.randn(2, length, TEXT_WIDTH, generator=random) for length in lengths]
    images, texts = ([each.to(dtype).requires_grad_() for each in group] for group in (images, texts))
    mask = None
    if padded is not None:
        mask = torch.arange(lengths[-1]) < lengths[-1] - torch.tensor(padded)[:, None]
    sigmas = torch.tensor([0.7127, 0.25])
    if alone:
        outputs = []
        for i, count in enumerate(padded or (0, 0)):
            own = [*(text[i : i + 1] for text in texts[:-1]), texts[-1][i : i + 1, : lengths[-1] - count]]
            outputs.append(theirs_called(transformer, [image[i : i + 1] for image in images], sigmas[i : i + 1], own))
        output = torch.cat(outputs)
    else:
        output = theirs_called(transformer, images, sigmas, texts, mask)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype))
    return [output.detach(), *(each.grad for each in (*images, *texts) if each.numel())]  # type: ignore[misc]


def pair(dtype: torch.dtype = torch.float32) -> tuple[QwenImage21Transformer2DModel, QwenImage21Transformer2DModel]:
    theirs = tiny_21_transformer().to(dtype).requires_grad_(False)
    return theirs, optimise_forward(copy.deepcopy(theirs))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_fp32_output_and_input_gradients_are_those_of_diffusers(case: str, checkpointing: bool) -> None:
    theirs, ours = pair()
    if checkpointing:
        ours.enable_gradient_checkpointing()
    alone = CASES[case][2] is not None
    for mine, reference in zip(forward(ours, case), forward(theirs, case, alone=alone), strict=True):
        assert reference.abs().max() > 1e-3, "it counts"
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=2e-6)  # sums may be split otherwise


def test_the_timestep_of_every_token_is_diffusers_without_causal_condition() -> None:
    theirs = tiny_21_transformer().requires_grad_(False)
    theirs.register_to_config(causal_condition=False)
    ours = optimise_forward(copy.deepcopy(theirs))
    for mine, reference in zip(forward(ours, "a reference"), forward(theirs, "a reference"), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=2e-6)


def test_bf16_agrees_within_rounding() -> None:
    theirs, ours = pair(torch.bfloat16)
    exact, _ = pair()
    bf16 = (forward(each, "a reference", torch.bfloat16) for each in (ours, theirs))
    assert_as_near_as_diffusers(*bf16, forward(exact, "a reference"))


def test_a_lora_saves_about_half_of_what_peft_on_diffusers_saves_for_backward() -> None:
    theirs, ours = pair()
    layers = ["to_q", "to_k", "to_v", "to_out.0", "gate_layer", "proj", "img_mlp.out"]
    theirs.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=layers))
    config = NetworkConfig(network_dim=4, network_alpha=4)
    inject_adapter(ours, parse_network_args(config, QWEN_21_TARGETS), QWEN_21_TARGETS, seed=0)
    assert saved_bytes(lambda: run_21(ours.train())) < 0.55 * saved_bytes(lambda: run_21(theirs.train()))


def test_positions_are_diffusers_numbers() -> None:
    shapes, runs = [(1, 4, 6), (1, 2, 2), (1, 64, 32)], (5, 0, 700)
    counts = [each for run, (_, h, w) in zip(runs, shapes, strict=True) for each in ((run, False), (h * w, True))]
    images = torch.cat([torch.full((count,), image) for count, image in counts])
    theirs = QwenImage21Rope(10000, [16, 56, 56])(shapes, images, torch.device("cpu"))
    cos, sin = InterleavedRope(10000, [16, 56, 56])(runs, shapes, torch.device("cpu"))
    assert torch.equal(torch.complex(cos, sin), theirs)


def test_swapped_transformer_has_the_same_parameters_under_the_same_names() -> None:
    theirs, ours = pair()
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert sum(isinstance(module, RMSNorm) for module in ours.modules()) == 2 * 2
    before = run_21(ours)
    optimise_forward(ours)  # a second time changes nothing
    assert torch.equal(run_21(ours), before)


def test_timestep_is_not_rounded_to_bf16_under_autocast() -> None:
    theirs, ours = pair()
    run = partial(forward, case="plain")
    angles = torch.tensor([712.7, 250.0, 0.0])[:, None] * 10000 ** (-torch.arange(128) / 128)
    exact = torch.cat([angles.cos(), angles.sin()], dim=1)
    assert_timesteps_are_not_rounded(ours, theirs, run, exact, most=2**-8)  # cosines rounded to bf16 at the end


def test_what_padded_rows_hold_changes_nothing() -> None:
    _, ours = pair()
    inputs = tiny_21_inputs()
    mask = torch.tensor([[True] * 12, [True] * 7 + [False] * 5])
    outputs = []
    for filling in (0.0, 100.0):
        embeds = inputs["prompt_embeds"].clone()
        embeds[~mask] = filling
        with torch.no_grad():
            outputs.append(theirs_called(ours, [inputs["latents"]], inputs["sigmas"], [embeds], mask))
    assert torch.equal(*outputs)
