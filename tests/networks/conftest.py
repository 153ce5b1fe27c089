"""A FLUX transformer of a few thousand weights, its inputs, LoRAs that are not zero, and what programs make of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    ErnieImagePipeline,
    Flux2KleinPipeline,
    Flux3ModularPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    Krea2Pipeline,
    QwenImage21Pipeline,
    QwenImagePipeline,
    ZImagePipeline,
)
from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import Flux3CoreDenoiseStep
from torch import Tensor, nn

from library.config.schema import NetworkConfig
from library.models.layer_names import LoraTargets
from networks.files.adapters import load_lora
from networks.files.layouts import layout_of
from networks.files.weights import LoraWeights
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.targets import FLUX_TARGETS
from tests.tiny_qwen import tiny_qwen_tokenizer
from tests.tiny_qwen_21 import TinyProcessor


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


def filled(
    model: nn.Module, targets: LoraTargets = FLUX_TARGETS, *network_args: str, scale: float = 0.1, **fields: Any
) -> AdapterNetwork:
    """Inject an adapter, rank 4 and alpha 3 unless given, of which every parameter has been moved, as training does."""
    config = NetworkConfig(**{"network_dim": 4, "network_alpha": 3.0, "network_args": list(network_args), **fields})
    network = inject_adapter(model, parse_network_args(config, targets), targets, seed=0)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=random)
    return network


def random_pair(
    shape: Sequence[int], rank: int, alpha: float, random: torch.Generator, down: float = 1.0, up: float | Tensor = 1.0
) -> LoraWeights:
    """Return a LoRA of a layer of ``shape`` [out, in], of random numbers times ``down`` and ``up``."""
    a = torch.randn(rank, shape[1], generator=random) * down
    return LoraWeights(a, torch.randn(shape[0], rank, generator=random) * up, alpha)


PIPELINES: dict[str, Any] = {
    "flux": FluxPipeline,
    "qwen_image": QwenImagePipeline,
    "qwen_image_21": QwenImage21Pipeline,
    "z_image": ZImagePipeline,
    "flux2_klein": Flux2KleinPipeline,
    "krea2": Krea2Pipeline,
    "ernie_image": ErnieImagePipeline,
}


def diffusers_pipeline(family: str, transformer: nn.Module) -> Any:
    """Return diffusers' pipeline around ``transformer`` alone."""
    if family.startswith("flux3"):
        modular = Flux3ModularPipeline(blocks=Flux3CoreDenoiseStep())
        modular.update_components(transformer=transformer)
        return modular
    pipeline = PIPELINES[family]
    required = [name for name, each in inspect.signature(pipeline).parameters.items() if each.default is each.empty]
    parts = {"transformer": transformer, "processor": TinyProcessor(tiny_qwen_tokenizer())}
    return pipeline(**(dict.fromkeys(required) | {name: parts[name] for name in parts if name in required}))


def assert_read_as_written(path: Path, network: AdapterNetwork, targets: LoraTargets, save_format: str) -> None:
    """Hold a file's layout, and every layer's A, B and alpha, to what was saved in fp32."""
    read = load_lora(path, targets)
    assert read.layout == save_format
    for name, weights in network.weights().items():
        if read.weights[name].rank != weights.rank:  # a layer that is joined there has its parts' ranks together
            found, update = ((w.up @ w.down) * w.scale for w in (read.weights[name], weights))
            torch.testing.assert_close(found, update, rtol=1e-5, atol=1e-6)
            continue
        assert torch.equal(read.weights[name].down, weights.down)
        if layout_of("lora", save_format, targets).alpha == "folded":  # alpha / rank is in B there
            assert read.weights[name].alpha == read.weights[name].rank
            torch.testing.assert_close(read.weights[name].up, weights.up * weights.scale, rtol=1e-7, atol=0)
        else:
            assert torch.equal(read.weights[name].up, weights.up)
            assert read.weights[name].alpha == weights.alpha


def comfy_weight(weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return, in float64, what ComfyUI makes of a layer's weight at strength 1, from its ``comfy/weight_adapter``.

    ``tensors`` are those behind one module's stem: ``lokr_w1``, ``alpha``, ...
    """
    w = weight.double()
    t = {name: tensor.double() for name, tensor in tensors.items()}
    alpha = float(t["alpha"])
    if "dora_scale" in t:  # lora.py with base.py's weight_decompose, magnitudes along the outputs
        diff = t["lora_up.weight"] @ t["lora_down.weight"] * (alpha / t["lora_down.weight"].shape[0])
        assert t["dora_scale"].shape == (w.shape[0], 1)
        return (w + diff) * (t["dora_scale"] / w.norm(dim=1, keepdim=True))
    if any(name.startswith("lokr") for name in t):
        dim = None
        if (w1 := t.get("lokr_w1")) is None:
            dim = t["lokr_w1_b"].shape[0]
            w1 = t["lokr_w1_a"] @ t["lokr_w1_b"]
        if (w2 := t.get("lokr_w2")) is None:
            dim = t["lokr_w2_b"].shape[0]
            w2 = t["lokr_w2_a"] @ t["lokr_w2_b"]
        return w + (alpha / dim if dim else 1.0) * torch.kron(w1, w2)
    product = (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])
    return w + alpha / t["hada_w1_b"].shape[0] * product


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
