"""One training step's forward pass: from a batch to a loss, and the same at fixed points for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from library.training.flow import add_noise, loss_weights, noise_for, sample_losses, sample_sigmas
from library.training.region_loss import region_weights

if TYPE_CHECKING:
    from library.config.schema import FlowConfig
    from library.data.batches import Batch
    from library.models.protocol import Family
    from library.training.teacher import Teacher


class TrainingStep(Protocol):
    """What the loop asks of a forward pass.

    Attributes:
        figure: what the metrics call the mean of the second value of :meth:`loss`.
        seed: of the run.
        text_encoders: those that are trained, as prepared.
    """

    figure: ClassVar[str]

    @property
    def seed(self) -> int: ...

    @property
    def text_encoders(self) -> nn.Module | None: ...

    def loss(self, model: nn.Module, batch: Any, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch's loss (a scalar with gradient) and a figure of each sample (CPU) at step ``step``."""


@dataclass(frozen=True)
class FlowStep:
    """What a forward pass needs besides the batch."""

    figure: ClassVar[str] = "sigma_mean"

    family: Family
    flow: FlowConfig
    seed: int
    text_encoders: nn.Module | None = None  # those that are trained, as prepared
    teacher: Teacher | None = None  # whose velocity is learnt instead of the data's, or with it

    def text(self, batch: Batch) -> dict[str, Tensor]:
        """Return the batch's text embeddings: as cached, those of encoders in training computed now."""
        return batch.text if self.text_encoders is None else batch.text | self.text_encoders(batch.captions)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch's loss (a scalar with gradient) and its sigmas ([B] fp32, CPU) at optimizer step ``step``.

        Args:
            model: the network as prepared, wrapped or not; only called, so that engines see the forward pass.
            batch: latents [B, C, h, w], text embeddings, weights [B], masks.
            step: part of the key of noise and sigmas.
        """
        tokens = batch.latents.shape[-2] * batch.latents.shape[-1] // self.family.patch_size**2
        sigmas = sample_sigmas(self.flow, batch.sample_ids, tokens, self.seed, step)
        noise = noise_for(batch.latents, batch.sample_ids, self.seed, step)
        losses = self._losses(model, batch, self.text(batch), noise, sigmas, region_weights(self.flow, batch), step)
        weights = loss_weights(self.flow, sigmas).to(losses.device, non_blocking=True) * batch.loss_weights
        return (losses * weights).mean(), sigmas

    @torch.no_grad()
    def validation_losses(self, model: nn.Module, batch: Batch, sigmas: Sequence[float]) -> Tensor:
        """Return each held-out sample's unweighted loss at each sigma, [len(sigmas) * B]; the noise never changes.

        Masks count, the seam's extra weight does not.
        """
        text, regions = self.text(batch), region_weights(self.flow, batch, seam=False)
        losses = []
        for sigma in sigmas:
            noise = noise_for(batch.latents, batch.sample_ids, "validation", round(sigma * 1e6))
            everywhere = torch.full((len(batch.sample_ids),), sigma)
            losses.append(self._losses(model, batch, text, noise, everywhere, regions))
        return torch.cat(losses)

    def _losses(
        self,
        model: nn.Module,
        batch: Batch,
        text: dict[str, Tensor],
        noise: Tensor,
        sigmas: Tensor,
        regions: Tensor | None,
        taught_at: int | None = None,
    ) -> Tensor:
        """Return each sample's loss, [B]; ``taught_at`` is the step whose teacher's answers count, None for none."""
        noisy, target = add_noise(batch.latents, noise, sigmas)
        if self.teacher is not None and taught_at is not None:
            target = self.teacher.blend(target, batch.sample_ids, taught_at)
        sigmas = sigmas.to(noisy.device, non_blocking=True)
        velocity = self.family.predict_velocity(model, noisy, sigmas, text, self.flow.guidance_scale, batch.conditions)
        return sample_losses(self.flow, velocity, target, regions)
