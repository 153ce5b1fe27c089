"""peft's LoRA beside ours: the same weights put into it, and the gradients of a step compared."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from networks.network import AdapterNetwork


def fill_up(network: AdapterNetwork) -> AdapterNetwork:
    """Give lora_B values, so that lora_A gets a gradient too."""
    random = torch.Generator().manual_seed(1)
    for layer in network.modules.values():
        layer.lora_B.weight.data.normal_(std=0.05, generator=random)
    return network


def copy_to_peft(network: AdapterNetwork, named: Mapping[str, nn.Parameter]) -> None:
    """Copy our weights into peft's parameters."""
    for name, tensor in network.state_dict().items():
        named[name.replace(".weight", ".default.weight")].data.copy_(tensor)


def assert_gradients_are_pefts(network: AdapterNetwork, named: Mapping[str, nn.Parameter], within: float) -> None:
    """Compare every gradient: ``within`` a share of a tensor's largest."""
    for name, layer in network.modules.items():
        for part in ("lora_A", "lora_B"):
            ours, theirs = getattr(layer, part).weight.grad, named[f"{name}.{part}.default.weight"].grad
            assert ours is not None
            assert theirs is not None
            assert (ours - theirs).abs().max() <= within * theirs.abs().max(), f"{name}.{part}"
