"""One training step's forward pass: from a batch to a loss, and the same at fixed points for validation.

Where in an image the loss counts, for fill models and datasets with masks, is a map of weights over latent cells,
[B, 1, h, w], that multiplies the pointwise loss. With the mask ``m`` (a cell's mean over its pixels, 0 to 1), the ring
``r`` of cells at the mask's border and the weight ``w`` of the seam (``seam_loss_weight``) it is

    m + w * r   with masked_loss
    1 + w * r   without

so that a border cell inside the region weighs 1 + w, one outside it w. A cell is inside where ``m`` is at least 1/2; it
is on the ring if a cell of the other side lies within ``seam_width`` cells, diagonals counting as one step (Chebyshev
distance). That is the dilation of the inside minus its erosion, both a ``max_pool2d``; the image's own edge is no
border, as beyond it there is nothing to match.

Where a sample preserves (``preserve = "prior"``), its target is the *frozen model's answer* v_0: the velocity at the
same noisy latents, noise level and text with the LoRA switched off, from a forward pass without gradients. The data's
target has the variance of noise - image given the noisy image, v_0 has none, so that little of it does much. Which
samples preserve, the dataset says: regularisation images, and training images with another caption. With
``preserve_outside_mask`` every masked sample does, outside of its mask:

    m * l(v, noise - image) + w * (1 - m) * l(v, v_0)      l: loss_type by cell; w: prior_loss_weight

The special cases are those of others. ``target[i] = v_0`` for samples marked so is sd-scripts' custom attribute
``diff_output_preservation`` and OneTrainer's concept PRIOR_PREDICTION; ai-toolkit adds ``mean((v(class) -
v_0(class))^2)`` to the loss of every batch, which is a sample with the class caption beside each (at half the weight of
a mean over both); the sum over the mask is OneTrainer's ``masked_prior_preservation_weight`` (docs/preservation.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d

from library.conditions import Conditions
from library.config.schema import FlowConfig, PairsConfig
from library.data.batches import Batch, CachedDataset, TensorBatch, collate
from library.data.cache import Progress
from library.data.dataset import TrainingData
from library.errors import UserError
from library.models.family import Family
from library.safetensors_io import read_checked
from library.training.flow import (
    NOISE_LEVELS,
    add_noise,
    by_noise_level,
    loss_weights,
    noise_for,
    noisy_latents,
    resolve_sampling,
    sample_losses,
)
from library.training.optim.preconditioning import Directions, leading_directions
from networks.network import AdapterNetwork

MEASURING = "measuring what general images use"
_GENERAL_IMAGES, _DRAWS = 16, 2  # that directions are measured on, each at so many noise levels


@dataclass
class StepInputs(TensorBatch):
    """What a step computes from, on the device.

    Attributes:
        noisy, target: latents, and the velocity to predict there, [B, C, h, w] fp32.
        sigmas, weights: noise level and weight in the loss of each sample, [B] fp32.
        text, conditions: of the batch.
        regions: weights of latent cells, [B, 1, h, w] fp32; None where all weigh 1.
        outside: weights of the cells where v_0 is the target, likewise; None without ``preserve_outside_mask``.
        frozen_rows: samples whose v_0 is needed, [n] int64; None where none is.
        frozen_text: their text by encoders that are trained, without what these have learnt; else None.
        preserves: which samples preserve, [B] bool; None where none does.
    """

    noisy: Tensor
    target: Tensor
    sigmas: Tensor
    text: dict[str, Tensor]
    conditions: Conditions
    weights: Tensor
    regions: Tensor | None = None
    outside: Tensor | None = None
    frozen_rows: Tensor | None = None
    frozen_text: dict[str, Tensor] | None = None
    preserves: Tensor | None = None


@dataclass(frozen=True)
class FlowStep:
    """What a forward pass needs besides the batch.

    Attributes:
        more_metrics: of the columns that :meth:`loss` returns behind sigma.
        more_validated: likewise of those of :meth:`validated` behind the loss.
    """

    more_metrics: ClassVar[Sequence[str]] = tuple(
        f"loss/sigma_{i / NOISE_LEVELS:g}-{(i + 1) / NOISE_LEVELS:g}" for i in range(NOISE_LEVELS)
    )
    more_validated: ClassVar[Sequence[str]] = ()

    family: Family
    flow: FlowConfig
    seed: int
    text_encoders: nn.Module | None = None  # those that are trained, as prepared
    teacher: Teacher | None = None  # whose velocity is the target instead of the data's, or with it
    network: AdapterNetwork | None = None  # that is switched off for the frozen model's answers
    outside_mask: float = 0.0  # weight of these outside of masks
    lockstep: bool = False  # every process runs the model as often as the others, which gather its weights with it
    rounds_text: bool = False  # to few lengths, for steps that are captured
    pairs: PairsConfig = field(default_factory=PairsConfig)

    def text(self, batch: Batch) -> dict[str, Tensor]:
        """Return the batch's text embeddings: as cached, those of encoders in training computed now."""
        return batch.text if self.text_encoders is None else batch.text | self.text_encoders(batch.captions)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch's loss (a scalar with gradient) at optimizer step ``step``, and each sample's metrics.

        These are its sigma and its loss before weights by noise level, [B, 1 + NOISE_LEVELS]; of a sample that
        preserves its sigma alone.

        Args:
            model: the network as prepared, wrapped or not; only called, so that engines see the forward pass.
            batch: latents [B, C, h, w], text embeddings, weights [B], masks, which samples preserve.
            step: part of the key of noise and sigmas.
        """
        return self.compute(model, self.inputs(batch, step))

    def inputs(self, batch: Batch, step: int) -> StepInputs:
        """Return what :meth:`loss` computes from: all that is drawn, read, or copied from the host."""
        device, flow = batch.latents.device, resolve_sampling(self.flow, self.family)
        noisy, target, sigmas = noisy_latents(flow, self.family, batch.latents, batch.sample_ids, self.seed, step)
        if self.teacher is not None:
            target = self.teacher.blend(target, batch.keys, step)
        mask = region_weights(self.flow, batch, seam=False) if self.outside_mask else None
        rows = self._frozen_rows(batch, everywhere=mask is not None)
        text = self.text(batch)
        if self.rounds_text:
            text = self.family.rounded_text(text)
        preserves = torch.tensor(batch.prior).to(device, non_blocking=True) if any(batch.prior) else None
        return StepInputs(
            noisy=noisy,
            target=target,
            sigmas=sigmas.to(device, non_blocking=True),
            text=text,
            conditions=batch.conditions,
            weights=loss_weights(self.flow, sigmas).to(device, non_blocking=True) * batch.loss_weights,
            regions=region_weights(self.flow, batch),
            outside=None if mask is None else 1 - mask,
            frozen_rows=torch.tensor(rows).to(device, non_blocking=True) if rows else None,
            frozen_text=self._frozen_text(batch, rows),
            preserves=preserves,
        )

    def compute(self, model: nn.Module, given: StepInputs) -> tuple[Tensor, Tensor]:
        """Return :meth:`loss` of its inputs: operations on the device alone, the same for inputs of the same shapes."""
        target = frozen = given.target
        if given.frozen_rows is not None:
            frozen = self.frozen_answers(model, given, given.frozen_rows)
        if given.preserves is not None:
            target = torch.where(given.preserves.view(-1, 1, 1, 1), frozen, target)
        velocity = self._velocity(model, given.noisy, given.sigmas, given.text, given.conditions)
        losses = sample_losses(self.flow, velocity, target, given.regions)
        data_losses = losses.detach()
        if given.preserves is not None:
            data_losses = data_losses.masked_fill(given.preserves, torch.nan)
        if given.outside is not None:
            losses = losses + self.outside_mask * sample_losses(self.flow, velocity, frozen, given.outside)
        metrics = torch.column_stack([given.sigmas, by_noise_level(data_losses, given.sigmas)])
        return (losses * given.weights).mean(), metrics

    def _frozen_rows(self, batch: Batch, everywhere: bool) -> list[int]:
        """Return which samples v_0 is needed of; with ``lockstep`` the model is run where nobody asks, too."""
        rows = [row for row, prior in enumerate(batch.prior) if prior]
        rows = list(range(len(batch))) if everywhere else rows or [0] * self.lockstep
        return rows if self.network is not None else []

    def _frozen_text(self, batch: Batch, rows: list[int]) -> dict[str, Tensor] | None:
        """Return the text of ``rows`` by encoders in training, without what these have learnt; None without them."""
        if not rows or self.text_encoders is None or self.network is None:
            return None
        with torch.no_grad(), self.network.bypassed():
            return self.text(batch if len(rows) == len(batch.sample_ids) else batch.rows(rows))

    def frozen_answers(self, model: nn.Module, given: StepInputs, rows: Tensor) -> Tensor:
        """Return v_0 of the samples ``rows`` [n], [B, C, h, w]; of the others their target."""
        assert self.network is not None

        def chosen(tensor: Tensor) -> Tensor:
            return tensor if len(rows) == len(given.target) else tensor.index_select(0, rows)

        text = given.frozen_text or {name: chosen(tensor) for name, tensor in given.text.items()}
        with torch.no_grad(), self.network.bypassed():
            noisy, sigmas, conditions = chosen(given.noisy), chosen(given.sigmas), given.conditions.map(chosen)
            answers = self._velocity(model, noisy, sigmas, text, conditions)
        return given.target.index_copy(0, rows, answers.to(given.target.dtype))

    def leading_directions(
        self, model: nn.Module, data: CachedDataset, count: int, device: torch.device, start: Progress
    ) -> dict[str, Directions]:
        """Return the ``count`` leading directions of what each LoRA layer is given on regularisation images.

        The images are spread over those of an epoch; ``start`` shows how far this is.
        """
        assert self.network is not None
        items = data.regularisation_items()
        chosen = items[:: math.ceil(len(items) / _GENERAL_IMAGES)]
        advance = start(MEASURING, 2 * _DRAWS * len(chosen))  # each is looked at twice

        def answer_all() -> None:
            for item in chosen:
                batch = collate([data[0, item]]).to(device)
                for draw in range(_DRAWS):
                    given = self.inputs(batch, draw)
                    assert given.frozen_rows is not None, "regularisation images preserve"
                    self.frozen_answers(model, given, given.frozen_rows)
                    advance(1)

        names = self.network.component(self.network.targets.file_prefix).modules
        return leading_directions(model, names, answer_all, count, self.seed)

    def validated(self, model: nn.Module, batch: Batch, sigmas: Sequence[float]) -> Tensor:
        """Return :meth:`values` of held-out samples at each sigma, [len(sigmas), B, K]; the noise never changes.

        Masks count, the seam's extra weight does not.
        """
        rows = self._frozen_rows(batch, everywhere=False)
        return torch.stack([self.values(model, given) for given in self._held_out(batch, sigmas, rows)])

    def values(self, model: nn.Module, given: StepInputs) -> Tensor:
        """Return each sample's unweighted loss, and behind it what ``more_validated`` names, [B, K]."""
        velocity = self._velocity(model, given.noisy, given.sigmas, given.text, given.conditions)
        return sample_losses(self.flow, velocity, given.target, given.regions)[:, None]

    def prior_losses(self, model: nn.Module, batch: Batch, sigmas: Sequence[float]) -> Tensor:
        """Return how far the LoRA has moved each sample's velocity at each sigma, [len(sigmas) * B].

        That is mean((v - v_0)^2) at the noise of :meth:`validated`. On pictures that the model itself has
        painted v_0 is the best answer there is, and this is by how much the squared error grows: the same unit as that
        of a fall of the held-out loss.
        """
        assert self.network is not None
        differences = []
        for given in self._held_out(batch, sigmas, list(range(len(batch.sample_ids)))):
            velocity = self._velocity(model, given.noisy, given.sigmas, given.text, given.conditions)
            assert given.frozen_rows is not None
            frozen = self.frozen_answers(model, given, given.frozen_rows)
            differences.append((velocity - frozen).square().flatten(1).mean(1))
        return torch.cat(differences)

    def _held_out(self, batch: Batch, sigmas: Sequence[float], rows: list[int]) -> Iterator[StepInputs]:
        """Yield what is computed from at each of ``sigmas``, ready for v_0 of ``rows``; the noise is fixed."""
        text, frozen_text, device = self.text(batch), self._frozen_text(batch, rows), batch.latents.device
        regions = region_weights(self.flow, batch, seam=False)
        frozen_rows = torch.tensor(rows).to(device, non_blocking=True) if rows else None
        for sigma in sigmas:
            noise = noise_for(batch.latents, batch.sample_ids, "validation", round(sigma * 1e6))
            all_at = torch.full((len(batch.sample_ids),), sigma, device=device)
            noisy, target = add_noise(batch.latents, noise, all_at)
            more = torch.ones_like(all_at), regions, None, frozen_rows, frozen_text
            yield StepInputs(noisy, target, all_at, text, batch.conditions, *more)

    def _velocity(
        self, model: nn.Module, noisy: Tensor, sigmas: Tensor, text: dict[str, Tensor], conditions: Conditions
    ) -> Tensor:
        """Return the model's velocity at the latents ``noisy``, [B, C, h, w] fp32."""
        sigmas = sigmas.to(noisy.device, non_blocking=True)
        return self.family.predict_velocity(model, noisy, sigmas, text, self.flow.guidance_scale, conditions)


def check_seam(flow: FlowConfig, data: TrainingData) -> None:
    """Refuse ``seam_loss_weight`` where no sample has a mask.

    Raises:
        UserError: it is set and nothing has a border.
    """
    if flow.seam_loss_weight and not data.has_regions:
        raise UserError(
            "seam_loss_weight: no image has a mask, so there is no border; set masked_loss with conditioning_data_dir "
            "or alpha_mask, or remove it"
        )


def region_weights(flow: FlowConfig, batch: Batch, seam: bool = True) -> Tensor | None:
    """Return the weights [B, 1, h, w] fp32 of a batch's latent cells, or None where all weigh 1.

    A sample's mask is the one it brings to weigh its loss, else the region to fill. The seam is that of the region to
    fill, else of the mask.

    Args:
        flow: masked_loss, seam_loss_weight, seam_width.
        batch: masks [B, 1, h, w] or None; conditions with a mask [B, 1, H, W] or None.
        seam: whether seam_loss_weight counts; validation leaves it out, so that runs can be compared.
    """
    fill = batch.conditions.mask
    region = batch.masks if fill is None else avg_pool2d(fill, fill.shape[-1] // batch.latents.shape[-1])
    mask = region if batch.masks is None else batch.masks
    weights = mask if flow.masked_loss else None
    if not seam or not flow.seam_loss_weight or region is None:
        return weights
    ring = flow.seam_loss_weight * border_ring(region, flow.seam_width)
    return ring + (1 if weights is None else weights)


def border_ring(mask: Tensor, width: int) -> Tensor:
    """Return 1 where a cell of the other side of ``mask`` [B, 1, h, w] lies within ``width`` cells, else 0."""
    inside = (mask >= 0.5).to(mask.dtype)
    near_inside = max_pool2d(inside, 2 * width + 1, stride=1, padding=width)
    near_outside = max_pool2d(1 - inside, 2 * width + 1, stride=1, padding=width)
    return near_inside * near_outside


@dataclass(frozen=True)
class Teacher:
    """The teacher's answers on disk, and how much they count.

    Attributes:
        folder: one file for each sample of each step, named by all that the sample is in that step.
        weight: w above, in (0, 1].
    """

    folder: Path
    weight: float

    def blend(self, target: Tensor, keys: Sequence[str], step: int) -> Tensor:
        """Return the velocity to learn, [B, C, h, w] fp32, from the data's ``target`` and the answers to ``keys``.

        Raises:
            UserError: an answer is gone or damaged.
        """
        answers = [read_checked(self.path(step, key))["velocity"].float() for key in keys]
        return torch.lerp(target, torch.stack(answers).to(target.device, non_blocking=True), self.weight)

    def path(self, step: int, key: str) -> Path:
        """Return the file of the answer to what goes by ``key`` (of ``library.data.batches.Item``).

        Its name, which its checksum covers, is of the teacher and the step too: it is no other's answer.
        """
        return self.folder / f"{step:08d}" / f"{self.folder.name}-{step:08d}-{key}"
