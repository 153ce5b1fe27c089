"""Frozen modulation is made once a step, however its block is computed again; what trains it still learns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.families import FAMILIES, Sizes, build_transformer, example_inputs
from library.config.schema import NetworkConfig
from library.models.family_by_name import family_class
from library.models.registry import lora_targets
from library.nn.checkpointing import ActivationCheckpointing, HostOffload
from networks.network import inject_adapter
from networks.options import parse_network_args

SIZES = Sizes(width=64, head_dim=32, blocks=(2, 2), image_sides=(4, 4), text_tokens=6, batch=2)
MODULATIONS = {"flux": ("norm1.linear", "norm1_context.linear", "norm.linear"), "qwen_image": ("_mod.1",)}
FROZEN = {"flux": ["img_mod_dim=0", "txt_mod_dim=0", "single_mod_dim=0"], "qwen_image": []}
TRAINED = {"flux": ["img_mod_dim=2", "txt_mod_dim=2", "single_mod_dim=2"], "qwen_image": ["img_mod_dim=2"]}
Policy = Callable[[int], ActivationCheckpointing | None]
POLICIES: dict[str, Policy] = {
    "all": ActivationCheckpointing,
    "attention kept": lambda blocks: ActivationCheckpointing(blocks, budget_bytes=30_000),
    "offloaded": lambda blocks: ActivationCheckpointing(blocks, offload=HostOffload(torch.device("cpu"), smallest=0)),
}


def step(family: str, policy: Policy | None, arguments: list[str]) -> tuple[dict[str, Tensor], Counter[str]]:
    """Take two steps; return the second's gradients, and how often it ran each modulation layer."""
    architecture = family_class(family)
    transformer: Any = architecture.optimise_forward(build_transformer(family, SIZES, torch.float32))
    targets = lora_targets()[family]
    options = parse_network_args(NetworkConfig(network_dim=2, network_alpha=2, network_args=arguments), targets)
    network = inject_adapter(transformer, options, targets, seed=0)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(parameter.numel()))
    if policy is not None:
        transformer.enable_gradient_checkpointing(policy(len(architecture.blocks(transformer))))
    runs: Counter[str] = Counter()
    for name, module in transformer.named_modules():
        if name.startswith(("transformer_blocks", "single")) and name.endswith(MODULATIONS[family]):
            module.register_forward_hook(lambda *_, name=name: runs.update([name]))
    inputs = example_inputs(family, SIZES, torch.device("cpu"))
    for sigma in (0.2, 0.7):  # what was kept of one step must not serve the next
        runs.clear()
        transformer.zero_grad()
        output = transformer.train()(**inputs | {"timestep": torch.full((2,), sigma)}, return_dict=False)[0]
        output.square().mean().backward()
    return {name: p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None}, runs


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_modulation_runs_once_a_step(family: str, policy: str) -> None:
    plain, once = step(family, None, FROZEN[family])
    again, runs = step(family, POLICIES[policy], FROZEN[family])
    assert runs == once
    assert len(runs) == {"flux": 2 * 2 + 2, "qwen_image": 2 * 2}[family]
    assert set(runs.values()) == {1}
    torch.testing.assert_close(again, plain, rtol=0, atol=0)  # the same operations on the same numbers


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_modulation_learns_the_same(family: str) -> None:
    plain, _ = step(family, None, TRAINED[family])
    again, _ = step(family, ActivationCheckpointing, TRAINED[family])
    assert any(tensor.abs().sum() > 0 for name, tensor in again.items() if "_mod." in name or "norm" in name)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
