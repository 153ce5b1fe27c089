"""The Qwen-Image transformer with the optimised forward against diffusers' own, same weights."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.embeddings import get_timestep_embedding
from torch import Tensor, nn

from library.models.qwen_image.model import optimise_forward
from library.models.vae import pack_latents
from library.nn.norms import RMSNorm
from tests.models.claims import assert_as_near_as_diffusers, assert_timesteps_are_not_rounded
from tests.tiny_qwen import tiny_qwen_inputs, tiny_qwen_transformer

PADDED = torch.tensor([[True] * 12, [True] * 7 + [False] * 5])


def forward(
    transformer: nn.Module,
    sigmas: Tensor,
    mask: Tensor | None = None,
    references: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output and gradients with respect to image and text inputs; the picture is 8 x 6 latents."""
    inputs = tiny_qwen_inputs()
    parts = [inputs["latents"][..., :6], inputs["latents"].flip(0)[..., :4, :], inputs["latents"].flip(1)]
    tokens = torch.cat([pack_latents(part) for part in parts[: 1 + references]], dim=1).to(dtype).requires_grad_()
    embeds = inputs["prompt_embeds"].to(dtype).requires_grad_()
    output = transformer(
        hidden_states=tokens,
        timestep=sigmas,
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, 4, 3), (1, 2, 4), (1, 4, 4)][: 1 + references]] * 2,
        return_dict=False,
    )[0]
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype))
    assert tokens.grad is not None
    assert embeds.grad is not None
    return output.detach(), tokens.grad, embeds.grad


def pair(
    dtype: torch.dtype = torch.float32, zero_cond_t: bool = False
) -> tuple[QwenImageTransformer2DModel, QwenImageTransformer2DModel]:
    theirs = tiny_qwen_transformer(zero_cond_t=zero_cond_t).to(dtype).requires_grad_(False)
    return theirs, optimise_forward(copy.deepcopy(theirs))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", ["plain", "padded", "two references", "zero_cond_t", "zero_cond_t padded"])
def test_fp32_output_and_input_gradients_are_those_of_diffusers(case: str, checkpointing: bool) -> None:
    theirs, ours = pair(zero_cond_t=case.startswith("zero"))
    if checkpointing:
        ours.enable_gradient_checkpointing()
    sigmas = tiny_qwen_inputs()["sigmas"]
    mask = PADDED if "padded" in case else None
    references = 0 if case in ("plain", "padded") else 2
    for mine, reference in zip(
        forward(ours, sigmas, mask, references), forward(theirs, sigmas, mask, references), strict=True
    ):
        # The same operations in the same order; 1e-6 leaves room for kernels that split sums by thread.
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6)


def test_bf16_agrees_within_rounding() -> None:
    theirs, ours = pair(torch.bfloat16)
    exact, _ = pair()
    sigmas = torch.tensor([0.5, 0.25])  # bf16 numbers whose thousandfold are too, so diffusers does not round them
    bf16 = (forward(each, sigmas, PADDED, dtype=torch.bfloat16) for each in (ours, theirs))
    assert_as_near_as_diffusers(*bf16, forward(exact, sigmas, PADDED))


def test_swapped_transformer_has_the_same_parameters_under_the_same_names() -> None:
    theirs, ours = pair()
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert sum(isinstance(module, RMSNorm) for module in ours.modules()) == 2 * 4 + 1
    before = forward(ours, tiny_qwen_inputs()["sigmas"])[0]
    optimise_forward(ours)  # a second time changes nothing
    assert torch.equal(forward(ours, tiny_qwen_inputs()["sigmas"])[0], before)


@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_timestep_is_not_rounded_to_bf16_under_autocast(zero_cond_t: bool) -> None:
    theirs, ours = pair(zero_cond_t=zero_cond_t)
    sigma = torch.tensor([0.7127, 0.7127])  # the nearest bf16 number is 0.7109
    run = partial(forward, sigmas=sigma, references=1)
    # The published embedding of t = 712.7 (and of 0 for reference pictures): 256 numbers, cosines first.
    clean = sigma.new_zeros(2 if zero_cond_t else 0)
    exact = get_timestep_embedding(torch.cat([sigma, clean]) * 1000, 256, flip_sin_to_cos=True, downscale_freq_shift=0)
    assert_timesteps_are_not_rounded(ours, theirs, run, exact)  # cos(710.9) is not cos(712.7)
