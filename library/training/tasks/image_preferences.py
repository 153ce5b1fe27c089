"""Preference pairs of images: of two pictures of one prompt, the one is the better.

Diffusion-DPO (https://arxiv.org/abs/2311.12908, equation 14) in its form for rectified flows (Flow-DPO,
https://arxiv.org/abs/2501.13918). Both pictures of a pair are seen at the same noise and noise level. An image model
has no log p; how well it predicts a picture's velocity u = noise - image takes its place:

    log p(x) - log p_0(x)  ~  -1/2 (|v - u|^2 - |v_0 - u|^2)        |.|^2: the mean over the latents

with v_0 the base's answer at the same point. All else is DPO's (``library.training.tasks.dpo``). Means instead of sums
keep beta independent of the size, as in diffusers' ``train_diffusion_dpo.py``, whose beta is this one. Noise levels
weigh the same, as there; ``weighting_scheme`` weighs them otherwise.

A step's loss is the mean over its pairs. Regularisation images, which preserve (``preserve = "prior"``), have batches
of their own, and the loss of ``library.training.tasks.image_step``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from library.data.batches import Batch
from library.training.flow import by_noise_level, sample_losses
from library.training.tasks.dpo import REWARDS, dpo_loss
from library.training.tasks.image_step import FlowStep, StepInputs, region_weights


@dataclass(frozen=True)
class PreferenceStep(FlowStep):
    """See the module's text."""

    more_metrics: ClassVar[Sequence[str]] = (*FlowStep.more_metrics, *REWARDS)
    more_validated: ClassVar[Sequence[str]] = REWARDS

    def compute(self, model: nn.Module, given: StepInputs) -> tuple[Tensor, Tensor]:
        """Return the pairs' mean loss, and of each pair its sigma, its loss by noise level and its rewards."""
        if given.preserves is not None:
            loss, values = super().compute(model, given)
            return loss, torch.column_stack([values, values.new_full((len(values), len(REWARDS)), torch.nan)])
        assert given.frozen_rows is not None
        frozen = self._frozen_answers(model, given, given.frozen_rows)
        velocity = self._velocity(model, given.noisy, given.sigmas, given.text, given.conditions)
        losses, rewards = self._losses(velocity, frozen, given.target, given.regions)
        sigmas = given.sigmas[::2]
        metrics = torch.column_stack([sigmas, by_noise_level(losses.detach(), sigmas), rewards])
        return (losses * given.weights[::2]).mean(), metrics

    def validated(self, model: nn.Module, batch: Batch, sigmas: Sequence[float]) -> Tensor:
        """Return each held-out pair's loss and rewards at each sigma, [len(sigmas), B, 1 + REWARDS]."""
        assert self.network is not None
        text, regions = self.text(batch), region_weights(self.flow, batch, seam=False)
        with self.network.bypassed():
            plain = self.text(batch)
        found = []
        for noisy, target, everywhere in self._validated(batch, sigmas):
            velocity = self._velocity(model, noisy, everywhere, text, batch.conditions)
            with self.network.bypassed():
                frozen = self._velocity(model, noisy, everywhere, plain, batch.conditions)
            found.append(torch.column_stack(self._losses(velocity, frozen, target, regions)))
        return torch.stack(found)

    def _frozen_rows(self, batch: Batch, everywhere: bool) -> list[int]:
        """Return all: v_0 is needed of both pictures, and of what preserves."""
        return list(range(len(batch.sample_ids)))

    def _losses(
        self, velocity: Tensor, frozen: Tensor, target: Tensor, regions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return what ``dpo_loss`` does, of rows [2 B, C, h, w] in which each rejected one follows its chosen one."""
        errors = sample_losses(self.flow, velocity, target, regions)
        log_ratios = (sample_losses(self.flow, frozen, target, regions) - errors) / 2
        return dpo_loss(log_ratios.view(-1, 2), self.pairs.dpo_beta, self.pairs.dpo_label_smoothing)
