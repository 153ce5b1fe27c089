"""The Qwen-Image family against diffusers' QwenImagePipeline: velocity, text, latents, samples."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file
from torch import nn

from library.config.schema import FlowConfig, ModelConfig
from library.errors import UserError
from library.models.family import SampleSettings
from library.models.family_by_name import model_family
from library.models.qwen_image.spec import QwenImageFamily
from library.precision.files.fp8 import Fp8Scheme
from library.precision.recipe import Recipe
from tests.models.claims import (
    assert_bf16_is_near,
    assert_captions_are_as_alone,
    assert_fp8_is_near,
    assert_same_model,
)
from tests.models.sampled import assert_sample_is_the_pipelines
from tests.tiny_qwen import save_split_files, tiny_qwen_inputs, tiny_qwen_pipeline

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


def test_velocity_is_that_of_diffusers_called_by_hand(folder: Path, pipeline: QwenImagePipeline) -> None:
    family, inputs, text = family_of(folder), tiny_qwen_inputs(), text_of()
    text["prompt_embeds_mask"][1, 7:] = False
    latents = inputs["latents"][..., :6]  # 8 x 6: a swapped axis would show
    with torch.no_grad():
        ours = family.predict_velocity(family.load_transformer(torch.float32), latents, inputs["sigmas"], text)
        tokens = pipeline.transformer(
            hidden_states=QwenImagePipeline._pack_latents(latents, 2, 16, 8, 6),
            timestep=inputs["sigmas"],
            encoder_hidden_states=text["prompt_embeds"],
            encoder_hidden_states_mask=text["prompt_embeds_mask"],
            img_shapes=[[(1, 4, 3)]] * 2,
            return_dict=False,
        )[0]
    theirs = QwenImagePipeline._unpack_latents(tokens, 64, 48, 8)[:, :, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # one order of operations; sums may be split


def test_captions_of_different_lengths_have_the_losses_and_gradients_they_have_alone(folder: Path) -> None:
    flow = FlowConfig(timestep_sampling="qwen_shift")
    assert_captions_are_as_alone(family_of(folder), tiny_qwen_inputs(3), (12, 3, 7), "img_in", flow, 1e-2)


def test_bf16_weights_with_and_without_autocast_are_near(folder: Path) -> None:
    assert_bf16_is_near(family_of(folder), tiny_qwen_inputs(), text_of())


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


def test_embeddings_do_not_depend_on_the_batch(folder: Path) -> None:
    encoder = family_of(folder).load_text_encoder(torch.float32)
    together = encoder.encode(CAPTIONS)
    for both, caption in zip(together, CAPTIONS, strict=True):
        (alone,) = encoder.encode([caption])
        torch.testing.assert_close(both["prompt_embeds"], alone["prompt_embeds"], rtol=1e-5, atol=1e-5)


def test_text_only_models_load_no_vision_tower_and_an_fp8_one_is_near(folder: Path) -> None:
    family = family_of(folder)
    plain = family.load_text_encoder(torch.bfloat16)
    small = family.load_text_encoder(torch.bfloat16, recipe=Recipe(Fp8Scheme("block64"), exclude=()))
    assert plain.fingerprint != small.fingerprint
    (expected,), (found,) = plain.encode(CAPTIONS[:1]), small.encode(CAPTIONS[:1])
    assert found["prompt_embeds"].dtype == torch.bfloat16
    error = (found["prompt_embeds"] - expected["prompt_embeds"]).float().norm() / expected["prompt_embeds"].norm()
    assert 0 < error < 0.15  # e4m3 rounds a weight by 2.6 % (rms); 14 matrices one after the other: 10 %
    assert plain._model is not None
    assert not any("visual" in name for name, _ in plain._model.named_parameters())
    plain.release()
    assert plain._model is None


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
    with pytest.raises(UserError, match="48 x 40 pixels: sides must be multiples of 16"):
        encoder.encode(torch.zeros(1, 3, 40, 48))


@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_samples_are_those_of_the_pipeline(folder: Path, pipeline: QwenImagePipeline, cfg: float) -> None:
    assert_sample_is_the_pipelines(family_of(folder), pipeline, cfg, true_cfg_scale=cfg)


def test_sampling_refuses_one_step_and_odd_sizes_and_keeps_no_reference(folder: Path) -> None:
    family = family_of(folder)
    transformer, encoder = family.load_transformer(torch.bfloat16), family.load_image_encoder(torch.float32)
    text = {name: rows[0] for name, rows in text_of(1).items()}
    with pytest.raises(UserError, match="sample of 1 step: Qwen-Image's schedule has at least two"):
        family.sample(transformer, encoder, text, SampleSettings(64, 64, steps=1, guidance=1.0, seed=1))
    with pytest.raises(UserError, match="60 x 64 pixels: both must be multiples of 16"):
        family.sample(transformer, encoder, text, SampleSettings(60, 64, steps=2, guidance=1.0, seed=1))
    wrapped = nn.Module()
    wrapped.module = transformer
    family.sample(wrapped, encoder, text, SampleSettings(64, 64, steps=2, guidance=1.0, seed=1))
    gone = weakref.ref(transformer)
    del transformer, wrapped
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_split_files_hold_the_same_model(folder: Path, tmp_path: Path, prefix: str) -> None:
    files = save_split_files(folder, tmp_path, prefix)
    assert_same_model(model_family(files.model_config()), family_of(folder), CAPTIONS)


def test_fp8_base_stays_near_and_keeps_its_inputs_high(folder: Path) -> None:
    # quantised are the linear layers of two blocks; inputs, timestep and output stay
    assert_fp8_is_near(family_of(folder), tiny_qwen_inputs(), text_of(), ("embedders", "final"), (2 * 14, 6))


def test_the_transformer_loads_what_the_pipeline_saved(folder: Path) -> None:
    weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    loaded = family_of(folder).load_transformer(torch.float32)
    state = loaded.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
