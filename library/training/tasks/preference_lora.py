"""A LoRA for a language model, trained on preferences: of two answers to the same chat, one is the better.

DPO (``library.training.tasks.dpo``), with log p(y) the log-probability of an answer's tokens together. The base is
asked first, without gradients, so that its activations are gone before those of training come.

A step's loss is the mean over its pairs, whatever the batch size, the accumulation and the number of processes are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from library.llm.chat_batches import ChatBatch, PairSampler
from library.training.tasks.chat_lora import ChatLora
from library.training.tasks.dpo import REWARDS, dpo_loss


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
