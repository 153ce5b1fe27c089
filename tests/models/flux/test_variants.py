"""What every variant of FLUX.1 must do: diffusers' numbers forward and backward, a step of peft's, LoRAs that load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from torch import Tensor

from library.conditions import Conditions
from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.data.batches import Batch
from library.errors import UserError
from library.models.family_by_name import model_family
from library.models.flux.spec import FluxFamily
from library.models.registry import lora_targets
from library.training.flow import noise_for, sample_sigmas
from library.training.tasks.image_step import FlowStep
from networks.files.adapters import load_lora
from networks.files.layouts import SAVE_FORMATS
from networks.files.writing import save_adapter
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.flux_variants import TEXT, VARIANTS, diffusers_forward, tiny_conditions
from tests.tiny import FLUX_PIPELINES, SingleFiles, save_single_files, tiny_flux_inputs, tiny_flux_pipeline

ALPHA = 3.0
EMBEDDER = ("in_dims=[4,0,0,0,0]",)


@dataclass(frozen=True)
class Variant:
    """A tiny random model of one variant, on disk in all layouts."""

    name: str
    folder: Path
    files: SingleFiles

    def family(self) -> FluxFamily:
        family = model_family(ModelConfig(model_type=self.name, pretrained_model_name_or_path=str(self.folder)))
        assert isinstance(family, FluxFamily)
        return family

    def pipeline(self) -> Any:
        pipeline = FLUX_PIPELINES[self.name].from_pretrained(self.folder)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Variant]:
    root = tmp_path_factory.mktemp("variants")
    made = {}
    for name in ("flux", *VARIANTS):
        folder = tiny_flux_pipeline(root / name, model_type=name)
        made[name] = Variant(name, folder, save_single_files(folder, root / f"{name}_files"))
    return made


@pytest.fixture(params=VARIANTS)
def variant(variants: dict[str, Variant], request: pytest.FixtureRequest) -> Variant:
    return variants[request.param]


def inputs_of(variant: Variant, batch: int = 2) -> tuple[Tensor, Tensor, dict[str, Tensor], Conditions]:
    inputs = tiny_flux_inputs(batch=batch)
    text = {name: inputs[name] for name in TEXT}
    return inputs["latents"], inputs["sigmas"], text, tiny_conditions(variant.name, batch)


def lora_on(transformer: torch.nn.Module, name: str, *network_args: str) -> AdapterNetwork:
    """Inject a LoRA that already does something."""
    config = NetworkConfig(network_dim=4, network_alpha=ALPHA, network_args=list(network_args))
    network = inject_adapter(
        transformer, parse_network_args(config, lora_targets()[name]), lora_targets()[name], 0, torch.float32
    )
    random = torch.Generator().manual_seed(1)
    for layer in network.modules.values():
        layer.lora_B.weight.data.normal_(std=0.05, generator=random)
    return network


def test_velocity_and_input_gradients_are_diffusers(variant: Variant) -> None:
    family, pipeline = variant.family(), variant.pipeline()
    latents, sigmas, text, conditions = inputs_of(variant)
    weight = torch.randn(latents.shape, generator=torch.Generator().manual_seed(2))

    def gradients(forward: Any) -> tuple[Tensor, list[Tensor]]:
        leaves: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            leaves.append(tensor.clone().requires_grad_())
            return leaves[-1]

        velocity = forward(leaf(latents), {name: leaf(one) for name, one in text.items()}, conditions.map(leaf))
        (velocity * weight).sum().backward()
        return velocity.detach(), [one.grad for one in leaves if one.grad is not None]

    transformer = family.load_transformer(torch.float32)
    ours, our_gradients = gradients(lambda x, t, c: family.predict_velocity(transformer, x, sigmas, t, 3.5, c))
    theirs, their_gradients = gradients(
        lambda x, t, c: diffusers_forward(pipeline, pipeline.transformer, x, sigmas, t, c, 3.5)
    )
    # fp32 and the same operations; sums over tokens may be split differently
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert len(our_gradients) == len(their_gradients) == 4 + (variant.name == "flux_fill")
    for one, other in zip(our_gradients, their_gradients, strict=True):
        assert other.abs().max() > 1e-3  # every input matters
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_a_training_step_is_that_of_diffusers_and_peft(variant: Variant) -> None:
    latents, _, text, conditions = inputs_of(variant, batch=3)
    batch = Batch(latents, text, torch.ones(3), None, [5, 6, 7], conditions=conditions)
    family, flow, step = variant.family(), FlowConfig(timestep_sampling="flux_shift", guidance_scale=3.5), 11
    transformer = family.load_transformer(torch.float32)
    network = lora_on(transformer, variant.name, *EMBEDDER)
    loss, _ = FlowStep(family, flow, seed=9).loss(transformer.train(), batch, step)
    loss.backward()

    theirs = FluxTransformer2DModel.from_pretrained(variant.folder, subfolder="transformer").requires_grad_(False)
    theirs.add_adapter(LoraConfig(r=4, lora_alpha=ALPHA, target_modules=list(network.modules)))
    named = dict(theirs.named_parameters())
    for name, tensor in network.state_dict().items():
        named[name.replace(".weight", ".default.weight")].data.copy_(tensor)
    noise = noise_for(latents, batch.sample_ids, 9, step)
    sigmas = sample_sigmas(flow, batch.sample_ids, 16, 9, step)
    noisy = torch.lerp(latents, noise, sigmas.view(-1, 1, 1, 1))
    velocity = diffusers_forward(variant.pipeline(), theirs.train(), noisy, sigmas, text, conditions, 3.5)
    their_loss = torch.nn.functional.mse_loss(velocity, noise - latents)
    their_loss.backward()

    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
    assert "x_embedder" in network.modules
    for name, layer in network.modules.items():
        for part in ("lora_A", "lora_B"):
            ours, peft = getattr(layer, part).weight.grad, named[f"{name}.{part}.default.weight"].grad
            assert (ours - peft).abs().max() <= 1e-5 * peft.abs().max(), f"{name}.{part}"


@pytest.mark.parametrize("save_format", SAVE_FORMATS)
def test_a_saved_lora_gives_the_pipeline_our_output(variant: Variant, save_format: str, tmp_path: Path) -> None:
    family, pipeline = variant.family(), variant.pipeline()
    transformer = family.load_transformer(torch.float32)
    # diffusers' converters split linear1 at FLUX.1's width only, and drop img_in of both layouts without a word
    options = EMBEDDER if save_format == "diffusers" else ("single_dim=0",)
    network = lora_on(transformer, variant.name, *options)
    save_adapter(tmp_path / "a.safetensors", network.weights(), lora_targets()[variant.name], save_format)
    pipeline.load_lora_weights(tmp_path / "a.safetensors")
    latents, sigmas, text, conditions = inputs_of(variant)
    with torch.no_grad():
        ours = family.predict_velocity(transformer, latents, sigmas, text, 3.5, conditions)
        theirs = diffusers_forward(pipeline, pipeline.transformer, latents, sigmas, text, conditions, 3.5)
        plain = variant.pipeline()
        without = diffusers_forward(plain, plain.transformer, latents, sigmas, text, conditions, 3.5)
    assert (ours - without).abs().max() > 1e-2  # the LoRA does something
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("save_format", SAVE_FORMATS)
def test_every_format_keeps_the_first_layers_lora_at_its_width(
    variant: Variant, save_format: str, tmp_path: Path
) -> None:
    transformer = variant.family().load_transformer(torch.float32)
    weights = lora_on(transformer, variant.name, *EMBEDDER).weights()
    assert weights["x_embedder"].down.shape == (4, 384 if variant.name == "flux_fill" else 64)
    save_adapter(tmp_path / "a.safetensors", weights, lora_targets()[variant.name], save_format)
    read = load_lora(tmp_path / "a.safetensors", lora_targets()[variant.name]).weights
    assert read.keys() == weights.keys()
    # kohya and comfy fold a fused layer's scale into B: one fp32 rounding
    torch.testing.assert_close(read["x_embedder"].delta(torch.float64), weights["x_embedder"].delta(torch.float64))


@pytest.mark.parametrize("comfy", [False, True])
def test_published_files_hold_the_same_model_as_the_folder(variant: Variant, comfy: bool) -> None:
    family = model_family(variant.files.model_config(comfy=comfy, model_type=variant.name))
    assert family.name == variant.name
    ours = family.load_transformer(torch.float32).state_dict()
    theirs = FluxTransformer2DModel.from_pretrained(variant.folder, subfolder="transformer").state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (family.latent_channels, family.modelspec_architecture) == (16, "flux-1-dev")


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    ("model_type", "given", "message"),
    [
        ("flux", "flux_fill", r"a FLUX\.1 Fill transformer \(384 channels\); set model_type = flux_fill"),
        ("flux_kontext", "flux_fill", r"a FLUX\.1 Fill transformer \(384 channels\); set model_type = flux_fill"),
        ("flux_fill", "flux", r"takes 64 channels and no mask, so it is not FLUX\.1 Fill; set model_type = flux"),
        ("flux_fill", "flux_kontext", r"set model_type = flux \(Kontext: flux_kontext\)"),
    ],
)
def test_another_variants_model_is_refused_with_its_name(
    variants: dict[str, Variant], model_type: str, given: str, message: str, single: bool
) -> None:
    other = variants[given]
    config = ModelConfig(model_type=model_type, pretrained_model_name_or_path=str(other.folder))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        model_family(other.files.model_config(model_type=model_type) if single else config)


def test_dev_and_kontext_have_one_shape_and_load_as_each_other(variants: dict[str, Variant]) -> None:
    for model_type, given in (("flux", "flux_kontext"), ("flux_kontext", "flux")):
        files = variants[given].files
        assert model_family(files.model_config(model_type=model_type)).name == model_type
