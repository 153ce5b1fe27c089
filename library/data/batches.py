"""From caches to one sample, from samples to one batch, in an order that is a function of (seed, epoch).

:class:`CachedDataset` is asked for ``(epoch, index)``. Orientation, crop, caption variant and dropout are functions of
(seed, epoch, sample), so worker processes, resumed runs and other numbers of processes read the same.

All items of an epoch are permuted, then dealt in that order into the open batch of their bucket; a batch is given out
when it is full. With one bucket this is "permute, then cut": batches of four hold the very samples, in the very order,
of four batches of one. What remains in the buckets at the end is given out as smaller batches, so every item is seen
once an epoch.

The plan of an epoch knows nothing of processes. An optimizer step takes the next ``processes * accumulation`` batches
of it, the last of an epoch what is left: nothing is seen twice and nothing left out. A batch weighs as much as it has
samples, so that a step learns from the mean over its samples. So one process that accumulates over N batches, N
processes, and (with one bucket) batches N times as large are the same training. Batch ``i * processes + rank`` of a
step is that of ``rank``. Processes exchange gradients, so all compute as many batches: one for which none is left
computes the epoch's last batch with the weight 0 (:class:`MicroStep`).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler, get_worker_info

from library.accelerator import dp_rank_and_size
from library.conditions import NO_CONDITIONS, Conditions, stack_conditions
from library.data.buckets import Size
from library.data.cache import (
    Pixels,
    TextJob,
    condition_files,
    file_name,
    latent_path,
    load_pixels,
    read_cached,
    read_conditions,
)
from library.data.captions import can_drop, caption_variants, choose_caption, has_word, plain_caption, replace_word
from library.data.directions import Direction
from library.data.samples import Sample
from library.errors import UserError, reason_of
from library.randomness import generator, python_random


@dataclass
class Item:
    """One sample as it is trained in one epoch."""

    latents: Tensor  # [C, h, w]
    text: dict[str, Tensor]
    loss_weight: float
    mask: Tensor | None  # [1, h, w] fp32 in 0..1
    sample_id: int
    caption: str = ""
    conditions: Conditions = NO_CONDITIONS
    prior: bool = False  # the frozen model's answer is the target
    key: str = ""  # names all of the above but the mask
    views: int = 1  # rows of a batch that the sample is: of a pair there are two


@dataclass(frozen=True)
class CaptionPreservation:
    """How often, and with which captions, the frozen model's answers to training images are the targets.

    Attributes:
        share: of an image's appearances.
        class_word: takes the trigger word's place where a subset names none (``preserve_class``).
        blank: whether the empty caption is one of them.
        loss_weight: of such a sample.
    """

    share: float
    class_word: str | None
    blank: bool
    loss_weight: float

    def captions(self, sample: Sample, caption: str) -> list[str]:
        """Return the captions that a training image is seen with instead of ``caption``; none if it has no trigger."""
        settings = sample.settings
        if settings.is_reg or sample.held_out:
            return []
        trigger, word = settings.trigger_word, settings.preserve_class or self.class_word
        classes = [replace_word(caption, trigger, word)] if trigger and word and has_word(caption, trigger) else []
        return [*classes, *([""] if self.blank else [])]


@dataclass(frozen=True)
class ItemSource:
    """What an item is made from: a sample as an epoch sees it, and its caption.

    ``prior``: the frozen model's answer is the target.
    """

    sample: Sample
    flipped: bool
    epoch: int
    sample_id: int
    seed: int
    text: TextJob
    prior: bool = False

    def pixels(self) -> Pixels:
        """Return the pixels that its latents and conditions are encoded from; the image is decoded."""
        return load_pixels(self.sample, self.flipped, self.epoch, self.sample_id, self.seed)


@dataclass
class TensorBatch:
    """A batch whose fields are tensors, dictionaries of them, conditions, and what belongs to no device."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the batch on another device."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return the batch in page-locked memory (asked for by the data loader)."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order of the fields."""
        found: dict[int, Tensor] = {}
        self.map_tensors(lambda tensor: found.setdefault(len(found), tensor))
        return [*found.values()]

    def map_tensors(self, move: Callable[[Tensor], Any]) -> Self:
        """Return the batch with every tensor put through ``move``."""
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        for name, value in values.items():
            if isinstance(value, dict):
                values[name] = {key: move(tensor) for key, tensor in value.items()}
            elif isinstance(value, Tensor):
                values[name] = move(value)
            elif isinstance(value, Conditions):
                values[name] = value.map(move)
        return replace(self, **values)


@dataclass
class Batch(TensorBatch):
    """Samples of one size, stacked."""

    latents: Tensor  # [B, C, h, w], as the encoder returned them
    text: dict[str, Tensor]  # the encoder's tensors with a batch dimension in front
    loss_weights: Tensor  # [B] fp32: prior_loss_weight for regularisation images, else 1
    masks: Tensor | None  # [B, 1, h, w] fp32 in 0..1, 1 counts fully
    sample_ids: list[int]  # of the B samples, on the host, where the noise that follows from them is drawn
    captions: list[str] = field(default_factory=list)  # what ``text`` was made from, for text encoders in training
    conditions: Conditions = NO_CONDITIONS
    prior: list[bool] = field(default_factory=list)  # of the B samples, whose target is the frozen model's answer
    keys: list[str] = field(default_factory=list)  # of the B samples, what an answer to each goes by
    views: int = 1  # rows, next to each other, that are one sample: of a pair both, with the same id, noise and sigma

    def __len__(self) -> int:
        return len(self.sample_ids) // self.views

    def chunk(self, count: int) -> list[Batch]:
        """Return ``count`` batches of equal size with the samples in their order."""
        size = len(self) // count
        return [self.rows(range(first, first + size)) for first in range(0, len(self), size)]

    def rows(self, rows: Sequence[int]) -> Batch:
        """Return a batch of these of the samples."""

        def chosen(values: list[Any]) -> list[Any]:
            return [values[row] for row in rows] if values else []

        part = self.map_tensors(lambda tensor: tensor[list(rows)])
        ids, captions, prior = chosen(part.sample_ids), chosen(part.captions), chosen(part.prior)
        return replace(part, sample_ids=ids, captions=captions, prior=prior, keys=chosen(part.keys))


class CachedDataset(Dataset[Item]):
    """Samples times repeats, read from caches. Item ``i``'s bucket is ``buckets[i]``.

    Args:
        samples: of one size each, with hashed contents.
        seed: what orientations, crops and captions follow from.
        variants: most caption variants of an image.
        text_folder: cache folder of the text embeddings.
        pixel_multiple: patch size in pixels; random crops move by whole patches.
        latent_factor: pixels per latent.
        preservation: of training with ``preserve``, where regularisation images are its matter too; else None.
        directions: of a slider of prompts, which take the place of captions.
    """

    def __init__(
        self,
        samples: list[Sample],
        seed: int,
        variants: int,
        text_folder: Path,
        pixel_multiple: int,
        latent_factor: int,
        preservation: CaptionPreservation | None = None,
        directions: Sequence[Direction] = (),
    ) -> None:
        self.samples, self.directions = samples, directions
        self.seed = seed
        self.variants = variants
        self.text_folder = text_folder
        self.pixel_multiple = pixel_multiple
        self.latent_factor = latent_factor
        self.preservation = preservation
        self.image_fingerprint: str | None = None  # of the encoders whose cached outputs are read;
        self.text_fingerprint: str | None = None  # set once the caches are looked into
        self.text_sees_references = False
        repeats = torch.tensor([sample.repeats for sample in samples])
        self._owner = torch.repeat_interleave(torch.arange(len(samples)), repeats)  # item -> sample
        self._first = repeats.cumsum(0) - repeats  # sample -> its first item
        self._has_masks = any(has_mask(sample) for sample in samples)
        self.sample_buckets: list[Bucket] = [
            (sample.group.dataset, sample.fit.bucket, *sample.further_sizes(self.views_of(sample)))
            for sample in samples
        ]
        self.buckets: list[Bucket] = [self.sample_buckets[owner] for owner in self._owner.tolist()]
        regular: dict[Bucket, list[int]] = defaultdict(list)
        for i, sample in enumerate(samples):
            if sample.settings.is_reg:
                regular[self.sample_buckets[i]].append(i)
        # sample -> the samples that it takes turns with, how many of them an epoch has, and its place among these
        self._turns: dict[int, tuple[list[int], int, int]] = {}
        for group in regular.values():
            due = [i for i in group if samples[i].repeats]
            if len(due) < len(group):
                self._turns |= {i: (group, len(due), place) for place, i in enumerate(due)}
        self.batch_sizes: dict[Bucket, int] = {
            bucket: sample.group.batch_size for bucket, sample in zip(self.sample_buckets, samples, strict=True)
        }

    def __len__(self) -> int:
        return len(self.buckets)

    def regularisation_items(self) -> list[int]:
        """Return an item of each regularisation image that the first epoch sees."""
        pairs = enumerate(self.samples)
        return [int(self._first[i]) for i, sample in pairs if sample.settings.is_reg and sample.repeats]

    def samples_of(self, sample_ids: Sequence[int]) -> list[Sample]:
        """Return the samples with these ids, in their order; for messages: all ids are computed for it."""
        repeated = ((sample, repeat) for sample in self.samples for repeat in range(max(1, sample.repeats)))
        by_id = {sample.sample_id(repeat): sample for sample, repeat in repeated}
        return [by_id[one] for one in sample_ids]

    def captions_of(self, sample: Sample) -> tuple[str, ...]:
        """Return the caption variants of a sample; a held-out sample has one."""
        if self.directions and not sample.settings.is_reg:
            return tuple(direction.target for direction in self.directions)
        if sample.held_out:
            return (plain_caption(sample.caption, sample.settings),)
        return caption_variants(sample.caption, sample.settings, self.variants)

    def all_captions(self, sample: Sample) -> tuple[str, ...]:
        """Return all that a sample is ever seen with: its variants, "" where they drop, and what preserves."""
        captions = self.captions_of(sample)
        if self.directions and not sample.settings.is_reg:
            return tuple(text for direction in self.directions for text in direction)
        drops = (can_drop(sample.settings) and not sample.held_out) * ("",)
        if self.preservation is None:
            return captions + drops
        instead = [other for caption in captions for other in self.preservation.captions(sample, caption)]
        return (*captions, *drops, *dict.fromkeys(instead))

    def text_job(self, sample: Sample, caption: str, flipped: bool) -> TextJob:
        """Return what the text encoder makes the embeddings of a sample's caption from."""
        if not self.text_sees_references:
            return TextJob(caption)
        return TextJob(caption, sample.control_images, flipped)

    def sample_id(self, index: int) -> int:
        """Return the id of item ``index``, what its noise follows from; nothing is read."""
        owner = int(self._owner[index])
        return self.samples[owner].sample_id(index - int(self._first[owner]))

    def __getitem__(self, position: tuple[int, int]) -> Item:
        """Return item ``index`` as it is in ``epoch``.

        Raises:
            UserError: a cache file is damaged or gone.
        """
        source, rng = self._seen(position)
        sample, flipped, epoch, sample_id = source.sample, source.flipped, source.epoch, source.sample_id
        assert self.image_fingerprint is not None, "ask missing_latents or cache_latents first"
        assert self.text_fingerprint is not None, "ask missing_text or cache_text first"
        cached = read_cached(latent_path(sample, flipped, self.image_fingerprint), self._crop(sample, rng))
        latents, mask = cached["latents"], cached.get("mask")
        conditions = read_conditions(sample, flipped, epoch, sample_id, self.seed, self.image_fingerprint)
        if mask is None and self._has_masks:  # of a sample without one among others with: its region to fill, else all
            whole, region = torch.ones(1, *latents.shape[-2:]), conditions.mask
            mask = whole if region is None else torch.nn.functional.avg_pool2d(region, self.latent_factor)
        text = read_cached(source.text.path(self.text_folder, self.text_fingerprint))
        weight = sample.group.loss_weight
        if source.prior and self.preservation is not None:
            weight, mask = self.preservation.loss_weight, None if mask is None else torch.ones_like(mask)
        caption, key = source.text.caption, self.key(position)
        return Item(latents, text, weight, mask, sample_id, caption, conditions, source.prior, key)

    def views_of(self, sample: Sample) -> int:
        """Return how many rows of a batch an item of a sample is."""
        return 3 if self.directions and not sample.settings.is_reg else len(sample.pair)

    def views(self, position: tuple[int, int]) -> list[Item]:
        """Return the rows of a batch that an item is; all but what is named is the same.

        That is itself alone, of a pair both images, or with each of a direction's texts.
        """
        item, (source, rng) = self[position], self._seen(position)
        first, *others = source.sample.pair
        crop, fingerprint = self._crop(first, rng), str(self.image_fingerprint)
        paths = [latent_path(each, source.flipped, fingerprint) for each in others]
        rows = [item, *(replace(item, latents=read_cached(path, crop)["latents"]) for path in paths)]
        if self.directions and not first.settings.is_reg:
            for caption in self._direction(source.epoch, source.sample_id)[1:]:
                job = self.text_job(first, caption, source.flipped)
                text = read_cached(job.path(self.text_folder, str(self.text_fingerprint)))
                rows.append(replace(item, text=text, caption=caption))
        return [replace(row, views=len(rows)) for row in rows]

    def _direction(self, epoch: int, sample_id: int) -> Direction:
        return python_random("direction", self.seed, epoch, sample_id).choice(self.directions)

    def key(self, position: tuple[int, int]) -> str:
        """Return the ``key`` of an item; nothing is read."""
        (source, rng), images, text = self._seen(position), str(self.image_fingerprint), str(self.text_fingerprint)
        sample, flipped, sample_id = source.sample, source.flipped, source.sample_id
        latents, crop = latent_path(sample, flipped, images).name, self._crop(sample, rng)
        conditions = condition_files(sample, flipped, source.epoch, sample_id, self.seed, images)
        return file_name(sample_id, latents, crop, [path.name for path in conditions], source.text.file(text))

    def __getitems__(self, positions: list[tuple[int, int]]) -> list[Item] | UserError:
        """Return the rows of a batch (asked for by the data loader); a worker returns its error (RaisingLoader)."""
        try:
            return [row for position in positions for row in self.views(position)]
        except UserError as error:
            if get_worker_info() is None:
                raise
            return error

    def _caption(self, sample: Sample, epoch: int, sample_id: int) -> tuple[str, bool]:
        """Return a sample's caption in an epoch, and whether the frozen model's answer to it is the target."""
        if self.directions and not sample.settings.is_reg:
            return self._direction(epoch, sample_id).target, False
        captions = self.captions_of(sample)
        if sample.held_out:
            return captions[0], False
        caption = choose_caption(captions, sample.settings, self.seed, epoch, sample_id)
        if self.preservation is not None and (instead := self.preservation.captions(sample, caption)):
            rng = python_random("preservation", self.seed, epoch, sample_id)
            if rng.random() < self.preservation.share:
                return rng.choice(instead), True
        return caption, self.preservation is not None and sample.settings.is_reg

    def source(self, position: tuple[int, int]) -> ItemSource:
        """Return what the files of an item are made from."""
        return self._seen(position)[0]

    def _seen(self, position: tuple[int, int]) -> tuple[ItemSource, random.Random]:
        """Return what an item is made from, and what its crop is drawn from."""
        epoch, index = position
        owner = int(self._owner[index])
        sample, sample_id = self.samples[owner], self.sample_id(index)
        if owner in self._turns:
            group, due, place = self._turns[owner]
            sample = self.samples[group[(epoch * due + place) % len(group)]]
            sample_id = sample.sample_id(0)
        rng = python_random("orientation and crop", self.seed, epoch, sample_id)
        flipped = sample.flips and rng.random() < 0.5
        caption, prior = self._caption(sample, epoch, sample_id)
        text = self.text_job(sample, caption, flipped)
        return ItemSource(sample, flipped, epoch, sample_id, self.seed, text, prior), rng

    def _crop(self, sample: Sample, rng: random.Random) -> tuple[int, int, int, int] | None:
        """(top, left, height, width) in latents of this epoch's random crop; None where all is used."""
        fit = sample.fit
        if fit.encoded == fit.bucket:
            return None
        patch = self.pixel_multiple // self.latent_factor
        left, top = (
            rng.randint(0, (whole - part) // self.pixel_multiple) * patch
            for whole, part in zip(fit.encoded, fit.bucket, strict=True)
        )
        width, height = (side // self.latent_factor for side in fit.bucket)
        return top, left, height, width


def has_mask(sample: Sample) -> bool:
    """Whether a sample brings a mask of its own."""
    return sample.mask is not None or sample.settings.alpha_mask


class RaisingLoader:
    """The batches of a loader; a worker's error, which torch would wrap in a traceback, is raised as it is."""

    def __init__(self, loader: Iterable[Batch | UserError]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            if isinstance(batch, UserError):
                raise batch
            yield batch


def collate_or_error(items: list[Item] | UserError) -> Batch | UserError:
    """Return :func:`collate`'s batch, or the error of reading its items.

    A worker puts it into shared memory here. Where that is full the thread that sends a batch would lose it: the
    trainer would wait for ever.
    """
    if isinstance(items, UserError):
        return items
    batch = collate(items)
    if get_worker_info() is not None:
        try:
            batch.map_tensors(Tensor.share_memory_)
        except (RuntimeError, OSError) as error:
            remedy = "give it more (in Docker: --shm-size=2g), or set max_data_loader_n_workers = 0"
            return UserError(f"a batch does not fit into shared memory ({reason_of(error)}); {remedy}")
    return batch


def collate(items: list[Item]) -> Batch:
    """Stack items of one bucket; text tensors of different lengths are filled up with zeros at their end.

    A text's mask that is true everywhere is left out: a model would have to read it back from its device to know.
    """
    masks = [item.mask for item in items if item.mask is not None]
    texts = {name: [item.text[name] for item in items] for name in items[0].text}
    text = {name: pad_sequence(each, True) if each[0].ndim else torch.stack(each) for name, each in texts.items()}
    return Batch(
        latents=torch.stack([item.latents for item in items]),
        text={name: tensor for name, tensor in text.items() if tensor.dtype != torch.bool or not tensor.all()},
        loss_weights=torch.tensor([item.loss_weight for item in items], dtype=torch.float32),
        masks=torch.stack(masks) if masks else None,
        sample_ids=[item.sample_id for item in items],
        captions=[item.caption for item in items],
        conditions=stack_conditions([item.conditions for item in items]),
        prior=[item.prior for item in items],
        keys=[item.key for item in items],
        views=items[0].views,
    )


# number of the dataset, size of the image (of a pair, of both), of its control images
Bucket = tuple[int, Size, *tuple[Size, ...]]


@dataclass(frozen=True)
class MicroStep:
    """One batch of every process: an optimizer step has as many of them as gradients are accumulated over.

    Attributes:
        weight: of this process's loss, so that the mean over processes and accumulated batches is that over the step's
            samples, also where batches are smaller or fewer; 0 where the process computes only to take part.
        number: of this process's batch in the epoch.
        done: batches of all processes (of pretraining windows).
        samples: of all processes.
        ends_step: whether it is the step's last.
    """

    weight: float
    number: int
    done: int
    samples: int
    ends_step: bool


@dataclass(frozen=True)
class DataParallelRank:
    """Which of an epoch's batches a process computes.

    Attributes:
        processes: that have batches of their own (``dp_rank_and_size``).
        rank: of this one among them.
        accumulation: batches of each process in an optimizer step.
    """

    processes: int = 1
    rank: int = 0
    accumulation: int = 1

    @classmethod
    def of(cls, accelerator: Accelerator) -> Self:
        """Return this process's."""
        rank, processes = dp_rank_and_size(accelerator)
        return cls(processes, rank, accelerator.gradient_accumulation_steps)

    @property
    def step_batches(self) -> int:
        """Batches of a full optimizer step."""
        return self.processes * self.accumulation


ALL = DataParallelRank()


class PlannedBatchSampler(Sampler[list[Any]]):
    """Batch sampler whose epochs are planned wholly.

    One pass gives this process's batches of the rest of one epoch, from the position set, :meth:`micro_steps` what the
    loop has to know of each.
    """

    def __init__(self, dp_rank: DataParallelRank) -> None:
        self.dp_rank = dp_rank
        self.drop_last = False  # accelerate asks
        self.epoch = self.first_batch = 0
        self._plan: tuple[int, list[list[int]]] | None = None

    def plan_epoch(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch as indices: a function of seed and epoch."""
        raise NotImplementedError

    def key(self, index: int) -> Any:
        """Return what the dataset is asked for to get ``index`` of the present epoch."""
        return index

    def weight(self, batch: Sequence[int]) -> int:
        """Return how much a batch counts in its step: its samples."""
        return len(batch)

    def set_position(self, epoch: int, first_batch: int = 0) -> None:
        """Start the next pass in ``epoch`` (from 0) at ``first_batch``, counted over all processes."""
        self.epoch, self.first_batch = epoch, first_batch

    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch over all processes, the same in every epoch."""
        return len(self.planned(self.epoch))

    def __len__(self) -> int:
        """Batches of this process in the next pass."""
        return -(-max(0, self.batches_per_epoch() - self.first_batch) // self.dp_rank.processes)

    def __iter__(self) -> Iterator[list[Any]]:
        plan, (processes, rank) = self.planned(self.epoch), (self.dp_rank.processes, self.dp_rank.rank)
        for first in range(self.first_batch, len(plan), processes):
            yield [self.key(index) for index in plan[min(first + rank, len(plan) - 1)]]

    def micro_steps(self) -> Iterator[MicroStep]:
        """Yield what the loop has to know of each batch of the next pass."""
        plan, dp_rank = self.planned(self.epoch), self.dp_rank
        for begin in range(self.first_batch, len(plan), dp_rank.step_batches):
            step = plan[begin : begin + dp_rank.step_batches]
            weights = list(map(self.weight, step))
            for first in range(0, len(step), dp_rank.processes):
                own, behind = first + dp_rank.rank, first + dp_rank.processes
                weight = dp_rank.step_batches * weights[own] / sum(weights) if own < len(step) else 0.0
                number, everyone = min(begin + own, len(plan) - 1), step[first:behind]
                yield MicroStep(weight, number, len(everyone), sum(map(len, everyone)), behind >= len(step))

    def planned(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch over all processes."""
        if self._plan is None or self._plan[0] != epoch:
            self._plan = epoch, self.plan_epoch(epoch)
        return self._plan[1]


class EpochBatchSampler(PlannedBatchSampler):
    """Yields lists of (epoch, index) for :class:`CachedDataset`.

    Args:
        buckets: the bucket of each item; only items of one bucket share a batch.
        batch_sizes: items in a batch, for each bucket.
        seed: what the order follows from.
        dp_rank: of this process.
    """

    def __init__(
        self, buckets: Sequence[Bucket], batch_sizes: Mapping[Bucket, int], seed: int, dp_rank: DataParallelRank = ALL
    ) -> None:
        super().__init__(dp_rank)
        self.buckets, self.batch_sizes, self.seed = buckets, batch_sizes, seed

    def key(self, index: int) -> tuple[int, int]:
        return self.epoch, index

    def plan_epoch(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch: all items permuted, then dealt into the open batch of their bucket."""
        plan: list[list[int]] = []
        waiting: dict[Bucket, list[int]] = defaultdict(list)
        order = torch.randperm(len(self.buckets), generator=generator("epoch order", self.seed, epoch))
        for index in order.tolist():
            bucket = self.buckets[index]
            waiting[bucket].append(index)
            if len(waiting[bucket]) == self.batch_sizes[bucket]:
                plan.append(waiting.pop(bucket))
        return [*plan, *waiting.values()]
