"""The loss by noise level on metrics' lines, against each sample's own loss in float64."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from library.data.batches import Batch
from library.training.flow import add_noise, noise_for, noisy_latents
from library.training.tasks.image_step import FlowStep
from tests.runs import metrics as read_metrics
from tests.runs import run, write_dataset

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
    own_loss, own_validation = FlowStep.loss, FlowStep.validation_losses

    def loss(self: FlowStep, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        tokens = batch.latents.shape[-1] * batch.latents.shape[-2] // self.family.patch_size**2
        noisy, target, sigmas = noisy_latents(self.flow, batch.latents, batch.sample_ids, tokens, SEED, step)
        errors = squared_errors(self, model, batch, noisy, target, sigmas)
        losses["trained"] += [(step + 1, *pair) for pair in zip(sigmas.tolist(), errors, strict=True)]
        return own_loss(self, model, batch, step)

    def validation_losses(self: FlowStep, model: nn.Module, batch: Batch, sigmas: Sequence[float]) -> Tensor:
        for sigma in sigmas:
            noise = noise_for(batch.latents, batch.sample_ids, "validation", round(sigma * 1e6))
            at = torch.full((len(batch),), sigma)
            errors = squared_errors(self, model, batch, *add_noise(batch.latents, noise, at), at)
            losses["held out"] += [(sigma, error) for error in errors]
        return own_validation(self, model, batch, sigmas)

    monkeypatch.setattr(FlowStep, "loss", loss)
    monkeypatch.setattr(FlowStep, "validation_losses", validation_losses)
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
