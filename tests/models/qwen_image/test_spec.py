"""The Qwen-Image family against diffusers' QwenImagePipeline: velocity, text, latents, samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from torch import nn

from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.family import SampleSettings
from library.models.family_by_name import model_family
from library.models.qwen_image.spec import QwenImageFamily
from tests.tiny_qwen import tiny_qwen_inputs, tiny_qwen_pipeline

CAPTIONS = ["a red disc", "make the picture of a small plain disc blue, yellow and purple"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_pipeline(tmp_path_factory.mktemp("qwen") / "pipeline")


def family_of(folder: Path, **changes: object) -> QwenImageFamily:
    settings: dict[str, object] = {"model_type": "qwen_image", "pretrained_model_name_or_path": str(folder)}
    family = model_family(ModelConfig(**(settings | changes)))  # type: ignore[arg-type]
    assert isinstance(family, QwenImageFamily)
    return family


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> QwenImagePipeline:
    loaded = QwenImagePipeline.from_pretrained(folder)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def text_of(batch: int = 2) -> dict[str, torch.Tensor]:
    inputs = tiny_qwen_inputs(batch)
    return {name: inputs[name] for name in ("prompt_embeds", "prompt_embeds_mask")}


@pytest.mark.parametrize("captions", [CAPTIONS, CAPTIONS[:1], [""], ["a {brace} and <|im_end|>"], ["plain " * 1100]])
def test_text_embeddings_are_those_of_the_pipeline(
    folder: Path, pipeline: QwenImagePipeline, captions: list[str]
) -> None:
    encoder = family_of(folder).load_text_encoder(torch.float32)
    with torch.no_grad():
        embeds, mask = pipeline.encode_prompt(captions)
    for i, ours in enumerate(encoder.encode(captions)):
        length = embeds.shape[1] if mask is None else int(mask[i].sum())
        assert ours["prompt_embeds"].shape[0] == length
        assert ours["prompt_embeds_mask"].tolist() == [True] * length
        torch.testing.assert_close(ours["prompt_embeds"], embeds[i, :length], rtol=1e-5, atol=1e-5)


def test_latents_are_the_normalised_mean_of_the_pipelines_vae_and_decode_back(
    folder: Path, pipeline: QwenImagePipeline
) -> None:
    encoder = family_of(folder).load_image_encoder(torch.float32)
    assert (encoder.latent_factor, encoder.pixel_multiple, encoder.latent_channels) == (8, 16, 16)
    pixels = torch.rand(2, 3, 64, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    vae = pipeline.vae
    with torch.no_grad():
        mean = vae.encode(pixels[:, :, None]).latent_dist.mean
        shape = (1, 16, 1, 1, 1)
        theirs = (mean - torch.tensor(vae.config.latents_mean).view(shape)) / torch.tensor(vae.config.latents_std).view(
            shape
        )
        decoded = vae.decode(mean).sample[:, :, 0]
    ours = encoder.encode(pixels)
    torch.testing.assert_close(ours, theirs[:, :, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(encoder.decode(ours), decoded, rtol=1e-4, atol=1e-5)


def test_sampling_refuses_one_step_and_odd_sizes(folder: Path) -> None:
    family = family_of(folder)
    transformer, encoder = nn.Identity(), family.load_image_encoder(torch.float32)
    text = {name: rows[0] for name, rows in text_of(1).items()}
    with pytest.raises(UserError, match="sample of 1 step: Qwen-Image's schedule has at least two"):
        family.sample(transformer, encoder, text, SampleSettings(64, 64, steps=1, guidance=1.0, seed=1))
    with pytest.raises(UserError, match="60 x 64 pixels: both must be multiples of 16"):
        family.sample(transformer, encoder, text, SampleSettings(60, 64, steps=2, guidance=1.0, seed=1))
