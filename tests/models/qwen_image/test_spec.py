"""The Qwen-Image family against diffusers' QwenImagePipeline: velocity, text, latents, samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from torch import nn

from library.errors import UserError
from library.models.family import SampleSettings
from library.models.qwen_image.spec import QwenImageFamily
from tests.models.claims import family_maker, quiet
from tests.tiny_qwen import tiny_qwen_inputs, tiny_qwen_pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_pipeline(tmp_path_factory.mktemp("qwen") / "pipeline")


family_of = family_maker("qwen_image", QwenImageFamily)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> QwenImagePipeline:
    return quiet(QwenImagePipeline.from_pretrained(folder))


def test_latents_are_the_normalised_mean_of_the_pipelines_vae_and_decode_back(
    folder: Path, pipeline: QwenImagePipeline
) -> None:
    encoder = family_of(folder).load_image_encoder(torch.float32)
    assert (encoder.latent_factor, encoder.pixel_multiple, encoder.latent_channels) == (8, 16, 16)
    pixels = torch.rand(2, 3, 64, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    vae = pipeline.vae
    with torch.no_grad():
        mean = vae.encode(pixels[:, :, None]).latent_dist.mean
        shift, scale = (
            torch.tensor(each).view(1, 16, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std)
        )
        theirs = (mean - shift) / scale
        decoded = vae.decode(mean).sample[:, :, 0]
    ours = encoder.encode(pixels)
    torch.testing.assert_close(ours, theirs[:, :, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(encoder.decode(ours), decoded, rtol=1e-4, atol=1e-5)


def test_sampling_refuses_one_step_and_odd_sizes(folder: Path) -> None:
    family = family_of(folder)
    transformer, encoder = nn.Identity(), family.load_image_encoder(torch.float32)
    text = {name: rows[0] for name, rows in tiny_qwen_inputs(1).items() if name.startswith("prompt")}
    with pytest.raises(UserError, match="sample of 1 step: Qwen-Image's schedule has at least two"):
        family.sample(transformer, encoder, text, SampleSettings(64, 64, steps=1, guidance=1.0, seed=1))
    with pytest.raises(UserError, match="60 x 64 pixels: both must be multiples of 16"):
        family.sample(transformer, encoder, text, SampleSettings(60, 64, steps=2, guidance=1.0, seed=1))
