"""FLUX.1 Kontext dev (https://huggingface.co/black-forest-labs/FLUX.1-Kontext-dev): a picture from reference pictures.

FLUX.1 dev, shape for shape. Tokens of the reference pictures follow those of the picture and take part in attention;
their positions begin with 1 where the picture's begin with 0, and what comes out for them is cut off.

Kontext was trained on one reference and diffusers' FluxKontextPipeline takes one. Several lie side by side on one
canvas of index 1, as ComfyUI places them by default (comfy/ldm/flux/model.py, method "offset"): the first at the
origin, each further one to the right of all before it or below them, whichever reaches less far.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxTransformer2DModel
from torch import Tensor

from library.conditions import ConditionKind, Conditions
from library.models.flux import FluxFamily
from library.models.flux_tokens import image_positions, pack_latents


class FluxKontextFamily(FluxFamily):
    """FLUX.1 Kontext from the same kinds of files as FLUX.1 dev."""

    name = "flux_kontext"
    conditioning: ConditionKind = "references"
    sample_guidance = 2.5  # BFL's and the model card's; the pipeline's own default is 3.5

    def picture_tokens(self, latents: Tensor, conditions: Conditions) -> tuple[Tensor, Tensor]:
        """Return tokens [B, N + R, 64], picture then references, and their positions [N + R, 3]."""
        tokens, positions = super().picture_tokens(latents, conditions)
        if not conditions.references:
            return tokens, positions
        reference_tokens, reference_positions = _reference_tokens(conditions.references)
        return (
            torch.cat([tokens, reference_tokens.to(tokens.dtype)], dim=1),
            torch.cat([positions, reference_positions]),
        )

    def pipeline(
        self, transformer: FluxTransformer2DModel, scheduler: FlowMatchEulerDiscreteScheduler, conditions: Conditions
    ) -> FluxKontextPipeline:
        """Return FluxKontextPipeline with the references as tokens."""
        pipeline = _GivenReferences(scheduler, None, None, None, None, None, transformer)
        pipeline.references = conditions.references
        return pipeline

    def pipeline_inputs(self, width: int, height: int, seed: int, cfg: float, conditions: Conditions) -> dict[str, Any]:
        """Return the pipeline's arguments; it would otherwise choose a size of one megapixel itself."""
        return super().pipeline_inputs(width, height, seed, cfg, conditions) | {"max_area": width * height}


class _GivenReferences(FluxKontextPipeline):
    """FluxKontextPipeline for any number of references, given as latents."""

    references: tuple[Tensor, ...] = ()

    def prepare_latents(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Return noise, tokens of the references, and the positions of both."""
        latents, _, positions, _ = super().prepare_latents(*args, **kwargs)
        if not self.references:
            return latents, None, positions, None
        tokens, reference_positions = _reference_tokens(self.references)
        return latents, tokens.to(latents), positions, reference_positions.to(positions)


def _reference_tokens(references: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return tokens [B, R, 64] of ``references``, each [B, 16, h, w], and their positions [R, 3]."""
    tokens = torch.cat([pack_latents(reference) for reference in references], dim=1)
    sizes = [(reference.shape[-2] // 2, reference.shape[-1] // 2) for reference in references]
    placed = [
        image_positions(*size, tokens.device, index=1) + torch.tensor([0.0, *offset], device=tokens.device)
        for size, offset in zip(sizes, canvas_offsets(sizes), strict=True)
    ]
    return tokens, torch.cat(placed)


def canvas_offsets(sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (row, column) of each reference's first token, for references of ``sizes`` (rows, columns) in tokens."""
    offsets: list[tuple[int, int]] = []
    high, wide = 0, 0  # of the canvas so far
    for rows, columns in sizes:
        row, column = (0, wide) if rows + high > columns + wide else (high, 0)
        offsets.append((row, column))
        high, wide = max(high, row + rows), max(wide, column + columns)
    return offsets
