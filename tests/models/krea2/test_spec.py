"""The Krea 2 family against diffusers' Krea2Pipeline: velocity, gradients, text, samples, files, a peft step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.models.family_by_name import model_family
from library.models.krea2.model import optimise_forward
from library.models.krea2.spec import Krea2Family
from library.models.vae import pack_latents, unpack_latents
from library.training.sampling.sample_model import sample_family
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.models.claims import (
    assert_refused,
    assert_same_gradients,
    assert_sample_is_the_pipelines,
    assert_step_is_pefts,
    family_maker,
    gradients_of,
    quiet,
    saved_bytes,
)
from tests.targets import KREA2_TARGETS
from tests.tiny_krea2 import (
    TEXT_LAYERS,
    TEXT_WIDTH,
    positions,
    save_krea2_split_files,
    tiny_krea2_inputs,
    tiny_krea2_pipeline,
    tiny_krea2_transformer,
)
from tests.tiny_z_image import tiny_z_pipeline

FLOW = FlowConfig(timestep_sampling="krea2_shift")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_krea2_pipeline(tmp_path_factory.mktemp("krea2") / "pipeline")


family_of = family_maker("krea2", Krea2Family)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Krea2Pipeline:
    return quiet(Krea2Pipeline.from_pretrained(folder))


def text_of(inputs: dict[str, Tensor], *lengths: int) -> dict[str, Tensor]:
    """Return the text of ``inputs``, captions cut to ``lengths`` by a mask; without lengths there is none."""
    if not lengths:
        return {"prompt_embeds": inputs["prompt_embeds"]}
    mask = inputs["prompt_embeds_mask"].clone()
    for row, length in zip(mask, lengths, strict=True):
        row[length:] = False
    return {"prompt_embeds": inputs["prompt_embeds"], "prompt_embeds_mask": mask}


def by_hand(transformer: nn.Module, latents: Tensor, sigmas: Tensor, text: dict[str, Tensor]) -> Tensor:
    """Call a transformer as Krea2Pipeline does; return the velocity."""
    rows, columns = latents.shape[-2] // 2, latents.shape[-1] // 2
    output = transformer(
        hidden_states=pack_latents(latents),
        encoder_hidden_states=text["prompt_embeds"].unflatten(-1, (TEXT_LAYERS, TEXT_WIDTH)),
        timestep=sigmas,
        position_ids=positions(text["prompt_embeds"].shape[1], rows, columns),
        encoder_attention_mask=text.get("prompt_embeds_mask"),
        return_dict=False,
    )[0]
    return unpack_latents(output, *latents.shape[-2:])


@pytest.mark.parametrize("case", ["same lengths", "two lengths", "checkpointing"])
def test_velocity_and_input_gradients_are_diffusers(folder: Path, pipeline: Krea2Pipeline, case: str) -> None:
    inputs = tiny_krea2_inputs(tokens=20)
    latents = inputs["latents"][..., :6]  # 8 x 6: a swapped axis would show
    text = text_of(inputs, *((20, 9) if case == "two lengths" else ()))
    family = family_of(folder)
    transformer = family.load_transformer(torch.float32)
    if case == "checkpointing":
        transformer.enable_gradient_checkpointing()
        transformer.train()

    def called(velocity: Any) -> Any:
        return lambda x: velocity(x["latents"], inputs["sigmas"], text | {"prompt_embeds": x["prompt_embeds"]})

    names, given = ("latents", "prompt_embeds"), {**inputs, "latents": latents}
    ours = gradients_of(called(lambda *given: family.predict_velocity(transformer, *given)), given, names)
    theirs = gradients_of(called(lambda *given: by_hand(pipeline.transformer, *given)), given, names)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("seed", range(4))
def test_any_shape_gives_diffusers_numbers(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    batch, rows, columns, tokens = (int(torch.randint(1, most, (), generator=random)) for most in (4, 9, 9, 60))
    mask = torch.rand(batch, tokens, generator=random) < 0.7
    mask[:, 0] = True
    shape = (batch, tokens, TEXT_LAYERS, TEXT_WIDTH)
    leaves = [torch.randn(s, generator=random) for s in ((batch, rows * columns, 64), shape)]
    sigmas, weight = torch.rand(batch, generator=random), torch.randn(leaves[0].shape, generator=random)
    found = []
    for model in (tiny_krea2_transformer(3, seed), optimise_forward(tiny_krea2_transformer(3, seed))):
        image, text = (leaf.clone().requires_grad_() for leaf in leaves)
        output = model(image, text, sigmas, positions(tokens, rows, columns), mask, return_dict=False)[0]
        found.append([output, *torch.autograd.grad((output * weight).sum(), (image, text))])
    for theirs, ours in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_a_block_saves_less_for_backward_than_diffusers() -> None:
    saved = []
    for optimise in (False, True):
        model = tiny_krea2_transformer()
        if optimise:
            config = NetworkConfig(network_dim=4, network_alpha=4)
            inject_adapter(optimise_forward(model), parse_network_args(config, KREA2_TARGETS), KREA2_TARGETS, seed=0)
        else:
            model.requires_grad_(False).add_adapter(LoraConfig(r=4, target_modules="all-linear"))
        x, temb = torch.randn(1, 200, 64, requires_grad=True), torch.randn(1, 1, 6 * 64)
        turns, block = model.rotary_emb(torch.zeros(200, 3)), model.transformer_blocks[0]
        saved.append(saved_bytes(lambda block=block, turns=turns, x=x, temb=temb: block(x, temb, turns)))
    assert saved[1] < 0.65 * saved[0]


def test_a_training_step_is_that_of_diffusers_and_peft_with_a_lora_on_every_linear_layer(folder: Path) -> None:
    inputs = tiny_krea2_inputs(3, tokens=40)
    text = text_of(inputs, 40, 5, 33)
    theirs = Krea2Transformer2DModel.from_pretrained(folder, subfolder="transformer")
    velocity = lambda *given: by_hand(*given, text)  # noqa: E731
    assert not assert_step_is_pefts(family_of(folder), KREA2_TARGETS, inputs, text, FLOW, theirs, velocity)


def test_turbo_samples_with_a_shift_that_does_not_follow_the_size(tmp_path: Path) -> None:
    turbo = tiny_krea2_pipeline(tmp_path / "turbo", turbo=True)
    theirs = quiet(Krea2Pipeline.from_pretrained(turbo))
    family = family_of(turbo)
    assert_sample_is_the_pipelines(family, theirs, 1.0, guidance_scale=0.0)
    assert family.own_sampling() == {"timestep_sampling": "shift", "discrete_flow_shift": pytest.approx(math.exp(1.15))}


def test_a_single_file_is_raw_and_as_the_model_of_samples_turbo(folder: Path, tmp_path: Path) -> None:
    files = save_krea2_split_files(folder, tmp_path)
    config = ModelConfig(model_type="krea2", pretrained_model_name_or_path=str(folder))
    shown = sample_family(str(files.transformer), config, family_of(folder))
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / 8, 8).tolist(), mu=1.15)  # as Krea2Pipeline, is_distilled
    for tokens in (256, 4096):
        assert shown.sampling_sigmas(8, tokens) == pytest.approx(scheduler.sigmas.tolist())
    assert model_family(files.model_config()).sampling_sigmas(8, 256) == family_of(folder).sampling_sigmas(8, 256)


def test_training_is_shifted_as_raw_is_sampled(folder: Path) -> None:
    family = family_of(folder)
    assert family.own_sampling() == {"timestep_sampling": "krea2_shift"}
    for tokens in (256, 1024, 4096):
        mu = 0.5 + (tokens - 256) / (6400 - 256) * 0.65
        even = torch.linspace(1, 0.25, 4)
        expected = [*(math.exp(mu) / (math.exp(mu) + 1 / even - 1)).tolist(), 0.0]
        assert family.sampling_sigmas(4, tokens) == pytest.approx(expected)


def test_other_models_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    files = save_krea2_split_files(folder, tmp_path / "files")
    z_image = tiny_z_pipeline(tmp_path / "z")
    alone = z_image / "text_encoder/model.safetensors"
    short = {**load_file(files.transformer)}
    short["txtfusion.projector.weight"] = torch.ones(1, 3)
    save_file(short, tmp_path / "short.safetensors")
    wanted = {
        "not Krea2Transformer2DModel; set model_type = .z_image": {"pretrained_model_name_or_path": str(z_image)},
        r"not Qwen3-VL \(no model.layers.0": {"text_encoder": str(files.vae)},
        "Qwen3, not Qwen3-VL; give Qwen3-VL as text_encoder": {"text_encoder": str(z_image)},
        "text 64 wide, the transformer takes 32; give Qwen3-VL-4B": {"text_encoder": str(alone)},
        "takes 3 layers of the text encoder, 12 are read": {
            "pretrained_model_name_or_path": str(tmp_path / "short.safetensors")
        },
        "a Qwen-Image autoencoder .*, not Krea 2": {"pretrained_model_name_or_path": str(files.vae)},
    }
    assert_refused(files.model_config, wanted)
