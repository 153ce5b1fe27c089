"""A FLUX transformer of a few thousand weights, its inputs, and a LoRA on it that is not zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from library.config.schema import NetworkConfig
from library.models.flux.files import FLUX_TARGETS
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args


def make_flux(blocks: int = 2) -> FluxTransformer2DModel:
    """Return the same tiny model every time: width 32, so that single blocks have linear1 at 3 x 32 + 128."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=blocks,
            num_single_layers=blocks,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            pooled_projection_dim=20,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ).eval()


def run_flux(model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """Run a transformer on fixed inputs, two samples at two timesteps."""
    rng = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    return model(
        hidden_states=noise(2, 12, 16),
        encoder_hidden_states=noise(2, 5, 24),
        pooled_projections=noise(2, 20),
        timestep=torch.tensor([0.3, 0.8], dtype=dtype),
        img_ids=torch.randint(0, 4, (12, 3), generator=rng).to(dtype),
        txt_ids=torch.zeros(5, 3, dtype=dtype),
        guidance=torch.ones(2, dtype=dtype),
        return_dict=False,
    )[0]


def inject(model: nn.Module, *network_args: str, dim: int = 4, alpha: float = 4.0, **fields: float) -> AdapterNetwork:
    """Inject a LoRA described as in a config."""
    config = NetworkConfig(network_dim=dim, network_alpha=alpha, network_args=list(network_args), **fields)
    return inject_adapter(model, parse_network_args(config, FLUX_TARGETS), FLUX_TARGETS, seed=0)


def train_a_little(network: AdapterNetwork, scale: float = 0.3) -> None:
    """Give every lora_B values, as training would."""
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in network.modules.values():
            layer.lora_B.weight.normal_(0, scale, generator=rng)


def put_back(network: AdapterNetwork, state: Mapping[str, Tensor]) -> None:
    """Copy a state into the network's tensors, as a resumed run does."""
    own = network.state_dict()
    assert own.keys() == state.keys()
    for name, tensor in own.items():
        tensor.copy_(state[name])


@pytest.fixture
def mixed_lora() -> Callable[[], tuple[FluxTransformer2DModel, AdapterNetwork]]:
    """A model with a LoRA of mixed ranks, alpha other than rank, some of q, k, v missing, input layers included."""

    def make() -> tuple[FluxTransformer2DModel, AdapterNetwork]:
        model = make_flux()
        network = inject(
            model,
            "single_dim=8",
            "in_dims=[2,3,0,5,3]",
            r"exclude_patterns=['transformer_blocks\.0\.attn\.to_q', 'single_transformer_blocks\.1\.proj_out']",
            alpha=3.0,
        )
        train_a_little(network)
        return model, network

    return make
