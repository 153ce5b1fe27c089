"""Direct preference optimisation (DPO, https://arxiv.org/abs/2305.18290): the loss of pairs, of answers or of images.

With p(y) what the model in training makes of y, and p_0 what its base does,

    reward(y) = beta (log p(y) - log p_0(y))        loss = -log sigmoid(reward(chosen) - reward(rejected))

so the model is to prefer the chosen one by more than its base does, and beta says what moving away from the base costs.
Label smoothing s (https://ericmitchell.ai/cdpo.pdf) takes s of the pairs to be labelled the wrong way round:

    loss = -(1 - s) log sigmoid(margin) - s log sigmoid(-margin)        margin = reward(chosen) - reward(rejected)

The base is the same model with the LoRA switched off: nothing is loaded twice. A LoRA that training goes on from
(``network_weights``) is no part of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")  # as TRL calls them


def dpo_loss(log_ratios: Tensor, beta: float, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return each pair's loss, [B] with gradient, and its ``REWARDS``, [B, 4] without; the last is 1 or 0.

    Args:
        log_ratios: [B, 2] fp32, log p(y) - log p_0(y) of the chosen and of the rejected one.
        beta, label_smoothing: see the module's text.
    """
    rewards = beta * log_ratios
    margins = rewards[:, 0] - rewards[:, 1]
    losses = -(1 - label_smoothing) * F.logsigmoid(margins) - label_smoothing * F.logsigmoid(-margins)
    return losses, torch.column_stack([rewards, margins, margins > 0]).detach()
