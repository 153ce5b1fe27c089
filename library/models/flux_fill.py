"""FLUX.1 Fill dev (https://huggingface.co/black-forest-labs/FLUX.1-Fill-dev): a region of a picture is painted anew.

FLUX.1 dev with a wider first layer: a token holds the noisy latents, the latents of the picture with its region
blanked to mid-grey, and the 256 mask pixels under it, in this order (BFL's ``prepare_fill``; diffusers'
FluxFillPipeline is what the tests compare with).

A sample is the model's whole picture, the known part too as it came out of the autoencoder. Pasting the original's
pixels back over it keeps them exact, but draws the autoencoder's small errors as a line along the border; that is the
user's choice and not made here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxFillPipeline, FluxTransformer2DModel
from torch import Tensor

from library.conditions import ConditionKind, Conditions
from library.errors import UserError
from library.models.flux import FluxFamily
from library.models.flux_tokens import pack_latents, pack_mask


class FluxFillFamily(FluxFamily):
    """FLUX.1 Fill from the same kinds of files as FLUX.1 dev."""

    name = "flux_fill"
    conditioning: ConditionKind = "fill"
    sample_guidance = 30.0

    def picture_tokens(self, latents: Tensor, conditions: Conditions) -> tuple[Tensor, Tensor]:
        """Return tokens [B, N, 384], noise beside blanked picture beside mask, and their positions [N, 3]."""
        masked, mask = _region(conditions)
        height, width = latents.shape[-2:]
        if masked.shape != latents.shape or mask.shape[-2] % height or mask.shape[-1] % width:
            raise UserError(
                f"the region to fill is for {tuple(masked.shape)} latents, mask {tuple(mask.shape)}, the picture has "
                f"{tuple(latents.shape)}; use one size for the picture and its mask"
            )
        noise, positions = super().picture_tokens(latents, conditions)
        known = (pack_latents(masked), pack_mask(mask, mask.shape[-2] // height))
        return torch.cat([noise, *(part.to(noise.dtype) for part in known)], dim=-1), positions

    def pipeline(
        self, transformer: FluxTransformer2DModel, scheduler: FlowMatchEulerDiscreteScheduler, conditions: Conditions
    ) -> FluxFillPipeline:
        """Return FluxFillPipeline with an autoencoder that gives the blanked picture's latents as we have them.

        The pipeline takes pictures only: latents that it is given make it fail on the picture that is then missing
        (diffusers 0.42).
        """
        pipeline = FluxFillPipeline(scheduler, None, None, None, None, None, transformer)
        pipeline.vae = _KnownLatents(_region(conditions)[0])
        return pipeline

    def pipeline_inputs(self, width: int, height: int, seed: int, cfg: float, conditions: Conditions) -> dict[str, Any]:
        """Return mask, noise, and a picture for its size alone."""
        if cfg != 1.0:
            raise UserError("FLUX.1 Fill knows no negative prompt; remove --n and --l (negative_prompt, scale)")
        masked, mask = _region(conditions)
        if mask.shape[-2:] != (height, width):
            raise UserError(
                f"sample of {width} x {height} pixels with a mask of {mask.shape[-1]} x {mask.shape[-2]}; use one size"
            )
        noise = torch.randn(masked.shape, generator=torch.Generator().manual_seed(seed))
        return {
            "image": torch.zeros(1, 3, height, width),
            "mask_image": mask.float().cpu(),
            "latents": pack_latents(noise),
        }


class _KnownLatents:
    """Stands for the autoencoder inside the pipeline: whatever is encoded, the latents are those given."""

    def __init__(self, latents: Tensor) -> None:
        self._latents = latents
        # normalised already: the pipeline's (latents - shift) * scaling changes nothing
        self.config = SimpleNamespace(latent_channels=latents.shape[1], shift_factor=0.0, scaling_factor=1.0)

    def encode(self, pixels: Tensor) -> SimpleNamespace:
        """Return what ``AutoencoderKL.encode`` would, as far as the pipeline looks at it."""
        return SimpleNamespace(latents=self._latents)


def _region(conditions: Conditions) -> tuple[Tensor, Tensor]:
    """Return masked latents [B, C, h, w] and mask [B, 1, H, W]."""
    if conditions.masked_latents is None or conditions.mask is None:
        raise UserError(
            "FLUX.1 Fill needs a picture and a mask: in the dataset inpaint_mask_directory, inpaint_alpha_mask or "
            "inpaint_masks, in a prompt --ci and --mi"
        )
    return conditions.masked_latents, conditions.mask
