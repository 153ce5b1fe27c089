"""Pairs: losses of images, or of prompts, that are two sides of one thing. Preferences, and sliders.

A batch has the rows of a sample next to each other, with the same id and so the same noise and noise level.
Regularisation images, which preserve (``preserve = "prior"``), have batches of their own.

**Preferences.** Of two pictures of one prompt, the one is the better. Diffusion-DPO (https://arxiv.org/abs/2311.12908,
equation 14) in its form for rectified flows (Flow-DPO, https://arxiv.org/abs/2501.13918). An image model has no log p;
how well it predicts a picture's velocity u = noise - image takes its place:

    log p(x) - log p_0(x)  ~  -1/2 (|v - u|^2 - |v_0 - u|^2)        |.|^2: the mean over the latents

with v_0 the base's answer at the same point. All else is DPO's (``library.training.tasks.dpo``). Means instead of sums
keep beta independent of the size, as in diffusers' ``train_diffusion_dpo.py``, whose beta is this one. Noise levels
weigh the same, as there; ``weighting_scheme`` weighs them otherwise.

**Sliders.** A LoRA that is a direction: at strength 1 images become more of something, at -1 less, at 0 they stay the
base's. Concept Sliders (https://arxiv.org/abs/2311.12092), each step at both strengths; v(s): the velocity at s.

    of prompts    v(+1) learns v_0(target) + eta (v_0(positive) - v_0(negative)), v(-1) the same with - eta
                  eta: ``slider_guidance``; both see the noisy image with the target prompt
    of images     v(+1) learns the velocity of the one image, v(-1) that of the other

What the two images have in common pulls v(+1) and v(-1) alike, which to first order a LoRA cannot do: it learns what
they differ in. Both strengths are rows of one forward pass (``AdapterNetwork.set_row_strengths``): blocks that are
recomputed in backward, swapped or gathered run once a step, as in any training. What preserves does so at both.
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
from library.training.tasks.image_step import FlowStep, StepInputs

SHOWN = (-2.0, -1.0, 0.0, 1.0, 2.0)  # strengths that a slider's samples are made at


@dataclass(frozen=True)
class PairStep(FlowStep):
    """What both have: a sample is several rows."""

    def compute(self, model: nn.Module, given: StepInputs) -> tuple[Tensor, Tensor]:
        """Return the samples' mean loss, and of each its sigma, its loss by noise level and what else is measured."""
        values = self.values(model, given)
        losses, views = values[:, 0], len(given.sigmas) // len(values)
        sigmas, data_losses = given.sigmas[::views], losses.detach()
        if given.preserves is not None:
            data_losses = torch.full_like(data_losses, torch.nan)
        metrics = torch.column_stack([sigmas, by_noise_level(data_losses, sigmas), values[:, 1:].detach()])
        return (losses * given.weights[::views]).mean(), metrics


@dataclass(frozen=True)
class PreferenceStep(PairStep):
    """Rows are the chosen and the rejected picture."""

    more_metrics: ClassVar[Sequence[str]] = (*FlowStep.more_metrics, *REWARDS)
    more_validated: ClassVar[Sequence[str]] = REWARDS

    def values(self, model: nn.Module, given: StepInputs) -> Tensor:
        """Return each pair's loss and rewards, [B, 1 + REWARDS]; of what preserves NaN are the rewards."""
        assert given.frozen_rows is not None
        frozen = self.frozen_answers(model, given, given.frozen_rows)
        velocity = self._velocity(model, given.noisy, given.sigmas, given.text, given.conditions)
        if given.preserves is not None:
            losses = sample_losses(self.flow, velocity, frozen, given.regions)
            return torch.column_stack([losses, torch.full((len(losses), len(REWARDS)), torch.nan).to(losses)])
        errors = sample_losses(self.flow, velocity, given.target, given.regions)
        log_ratios = (sample_losses(self.flow, frozen, given.target, given.regions) - errors) / 2
        return torch.column_stack(dpo_loss(log_ratios.view(-1, 2), self.pairs.dpo_beta))

    def _frozen_rows(self, batch: Batch, everywhere: bool) -> list[int]:
        """Return all: v_0 is needed of both pictures, and of what preserves."""
        return list(range(len(batch.sample_ids)))


@dataclass(frozen=True)
class SliderStep(PairStep):
    """Rows are the images of strengths 1 and -1; or an image with the target, the positive and the negative prompt."""

    def _frozen_rows(self, batch: Batch, everywhere: bool) -> list[int]:
        """Return all where the base's answers to three prompts are needed."""
        if self.pairs.slider_prompts and not any(batch.prior):
            return list(range(len(batch.sample_ids)))
        return super()._frozen_rows(batch, everywhere)

    def values(self, model: nn.Module, given: StepInputs) -> Tensor:
        """Return each sample's loss [B, 1], the mean over both strengths."""
        target = frozen = given.target
        rows = torch.arange(len(target), device=target.device)
        if given.frozen_rows is not None:
            frozen = self.frozen_answers(model, given, given.frozen_rows)
        if given.preserves is not None:
            rows, target = rows.repeat_interleave(2), frozen.repeat_interleave(2, dim=0)
        elif self.pairs.slider_prompts:
            neutral, positive, negative = frozen.unflatten(0, (-1, 3)).unbind(1)
            change = self.pairs.slider_guidance * (positive - negative)
            target = torch.stack([neutral + change, neutral - change], dim=1).flatten(0, 1)
            rows = rows[::3].repeat_interleave(2)
        regions = None if given.regions is None else given.regions[rows]
        losses = sample_losses(self.flow, self._at_both(model, given, rows), target, regions)
        return losses.view(-1, 2).mean(dim=1, keepdim=True)

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
