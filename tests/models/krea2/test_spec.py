"""Krea 2 alone: any shape, noise levels of Raw and Turbo, refusals. What it shares: the files of the folder above."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline
from safetensors.torch import load_file, save_file

from library.config.schema import ModelConfig
from library.models.family_by_name import model_family
from library.models.krea2.model import optimise_forward
from library.models.krea2.spec import Krea2Family
from library.training.sampling.sample_model import sample_family
from tests.models.claims import assert_refused, assert_sample_is_the_pipelines, family_maker, quiet
from tests.tiny_krea2 import (
    TEXT_LAYERS,
    TEXT_WIDTH,
    positions,
    save_krea2_split_files,
    tiny_krea2_pipeline,
    tiny_krea2_transformer,
)
from tests.tiny_z_image import tiny_z_pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_krea2_pipeline(tmp_path_factory.mktemp("krea2") / "pipeline")


family_of = family_maker("krea2", Krea2Family)


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
