"""What is collected from Tandem's FLUX with a LoRA, against hooks on diffusers' own model with the LoRA added."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from library.models.flux.model import optimise_forward
from library.models.flux.spec import pack_latents
from library.precision.parity.activations import collect_inputs
from networks.files.weights import LoraWeights
from networks.network import attach_lora
from tests.targets import FLUX_TARGETS
from tests.tiny import tiny_flux_inputs, tiny_flux_transformer

LAYERS = [
    "transformer_blocks.0.norm1.linear",
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.attn.to_v",
    "transformer_blocks.0.attn.to_out.0",
    "transformer_blocks.0.ff.net.2",
    "single_transformer_blocks.1.attn.to_k",
    "single_transformer_blocks.1.proj_mlp",
    "single_transformer_blocks.1.proj_out",
]


def lora(model: nn.Module, layers: list[str]) -> dict[str, LoraWeights]:
    random = torch.Generator().manual_seed(3)

    def factors(layer: nn.Linear) -> LoraWeights:
        down, up = (torch.randn(s, generator=random) * 0.1 for s in ((4, layer.in_features), (layer.out_features, 4)))
        return LoraWeights(down, up, 4.0)

    return {name: factors(model.get_submodule(name)) for name in layers}


def call(model: nn.Module, seed: int) -> Tensor:
    given = tiny_flux_inputs(seed=seed)
    text = given["prompt_embeds"]
    with torch.no_grad():
        return model(
            hidden_states=pack_latents(given["latents"]),
            timestep=given["sigmas"],
            guidance=torch.full((2,), 3.5),
            pooled_projections=given["pooled_prompt_embeds"],
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3),
            img_ids=torch.zeros(16, 3),
            return_dict=False,
        )[0]


def test_inputs_are_those_that_diffusers_layers_see() -> None:
    theirs = tiny_flux_transformer()
    weights = lora(theirs, LAYERS)
    seen: dict[str, list[Tensor]] = {name: [] for name in LAYERS}
    for name in LAYERS:
        layer = theirs.get_submodule(name)
        with torch.no_grad():
            layer.weight += weights[name].delta()
        layer.register_forward_hook(lambda _, args, __, name=name: seen[name].append(args[0].flatten(0, -2)))
    for seed in (0, 1):
        call(theirs, seed)

    ours = optimise_forward(tiny_flux_transformer())
    attach_lora(ours, weights, FLUX_TARGETS, "lora")
    modules = dict(ours.named_modules())
    fit, check = [lambda s=seed: call(ours, s) for seed in (0, 1)], [lambda: call(ours, 2)]
    # 64 and 320 inputs: 16 kB and 410 kB a moment, so the wide layers are groups of their own
    groups = list(collect_inputs(ours, LAYERS, fit, check, memory_bytes=60_000))
    assert len(groups) > 3
    found = {name: inputs for group in groups for name, inputs in group.items()}
    assert list(found) == sorted(found, key=list(found).index)
    assert set(found) == set(LAYERS)
    for name in LAYERS:
        rows = torch.cat(seen[name]).double()
        inputs = found[name]
        assert inputs.count == len(rows)
        # fp32 sums of a few hundred rows in another order
        torch.testing.assert_close(inputs.moment.double(), rows.t() @ rows / len(rows), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(inputs.amax, rows.abs().amax(0).float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(inputs.rms.double(), rows.square().mean(0).sqrt(), rtol=1e-4, atol=1e-4)
    assert found[LAYERS[1]].moment is found[LAYERS[2]].moment  # q and v see the very same tensor
    # rows come from the held-out call alone, and each is one of its rows
    seen[LAYERS[3]].clear()
    call(theirs, 2)
    rows = found[LAYERS[3]].rows
    assert 0 < len(rows) <= 512
    distances = torch.cdist(rows.double(), seen[LAYERS[3]][0].double())  # in fp32 a distance of nothing is 1e-3
    assert float(distances.amin(1).max()) < 1e-3
    assert dict(ours.named_modules()) == modules  # everything is back in its place
