"""Loss on held-out images at fixed noise and fixed sigmas: the one loss that can be compared between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from library.accelerator import data_share
from library.data.batches import Bucket, CachedDataset, collate
from library.errors import UserError
from library.training.sharding import in_step
from library.training.step import FlowStep, TrainingStep

if TYPE_CHECKING:
    from accelerate import Accelerator

    from library.config.schema import ValidationConfig
    from library.data.dataset import TrainingData


@dataclass(frozen=True)
class HeldOut:
    """The held-out images and how they are looked at."""

    batches: DataLoader[Any]  # of Batch
    step: FlowStep
    config: ValidationConfig

    def loss(self, model: nn.Module, accelerator: Accelerator) -> float:
        """Return the validation loss of ``model`` as it is; see :func:`validation_loss`."""
        return validation_loss(model, self.batches, self.step, self.config.validation_sigmas, accelerator)


def hold_out(data: TrainingData, step: TrainingStep, config: ValidationConfig) -> HeldOut | None:
    """Return the held-out images, or None where the dataset holds none out.

    Raises:
        UserError: validation was asked for and there is nothing to validate on.
    """
    if data.validation is None:
        if config.model_fields_set:
            key = sorted(config.model_fields_set)[0]
            raise UserError(f"{key}: no images are held out; set validation_split in the dataset TOML, or remove {key}")
        return None
    assert isinstance(step, FlowStep)
    return HeldOut(held_out_loader(data.validation, config.max_validation_images), step, config)


def held_out_loader(images: CachedDataset, most: int) -> DataLoader[Any]:
    """Return the first ``most`` held-out images in batches of one bucket each, always in the same order."""
    by_bucket: dict[Bucket, list[tuple[int, int]]] = {}
    for index, bucket in list(enumerate(images.buckets))[:most]:
        by_bucket.setdefault(bucket, []).append((0, index))  # epoch 0: held-out samples have no random choices
    batches = [
        items[i : i + images.batch_sizes[bucket]]
        for bucket, items in by_bucket.items()
        for i in range(0, len(items), images.batch_sizes[bucket])
    ]
    return DataLoader(images, batch_sampler=batches, collate_fn=collate)


@torch.no_grad()
def validation_loss(
    model: nn.Module, batches: DataLoader[Any], step: FlowStep, sigmas: Sequence[float], accelerator: Accelerator
) -> float:
    """Return the mean loss over the held-out images and ``sigmas``.

    Every process takes its share of the batches; the sums are added up before the division, so the figure does
    not depend on the number of processes.

    Args:
        model: the prepared network; dropout is off while this runs.
        batches: held-out batches, the same on every process, each of one bucket.
        step: the forward pass.
        sigmas: noise levels in (0, 1).
        accelerator: gives device, rank and reduction.
    """
    total = torch.zeros(2, device=accelerator.device, dtype=torch.float64)  # sum of losses, number of them
    modules = [model] if step.text_encoders is None else [model, step.text_encoders]
    were_training = [module.training for module in modules]
    for module in modules:
        module.eval()
    rank, world = data_share(accelerator)
    for own in in_step(islice(iter(batches), rank, None, world), accelerator):
        batch = (next(iter(batches)) if own is None else own).to(accelerator.device)
        losses = step.validation_losses(model, batch, sigmas)
        if own is None:  # only to take part
            continue
        total += torch.stack([losses.double().sum(), torch.tensor(float(len(losses)), device=losses.device)])
    for module, was_training in zip(modules, were_training, strict=True):
        module.train(was_training)
    total = accelerator.reduce(total, reduction="sum")
    return float(total[0] / total[1])
