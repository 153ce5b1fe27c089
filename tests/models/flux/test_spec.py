"""The FLUX family against diffusers' FluxPipeline: velocity, text, latents, samples."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from torch import nn

from library.errors import UserError
from library.models.family import SampleSettings
from library.models.family_by_name import model_family
from library.models.flux.spec import FluxFamily
from library.models.vae import image_positions, pack_latents, unpack_latents
from tests.models.claims import family_maker, quiet
from tests.models.sampled import assert_sample_is_the_pipelines
from tests.tiny import save_single_files, tiny_flux_inputs, tiny_flux_pipeline

TEXT = ("prompt_embeds", "pooled_prompt_embeds")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("flux")
    return {name: tiny_flux_pipeline(root / name, guidance=name == "dev") for name in ("dev", "schnell")}


family_of = family_maker("flux", FluxFamily)


def pipeline_of(folder: Path) -> FluxPipeline:
    return quiet(FluxPipeline.from_pretrained(folder))


def test_packing_and_positions_are_those_of_the_pipeline() -> None:
    latents = tiny_flux_inputs(side=8)["latents"][..., :6]  # 8 x 6: a swapped axis would show
    assert torch.equal(pack_latents(latents), FluxPipeline._pack_latents(latents, 2, 16, 8, 6))
    assert torch.equal(unpack_latents(pack_latents(latents), 8, 6), latents)
    assert torch.equal(image_positions(4, 3), FluxPipeline._prepare_latent_image_ids(2, 4, 3, "cpu", torch.float32))


@pytest.mark.parametrize("kind", ["dev", "schnell"])
def test_velocity_is_that_of_diffusers_called_by_hand(folders: dict[str, Path], kind: str) -> None:
    family, pipeline = family_of(folders[kind]), pipeline_of(folders[kind])
    inputs = tiny_flux_inputs(side=8)
    with torch.no_grad():
        ours = family.predict_velocity(
            family.load_transformer(torch.float32),
            inputs["latents"],
            inputs["sigmas"],
            {name: inputs[name] for name in TEXT},
            guidance_scale=3.5,
        )
        tokens = pipeline.transformer(
            hidden_states=FluxPipeline._pack_latents(inputs["latents"], 2, 16, 8, 8),
            timestep=inputs["sigmas"],
            guidance=torch.full((2,), 3.5) if kind == "dev" else None,
            pooled_projections=inputs["pooled_prompt_embeds"],
            encoder_hidden_states=inputs["prompt_embeds"],
            txt_ids=torch.zeros(12, 3),
            img_ids=FluxPipeline._prepare_latent_image_ids(2, 4, 4, "cpu", torch.float32),
            return_dict=False,
        )[0]
    theirs = FluxPipeline._unpack_latents(tokens, 64, 64, 8)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # one order of operations; sums may be split


@pytest.mark.parametrize("kind", ["dev", "schnell"])
def test_text_is_encoded_as_the_pipeline_encodes_it(folders: dict[str, Path], kind: str) -> None:
    captions = ["a red ball", "", "x" * 200]  # short, empty, too long for both encoders
    encoder = family_of(folders[kind]).load_text_encoder(torch.float32)
    embeds, pooled, _ = pipeline_of(folders[kind]).encode_prompt(captions, max_sequence_length=24)
    rows = encoder.encode(captions)
    assert encoder.encode([]) == []
    for i, row in enumerate(rows):
        torch.testing.assert_close(row["prompt_embeds"], embeds[i], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(row["pooled_prompt_embeds"], pooled[i], rtol=1e-5, atol=1e-5)
    alone = encoder.encode([captions[0]])[0]
    torch.testing.assert_close(alone["prompt_embeds"], rows[0]["prompt_embeds"], rtol=1e-5, atol=1e-5)


def test_latents_are_the_normalised_mean_and_decode_to_pixels(folders: dict[str, Path]) -> None:
    encoder = family_of(folders["dev"]).load_image_encoder(torch.float32)
    vae = pipeline_of(folders["dev"]).vae
    pixels = torch.rand(2, 3, 64, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        mean = vae.encode(pixels).latent_dist.mean
    latents = encoder.encode(pixels)
    assert latents.shape == (2, 16, 8, 4)
    torch.testing.assert_close(latents, (mean - 0.1159) * 0.3611, rtol=1e-5, atol=1e-5)
    assert torch.equal(latents, encoder.encode(pixels))
    with torch.no_grad():
        torch.testing.assert_close(encoder.decode(latents), vae.decode(mean).sample, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="image of 40 x 64 pixels: sides must be multiples of 16"):
        encoder.encode(torch.zeros(1, 3, 64, 40))


@pytest.mark.parametrize(("kind", "cfg"), [("dev", 1.0), ("schnell", 1.0), ("dev", 3.0)])
def test_sample_is_the_pipelines_picture(folders: dict[str, Path], kind: str, cfg: float) -> None:
    family, pipeline = family_of(folders[kind]), pipeline_of(folders[kind])
    guidance = {"guidance_scale": 3.5, "true_cfg_scale": cfg, "max_sequence_length": 24}
    assert_sample_is_the_pipelines(family, pipeline, cfg, **guidance)


def test_sampling_leaves_the_transformer_as_it_was(folders: dict[str, Path]) -> None:
    family = family_of(folders["dev"])
    transformer = family.load_transformer(torch.bfloat16).train()
    transformer.transformer_blocks[0].eval()
    modes = [module.training for module in transformer.modules()]
    text = family.load_text_encoder(torch.float32).encode(["a red ball"])[0]
    encoder = family.load_image_encoder(torch.float32)

    class Wrapped(nn.Module):  # as DDP holds it
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    pictures = [
        family.sample(model, encoder, text, SampleSettings(32, 32, steps=2, guidance=3.5, seed=1))
        for model in (transformer, Wrapped(transformer))
    ]
    assert np.array_equal(pictures[0], pictures[1])
    assert [module.training for module in transformer.modules()] == modes
    reference = weakref.ref(transformer)
    del transformer
    gc.collect()
    assert reference() is None


def test_fingerprints_follow_weights_and_settings(folders: dict[str, Path], tmp_path: Path) -> None:
    dev, other = family_of(folders["dev"]), family_of(tiny_flux_pipeline(tmp_path / "other", seed=1))
    assert dev.fingerprint() != other.fingerprint()
    text = dev.load_text_encoder(torch.float32).fingerprint
    assert text == family_of(folders["dev"]).load_text_encoder(torch.float32).fingerprint
    assert text != other.load_text_encoder(torch.float32).fingerprint
    assert text != dev.load_text_encoder(torch.bfloat16).fingerprint
    assert text != family_of(folders["dev"], t5xxl_max_token_length=8).load_text_encoder(torch.float32).fingerprint
    image = dev.load_image_encoder(torch.float32).fingerprint
    assert image != other.load_image_encoder(torch.float32).fingerprint


def test_t5_length_is_the_option_and_never_more_than_the_tokenizers(folders: dict[str, Path]) -> None:
    short = family_of(folders["dev"], t5xxl_max_token_length=8).load_text_encoder(torch.float32)
    assert short.encode(["a"])[0]["prompt_embeds"].shape == (8, 64)
    with pytest.raises(UserError, match="t5xxl_max_token_length 300: the tokenizer gives at most 24; lower it"):
        family_of(folders["dev"], t5xxl_max_token_length=300).load_text_encoder(torch.float32)


@pytest.mark.parametrize(("kind", "length"), [("dev", 512), ("schnell", 256)])
def test_t5_length_defaults_to_the_published_one(folders: dict[str, Path], kind: str, length: int) -> None:
    assert family_of(folders[kind])._t5_length(10**30) == length


@pytest.mark.parametrize("kind", ["dev", "schnell"])
@pytest.mark.parametrize("comfy", [False, True])
def test_single_files_give_the_folders_model(folders: dict[str, Path], tmp_path: Path, kind: str, comfy: bool) -> None:
    files = save_single_files(folders[kind], tmp_path)
    ours, reference = model_family(files.model_config(comfy=comfy)), family_of(folders[kind])
    mine, theirs = ours.load_transformer(torch.float32), reference.load_transformer(torch.float32)
    assert mine.config.guidance_embeds is (kind == "dev")
    assert mine.config.axes_dims_rope == tuple(theirs.config.axes_dims_rope)
    state = theirs.state_dict()
    assert list(mine.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in mine.state_dict().items())
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    encoders = [family.load_image_encoder(torch.float32) for family in (ours, reference)]
    assert torch.equal(encoders[0].encode(pixels), encoders[1].encode(pixels))
    latents = encoders[0].encode(pixels)
    assert torch.equal(encoders[0].decode(latents), encoders[1].decode(latents))
    rows = [family.load_text_encoder(torch.float32).encode(["a red ball"])[0] for family in (ours, reference)]
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in TEXT)


def test_modules_for_training_give_what_the_encoder_caches_and_have_no_dropout(folders: dict[str, Path]) -> None:
    encoder = family_of(folders["dev"]).load_text_encoder(torch.float32)
    captions = ["a red ball", "blurry"]
    cached = encoder.encode(captions)
    modules = encoder.load_modules(["text_encoder", "text_encoder_2"])
    current = modules.train()(captions)
    assert current.keys() == cached[0].keys()
    for name, rows in current.items():
        assert not rows.requires_grad  # frozen until something is trained on top
        assert torch.equal(rows, torch.stack([one[name] for one in cached]))
    assert [name for name, _ in encoder.load_modules(["text_encoder"]).named_children()] == ["text_encoder"]
    assert encoder.load_modules(["text_encoder"])(captions).keys() == {"pooled_prompt_embeds"}
