"""What every variant of FLUX.1 must do: diffusers' numbers forward and backward, a step of peft's, LoRAs that load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from library.conditions import Conditions
from library.config.run_schema import SAVE_FORMATS
from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.errors import UserError
from library.models.family_by_name import model_family
from library.models.flux.spec import FluxFamily
from library.models.registry import lora_targets
from networks.files.writing import save_adapter
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.flux_variants import TEXT, VARIANTS, diffusers_forward, tiny_conditions
from tests.models.claims import assert_same_gradients, assert_step_is_pefts, gradients_of
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
    transformer = family.load_transformer(torch.float32)
    leaves = {"latents": latents, **text}
    conditions.map(lambda tensor: leaves.setdefault(f"condition {len(leaves)}", tensor))

    def split(given: dict[str, Tensor]) -> tuple[dict[str, Tensor], Conditions]:
        shown = iter([given[name] for name in given if name.startswith("condition")])
        return {name: given[name] for name in text}, conditions.map(lambda _: next(shown))

    def ours(given: dict[str, Tensor]) -> Tensor:
        words, shown = split(given)
        return family.predict_velocity(transformer, given["latents"], sigmas, words, 3.5, shown)

    def theirs(given: dict[str, Tensor]) -> Tensor:
        return diffusers_forward(pipeline, pipeline.transformer, given["latents"], sigmas, *split(given), 3.5)

    found = [gradients_of(each, leaves, list(leaves)) for each in (ours, theirs)]
    assert len(found[0][1]) == 4 + (variant.name == "flux_fill")
    assert_same_gradients(*found)


def test_a_training_step_is_that_of_diffusers_and_peft(variant: Variant) -> None:
    latents, _, text, conditions = inputs_of(variant, batch=3)
    flow = FlowConfig(timestep_sampling="flux_shift", guidance_scale=3.5)
    theirs = FluxTransformer2DModel.from_pretrained(variant.folder, subfolder="transformer")
    pipeline = variant.pipeline()

    def velocity(transformer: Any, noisy: Tensor, sigmas: Tensor) -> Tensor:
        return diffusers_forward(pipeline, transformer, noisy, sigmas, text, conditions, 3.5)

    targets = lora_targets()[variant.name]
    left = assert_step_is_pefts(
        variant.family(), targets, {"latents": latents}, text, flow, theirs, velocity, conditions
    )
    assert left == {"norm_out.linear", "proj_out"}


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
        ("flux", "flux_fill", r'is FLUX\.1 \(flux_fill\), not flux; set model_type = "flux_fill"'),
        ("flux_kontext", "flux_fill", r'is FLUX\.1 \(flux_fill\), not flux_kontext; set model_type = "flux_fill"'),
        ("flux_fill", "flux", r'is FLUX\.1 \(flux\), not flux_fill; set model_type = "flux"'),
        ("flux_fill", "flux_kontext", r'not flux_fill; set model_type = "flux'),
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
