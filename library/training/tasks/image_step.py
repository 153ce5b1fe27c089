"""One training step's forward pass: from a batch to a loss, and the same at fixed points for validation.

Where in an image the loss counts, for fill models and datasets with masks, is a map of weights over latent cells,
[B, 1, h, w], that multiplies the pointwise loss. With the mask ``m`` (a cell's mean over its pixels, 0 to 1), the ring
``r`` of cells at the mask's border and the weight ``w`` of the seam (``seam_loss_weight``) it is

    m + w * r   with masked_loss
    1 + w * r   without

so that a border cell inside the region weighs 1 + w, one outside it w. A cell is inside where ``m`` is at least 1/2; it
is on the ring if a cell of the other side lies within ``seam_width`` cells, diagonals counting as one step (Chebyshev
distance). That is the dilation of the inside minus its erosion, both a ``max_pool2d``; the image's own edge is no
border, as beyond it there is nothing to match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d

from library.config.schema import FlowConfig
from library.data.batches import Batch
from library.data.dataset import TrainingData
from library.errors import UserError
from library.models.family import Family
from library.safetensors_io import DamagedFile, read_checked
from library.training.flow import (
    add_noise,
    by_noise_level,
    loss_weights,
    noise_for,
    noisy_latents,
    resolve_sampling,
    sample_losses,
)


@dataclass(frozen=True)
class FlowStep:
    """What a forward pass needs besides the batch."""

    family: Family
    flow: FlowConfig
    seed: int
    text_encoders: nn.Module | None = None  # those that are trained, as prepared
    teacher: Teacher | None = None  # whose velocity is the target instead of the data's, or with it

    def text(self, batch: Batch) -> dict[str, Tensor]:
        """Return the batch's text embeddings: as cached, those of encoders in training computed now."""
        return batch.text if self.text_encoders is None else batch.text | self.text_encoders(batch.captions)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch's loss (a scalar with gradient) at optimizer step ``step``, and each sample's metrics.

        These are its sigma and its loss before weights by noise level, [B, 1 + NOISE_LEVELS].

        Args:
            model: the network as prepared, wrapped or not; only called, so that engines see the forward pass.
            batch: latents [B, C, h, w], text embeddings, weights [B], masks.
            step: part of the key of noise and sigmas.
        """
        tokens = batch.latents.shape[-2] * batch.latents.shape[-1] // self.family.patch_size**2
        flow = resolve_sampling(self.flow, self.family)
        noisy, target, sigmas = noisy_latents(flow, batch.latents, batch.sample_ids, tokens, self.seed, step)
        if self.teacher is not None:
            target = self.teacher.blend(target, batch.sample_ids, step)
        regions = region_weights(self.flow, batch)
        losses = self._losses(model, batch, self.text(batch), noisy, target, sigmas, regions)
        weights = loss_weights(self.flow, sigmas).to(losses.device, non_blocking=True) * batch.loss_weights
        sigmas = sigmas.to(losses.device, non_blocking=True)
        metrics = torch.column_stack([sigmas, by_noise_level(losses.detach(), sigmas)])
        return (losses * weights).mean(), metrics

    def validation_losses(self, model: nn.Module, batch: Batch, sigmas: Sequence[float]) -> Tensor:
        """Return each held-out sample's unweighted loss at each sigma, [len(sigmas) * B]; the noise never changes.

        Masks count, the seam's extra weight does not.
        """
        text, regions = self.text(batch), region_weights(self.flow, batch, seam=False)
        losses = []
        for sigma in sigmas:
            noise = noise_for(batch.latents, batch.sample_ids, "validation", round(sigma * 1e6))
            everywhere = torch.full((len(batch.sample_ids),), sigma)
            noisy, target = add_noise(batch.latents, noise, everywhere)
            losses.append(self._losses(model, batch, text, noisy, target, everywhere, regions))
        return torch.cat(losses)

    def _losses(
        self,
        model: nn.Module,
        batch: Batch,
        text: dict[str, Tensor],
        noisy: Tensor,
        target: Tensor,
        sigmas: Tensor,
        regions: Tensor | None,
    ) -> Tensor:
        """Return each sample's loss, [B], of the velocity at the latents ``noisy`` against ``target``."""
        sigmas = sigmas.to(noisy.device, non_blocking=True)
        velocity = self.family.predict_velocity(model, noisy, sigmas, text, self.flow.guidance_scale, batch.conditions)
        return sample_losses(self.flow, velocity, target, regions)


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


@dataclass(frozen=True)
class Teacher:
    """The teacher's answers on disk, and how much they count.

    Attributes:
        folder: one file for each sample of each step.
        weight: w above, in (0, 1].
    """

    folder: Path
    weight: float

    def blend(self, target: Tensor, sample_ids: Sequence[int], step: int) -> Tensor:
        """Return the velocity to learn, [B, C, h, w] fp32, from the data's ``target`` and the teacher's answers.

        Raises:
            UserError: an answer is gone or damaged.
        """
        answers = [self._read(step, sample) for sample in sample_ids]
        return torch.lerp(target, torch.stack(answers).to(target.device, non_blocking=True), self.weight)

    def path(self, step: int, sample_id: int) -> Path:
        """Return the file of one answer."""
        return self.folder / f"{step:08d}" / f"{sample_id:016x}.safetensors"

    def _read(self, step: int, sample_id: int) -> Tensor:
        path = self.path(step, sample_id)
        try:
            return read_checked(path)["velocity"].float()
        except DamagedFile as damage:
            path.unlink(missing_ok=True)
            raise UserError(
                f"{path}: the teacher's answer is {damage.reason}; go on with --resume auto: the teacher is loaded "
                "before the model and gives it again"
            ) from None
