"""Whether an error lies along the border: errors whose place is planted, against noise whose statistics are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from library.fidelity.border import LIMITS, STEP_8BIT, Border, interval, judge_border, white_noise
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
    sentence = found.sentence()
    assert sentence.startswith("The border is worse, and the error there is 6")  # 64 of 255 steps
    for figure in found.figures:
        shown = f"{figure.times:.2f} times [{figure.low:.2f} to {figure.high:.2f}], limit {figure.limit:g}"
        assert (shown in sentence) == figure.decides


def test_white_noise_is_never_worse() -> None:
    for seed in range(20):
        found = judged(8, lambda error, mask, seed=seed: error + noise(50 + seed))
        assert {figure.name for figure in found.figures} == set(LIMITS)
        assert found.state == "as usual", seed
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
    assert found.state == "unknown"
    assert f"{images} image" in found.sentence()
    assert "cannot tell whether the border is worse" in found.sentence()
    assert all(math.isnan(figure.low) == (images == 1) for figure in found.figures)


def test_what_saving_in_8_bits_rounds_away_does_not_decide() -> None:
    """Interiors that are exactly right divide nothing, and rings of half an 8-bit step are not worse."""

    def only_the_ring(error: Tensor, mask: Tensor) -> Tensor:
        ring = regions(mask, 8)
        return torch.where(ring.inside | ring.outside, error, torch.zeros(()))

    assert judged(8, only_the_ring, size=0.2 * STEP_8BIT).state == "as usual"
    assert judged(8, only_the_ring, size=0.9 * STEP_8BIT).state == "invisible"
    seen = judged(8, only_the_ring, size=6 * STEP_8BIT)
    assert seen.state == "worse"
    assert all(math.isfinite(figure.times) for figure in seen.figures)


def test_a_ring_that_is_darker_has_a_sign() -> None:
    def darken(error: Tensor, mask: Tensor) -> Tensor:
        error[:, regions(mask, 8).inside] -= 5 * STEP_8BIT
        return error

    assert judged(8, darken).signed == pytest.approx(-5, abs=0.3)
    assert abs(judged(8, lambda error, mask: error).signed) < 0.3


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
