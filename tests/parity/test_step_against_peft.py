"""One training step of ours beside the same step written plainly with diffusers and peft."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.data.batches import Batch
from library.models.family_by_name import model_family
from library.training.flow import noise_for, sample_sigmas
from library.training.tasks.image_step import FlowStep
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.parity.peft_lora import assert_gradients_are_pefts, copy_to_peft, fill_up
from tests.runs import pipeline_forward
from tests.targets import FLUX_TARGETS
from tests.tiny import tiny_flux_inputs, tiny_flux_pipeline

RANK, ALPHA = 4, 3.0


def _batch() -> Batch:
    inputs = tiny_flux_inputs(batch=3)
    return Batch(
        latents=inputs["latents"],
        text={k: inputs[k] for k in ("prompt_embeds", "pooled_prompt_embeds")},
        loss_weights=torch.ones(3),
        masks=None,
        sample_ids=[5, 6, 7],
    )


def test_loss_and_gradients_of_a_step_equal_diffusers_and_peft(tmp_path: Path) -> None:
    base = tiny_flux_pipeline(tmp_path / "base")
    batch, step = _batch(), 11

    family = model_family(ModelConfig(pretrained_model_name_or_path=str(base)))
    transformer = family.load_transformer(torch.float32)
    options = parse_network_args(NetworkConfig(network_dim=RANK, network_alpha=ALPHA), FLUX_TARGETS)
    network = fill_up(inject_adapter(transformer, options, FLUX_TARGETS, seed=0, dtype=torch.float32))
    flow = FlowConfig(timestep_sampling="flux_shift", guidance_scale=3.5)
    loss, _ = FlowStep(family, flow, seed=9).loss(transformer.train(), batch, step)
    loss.backward()

    theirs = FluxTransformer2DModel.from_pretrained(base, subfolder="transformer").requires_grad_(False)
    theirs.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(network.modules)))
    named = dict(theirs.named_parameters())
    copy_to_peft(network, named)
    noise = noise_for(batch.latents, batch.sample_ids, 9, step)
    sigmas = sample_sigmas(flow, batch.sample_ids, 16, 9, step)
    noisy = torch.lerp(batch.latents, noise, sigmas.view(-1, 1, 1, 1))
    velocity = pipeline_forward(theirs.train(), noisy, sigmas, batch.text, guidance=3.5)
    their_loss = torch.nn.functional.mse_loss(velocity, noise - batch.latents)
    their_loss.backward()

    assert len(get_peft_model_state_dict(theirs)) == len(network.state_dict())
    # fp32, the same operations with the down-projections of q, k, v stacked: rounding of sums, 1e-5 of the largest
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
    assert_gradients_are_pefts(network, named, 1e-5)


def test_a_frozen_base_gets_no_gradient_and_no_loss_weight_goes_unused(tmp_path: Path) -> None:
    base = tiny_flux_pipeline(tmp_path / "base")
    family = model_family(ModelConfig(pretrained_model_name_or_path=str(base)))
    transformer = family.load_transformer(torch.float32)
    options = parse_network_args(NetworkConfig(network_dim=RANK), FLUX_TARGETS)
    network = fill_up(inject_adapter(transformer, options, FLUX_TARGETS, seed=0, dtype=torch.float32))
    trained = {id(p) for p in network.parameters()}
    batch = _batch()
    flow = FlowStep(family, FlowConfig(), seed=9)
    flow.loss(transformer, batch, 0)[0].backward()
    assert all((p.grad is not None) == (id(p) in trained) for p in transformer.parameters())

    batch.loss_weights = torch.tensor([0.0, 2.0, 1.0])
    weighted = flow.loss(transformer, batch, 0)[0]
    each = [
        flow.loss(
            transformer,
            Batch(
                batch.latents[i : i + 1],
                {k: v[i : i + 1] for k, v in batch.text.items()},
                torch.ones(1),
                None,
                batch.sample_ids[i : i + 1],
            ),
            0,
        )[0]
        for i in range(3)
    ]
    torch.testing.assert_close(weighted, (2 * each[1] + each[2]) / 3, rtol=1e-5, atol=0)
