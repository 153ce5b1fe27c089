"""What an image is generated from besides its caption: an inpainting mask, or reference images.

The data side writes it, batches carry it, and a family's forward pass and sampler read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Conditions:
    """Conditions of a batch, or without the batch axis of one sample.

    Attributes:
        masked_latents: [B, C, h, w], the encoder's latents of the image with the region to fill blanked
            (0 in [-1, 1]), as FLUX.1 Fill was trained on them.
        mask: [B, 1, H, W] fp32 in pixels, 1 where the image is to be filled, 0 where it is known.
        references: latents of reference images in their order, each [B, C, h_i, w_i].
    """

    masked_latents: Tensor | None = None
    mask: Tensor | None = None
    references: tuple[Tensor, ...] = ()

    def map(self, change: Callable[[Tensor], Tensor]) -> Conditions:
        """Return the conditions with every tensor put through ``change``."""
        return Conditions(
            None if self.masked_latents is None else change(self.masked_latents),
            None if self.mask is None else change(self.mask),
            tuple(change(reference) for reference in self.references),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Conditions:
        """Return the conditions on another device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))


NO_CONDITIONS = Conditions()


def stack_conditions(samples: list[Conditions]) -> Conditions:
    """Return the conditions of a batch from those of its samples, which must agree in kind and sizes."""
    masked = [one.masked_latents for one in samples if one.masked_latents is not None]
    masks = [one.mask for one in samples if one.mask is not None]
    references = zip(*(one.references for one in samples), strict=True)
    return Conditions(
        torch.stack(masked) if masked else None,
        torch.stack(masks) if masks else None,
        tuple(torch.stack(reference) for reference in references),
    )
