"""Where the loss counts: the filled region, and the ring along its border, against a search cell by cell."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from library.conditions import NO_CONDITIONS, Conditions
from library.config.schema import FlowConfig
from library.data.batches import Batch
from library.errors import UserError
from library.training.flow import add_noise, noise_for, noisy_latents
from library.training.tasks.image_step import FlowStep, border_ring, check_seam, region_weights
from tests.data.folders import add_image, build, write_toml
from tests.runs import metrics as read_metrics
from tests.runs import run, write_dataset


def batch(masks: Tensor | None = None, fill: Tensor | None = None, side: int = 8) -> Batch:
    """A batch of random latents [B, 4, side, side] with loss masks and, in pixels, regions to fill."""
    count = next((len(one) for one in (masks, fill) if one is not None), 2)
    latents = torch.randn(count, 4, side, side, generator=torch.Generator().manual_seed(0))
    conditions = NO_CONDITIONS if fill is None else Conditions(torch.zeros_like(latents), fill)
    return Batch(latents, {}, torch.ones(count), masks, list(range(count)), conditions=conditions)


def regions(count: int = 3, side: int = 64) -> Tensor:
    """Rectangles [B, 1, side, side] of pixels that end within latent cells."""
    fill = torch.zeros(count, 1, side, side)
    for i in range(count):
        fill[i, :, 5 + 8 * i : 39 + 4 * i, 0 : 27 + 9 * i] = 1
    return fill


def cell_means(fill: Tensor) -> Tensor:
    count, _, height, width = fill.shape
    return fill.reshape(count, 1, height // 8, 8, width // 8, 8).mean(dim=(3, 5))


def searched_ring(mask: Tensor, width: int) -> Tensor:
    """The definition, cell by cell: a cell of the other side within ``width`` steps of a king."""
    ring = torch.zeros_like(mask)
    for at in torch.cartesian_prod(*(torch.arange(size) for size in mask.shape)).tolist():
        b, c, y, x = at
        others = (mask[b, c] >= 0.5) != (mask[b, c, y, x] >= 0.5)
        near = others[max(0, y - width) : y + width + 1, max(0, x - width) : x + width + 1]
        ring[b, c, y, x] = near.any()
    return ring


@pytest.mark.parametrize("width", [1, 2, 3, 9])
def test_the_ring_is_what_a_search_finds(width: int) -> None:
    blobs = torch.rand(4, 1, 9, 11, generator=torch.Generator().manual_seed(width)) - 0.15
    blobs = torch.nn.functional.avg_pool2d(blobs, 3, stride=1, padding=1) * 1.3
    assert 0.1 < (blobs >= 0.5).float().mean() < 0.9
    assert torch.equal(border_ring(blobs, width), searched_ring(blobs, width))


@pytest.mark.parametrize("masked", [True, False])
def test_the_seam_comes_on_top(masked: bool) -> None:
    fill = regions()
    mean = cell_means(fill)
    flow = FlowConfig(masked_loss=masked, seam_loss_weight=2.5, seam_width=1)
    weights = region_weights(flow, batch(fill=fill))
    assert weights is not None
    expected = (mean if masked else torch.ones_like(mean)) + 2.5 * searched_ring(mean, 1)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
    without = region_weights(flow, batch(fill=fill), seam=False)
    assert without is None if not masked else torch.allclose(without, mean)  # type: ignore[arg-type]


def test_a_mask_of_its_own_weighs_and_the_region_to_fill_has_the_seam() -> None:
    own, fill = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1)), regions()
    flow = FlowConfig(masked_loss=True, seam_loss_weight=1.0, seam_width=2)
    weights = region_weights(flow, batch(own, fill))
    assert weights is not None
    torch.testing.assert_close(weights, own + searched_ring(cell_means(fill), 2))
    alone = region_weights(flow, batch(own))
    assert alone is not None
    torch.testing.assert_close(alone, own + searched_ring(own, 2))


class _Zero:
    """A family whose network says zero, so that the pointwise loss is the squared target."""

    patch_size = 2

    def own_sampling(self) -> dict[str, object]:
        return {"timestep_sampling": "uniform", "discrete_flow_shift": 1.0}

    def predict_velocity(self, model: object, noisy: Tensor, *_: object) -> Tensor:
        return torch.zeros_like(noisy)


def test_the_loss_is_the_weighted_mean_of_the_pointwise_loss() -> None:
    """float64, from the loss of each cell alone: of a mask with one cell the loss is that cell's over all cells."""
    side, cells = 4, 16
    flow = FlowConfig(masked_loss=True, seam_loss_weight=3.0, seam_width=1)

    def losses(one: Batch, settings: FlowConfig) -> Tensor:
        step = FlowStep(_Zero(), settings, seed=0)  # type: ignore[arg-type]
        return step.loss(torch.nn.Identity(), one, 0)[0].double()

    alone = []
    for i in range(cells):
        mask = torch.zeros(1, 1, cells)
        mask[..., i] = 1
        alone.append(losses(batch(mask.reshape(1, 1, side, side), side=side), FlowConfig(masked_loss=True)))
    fill = torch.zeros(1, 1, 8 * side, 8 * side)
    fill[..., : 8 * 2] = 1  # the left half
    expected = sum(weight * loss for weight, loss in zip([1.0, 4.0, 3.0, 0.0] * side, alone, strict=True))
    # fp32 sums of 64 terms in another order
    torch.testing.assert_close(losses(batch(fill=fill, side=side), flow), expected, rtol=1e-5, atol=0)


def test_validation_counts_the_region_and_not_the_seam() -> None:
    fill = regions(1)
    step = FlowStep(_Zero(), FlowConfig(masked_loss=True, seam_loss_weight=5.0), seed=0)  # type: ignore[arg-type]
    plain = FlowStep(_Zero(), FlowConfig(masked_loss=True), seed=0)  # type: ignore[arg-type]
    model = torch.nn.Identity()
    one = batch(fill=fill)
    assert torch.equal(step.validated(model, one, [0.3]), plain.validated(model, one, [0.3]))
    assert step.loss(model, one, 0)[0] > plain.loss(model, one, 0)[0]


def test_a_seam_without_any_mask_is_refused(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    toml = write_toml(tmp_path)
    flow = FlowConfig(seam_loss_weight=1.0)
    with pytest.raises(UserError, match=r"^seam_loss_weight: no image has a mask, so there is no border; .*remove it$"):
        check_seam(flow, build(toml))
    check_seam(FlowConfig(), build(toml))
    check_seam(flow, build(toml, conditioning="fill"))
    check_seam(flow, build(write_toml(tmp_path, general="alpha_mask = true"), masked_loss=True))


EDGES = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
SEED = 3  # of tests.runs


@torch.no_grad()
def squared_errors(
    step: FlowStep, model: nn.Module, batch: Batch, noisy: Tensor, target: Tensor, sigmas: Tensor
) -> list:
    """Return each sample's mean squared error in float64."""
    velocity = step.family.predict_velocity(model, noisy, sigmas, batch.text, 1.0, batch.conditions)
    return (velocity.double() - target.double()).square().flatten(1).mean(1).tolist()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list]:
    """What runs of a test compute: (step, sigma, loss) of training samples, {sigma: loss} of held-out ones."""
    losses: dict[str, list] = {"trained": [], "held out": []}
    own_loss, own_validation = FlowStep.loss, FlowStep.validated

    def loss(self: FlowStep, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        noisy, target, sigmas = noisy_latents(self.flow, self.family, batch.latents, batch.sample_ids, SEED, step)
        errors = squared_errors(self, model, batch, noisy, target, sigmas)
        losses["trained"] += [(step + 1, *pair) for pair in zip(sigmas.tolist(), errors, strict=True)]
        return own_loss(self, model, batch, step)

    def validated(self: FlowStep, model: nn.Module, batch: Batch, sigmas: Sequence[float]) -> Tensor:
        for sigma in sigmas:
            noise = noise_for(batch.latents, batch.sample_ids, "validation", round(sigma * 1e6))
            at = torch.full((len(batch),), sigma)
            errors = squared_errors(self, model, batch, *add_noise(batch.latents, noise, at), at)
            losses["held out"] += [(sigma, error) for error in errors]
        return own_validation(self, model, batch, sigmas)

    monkeypatch.setattr(FlowStep, "loss", loss)
    monkeypatch.setattr(FlowStep, "validated", validated)
    return losses


@pytest.fixture
def metrics(base: Path, tmp_path: Path, seen: dict[str, list]) -> list[dict[str, float]]:
    """The lines of a run with every weight that a loss can have, logged every second step."""
    text = "batch_size = 3\nvalidation_split = 0.25\nvalidation_seed = 1"
    settings = {"weighting_scheme": "cosmap", "timestep_sampling": "sigma", "prior_loss_weight": 0.3}
    settings |= {"gradient_accumulation_steps": 2, "log_every_n_steps": 2, "max_train_steps": 7, "guidance_scale": 1.0}
    dataset = write_dataset(tmp_path / "data", text=text)
    shutil.copytree(tmp_path / "data/images", tmp_path / "data/regular")
    dataset.write_text(dataset.read_text() + '[[datasets.subsets]]\nimage_dir = "regular"\nis_reg = true\n')
    run(base, dataset, tmp_path / "out", seed=SEED, **settings)
    return read_metrics(tmp_path / "out")


def test_a_training_line_has_the_plain_loss_of_each_level_since_the_last(
    metrics: list[dict[str, float]], seen: dict[str, list]
) -> None:
    last = 0.0
    for line in (line for line in metrics if "loss" in line):
        levels = defaultdict(list)
        for step, sigma, loss in seen["trained"]:
            if last < step <= line["step"]:
                level = np.searchsorted(EDGES, sigma, side="right") - 1
                levels[f"loss/sigma_{EDGES[level]:g}-{EDGES[level + 1]:g}"].append(loss)
        found = {key: value for key, value in line.items() if key.startswith("loss/")}
        assert found == pytest.approx({key: np.mean(values) for key, values in levels.items()}, rel=1e-5)  # fp32
        last = line["step"]
    assert last == 7
    assert len({key for line in metrics for key in line if key.startswith("loss/")}) >= 4


def test_a_validation_line_has_the_loss_at_each_sigma_of_which_val_loss_is_the_mean(
    metrics: list[dict[str, float]], seen: dict[str, list]
) -> None:
    first, last = (line for line in metrics if "val_loss" in line)
    images = len(seen["held out"]) // 2
    for line, errors in ((first, seen["held out"][:images]), (last, seen["held out"][images:])):
        levels = defaultdict(list)
        for sigma, error in errors:
            levels[f"val_loss/sigma_{sigma:g}"].append(error)
        assert len(levels) == 5
        found = {key: value for key, value in line.items() if key.startswith("val_loss/")}
        assert found == pytest.approx({key: np.mean(values) for key, values in levels.items()}, rel=1e-5)
        assert line["val_loss"] == pytest.approx(np.mean(list(found.values())), rel=1e-12)
        assert line["val_loss"] == pytest.approx(np.mean([error for _, error in errors]), rel=1e-5)
