"""FLUX.1's variants for tests: their conditions, and their forward pass written with diffusers' own pipelines.

A further variant is a name in :data:`VARIANTS` and a branch in each of the two functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from library.conditions import Conditions

VARIANTS = ("flux_fill", "flux_kontext")
TEXT = ("prompt_embeds", "pooled_prompt_embeds")


def tiny_conditions(model_type: str, batch: int = 2, side: int = 8, seed: int = 5) -> Conditions:
    """Return random conditions for latents [batch, 16, side, side]: a box to fill, or a reference of another shape."""
    random = torch.Generator().manual_seed(seed)
    if model_type == "flux_fill":
        mask = torch.zeros(batch, 1, side * 8, side * 8)
        mask[:, :, 5:41, 19:50] = 1.0  # edges that no latent and no token has
        mask[-1, :, :7] = 1.0
        return Conditions(masked_latents=torch.randn(batch, 16, side, side, generator=random), mask=mask)
    return Conditions(references=(torch.randn(batch, 16, side + 2, side - 2, generator=random),))


def diffusers_forward(
    pipeline: Any,
    transformer: nn.Module,
    latents: Tensor,
    sigmas: Tensor,
    text: dict[str, Tensor],
    conditions: Conditions,
    guidance: float = 1.0,
) -> Tensor:
    """Call ``transformer`` as ``pipeline`` does, inputs prepared by the pipeline; return the velocity [B, C, h, w]."""
    batch, channels, height, width = latents.shape
    packed = pipeline._pack_latents(latents, batch, channels, height, width)
    positions = pipeline._prepare_latent_image_ids(batch, height // 2, width // 2, "cpu", torch.float32)
    size = (height * 8, width * 8)
    tokens = packed
    if conditions.mask is not None:
        config = pipeline.vae.config
        latent = (
            conditions.masked_latents / config.scaling_factor + config.shift_factor
        )  # as the autoencoder gives them
        mask, masked = pipeline.prepare_mask_latents(
            conditions.mask, latent, batch, channels, 1, *size, torch.float32, "cpu", None
        )
        tokens = torch.cat([packed, torch.cat([masked, mask], dim=-1)], dim=2)
    for reference in conditions.references:  # the pipeline takes one
        _, image, positions, image_positions = pipeline.prepare_latents(
            reference, batch, channels, *size, torch.float32, "cpu", None, packed
        )
        tokens, positions = torch.cat([packed, image], dim=1), torch.cat([positions, image_positions])
    output = transformer(
        hidden_states=tokens,
        timestep=sigmas,
        guidance=torch.full((batch,), guidance),
        pooled_projections=text["pooled_prompt_embeds"],
        encoder_hidden_states=text["prompt_embeds"],
        txt_ids=torch.zeros(text["prompt_embeds"].shape[1], 3),
        img_ids=positions,
        return_dict=False,
    )[0]
    return pipeline._unpack_latents(output[:, : packed.shape[1]], *size, vae_scale_factor=8)
