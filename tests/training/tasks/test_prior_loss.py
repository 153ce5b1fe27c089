"""A step that preserves, beside other trainers' definitions written out on the same batch; and what is not theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.data.batches import Batch
from library.models.family import Family
from library.models.family_by_name import model_family
from library.models.flux.files import FLUX_TARGETS
from library.training.flow import noise_for, sample_sigmas
from library.training.tasks.image_step import FlowStep
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.parity.peft_lora import fill_up
from tests.runs import pipeline_forward
from tests.tiny import tiny_flux_inputs, tiny_flux_pipeline

FLOW = FlowConfig(timestep_sampling="flux_shift", guidance_scale=3.5)
SEED, STEP = 9, 11
# fp32 on both sides: rounding of sums in another order, relative to the largest value
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux_pipeline(tmp_path_factory.mktemp("base") / "flux")


@pytest.fixture(scope="module")
def family(base: Path) -> Family:
    return model_family(ModelConfig(pretrained_model_name_or_path=str(base)))


def with_lora(family: Family, **options: object) -> tuple[torch.nn.Module, AdapterNetwork]:
    transformer = family.load_transformer(torch.float32)
    parsed = parse_network_args(NetworkConfig(network_dim=4, network_alpha=3.0, **options), FLUX_TARGETS)
    return transformer.train(), fill_up(inject_adapter(transformer, parsed, FLUX_TARGETS, seed=0, dtype=torch.float32))


def batch_of(ids: list[int], prior: list[bool], masks: Tensor | None = None) -> Batch:
    """Samples of these ids; those of one id have the same latents, and those that preserve another caption."""
    inputs = tiny_flux_inputs(batch=3)
    rows = [ids.index(each) for each in ids]
    text = {k: inputs[k][rows].clone() for k in ("prompt_embeds", "pooled_prompt_embeds")}
    for tensor in text.values():
        tensor[torch.tensor(prior)] *= -0.5
    return Batch(inputs["latents"][rows], text, torch.ones(len(ids)), masks, ids, prior=prior)


class Written:
    """The quantities of a step by diffusers' own transformer and formulas; the LoRA is merged into a second one."""

    def __init__(self, base: Path, network: AdapterNetwork, batch: Batch) -> None:
        self.plain = FluxTransformer2DModel.from_pretrained(base, subfolder="transformer")
        trained = FluxTransformer2DModel.from_pretrained(base, subfolder="transformer")
        for name, weights in network.weights().items():
            layer = trained.get_submodule(name)
            layer.weight.data = weights.apply(layer.weight.data.float(), 1.0)
        noise = noise_for(batch.latents, batch.sample_ids, SEED, STEP)
        sigmas = sample_sigmas(FLOW, batch.sample_ids, 16, SEED, STEP)
        noisy = torch.lerp(batch.latents, noise, sigmas.view(-1, 1, 1, 1))
        with torch.no_grad():
            self.v = pipeline_forward(trained, noisy, sigmas, batch.text, guidance=3.5).double()
            self.v_0 = pipeline_forward(self.plain, noisy, sigmas, batch.text, guidance=3.5).double()
        self.target = (noise - batch.latents).double()


def test_marked_samples_learn_what_sd_scripts_and_onetrainer_put_in_the_targets_place(
    base: Path, family: Family
) -> None:
    transformer, network = with_lora(family)
    batch = batch_of([5, 6, 7], [False, True, False])
    loss, _ = FlowStep(family, FLOW, SEED, network=network).loss(transformer, batch, STEP)

    each = Written(base, network, batch)
    each.target[[1]] = each.v_0[[1]]  # diff_output_preservation of sd-scripts, PRIOR_PREDICTION of OneTrainer
    torch.testing.assert_close(loss.double(), (each.v - each.target).square().mean(), **CLOSE)


def test_a_class_caption_beside_each_sample_is_twice_ai_toolkits_loss(base: Path, family: Family) -> None:
    transformer, network = with_lora(family)
    batch = batch_of([5, 6, 7, 5, 6, 7], [False] * 3 + [True] * 3)  # the same noise and noise levels: by the ids
    loss, _ = FlowStep(family, FLOW, SEED, network=network).loss(transformer, batch, STEP)

    each = Written(base, network, batch)
    taught, kept = slice(0, 3), slice(3, 6)
    normal = (each.v[taught] - each.target[taught]).square().mean()
    preservation = (each.v[kept] - each.v_0[kept]).square().mean()
    torch.testing.assert_close(2 * loss.double(), normal + preservation, **CLOSE)


def test_outside_of_the_mask_the_loss_is_onetrainers_masked_prior_preservation(base: Path, family: Family) -> None:
    transformer, network = with_lora(family)
    mask = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    batch, flow = batch_of([5, 6, 7], [False] * 3, mask), FLOW.model_copy(update={"masked_loss": True})
    loss, _ = FlowStep(family, flow, SEED, network=network, outside_mask=0.4).loss(transformer, batch, STEP)

    each = Written(base, network, batch)
    losses = (each.v - each.target).square() * mask
    prior_losses = (each.v - each.v_0).square() * (1 - mask) * 0.4
    torch.testing.assert_close(loss.double(), (losses + prior_losses).mean(), **CLOSE)


def test_the_frozen_answer_is_a_constant_to_the_gradient(base: Path, family: Family) -> None:
    transformer, network = with_lora(family)
    batch = batch_of([5, 6, 7], [True] * 3)
    FlowStep(family, FLOW, SEED, network=network).loss(transformer, batch, STEP)[0].backward()
    ours = {
        name: parameter.grad.clone() for name, parameter in transformer.named_parameters() if parameter.requires_grad
    }

    transformer.zero_grad()
    noise = noise_for(batch.latents, batch.sample_ids, SEED, STEP)
    sigmas = sample_sigmas(FLOW, batch.sample_ids, 16, SEED, STEP)
    noisy = torch.lerp(batch.latents, noise, sigmas.view(-1, 1, 1, 1))
    constant = Written(base, network, batch).v_0.float()
    velocity = pipeline_forward(transformer, noisy, sigmas, batch.text, guidance=3.5)
    (velocity - constant).square().mean().backward()
    largest = max(gradient.abs().max() for gradient in ours.values())
    assert largest > 0
    for name, parameter in transformer.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-5 * float(largest))


KINDS = {
    "lora": {},
    "joined qkv": {"network_args": ["split_qkv=False"]},
    "pissa": {"init_lora_weights": "pissa"},
    "dropout": {"network_dropout": 0.5},
    "dora": {"network_type": "dora"},
    "lokr": {"network_type": "lokr"},
    "loha": {"network_type": "loha"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_bypassed_every_kind_of_adapter_is_the_untouched_model(family: Family, kind: str) -> None:
    transformer = family.load_transformer(torch.float32).train()
    parsed = parse_network_args(NetworkConfig(**({"network_dim": 4} | KINDS[kind])), FLUX_TARGETS)
    network = inject_adapter(transformer, parsed, FLUX_TARGETS, seed=0, dtype=torch.float32)
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    inputs = tiny_flux_inputs(batch=3)
    arguments = inputs.pop("latents"), inputs.pop("sigmas"), inputs
    with torch.no_grad():
        plain = pipeline_forward(family.load_transformer(torch.float32), *arguments)
        with network.bypassed():
            bypassed = pipeline_forward(transformer, *arguments)
        changed = pipeline_forward(transformer, *arguments)
    torch.testing.assert_close(bypassed, plain, rtol=0, atol=1e-6 * float(plain.abs().max()))
    assert (changed - plain).abs().max() > 0.05 * plain.abs().max()


def test_the_change_elsewhere_is_the_growth_of_the_squared_error_on_what_the_model_paints(
    base: Path, family: Family
) -> None:
    transformer, network = with_lora(family)
    batch = batch_of([5, 6, 7], [False] * 3)
    step = FlowStep(family, FLOW, SEED, network=network)
    with torch.no_grad():
        found = step.prior_losses(transformer.eval(), batch, [0.2, 0.8])
    expected = []
    for sigma in (0.2, 0.8):
        noise = noise_for(batch.latents, batch.sample_ids, "validation", round(sigma * 1e6))
        noisy, sigmas = torch.lerp(batch.latents, noise, sigma), torch.full((3,), sigma)
        with torch.no_grad():
            v = pipeline_forward(transformer, noisy, sigmas, batch.text, guidance=3.5)
            plain = FluxTransformer2DModel.from_pretrained(base, subfolder="transformer")
            v_0 = pipeline_forward(plain, noisy, sigmas, batch.text, guidance=3.5)
        expected.append((v - v_0).double().square().mean(dim=(1, 2, 3)))
        # E|v - (v_0 + e)|^2 - E|e|^2 = |v - v_0|^2 for an error e of mean zero: the claim of the docstring, by numbers
        e = torch.randn(4000, *v.shape[1:], generator=torch.Generator().manual_seed(0)).double()
        e = e - e.mean(dim=0)
        growth = ((v - v_0)[0].double() - e).square().mean() - e.square().mean()
        torch.testing.assert_close(growth, expected[-1][0], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.double(), torch.cat(expected), **CLOSE)
