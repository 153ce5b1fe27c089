"""A LoRA for a language model, trained on preferences: of two answers to the same chat, one is the better.

Direct preference optimisation (DPO, https://arxiv.org/abs/2305.18290): with log p(y) the log-probability of an answer's
tokens together, and p_0 the base model's,

    reward(y) = beta (log p(y) - log p_0(y))        loss = -log sigmoid(reward(chosen) - reward(rejected))

so the model is to prefer the chosen answer by more than its base does, and beta says what moving away from the base
costs. Label smoothing s (https://ericmitchell.ai/cdpo.pdf) takes s of the pairs to be labelled the wrong way round:

    loss = -(1 - s) log sigmoid(margin) - s log sigmoid(-margin)        margin = reward(chosen) - reward(rejected)

The base is the same model with the LoRA switched off: nothing is loaded twice. It is asked first, without gradients,
so that its activations are gone before those of training come. A LoRA that training goes on from (``network_weights``)
is no part of it.

A step's loss is the mean over its pairs, whatever the batch size, the accumulation and the number of processes are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.llm.chat_batches import ChatBatch, PairSampler
from library.training.tasks.chat_lora import ChatLora

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")  # as TRL calls them


class PreferenceLora(ChatLora):
    """See the module's text."""

    metric, more_metrics = REWARDS[0], REWARDS[1:]
    sampler_type = PairSampler

    def prepare(self) -> None:
        super().prepare()
        if self.plan.config.network.network_weights:
            self.console.print("note: answers are compared with the base's, without network_weights", soft_wrap=True)

    def loss(self, model: nn.Module, batch: ChatBatch, step: int) -> tuple[Tensor, Tensor]:
        losses, rewards = self._losses(model, batch)
        return losses.mean(), rewards

    def validate(self, step: int) -> dict[str, float]:
        means = self.engine.mean_over(lambda: self.held_out, self._held_out_loss, 1 + len(REWARDS))
        return dict(zip(("val_loss", *(f"val_{key}" for key in REWARDS)), means, strict=True))

    def _held_out_loss(self, batch: ChatBatch) -> tuple[Tensor, Tensor | int]:
        losses, rewards = self._losses(self.engine.models[0], batch.to(self.accelerator.device))
        return torch.column_stack([losses, rewards]).double().sum(dim=0), len(batch)

    def _losses(self, model: nn.Module, batch: ChatBatch) -> tuple[Tensor, Tensor]:
        """Return what :func:`dpo_loss` does, of the pairs of a batch."""
        tokens, targets, chat = batch.tokens.flatten(0, 1), batch.targets.flatten(0, 1), self.plan.config.chat
        with torch.no_grad(), self.network.bypassed():
            base = model(tokens, targets, by_row=True)
        log_ratios = base - model(tokens, targets, by_row=True)  # cross-entropies, of which log p is minus one times
        return dpo_loss(log_ratios.view(-1, 2), chat.dpo_beta, chat.dpo_label_smoothing)


def dpo_loss(log_ratios: Tensor, beta: float, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return each pair's loss, [B] with gradient, and its ``REWARDS``, [B, 4] without; the last is 1 or 0.

    Args:
        log_ratios: [B, 2] fp32, log p(y) - log p_0(y) of the chosen and of the rejected answer.
        beta, label_smoothing: see the module's text.
    """
    rewards = beta * log_ratios
    margins = rewards[:, 0] - rewards[:, 1]
    losses = -(1 - label_smoothing) * F.logsigmoid(margins) - label_smoothing * F.logsigmoid(-margins)
    return losses, torch.column_stack([rewards, margins, margins > 0]).detach()
