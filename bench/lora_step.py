"""One LoRA training step, the same for every trainer that is measured: forward, mean squared error, backward, AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.families import base_bytes


class LoraStep:
    """A model with trained LoRA parameters that can take training steps."""

    def __init__(
        self,
        model: nn.Module,
        trained: list[nn.Parameter],
        forward: Callable[[nn.Module, dict[str, Any]], Tensor],
        inputs: dict[str, Any],
        autocast: bool,
    ) -> None:
        self.model, self.trained, self.forward, self.inputs = model.train(), trained, forward, inputs
        self.base_bytes = base_bytes(model)
        self.autocast = autocast
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        self.target = target_of(inputs)

    def loss(self) -> Tensor:
        """Run one step and return its loss, still on the device."""
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.autocast):
            output = self.forward(self.model, self.inputs)
        loss = (output.float() - self.target).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def step(self) -> float:
        """Take one step; return its loss."""
        return self.loss().item()


def call_transformer(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Return the output of a diffusers transformer."""
    return model(**inputs, return_dict=False)[0]


def target_of(inputs: dict[str, Tensor]) -> Tensor:
    """Return a velocity [B, tokens, channels] to learn."""
    tokens = inputs["hidden_states"]
    return torch.randn(tokens.shape, generator=torch.Generator().manual_seed(2)).to(tokens.device)
