"""Where in a picture the loss counts, for fill models and datasets with masks.

Everything is a map of weights over latent cells, [B, 1, h, w], that multiplies the pointwise loss. With the mask ``m``
(a cell's mean over its pixels, 0 to 1), the ring ``r`` of cells at the mask's border and the weight ``w`` of the seam
(``seam_loss_weight``) it is

    m + w * r   with masked_loss
    1 + w * r   without

so that a border cell inside the region weighs 1 + w, one outside it w. A cell is inside where ``m`` is at least 1/2; it
is on the ring if a cell of the other side lies within ``seam_width`` cells, diagonals counting as one step (Chebyshev
distance). That is the dilation of the inside minus its erosion, both a ``max_pool2d``; the picture's own edge is no
border, as beyond it there is nothing to match.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import avg_pool2d, max_pool2d

from library.errors import UserError

if TYPE_CHECKING:
    from library.config.schema import FlowConfig
    from library.data.batches import Batch
    from library.data.dataset import TrainingData


def check_seam(flow: FlowConfig, data: TrainingData) -> None:
    """Refuse ``seam_loss_weight`` where no sample has a mask.

    Raises:
        UserError: it is set and nothing has a border.
    """
    if flow.seam_loss_weight and not data.has_regions:
        raise UserError(
            "seam_loss_weight: no image has a mask, so there is no border; set masked_loss with conditioning_data_dir "
            "or alpha_mask, or remove it"
        )


def region_weights(flow: FlowConfig, batch: Batch, seam: bool = True) -> Tensor | None:
    """Return the weights [B, 1, h, w] fp32 of a batch's latent cells, or None where all weigh 1.

    A sample's mask is the one it brings to weigh its loss, else the region to fill. The seam is that of the region to
    fill, else of the mask.

    Args:
        flow: masked_loss, seam_loss_weight, seam_width.
        batch: masks [B, 1, h, w] or None; conditions with a mask [B, 1, H, W] or None.
        seam: whether seam_loss_weight counts; validation leaves it out, so that runs can be compared.
    """
    fill = batch.conditions.mask
    region = batch.masks if fill is None else avg_pool2d(fill, fill.shape[-1] // batch.latents.shape[-1])
    mask = region if batch.masks is None else batch.masks
    weights = mask if flow.masked_loss else None
    if not seam or not flow.seam_loss_weight or region is None:
        return weights
    ring = flow.seam_loss_weight * border_ring(region, flow.seam_width)
    return ring + (1 if weights is None else weights)


def border_ring(mask: Tensor, width: int) -> Tensor:
    """Return 1 where a cell of the other side of ``mask`` [B, 1, h, w] lies within ``width`` cells, else 0."""
    inside = (mask >= 0.5).to(mask.dtype)
    near_inside = max_pool2d(inside, 2 * width + 1, stride=1, padding=width)
    near_outside = max_pool2d(1 - inside, 2 * width + 1, stride=1, padding=width)
    return near_inside * near_outside
