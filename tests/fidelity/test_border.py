"""Whether an error lies along the border: errors whose place is planted, against noise whose statistics are known."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from library.data.cache import Pixels
from library.fidelity.border import LIMITS, STEP_8BIT, Border, BorderFigure, judge_border, white_noise
from library.fidelity.conditioning import black_region, blur, change_mask, give, grow, round_latents, snap
from library.fidelity.intervals import images_to_tell, interval, ratio_interval
from library.fidelity.serving import REFERENCE, Variant
from library.precision.parity.seam import regions

SIZE = 96


def masks(count: int) -> list[Tensor]:
    """Boxes of different places and sizes."""
    found = []
    for number in range(count):
        mask = torch.zeros(SIZE, SIZE, dtype=torch.bool)
        top, left = 12 + 3 * (number % 5), 10 + 4 * (number % 4)
        mask[top : top + 44 + 2 * (number % 3), left : left + 50] = True
        found.append(mask)
    return found


def noise(number: int, size: float = 8 * STEP_8BIT) -> Tensor:
    return size * torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(number))


def judged(count: int, plant: object, size: float = 8 * STEP_8BIT) -> Border:
    """Judge ``count`` errors of white noise, each changed by ``plant(error, mask)``, beside other white noise."""
    borders = masks(count)
    errors = [plant(noise(number, size), mask) for number, mask in enumerate(borders)]  # type: ignore[operator]
    found = judge_border(errors, [noise(1000 + number, size) for number in range(count)], borders)
    assert found is not None
    return found


def rim(error: Tensor, mask: Tensor, factor: float) -> Tensor:
    ring = regions(mask, 8)
    error[:, ring.inside | ring.outside] *= factor
    return error


def test_noise_eight_times_as_strong_along_the_border_is_worse_by_eight() -> None:
    found = judged(8, lambda error, mask: rim(error, mask, 8))
    assert found.state == "worse"
    figures = {figure.name: figure for figure in found.figures}
    # a ring's rms over 2,500 and more numbers: 1.4 % of deviation an image
    assert figures["ring inside"].times == pytest.approx(8, rel=0.03)
    assert figures["ring outside"].times == pytest.approx(8, rel=0.03)
    # the interior's outermost pixels have the ring's in their 3 x 3 mean: a little of the grain is theirs
    assert 6.5 < figures["grain inside"].times < 8.2
    assert found.sentence().startswith("The border is worse, and the error there is 6")  # 64 of 255 steps


def test_white_noise_is_never_worse() -> None:
    for seed in range(20):
        found = judged(8, lambda error, mask, seed=seed: error + noise(50 + seed))
        assert {figure.name for figure in found.figures} == set(LIMITS)
        assert found.state == "not worse", seed
        assert all(figure.times == pytest.approx(1, abs=0.1) for figure in found.figures), seed


@pytest.mark.parametrize("side", ["inside", "outside"])
def test_each_side_decides_for_itself(side: str) -> None:
    def plant(error: Tensor, mask: Tensor) -> Tensor:
        error[:, getattr(regions(mask, 8), side)] *= 3
        return error

    decides = {figure.name for figure in judged(6, plant).figures if figure.decides}
    assert f"ring {side}" in decides
    assert f"grain {side}" in decides
    assert not {f"ring {other}" for other in ("inside", "outside") if other != side} & decides


@pytest.mark.parametrize("images", [1, 2])
def test_few_images_say_that_they_cannot_say(images: int) -> None:
    found = judged(images, lambda error, mask: rim(error, mask, 8))
    assert found.state == "cannot tell"
    assert f"{images} image" in found.sentence()
    assert "cannot tell whether the border is worse" in found.sentence()
    assert all(math.isnan(figure.low) == (images == 1) for figure in found.figures)


def figures(times: float, low: float, high: float) -> tuple[BorderFigure, ...]:
    return tuple(BorderFigure(name, times, 1.0, times, low, high, ()) for name in LIMITS)


def test_an_interval_that_crosses_its_limit_is_never_worded_as_yes_or_no() -> None:
    random = np.random.default_rng(3)
    states = set()
    for _ in range(300):
        times, width = np.exp(random.normal(0.3, 0.4)), np.exp(random.exponential(0.5))
        found = Border(figures(times, times / width, times * width), int(random.integers(1, 20)), 9.0)
        crossed = all(each.low <= each.limit <= each.high for each in found.figures)
        states.add(found.state)
        assert ("border is worse, and" in found.sentence()) == (found.state == "worse")
        assert ("not worse" in found.sentence()) == (found.state == "not worse")
        if crossed or found.images < 3:
            assert found.state == "cannot tell"
            assert re.search(r"(about|more than) \d+ images|8 or more images", found.sentence())
    assert states == {"worse", "not worse", "cannot tell"}


def test_so_many_images_as_are_asked_for_would_tell() -> None:
    """Normal numbers, of which the interval is as wide as 1 / sqrt(n): with the number that is named it is clear."""
    values = 0.3 + torch.randn(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    low, high = interval(values)
    middle = float(values.mean())
    assert low < 0 < high
    wanted = int(images_to_tell(8, middle, low, high, 0.0).split()[1])
    width = (middle - low) * math.sqrt(8 / wanted)
    assert middle - width >= 0 > middle - width * math.sqrt(2)  # and half as many would not
    assert images_to_tell(8, 1.0, 0.5, 1.5, 1.0) == "more than 300 images"
    assert images_to_tell(1, 1.0, math.nan, math.nan, 2.0) == "8 or more images"


def test_the_interval_of_a_ratio_is_that_of_sums() -> None:
    assert ratio_interval([2.0, 6.0, 4.0], [1.0, 3.0, 2.0]) == (2, 2)
    low, high = ratio_interval([1.0, 0.0], [1.0, 1.0])
    assert (low, high) == (0, 1)
    assert all(math.isnan(end) for end in ratio_interval([1.0], [1.0]))


def test_what_saving_in_8_bits_rounds_away_does_not_decide() -> None:
    """Interiors that are exactly right divide nothing, and rings of half an 8-bit step are not worse."""

    def only_the_ring(error: Tensor, mask: Tensor) -> Tensor:
        ring = regions(mask, 8)
        return torch.where(ring.inside | ring.outside, error, torch.zeros(()))

    assert judged(8, only_the_ring, size=0.2 * STEP_8BIT).state == "not worse"
    assert judged(8, only_the_ring, size=0.9 * STEP_8BIT).state == "invisible"
    seen = judged(8, only_the_ring, size=6 * STEP_8BIT)
    assert seen.state == "worse"
    assert all(math.isfinite(figure.times) for figure in seen.figures)


def test_the_interval_is_the_bootstrap_of_the_mean() -> None:
    """Of many normal numbers the percentile bootstrap is mean +- 1.96 standard errors (Efron 1979)."""
    values = 3 + torch.randn(400, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    low, high = interval(values)
    error = float(values.std()) / math.sqrt(400)
    assert low == pytest.approx(float(values.mean()) - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(float(values.mean()) + 1.96 * error, abs=0.1 * error)
    assert all(math.isnan(end) for end in interval(torch.tensor([1.0])))


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """Of 12 images; a percentile bootstrap of so few is known to be a little too narrow."""
    random = torch.Generator().manual_seed(6)
    hits = [low < 0 < high for low, high in (interval(torch.randn(12, generator=random)) for _ in range(300))]
    assert 0.86 < sum(hits) / len(hits) < 0.97


def test_the_control_misses_by_as_much_as_what_is_judged() -> None:
    wanted = torch.randn(4, 24, 24, generator=torch.Generator().manual_seed(1))
    found = wanted + 0.1 * torch.randn(4, 24, 24, generator=torch.Generator().manual_seed(2))
    image = torch.zeros(3, 96, 96)

    def decode(latents: Tensor) -> Tensor:
        return latents[:, :3].repeat_interleave(4, 2).repeat_interleave(4, 3)

    control = white_noise(wanted, found, image, image, decode, 0) - decode(wanted[None])[0]
    assert float(control.square().mean().sqrt()) == pytest.approx(0.1, rel=0.05)
    # the latents are right and the decoder alone errs: noise in the pixels
    control = white_noise(wanted, wanted, image, image + 0.2, decode, 0)
    assert float(control.square().mean().sqrt()) == pytest.approx(0.2, rel=0.05)


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
