"""What a server makes of pictures and masks, against numpy, Pillow and the dataset's cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from library.data.cache import Pixels
from library.fidelity.conditioning import black_region, blur, change_mask, give, grow, round_latents, snap
from library.fidelity.serving import REFERENCE, Variant


def random_mask(seed: int = 0) -> torch.Tensor:
    mask = torch.zeros(1, 48, 64)
    rng = np.random.default_rng(seed)
    for _ in range(3):
        top, left = rng.integers(0, 36), rng.integers(0, 50)
        mask[:, top : top + rng.integers(3, 12), left : left + rng.integers(3, 14)] = 1
    return mask


def pixels_of(mask: torch.Tensor | None, references: tuple[torch.Tensor, ...] = ()) -> Pixels:
    image = torch.rand(3, 48, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return Pixels(image, mask, None if mask is None or references else torch.zeros(3, 48, 64), references)


@pytest.mark.parametrize("pixels", [1, 3, 8])
def test_growing_is_every_pixel_within_so_many_rows_and_columns(pixels: int) -> None:
    mask = random_mask()
    wanted = np.zeros((48, 64))
    for row, column in zip(*np.nonzero(mask[0].numpy()), strict=True):
        wanted[max(0, row - pixels) : row + pixels + 1, max(0, column - pixels) : column + pixels + 1] = 1
    assert np.array_equal(grow(mask, pixels)[0].numpy(), wanted)
    assert torch.equal(grow(mask, -pixels), 1 - grow(1 - mask, pixels))


def test_snapping_fills_every_cell_that_is_touched() -> None:
    mask = torch.zeros(1, 48, 64)
    mask[0, 9, 17] = 1
    snapped = snap(mask, 8)
    assert snapped.sum() == 64
    assert snapped[0, 8:16, 16:24].all()


def test_blurring_is_pillows_gaussian() -> None:
    mask = random_mask()
    picture = Image.fromarray((mask[0] * 255).to(torch.uint8).numpy())
    wanted = np.asarray(picture.filter(ImageFilter.GaussianBlur(3))) / 255  # three box blurs: near, not equal
    assert np.abs(blur(mask, 3)[0].numpy() - wanted).max() < 0.06


def test_a_soft_mask_is_given_soft_and_blanks_hard_as_comfyui_does() -> None:
    """InpaintModelConditioning: ``m = 1 - mask.round()``, pixels around 0.5, and the mask itself to the model."""
    mask, pixels = random_mask(), pixels_of(random_mask())
    given = give(pixels, "fill", Variant(mask_blur=3))
    soft = blur(mask, 3)
    as_image = (pixels.image + 1) / 2
    blanked = (as_image - 0.5) * (1 - soft.round()) + 0.5
    assert torch.equal(given.mask, soft)  # type: ignore[arg-type]
    assert torch.allclose((given.shown[0] + 1) / 2, blanked, atol=1e-6)


@pytest.mark.parametrize(("blank", "value"), [("grey", 0.0), ("black", -1.0), ("white", 1.0)])
def test_the_region_has_the_colour_that_is_said_and_the_rest_stays(blank: str, value: float) -> None:
    mask = random_mask()
    given = give(pixels_of(mask), "fill", Variant(blank=blank))  # type: ignore[arg-type]
    assert (given.shown[0][:, mask[0] == 1] == value).all()
    assert torch.equal(given.shown[0][:, mask[0] == 0], given.image[:, mask[0] == 0])


def test_an_inverted_mask_blanks_the_other_side() -> None:
    mask = random_mask()
    assert torch.equal(change_mask(mask, Variant(mask_invert=True)), 1 - mask)


def test_the_black_region_of_a_reference_is_found_and_changed_where_there_is_no_mask() -> None:
    picture = torch.rand(3, 48, 64, generator=torch.Generator().manual_seed(2)) + 0.01
    picture[:, 10:30, 20:50] = -1
    picture[:, 40:43, 2:5] = -1  # a speck
    found = black_region(picture)
    assert found is not None
    wanted = torch.zeros(48, 64)
    wanted[10:30, 20:50] = 1
    assert torch.equal(found[0], wanted)
    pixels = pixels_of(None, (picture,))
    assert torch.equal(give(pixels, "references", REFERENCE).shown[0], picture)
    grey = give(pixels, "references", Variant(blank="grey")).shown[0]
    assert (grey[:, wanted == 1] == 0).all()
    assert torch.equal(grey[:, wanted == 0], picture[:, wanted == 0])
    grown = give(pixels, "references", Variant(mask_grow=4)).shown[0]
    assert (grown[:, 6:34, 16:54] == -1).all()
    assert black_region(torch.ones(3, 16, 16)) is None
    assert black_region(-torch.ones(3, 16, 16)) is None


def test_rounded_latents_are_those_of_a_cast() -> None:
    latents = torch.randn(1, 16, 4, 4)
    assert torch.equal(round_latents(latents, "bf16"), latents.bfloat16().float())
    assert torch.equal(round_latents(latents, "fp8"), latents.to(torch.float8_e4m3fn).float())
    assert torch.equal(round_latents(latents, None), latents)
