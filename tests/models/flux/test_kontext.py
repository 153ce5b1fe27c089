"""FLUX.1 Kontext: samples against FluxKontextPipeline on pictures, and where several references lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline
from PIL import Image
from torch import Tensor

from library.conditions import NO_CONDITIONS, Conditions
from library.models.family import SampleSettings
from library.models.flux.spec import FluxFamily, canvas_offsets
from tests.flux_variants import TEXT
from tests.models.claims import assert_same_picture, family_maker, quiet
from tests.tiny import tiny_flux_inputs, tiny_flux_pipeline

WIDTH, HEIGHT = 64, 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux_pipeline(tmp_path_factory.mktemp("kontext") / "model", model_type="flux_kontext")


@pytest.fixture
def family(folder: Path) -> FluxFamily:
    return family_maker("flux_kontext", FluxFamily)(folder)


def text_of(seed: int = 0) -> dict[str, Tensor]:
    inputs = tiny_flux_inputs(batch=1, seed=seed)
    return {name: inputs[name] for name in TEXT}


@pytest.mark.parametrize("with_reference", [True, False])
@pytest.mark.parametrize("cfg", [1.0, 2.0])
def test_a_sample_is_what_the_pipeline_draws(
    family: FluxFamily, folder: Path, with_reference: bool, cfg: float
) -> None:
    random = np.random.default_rng(3)
    reference = Image.fromarray(random.integers(0, 256, (80, 32, 3), dtype=np.uint8)) if with_reference else None
    encoder = family.load_image_encoder(torch.float32)
    conditions = NO_CONDITIONS
    if reference is not None:
        pixels = torch.from_numpy(np.asarray(reference) / np.float32(127.5) - 1).permute(2, 0, 1).unsqueeze(0)
        conditions = Conditions(references=(encoder.encode(pixels),))
    negative = text_of(1) if cfg != 1 else None
    settings = SampleSettings(WIDTH, HEIGHT, steps=3, guidance=2.5, seed=7, cfg=cfg)
    given = (family.load_transformer(torch.float32), encoder, text_of(), settings)
    ours = family.sample(*given, negative_text=negative, conditions=conditions)
    theirs = quiet(FluxKontextPipeline.from_pretrained(folder))(
        image=reference,
        width=WIDTH,
        height=HEIGHT,
        max_area=WIDTH * HEIGHT,  # or it draws a megapixel
        _auto_resize=False,  # or it makes the reference one
        num_inference_steps=3,
        guidance_scale=2.5,
        true_cfg_scale=cfg,
        generator=torch.Generator().manual_seed(7),
        **text_of(),
        **{f"negative_{name}": tensor for name, tensor in (negative or {}).items()},
    ).images[0]
    assert_same_picture(ours, theirs)


def test_several_references_lie_on_one_canvas_as_in_comfyui() -> None:
    # by hand: the second would make 8 high below, 8 wide beside: below; the third 10 high or 10 wide: below; the
    # fourth 14 high or 10 wide: beside the widest so far
    assert canvas_offsets([(4, 4), (4, 4), (2, 6), (4, 4)]) == [(0, 0), (4, 0), (8, 0), (0, 6)]
    assert canvas_offsets([(6, 2)]) == [(0, 0)]
    assert canvas_offsets([(6, 2), (6, 2)]) == [(0, 0), (0, 2)]


def test_tokens_of_references_follow_the_pictures_at_their_places(family: FluxFamily) -> None:
    random = torch.Generator().manual_seed(1)
    sizes = ((8, 8), (12, 4), (12, 4))
    latents, *references = (torch.randn(1, 16, *size, generator=random) for size in sizes)
    transformer, inputs = family.load_transformer(torch.float32), tiny_flux_inputs(batch=1)

    def patches(picture: Tensor) -> Tensor:
        rows = picture.unfold(2, 2, 2).unfold(3, 2, 2)  # [1, 16, rows, columns, 2, 2]
        return rows.permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)

    places = [[0, row, column] for row in range(4) for column in range(4)]
    places += [[1, row, column] for row in range(6) for column in range(2)]
    places += [[1, row, column + 2] for row in range(6) for column in range(2)]
    with torch.no_grad():
        ours = family.predict_velocity(
            transformer, latents, inputs["sigmas"], text_of(), 2.5, Conditions(references=tuple(references))
        )
        theirs = transformer(
            hidden_states=torch.cat([patches(picture) for picture in (latents, *references)], dim=1),
            timestep=inputs["sigmas"],
            guidance=torch.tensor([2.5]),
            pooled_projections=inputs["pooled_prompt_embeds"],
            encoder_hidden_states=inputs["prompt_embeds"],
            txt_ids=torch.zeros(12, 3),
            img_ids=torch.tensor(places, dtype=torch.float32),
            return_dict=False,
        )[0]
    assert theirs.shape == (1, 16 + 24, 64)
    torch.testing.assert_close(patches(ours), theirs[:, :16], rtol=1e-6, atol=1e-6)


def test_every_reference_reaches_the_sample(family: FluxFamily) -> None:
    encoder, transformer = family.load_image_encoder(torch.float32), family.load_transformer(torch.float32)
    random = torch.Generator().manual_seed(1)
    first, second = (torch.randn(1, 16, 6, 8, generator=random) for _ in range(2))

    settings = SampleSettings(WIDTH, HEIGHT, steps=2, guidance=2.5, seed=7)

    def drawn(*references: Tensor) -> np.ndarray:
        conditions = Conditions(references=references)
        return np.asarray(family.sample(transformer, encoder, text_of(), settings, conditions=conditions), dtype=int)

    both = drawn(first, second)
    for others in ((first,), (second,), (second, first), ()):
        assert np.abs(drawn(*others) - both).mean() > 0.1
