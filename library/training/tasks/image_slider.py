"""Sliders: a LoRA that is a direction. At strength 1 images become more of something, at -1 less, at 0 stay the base's.

Concept Sliders (https://arxiv.org/abs/2311.12092), each step at both strengths, v(s) being the velocity at strength s:

    of prompts    v(+1) learns v_0(target) + eta (v_0(positive) - v_0(negative)), v(-1) the same with - eta
                  v_0 is the base's answer, eta ``slider_guidance``; both see the noisy image with the target prompt
    of images     v(+1) learns the velocity of the one image, v(-1) that of the other, at the same noise and noise level

What the two images have in common pulls v(+1) and v(-1) alike, which to first order a LoRA cannot do: it learns what
they differ in.

Both strengths are rows of one forward pass (``AdapterNetwork.set_row_strengths``): blocks that are recomputed in
backward, swapped or gathered then run once a step, as in any other training. Regularisation images (``preserve``) are
kept at both strengths, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from library.data.batches import Batch
from library.training.flow import by_noise_level, sample_losses
from library.training.tasks.image_step import FlowStep, StepInputs, region_weights

SHOWN = (-2.0, -1.0, 0.0, 1.0, 2.0)  # strengths that samples are made at


@dataclass(frozen=True)
class SliderStep(FlowStep):
    """See the module's text."""

    def compute(self, model: nn.Module, given: StepInputs) -> tuple[Tensor, Tensor]:
        """Return the mean loss, and of each sample its sigma and its loss by noise level."""
        losses = self._losses(model, given)
        views = len(given.sigmas) // len(losses)
        sigmas, data_losses = given.sigmas[::views], losses.detach()
        if given.preserves is not None:
            data_losses = torch.full_like(data_losses, torch.nan)
        metrics = torch.column_stack([sigmas, by_noise_level(data_losses, sigmas)])
        return (losses * given.weights[::views]).mean(), metrics

    def validated(self, model: nn.Module, batch: Batch, sigmas: Sequence[float]) -> Tensor:
        """Return each held-out sample's loss at each sigma, [len(sigmas), B, 1]."""
        text, regions = self.text(batch), region_weights(self.flow, batch, seam=False)
        rows = self._frozen_rows(batch, everywhere=False)
        found = []
        for noisy, target, everywhere in self._validated(batch, sigmas):
            device = noisy.device
            frozen_rows = torch.tensor(rows, device=device) if rows else None
            weights = torch.ones(len(target), device=device)
            given = StepInputs(
                noisy, target, everywhere.to(device), text, batch.conditions, weights, regions, frozen_rows=frozen_rows
            )
            found.append(self._losses(model, given))
        return torch.stack(found)[..., None]

    def _frozen_rows(self, batch: Batch, everywhere: bool) -> list[int]:
        """Return all where the base's answers to three prompts are needed."""
        if self.pairs.slider_prompts and not any(batch.prior):
            return list(range(len(batch.sample_ids)))
        return super()._frozen_rows(batch, everywhere)

    def _losses(self, model: nn.Module, given: StepInputs) -> Tensor:
        """Return each sample's loss [B], the mean over both strengths."""
        target = frozen = given.target
        rows = torch.arange(len(target), device=target.device)
        if given.frozen_rows is not None:
            frozen = self._frozen_answers(model, given, given.frozen_rows)
        if given.preserves is not None:
            rows, target = rows.repeat_interleave(2), frozen.repeat_interleave(2, dim=0)
        elif self.pairs.slider_prompts:  # rows are target, positive, negative of each sample in turn
            neutral, positive, negative = frozen.unflatten(0, (-1, 3)).unbind(1)
            change = self.pairs.slider_guidance * (positive - negative)
            target = torch.stack([neutral + change, neutral - change], dim=1).flatten(0, 1)
            rows = rows[::3].repeat_interleave(2)
        regions = None if given.regions is None else given.regions[rows]
        return sample_losses(self.flow, self._at_both(model, given, rows), target, regions).view(-1, 2).mean(dim=1)

    def _at_both(self, model: nn.Module, given: StepInputs, rows: Tensor) -> Tensor:
        """Return the velocities of ``rows`` [2 B], of two neighbours the first at strength 1, the second at -1."""
        assert self.network is not None
        noisy, sigmas, conditions = given.noisy[rows], given.sigmas[rows], given.conditions.map(lambda one: one[rows])
        text = {name: tensor[rows] for name, tensor in given.text.items()}
        if torch.is_grad_enabled():
            strengths = torch.ones(len(rows), device=rows.device)
            strengths[1::2] = -1
            self.network.set_row_strengths(strengths)
            return self._velocity(model, noisy, sigmas, text, conditions)
        found = []
        for strength in (1.0, -1.0):
            with self.network.at_strength(strength):
                found.append(self._velocity(model, noisy, sigmas, text, conditions))
        return torch.stack([found[0][::2], found[1][1::2]], dim=1).flatten(0, 1)
