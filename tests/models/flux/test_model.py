"""The transformer with the optimised forward against diffusers' own, same weights."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.embeddings import get_timestep_embedding
from torch import Tensor, nn

from library.models.flux.model import optimise_forward
from library.models.vae import image_positions, pack_latents
from library.nn.norms import RMSNorm
from tests.models.claims import assert_as_near_as_diffusers, assert_timesteps_are_not_rounded
from tests.tiny import tiny_flux_inputs, tiny_flux_transformer


def forward(
    transformer: nn.Module, sigmas: Tensor, dtype: torch.dtype, guidance: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output and gradients with respect to image and text inputs."""
    inputs = tiny_flux_inputs()
    tokens = pack_latents(inputs["latents"]).to(dtype).requires_grad_()
    embeds = inputs["prompt_embeds"].to(dtype).requires_grad_()
    output = transformer(
        hidden_states=tokens,
        timestep=sigmas,
        guidance=torch.full((2,), 4.0) if guidance else None,
        pooled_projections=inputs["pooled_prompt_embeds"].to(dtype),
        encoder_hidden_states=embeds,
        txt_ids=torch.zeros(12, 3),
        img_ids=image_positions(4, 4),
        return_dict=False,
    )[0]
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype))
    assert tokens.grad is not None
    assert embeds.grad is not None
    return output.detach(), tokens.grad, embeds.grad


def pair(guidance: bool, dtype: torch.dtype = torch.float32) -> tuple[FluxTransformer2DModel, FluxTransformer2DModel]:
    theirs = tiny_flux_transformer(guidance, double_blocks=2).to(dtype).requires_grad_(False)
    return theirs, optimise_forward(copy.deepcopy(theirs))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("guidance", [True, False])
def test_fp32_output_and_input_gradients_are_those_of_diffusers(guidance: bool, checkpointing: bool) -> None:
    theirs, ours = pair(guidance)
    if checkpointing:
        ours.enable_gradient_checkpointing()
    sigmas = tiny_flux_inputs()["sigmas"]
    mine_and_theirs = (forward(each, sigmas, torch.float32, guidance) for each in (ours, theirs))
    for mine, reference in zip(*mine_and_theirs, strict=True):
        # The same operations in the same order; 1e-6 leaves room for kernels that split sums by thread.
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("double", "single", "heads", "width"), [(3, 5, 4, 24), (1, 2, 3, 40), (2, 4, 4, 32)])
def test_fp32_is_diffusers_within_rounding_at_other_sizes(double: int, single: int, heads: int, width: int) -> None:
    third = width // 4 // 2 * 2
    theirs = FluxTransformer2DModel(
        in_channels=64, num_layers=double, num_single_layers=single, attention_head_dim=width,
        num_attention_heads=heads, joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True,
        axes_dims_rope=(width - 2 * third, third, third),
    )  # fmt: skip
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.1 if parameter.ndim > 1 else 0.3, generator=random)
    ours = optimise_forward(copy.deepcopy(theirs))
    inputs = {
        "hidden_states": torch.randn(2, 36, 64, generator=random),
        "encoder_hidden_states": torch.randn(2, 12, 32, generator=random),
        "pooled_projections": torch.randn(2, 32, generator=random),
        "timestep": torch.tensor([0.711, 0.2]),
        "guidance": torch.full((2,), 4.0),
        "txt_ids": torch.zeros(12, 3),
        "img_ids": image_positions(6, 6),
    }
    mine, reference = (model(**inputs, return_dict=False)[0] for model in (ours, theirs))
    assert (mine - reference).abs().max() <= 2e-6 * reference.abs().max()  # 17 roundings of fp32


@pytest.mark.parametrize("guidance", [True, False])
def test_bf16_agrees_within_rounding(guidance: bool) -> None:
    theirs, ours = pair(guidance, torch.bfloat16)
    exact, _ = pair(guidance)
    sigmas = torch.tensor([0.5, 0.25])  # 500 and 250 are bf16 numbers, so diffusers does not round them
    bf16 = (forward(each, sigmas, torch.bfloat16, guidance) for each in (ours, theirs))
    assert_as_near_as_diffusers(*bf16, forward(exact, sigmas, torch.float32, guidance))


def test_swapped_transformer_has_the_same_parameters_under_the_same_names() -> None:
    theirs, ours = pair(guidance=True)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert not any(type(module) is nn.RMSNorm for module in ours.modules())
    assert sum(isinstance(module, RMSNorm) for module in ours.modules()) == 2 * 4 + 2 * 2
    sigmas = tiny_flux_inputs()["sigmas"]
    before = forward(ours, sigmas, torch.float32, True)[0]
    optimise_forward(ours)  # a second time changes nothing
    assert torch.equal(forward(ours, sigmas, torch.float32, True)[0], before)


def test_timestep_is_not_rounded_to_bf16_under_autocast() -> None:
    theirs, ours = pair(guidance=True)
    sigma = torch.tensor([0.711, 0.711])
    run = partial(forward, sigmas=sigma, dtype=torch.float32, guidance=True)
    # The published embedding of t = 711: 256 numbers, cosines first.
    exact = get_timestep_embedding(sigma * 1000, 256, flip_sin_to_cos=True, downscale_freq_shift=0)
    assert_timesteps_are_not_rounded(ours, theirs, run, exact)  # cos(712) is not cos(711)


def test_projections_are_wrappers_without_a_change() -> None:
    """After LoRA injection attn.to_q is some module that maps the input; nothing may reach for its weight."""

    class Wrapper(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x)

    _, ours = pair(guidance=True)
    sigmas = tiny_flux_inputs()["sigmas"]
    before = forward(ours, sigmas, torch.float32, True)[0]
    for name, module in list(ours.named_modules()):
        if isinstance(module, nn.Linear) and "transformer_blocks" in name:
            owner, _, leaf = name.rpartition(".")
            parent = ours.get_submodule(owner)
            if leaf.isdigit():
                parent[int(leaf)] = Wrapper(module)  # type: ignore[operator]
            else:
                setattr(parent, leaf, Wrapper(module))
    assert torch.equal(forward(ours, sigmas, torch.float32, True)[0], before)
