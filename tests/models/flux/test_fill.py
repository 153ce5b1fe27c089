"""FLUX.1 Fill: the mask's packing, samples against FluxFillPipeline on pictures, overfitting, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline
from torch import Tensor

from library.conditions import NO_CONDITIONS, Conditions
from library.errors import UserError
from library.models.family import SampleSettings
from library.models.flux.model import pack_mask
from library.models.flux.spec import FluxFamily
from library.models.vae import pack_latents
from tests.flux_variants import TEXT, tiny_conditions
from tests.models.claims import assert_same_picture, family_maker, quiet
from tests.tiny import tiny_flux_inputs, tiny_flux_pipeline

WIDTH, HEIGHT = 64, 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux_pipeline(tmp_path_factory.mktemp("fill") / "model", model_type="flux_fill")


@pytest.fixture
def family(folder: Path) -> FluxFamily:
    return family_maker("flux_fill", FluxFamily)(folder)


def picture_and_mask() -> tuple[Tensor, Tensor]:
    """Return a picture [1, 3, H, W] in 0..1 and a mask [1, 1, H, W]."""
    picture = torch.rand(1, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(4))
    mask = torch.zeros(1, 1, HEIGHT, WIDTH)
    mask[:, :, 9:30, 20:51] = 1.0
    return picture, mask


def text_of() -> dict[str, Tensor]:
    inputs = tiny_flux_inputs(batch=1)
    return {name: inputs[name] for name in TEXT}


def test_a_mask_token_holds_the_16_by_16_pixels_under_it() -> None:
    """Channel order written out: first the pixel's row and column in its latent, then the latent's in its token."""
    mask = torch.rand(2, 1, 48, 32, generator=torch.Generator().manual_seed(0))
    tokens = pack_mask(mask, 8)
    assert tokens.shape == (2, 3 * 2, 256)
    for row, column, y, x in ((0, 0, 0, 0), (1, 1, 5, 3), (2, 0, 15, 9), (2, 1, 8, 15)):
        channel = ((y % 8) * 8 + x % 8) * 4 + (y // 8) * 2 + x // 8
        assert torch.equal(tokens[:, row * 2 + column, channel], mask[:, 0, row * 16 + y, column * 16 + x])


def test_a_sample_is_what_the_pipeline_paints_into_the_picture_itself(family: FluxFamily, folder: Path) -> None:
    picture, mask = picture_and_mask()
    encoder, transformer = family.load_image_encoder(torch.float32), family.load_transformer(torch.float32)
    conditions = Conditions(masked_latents=encoder.encode((picture * 2 - 1) * (1 - mask)), mask=mask)
    settings = SampleSettings(WIDTH, HEIGHT, steps=3, guidance=30.0, seed=7)
    ours = family.sample(transformer, encoder, text_of(), settings, conditions=conditions)

    pipeline = quiet(FluxFillPipeline.from_pretrained(folder))
    # The pipeline draws latents from the autoencoder's distribution, we take its mean: a variance of exp(-30) makes
    # the two the same to 3e-7 of a latent.
    final = pipeline.vae.encoder.conv_out
    final.weight.data[16:], final.bias.data[16:] = 0.0, -100.0
    noise = torch.randn(1, 16, HEIGHT // 8, WIDTH // 8, generator=torch.Generator().manual_seed(7))
    sizes = {"width": WIDTH, "height": HEIGHT, "num_inference_steps": 3, "guidance_scale": 30.0}
    given = {"image": picture, "mask_image": mask, "latents": pack_latents(noise)}
    assert_same_picture(ours, pipeline(**given, **sizes, **text_of()).images[0])


def test_the_mask_and_the_known_part_decide_the_sample(family: FluxFamily) -> None:
    picture, mask = picture_and_mask()
    encoder, transformer = family.load_image_encoder(torch.float32), family.load_transformer(torch.float32)
    settings = SampleSettings(WIDTH, HEIGHT, steps=2, guidance=30.0, seed=7)

    def drawn(conditions: Conditions) -> np.ndarray:
        return np.asarray(family.sample(transformer, encoder, text_of(), settings, conditions=conditions), dtype=int)

    known = encoder.encode((picture * 2 - 1) * (1 - mask))
    usual = drawn(Conditions(masked_latents=known, mask=mask))
    assert (drawn(Conditions(masked_latents=known, mask=mask)) == usual).all()
    assert np.abs(drawn(Conditions(masked_latents=known, mask=1 - mask)) - usual).mean() > 0.5
    assert np.abs(drawn(Conditions(masked_latents=-known, mask=mask)) - usual).mean() > 0.5


def test_what_fill_cannot_do_is_refused(family: FluxFamily) -> None:
    inputs, transformer = tiny_flux_inputs(batch=1), family.load_transformer(torch.float32)
    text, encoder = text_of(), family.load_image_encoder(torch.float32)
    right, larger = tiny_conditions("flux_fill", 1), tiny_conditions("flux_fill", 1, side=10)
    for conditions, message in (
        (NO_CONDITIONS, "needs an image and a mask"),
        (larger, "use one size for the image and its mask"),
    ):
        with pytest.raises(UserError, match=message):
            family.predict_velocity(transformer, inputs["latents"], inputs["sigmas"], text, 1.0, conditions)
    for height, cfg, more, message in (
        (64, 1.0, {}, "needs an image and a mask"),
        (48, 1.0, {"conditions": right}, "use one size for the image and its mask"),
        (64, 3.0, {"conditions": right, "negative_text": text}, "knows no negative prompt; remove --n and --l"),
    ):
        settings = SampleSettings(64, height, steps=1, guidance=30.0, seed=0, cfg=cfg)
        with pytest.raises(UserError, match=message):
            family.sample(transformer, encoder, text, settings, **more)  # type: ignore[arg-type]
